import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from models.artifact import Artifact, new_folder, write_manifest
from models.manifest import ArtifactError


@pytest.fixture
def copy(artifact: Artifact, tmp_path: Path) -> Path:
    """Copy the default model's artifact, without its reference model for speed."""
    target = tmp_path / "copy"
    shutil.copytree(artifact.path, target, ignore=shutil.ignore_patterns("source"))
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"] = {
        name: digest for name, digest in manifest["files"].items() if not name.startswith("source")
    }
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def read_everything(path: Path) -> None:
    artifact = Artifact.load(path)
    for name in artifact.manifest.files:
        artifact.verify(name)


def test_intact_artifact_reads_without_error(copy: Path) -> None:
    read_everything(copy)


def test_manifest_describes_the_exported_model(artifact: Artifact) -> None:
    manifest = artifact.manifest
    assert manifest.name == "sentence-transformers/all-MiniLM-L6-v2"
    assert manifest.weights_sha256["model.safetensors"].startswith("53aa51172d142c89")
    assert (manifest.width, manifest.max_tokens, manifest.vocab_size) == (384, 256, 30522)
    assert (manifest.pooling, manifest.normalize) == (("mean",), True)
    parity = artifact.graph("onnxruntime").parity
    assert parity is not None
    assert parity["worst_cosine"] > 1 - 1e-9
    lengths = [len(row) for row in artifact.check().rows]
    assert min(lengths) == 3
    assert max(lengths) == 256


@pytest.mark.parametrize("name", ["model.onnx", "model.weights", "tokenizer.json", "check.json"])
def test_changed_byte_raises_artifact_error_naming_the_file(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(
        ArtifactError, match=f"{name} in the artifact copy is not the exported file"
    ):
        read_everything(copy)


def test_empty_file_is_not_the_exported_file(copy: Path) -> None:
    (copy / "model.weights").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"model\.weights .* is not the exported file"):
        Artifact.load(copy).verify("model.weights")


def test_truncated_file_raises_artifact_error(copy: Path) -> None:
    with (copy / "model.onnx").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ArtifactError, match=r"model.onnx in the artifact copy is not the exported"):
        read_everything(copy)


def test_missing_and_unlisted_files_are_named_in_the_error(copy: Path) -> None:
    (copy / "extra.bin").touch()
    with pytest.raises(ArtifactError, match=r"copy has an unlisted file extra.bin"):
        Artifact.load(copy)
    (copy / "check.json").unlink()
    with pytest.raises(ArtifactError, match=r"copy lacks file check.json"):
        Artifact.load(copy)


def replace_by_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_broken_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(path.parent / "nowhere")


def replace_by_pipe(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    os.mkfifo(path)


def replace_by_folder(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (replace_by_link, "{name} in the artifact copy is a symbolic link"),
        (replace_by_broken_link, "{name} in the artifact copy is a symbolic link"),
        (replace_by_pipe, "{name} in the artifact copy is not a regular file"),
        (replace_by_folder, "the artifact copy lacks file {name}"),
    ],
)
def test_every_file_must_be_regular(
    small_artifact: Artifact, tmp_path: Path, change: Callable[[Path, Path], None], problem: str
) -> None:
    assert any("/" in name for name in small_artifact.manifest.files)  # in a subfolder too
    copy = tmp_path / "copy"
    shutil.copytree(small_artifact.path, copy)
    for index, name in enumerate(small_artifact.manifest.files):
        elsewhere = tmp_path / str(index)
        change(copy / name, elsewhere)
        with pytest.raises(ArtifactError, match=re.escape(problem.format(name=name))):
            Artifact.load(copy)
        (copy / name).rmdir() if (copy / name).is_dir() else (copy / name).unlink()
        elsewhere.rename(copy / name)
    Artifact.load(copy)


def test_folder_that_is_a_link_is_rejected(small_artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small_artifact.path, copy)
    for folder in ("source/1_Pooling", "source"):
        replace_by_link(copy / folder, tmp_path / "elsewhere")
        with pytest.raises(
            ArtifactError, match=f"{folder} in the artifact copy is a symbolic link"
        ):
            Artifact.load(copy)
        (copy / folder).unlink()
        (tmp_path / "elsewhere").rename(copy / folder)
    Artifact.load(copy)


def test_manifest_that_is_a_link_is_rejected(small_artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small_artifact.path, copy)
    replace_by_link(copy / "manifest.json", tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact copy is a symbolic"):
        Artifact.load(copy)


def test_file_that_becomes_a_link_later_is_not_read(copy: Path, tmp_path: Path) -> None:
    artifact = Artifact.load(copy)
    replace_by_link(copy / "check.json", tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"check.json cannot be read"):
        artifact.read("check.json")


def test_file_that_becomes_a_pipe_later_is_rejected_without_blocking(
    copy: Path, tmp_path: Path
) -> None:
    artifact = Artifact.load(copy)
    replace_by_pipe(copy / "check.json", tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"check.json is not a regular file"):
        artifact.read("check.json")


def test_folder_without_manifest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is not an artifact: it has no manifest.json"):
        Artifact.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "manifest.json is invalid"),
        ("[]", "manifest.json is invalid"),
        ('{"format": 8}', "manifest.json is invalid"),
        ('{"format": 8, "graphs": [], "pooling": [], "files": null}', "manifest.json is invalid"),
        ('{"format": 99}', "has format 99; format 8 is required: export again"),
    ],
)
def test_invalid_manifest_raises_artifact_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(tmp_path)


def test_file_outside_the_manifest_cannot_be_read(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="does not list"):
        artifact.read("../secret")


def test_missing_graph_error_names_the_engine(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match=f"{artifact.path.name} has no graph for cuda"):
        artifact.graph("cuda")


def test_failed_write_leaves_no_files_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_existing_artifact_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="already exists"), new_folder(tmp_path):
        pass


def test_folder_that_another_export_has_made_meanwhile_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ArtifactError, match="out already exists; remove it"), new_folder(out):
        (out / "graph").mkdir(parents=True)
    assert list(tmp_path.iterdir()) == [out]


def test_new_folder_refuses_a_link_to_nothing(tmp_path: Path) -> None:
    link = tmp_path / "out"
    link.symlink_to("nowhere")
    with pytest.raises(ArtifactError, match="out already exists; remove it"), new_folder(link):
        pytest.fail("the block ran")


def test_manifest_round_trips_through_disk(artifact: Artifact, tmp_path: Path) -> None:
    write_manifest(tmp_path, artifact.manifest)
    for name in artifact.manifest.files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert Artifact.load(tmp_path).manifest == artifact.manifest


def test_hard_linked_artifact_reads_like_its_copy(copy: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(copy, linked, copy_function=os.link)
    assert Artifact.load(linked).read("check.json") == Artifact.load(copy).read("check.json")
