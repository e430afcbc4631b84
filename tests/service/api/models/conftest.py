"""Services of several models, and their admin."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.app import create_app
from service.settings import (
    ApiKey,
    AuthSettings,
    DebugSettings,
    EngineSettings,
    ModelSettings,
    ModelsSettings,
    ServedModel,
    Settings,
)
from tests.serving import serving

KEY = "admin-key-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
AUTH = AuthSettings(
    keys=(
        ApiKey(name="admin", key=SecretStr(KEY), scopes=("encode", "debug", "metrics", "admin")),
        ApiKey(name="user", key=SecretStr("user-key-0123456789"), scopes=("encode",)),
    )
)
TEXT = "The cat sat on the mat."
ENGINE = EngineSettings(threads=2)


@pytest.fixture(scope="module")
def several(small_artifact: Artifact, other_artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service with two models and no default."""
    served = (
        ServedModel(name="cats", path=small_artifact.path, aliases=("felines",)),
        ServedModel(name="org/dogs", path=other_artifact.path),
    )
    settings = Settings(
        models=ModelsSettings(served=served),
        engine=ENGINE,
        debug=DebugSettings(enabled=True, hosts=("testserver",)),
    )
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(
    small_artifact: Artifact, other_artifact: Artifact
) -> dict[str, np.typing.NDArray[np.float64]]:
    """The vector of the text by each model, as served alone."""
    found = {}
    for name, artifact in (("cats", small_artifact), ("org/dogs", other_artifact)):
        settings = Settings(model=ModelSettings(path=artifact.path), engine=ENGINE)
        with serving(create_app(settings)) as client:
            body = client.post("/encode", json={"inputs": TEXT}).json()
            found[name] = np.array(body["embeddings"])
    assert np.abs(found["cats"] - found["org/dogs"]).max() > 0.01
    return found


@pytest.fixture
def one(small_artifact: Artifact) -> Iterator[TestClient]:
    """A client, with the admin's key, of a service with one model."""
    settings = Settings(model=ModelSettings(path=small_artifact.path), engine=ENGINE, auth=AUTH)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
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
