"""Artifacts that change on disk: a watched folder, and configured paths."""

import logging
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
import pytest

from models.artifact import Artifact
from tests.eventually import eventually
from tests.service.api.models.conftest import AUTH, HEADERS, TEXT, same
from tests.serving import PATIENCE_S, process, served, state_of, url_of


@pytest.fixture
def folder(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A folder of artifacts, with the model `cats`."""
    models = tmp_path / "models"
    shutil.copytree(small_artifact.path, models / "cats")
    return models


def replace(folder: Path, artifact: Artifact) -> None:
    """Replace an artifact by another one, as the README tells."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.copytree(artifact.path, temporary)
    if folder.exists():
        folder.rename(folder.with_name(".old"))
    temporary.rename(folder)


def test_scan_loads_new_and_changed_artifacts_and_unloads_deleted_ones(
    folder: Path,
    other_artifact: Artifact,
    vectors: dict[str, np.typing.NDArray[np.float64]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vitrine")

    def vector(model: str) -> object:
        return client.post("/encode", json={"inputs": TEXT, "model": model}).json()["embeddings"]

    with served(models={"folder": folder, "watch_s": 0.01}) as client:
        assert same(vector("cats"), vectors["cats"])
        replace(folder / "dogs", other_artifact)
        eventually(lambda: len(client.get("/models").json()["models"]) == 2)
        assert same(vector("dogs"), vectors["org/dogs"])
        replace(folder / "cats", other_artifact)
        eventually(lambda: same(vector("cats"), vectors["org/dogs"]))
        (folder / "dogs").rename(folder / ".gone")
        eventually(lambda: len(client.get("/models").json()["models"]) == 1)
        # The artifact of the default model cannot be missed.
        (folder / "cats").rename(folder / ".gone too")
        shutil.copytree(other_artifact.path, folder / "birds")
        eventually(lambda: "the default model cannot be deleted" in caplog.text)
        assert same(vector("cats"), vectors["org/dogs"])


def test_artifact_that_is_copied_slowly_is_loaded_when_it_is_complete(
    folder: Path, other_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    with served(models={"folder": folder}) as client:
        assert client.portal is not None
        shutil.copytree(
            other_artifact.path, folder / "dogs", ignore=shutil.ignore_patterns("*.weights")
        )
        client.portal.call(state_of(client).watch.scan)
        assert "cannot load" in caplog.text
        shutil.copy(other_artifact.path / "model.weights", folder / "dogs")
        client.portal.call(state_of(client).watch.scan)
        assert client.post("/encode", json={"inputs": TEXT, "model": "dogs"}).is_success


@pytest.mark.slow
def test_sighup_loads_a_changed_artifact(folder: Path, other_artifact: Artifact) -> None:
    settings = {"VITRINE_MODEL__PATH": str(folder / "cats")}
    with process(**settings) as started:
        url = url_of(started)

        def version() -> str:
            body = {"inputs": TEXT}
            return httpx2.post(f"{url}/encode", json=body, timeout=PATIENCE_S).headers[
                "X-Model-Version"
            ]

        before = version()
        replace(folder / "cats", other_artifact)
        os.kill(started.pid, signal.SIGHUP)
        eventually(lambda: version() != before)


def test_scan_leaves_a_model_that_was_moved_to_another_path(
    folder: Path, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    replace(folder / "dogs", other_artifact)
    with served(models={"folder": folder, "default": "cats"}, auth=AUTH) as client:
        assert client.portal is not None
        client.headers.update(HEADERS)
        moved = client.post("/models/dogs", json={"path": str(small_artifact.path)})
        assert moved.status_code == 200, moved.text
        (folder / "dogs").rename(folder / ".gone")
        client.portal.call(state_of(client).watch.scan)
        assert client.post("/encode", json={"inputs": TEXT, "model": "dogs"}).is_success


def test_scan_keeps_the_aliases_that_a_request_has_set(
    folder: Path, other_artifact: Artifact
) -> None:
    with served(models={"folder": folder}, auth=AUTH) as client:
        assert client.portal is not None
        client.headers.update(HEADERS)
        body = {"path": str(folder / "cats"), "aliases": ["felines"]}
        first = client.post("/models/cats", json=body).json()["version"]
        replace(folder / "cats", other_artifact)
        client.portal.call(state_of(client).watch.scan)
        response = client.post("/encode", json={"inputs": TEXT, "model": "felines"})
        assert response.status_code == 200
        assert response.headers["X-Model-Version"] != first


def test_patient_scan_unloads_an_artifact_that_is_missing_twice(
    folder: Path, other_artifact: Artifact
) -> None:
    replace(folder / "dogs", other_artifact)
    with served(models={"folder": folder, "default": "cats"}) as client:
        assert client.portal is not None
        scan = partial(state_of(client).watch.scan, is_patient=True)
        (folder / "dogs").rename(folder / ".gone")
        client.portal.call(scan)
        assert len(client.get("/models").json()["models"]) == 2
        client.portal.call(scan)
        assert len(client.get("/models").json()["models"]) == 1


def test_missing_artifact_of_a_configured_path_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(folder / "cats") as client:
        assert client.portal is not None
        (folder / "cats").rename(folder / ".gone")
        for _ in range(2):
            client.portal.call(state_of(client).watch.scan)
        assert caplog.text.count("is gone; its model stays in service") == 1
        assert client.post("/encode", json={"inputs": TEXT}).is_success
