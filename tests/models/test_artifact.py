import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from models.artifact import Artifact, ArtifactError, write_manifest, writing


@pytest.fixture
def copy(artifact: Artifact, tmp_path: Path) -> Path:
    """The default model's artifact, to be damaged; without the twin, for speed."""
    target = tmp_path / "copy"
    shutil.copytree(artifact.path, target, ignore=shutil.ignore_patterns("twin"))
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"] = {
        name: digest for name, digest in manifest["files"].items() if not name.startswith("twin")
    }
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def read_everything(path: Path) -> None:
    artifact = Artifact.load(path)
    for name in artifact.manifest.files:
        artifact.read(name)


def test_an_intact_artifact_is_read(copy: Path) -> None:
    read_everything(copy)


def test_the_manifest_says_what_the_model_is(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert manifest.name == "sentence-transformers/all-MiniLM-L6-v2"
    assert manifest.weights_sha256["model.safetensors"].startswith("53aa51172d142c89")
    assert (manifest.width, manifest.max_tokens, manifest.vocab_size) == (384, 256, 30522)
    assert (manifest.pooling, manifest.normalize) == (("mean",), True)
    parity = artifact.graph("cpu").parity
    assert parity is not None
    assert parity["worst_cosine"] > 1 - 1e-9
    lengths = [len(row) for row in artifact.check().rows]
    assert min(lengths) == 3
    assert max(lengths) == 256


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "check.json"])
def test_a_changed_byte_is_refused_with_the_files_name(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} in the artifact copy is not the file that"):
        read_everything(copy)


def test_a_file_that_is_cut_short_is_refused(copy: Path) -> None:
    with (copy / "model.onnx").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ArtifactError, match=r"model.onnx in the artifact copy is not the file"):
        read_everything(copy)


def test_a_missing_and_an_extra_file_are_named(copy: Path) -> None:
    (copy / "extra.bin").touch()
    with pytest.raises(ArtifactError, match=r"copy has an unlisted file extra.bin"):
        Artifact.load(copy)
    (copy / "check.json").unlink()
    with pytest.raises(ArtifactError, match=r"copy lacks file check.json"):
        Artifact.load(copy)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_linked_file_is_refused(copy: Path, tmp_path: Path, link: object) -> None:
    assert callable(link)
    (copy / "check.json").rename(tmp_path / "elsewhere")
    link(tmp_path / "elsewhere", copy / "check.json")
    with pytest.raises(ArtifactError, match=r"check.json (is a link|cannot be read)"):
        read_everything(copy)


def test_a_pipe_is_refused_and_not_waited_for(copy: Path) -> None:
    (copy / "check.json").unlink()
    os.mkfifo(copy / "check.json")
    with pytest.raises(ArtifactError, match=r"check.json is a link or not a regular file"):
        read_everything(copy)


def test_what_is_no_artifact_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is not an artifact: it has no manifest.json"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable"),
        ("[]", "is not readable"),
        ('{"format": 1}', "is not readable"),
        ('{"format": 1, "graphs": [], "pooling": [], "files": null}', "is not readable"),
        ('{"format": 99}', "is not of format 1; export again"),
    ],
)
def test_a_manifest_that_is_not_understood_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(tmp_path)


def test_a_file_outside_the_manifest_cannot_be_read(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="does not list"):
        artifact.read("../secret")


def test_a_graph_for_another_target_is_asked_for_with_what_would_help(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="no graph for cuda; export it with --target cuda"):
        artifact.graph("cuda")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with writing(tmp_path / "out") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is there already"), writing(tmp_path):
        pass


def test_a_manifest_survives_being_written_and_read(artifact: Artifact, tmp_path: Path) -> None:
    write_manifest(tmp_path, replace(artifact.manifest, files={}))
    assert Artifact.load(tmp_path).manifest == replace(artifact.manifest, files={})
