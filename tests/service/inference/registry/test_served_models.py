"""The models of a folder of artifacts, and their names."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from models.artifact import Artifact
from models.manifest import MANIFEST, ArtifactError
from service.inference.model.opening import ModelOptions
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec, specs_in
from tests.hostile_artifacts import copy_of, edit
from tests.service.inference.registry.conftest import ONE_THREAD


def test_folder_of_artifacts_names_models_by_their_folders(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    for name in ("x", "y", ".hidden"):
        shutil.copytree(small_artifact.path, tmp_path / name)
    (tmp_path / "not an artifact").mkdir()
    found = [(spec.path, spec.options.name) for spec in specs_in(tmp_path, ONE_THREAD)]
    assert found == [(tmp_path / "x", "x"), (tmp_path / "y", "y")]


def test_folders_whose_names_are_invalid_are_skipped_and_logged_once(
    small_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [b"a\nCRITICAL b\x1b[31m", "\u202ec".encode()]
    if sys.platform != "darwin":  # where names of files are Unicode
        bad.append(b"\xff\xfe")
    shutil.copytree(small_artifact.path, tmp_path / "good")
    for name in bad:
        shutil.copytree(small_artifact.path, tmp_path / os.fsdecode(name))
    for _ in range(3):
        assert [spec.options.name for spec in specs_in(tmp_path, ONE_THREAD)] == ["good"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(bad)
    assert all(message.isprintable() for message in messages)
    assert r"a\nCRITICAL b\x1b[31m: its name must have printable characters only" in caplog.text


def test_folder_that_cannot_be_read_is_skipped_and_logged(
    small_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(small_artifact.path, tmp_path / "good")
    (tmp_path / "loop").symlink_to("loop")
    assert [spec.options.name for spec in specs_in(tmp_path, ONE_THREAD)] == ["good"]
    assert f"skipping the folder {tmp_path / 'loop'}: it cannot be read: Too many" in caplog.text


@pytest.mark.parametrize("place", ["name", "alias", "manifest"])
@pytest.mark.parametrize("name", ["a\nb", "\u202ea", " "])
async def test_invalid_name_of_a_model_is_refused_wherever_it_is(
    small_artifact: Artifact, tmp_path: Path, name: str, place: str
) -> None:
    path = copy_of(small_artifact.path, tmp_path / "copy")
    if place == "manifest":
        edit(path, MANIFEST, name=name)
    own = {"name": name, "alias": "valid", "manifest": None}[place]
    aliases = (name,) if place == "alias" else ()
    spec = ModelSpec(path=path, aliases=aliases, options=ModelOptions(name=own))
    with pytest.raises(ValueError, match=re.escape(f"the name {name!r} of a model must")):
        await ModelRegistry().register([spec])


def test_folder_without_artifacts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no folder with an artifact"):
        specs_in(tmp_path, ONE_THREAD)
