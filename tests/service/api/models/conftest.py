"""Services of several models, and their admin."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.service.debug.held_worker import NO_FILE, held_workers
from tests.serving import served

KEY = "admin-key-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
AUTH: dict[str, Any] = {
    "keys": [
        {"name": "admin", "key": KEY, "scopes": ["encode", "debug", "metrics", "admin"]},
        {"name": "user", "key": "user-key-0123456789", "scopes": ["encode"]},
    ]
}
TEXT = "The cat sat on the mat."


@pytest.fixture(scope="module")
def several(small_artifact: Artifact, other_artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service with two models and no default."""
    two = [
        {"name": "cats", "path": small_artifact.path, "aliases": ["felines"]},
        {"name": "org/dogs", "path": other_artifact.path},
    ]
    debug = {"enabled": True, "hosts": ["testserver"]}
    with held_workers(Path(NO_FILE)), served(models={"served": two}, debug=debug) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(
    small_artifact: Artifact, other_artifact: Artifact
) -> dict[str, np.typing.NDArray[np.float64]]:
    """The vector of the text by each model, as served alone."""
    found = {}
    for name, artifact in (("cats", small_artifact), ("org/dogs", other_artifact)):
        with served(artifact.path) as client:
            body = client.post("/encode", json={"inputs": TEXT}).json()
            found[name] = np.array(body["embeddings"])
    assert np.abs(found["cats"] - found["org/dogs"]).max() > 0.01
    return found


@pytest.fixture
def one(small_artifact: Artifact) -> Iterator[TestClient]:
    """A client, with the admin's key, of a service with one model."""
    yield from _client_of_admin(small_artifact)


@pytest.fixture(scope="package")
def shared(small_artifact: Artifact) -> Iterator[TestClient]:
    yield from _client_of_admin(small_artifact)


@pytest.fixture
def unchanged(shared: TestClient) -> Iterator[TestClient]:
    """A client like `one`, of a service whose model the test must not change."""

    def state() -> object:
        models = shared.get("/models").json()["models"]
        return [(model["name"], model["version"], model["aliases"]) for model in models]

    before = state()
    yield shared
    assert state() == before


def _client_of_admin(artifact: Artifact) -> Iterator[TestClient]:
    with served(artifact.path, auth=AUTH) as client:
        client.headers.update(HEADERS)
        yield client


class Checked(threading.Thread):
    """A thread that keeps the exception that ended it."""

    def __init__(self, work: Any) -> None:  # noqa: ANN401
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.error = error


def same(actual: object, expected: np.typing.NDArray[np.float64]) -> bool:
    return bool(np.abs(np.array(actual) - expected).max() < 1e-5)
