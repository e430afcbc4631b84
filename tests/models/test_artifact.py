import errno
import mmap
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.artifact import Artifact, new_folder, write_manifest
from models.manifest import ArtifactError


def test_intact_artifact_reads_without_error(copy: Path) -> None:
    Artifact.load(copy).verify_all()


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


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("name", ["model.onnx", "model.weights", "tokenizer.json", "check.json"])
@pytest.mark.parametrize("change", [flip, lambda content: content[:1000], lambda _: b""])
def test_changed_file_raises_artifact_error_with_its_name(
    copy: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    (copy / name).write_bytes(change((copy / name).read_bytes()))
    message = f"{name} in the artifact copy is not the exported file"
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(copy).verify_all()


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
    copy: Path, tmp_path: Path, change: Callable[[Path, Path], None], problem: str
) -> None:
    names = Artifact.load(copy).manifest.files
    assert any("/" in name for name in names)  # in a subfolder too
    for index, name in enumerate(names):
        elsewhere = tmp_path / str(index)
        change(copy / name, elsewhere)
        with pytest.raises(ArtifactError, match=re.escape(problem.format(name=name))):
            Artifact.load(copy)
        (copy / name).rmdir() if (copy / name).is_dir() else (copy / name).unlink()
        elsewhere.rename(copy / name)
    Artifact.load(copy)


def test_folder_that_is_a_link_is_rejected(copy: Path, tmp_path: Path) -> None:
    for folder in ("source/1_Pooling", "source"):
        replace_by_link(copy / folder, tmp_path / "elsewhere")
        with pytest.raises(
            ArtifactError, match=f"{folder} in the artifact copy is a symbolic link"
        ):
            Artifact.load(copy)
        (copy / folder).unlink()
        (tmp_path / "elsewhere").rename(copy / folder)
    Artifact.load(copy)


def test_manifest_that_is_a_link_is_rejected(copy: Path, tmp_path: Path) -> None:
    replace_by_link(copy / "manifest.json", tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"manifest.json in the artifact copy is a symbolic"):
        Artifact.load(copy)


def test_file_that_becomes_a_link_later_is_not_read(copy: Path, tmp_path: Path) -> None:
    artifact = Artifact.load(copy)
    replace_by_link(copy / "check.json", tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"check.json in the artifact copy cannot be read"):
        artifact.read("check.json")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem")
def test_file_that_a_broken_disk_does_not_return_is_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_broken(path: Path, flags: int) -> int:
        # The kernel answers reads of address 0 with EIO.
        return os.open("/proc/self/mem" if path.name == broken else path, flags)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    artifact = Artifact.load(copy)
    monkeypatch.setattr("models.artifact.os", SimpleNamespace(**{**vars(os), "open": open_broken}))
    monkeypatch.setattr("models.artifact.mmap", SimpleNamespace(**{**vars(mmap), "mmap": fail}))
    problem = "^{} in the artifact copy cannot be read: Input/output error"
    broken = "manifest.json"
    with pytest.raises(ArtifactError, match=problem.format(broken)):
        Artifact.load(copy)
    broken = "tokenizer.json"
    with pytest.raises(ArtifactError, match=problem.format(broken)):
        artifact.read(broken)
    with pytest.raises(ArtifactError, match=problem.format("model.weights")):
        artifact.verify("model.weights")


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


def test_file_outside_the_manifest_cannot_be_read(small_artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="does not list"):
        small_artifact.read("../secret")


def test_missing_graph_error_names_the_engine(small_artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="artifact has no graph for cuda"):
        small_artifact.graph("cuda")


def test_failed_write_leaves_no_files_behind(tmp_path: Path) -> None:
    def fail_halfway() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []


def test_new_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the files of a folder can be empty after a power failure."""
    out = tmp_path / "out"
    names: dict[int, bool] = {}  # whether the folder had its name, by the inode that was synced

    def fsync(descriptor: int) -> None:
        names[os.fstat(descriptor).st_ino] = out.exists()

    monkeypatch.setattr("os.fsync", fsync)
    with new_folder(out) as folder:
        (folder / "source" / "1_Pooling").mkdir(parents=True)
        for name in ("weights", "source/a", "source/1_Pooling/b"):
            (folder / name).write_text(name)
    assert names.pop(tmp_path.stat().st_ino)
    assert names == {path.stat().st_ino: False for path in (out, *out.rglob("*"))}


def test_file_system_that_cannot_sync_folders_takes_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # Linux, where a file system has no fsync
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.fsync", fsync)
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert [*tmp_path.rglob("*")] == [tmp_path / "out", tmp_path / "out" / "file"]


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
    problem = "out already exists; remove it or choose another path$"  # of export and migrate
    with pytest.raises(ArtifactError, match=problem), new_folder(link):
        pytest.fail("the block ran")


# Writes a new folder until its standard input ends.
_WRITER = """
import sys
from pathlib import Path
from models.artifact import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def writing(out: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield another process that is writing a folder, and the temporary folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().rstrip())
        finally:
            process.kill()


def test_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    out = tmp_path / "a*[b]"
    with writing(out) as (process, temporary):
        assert temporary.parent == tmp_path
        process.kill()
    assert list(tmp_path.iterdir()) == [temporary]
    with new_folder(out):
        assert not temporary.exists()
    assert list(tmp_path.iterdir()) == [out]


def test_folder_of_a_running_process_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with writing(out) as (process, temporary):
        with pytest.raises(KeyboardInterrupt), new_folder(out):
            raise KeyboardInterrupt
        assert [*temporary.iterdir()] == [temporary / "half"]
        process.communicate()
        assert process.returncode == 0
    assert [*tmp_path.rglob("*")] == [out, out / "half"]


def test_folders_of_other_names_stay_and_so_do_files_and_links(tmp_path: Path) -> None:
    names = {".out.2.abcdefgh.partial", ".out.mine.partial", ".outabcdefgh.partial"}
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.aaaaaaaa.partial").symlink_to(tmp_path / ".out.mine.partial")
    (tmp_path / ".out.bbbbbbbb.partial").touch()
    others = {*tmp_path.iterdir()}
    with new_folder(tmp_path / "out"):
        pass
    assert {*tmp_path.iterdir()} == {*others, tmp_path / "out"}


def test_file_system_without_locks_takes_new_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", fail)
    other = tmp_path / ".out.abcdefgh.partial"
    other.mkdir()
    with new_folder(tmp_path / "out"):
        pass
    assert {*tmp_path.iterdir()} == {other, tmp_path / "out"}


def test_manifest_round_trips_through_disk(small_artifact: Artifact, tmp_path: Path) -> None:
    manifest = small_artifact.manifest
    write_manifest(tmp_path, manifest)
    for name in manifest.files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert Artifact.load(tmp_path).manifest == manifest


def test_hard_linked_artifact_reads_like_its_copy(copy: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(copy, linked, copy_function=os.link)
    assert Artifact.load(linked).read("check.json") == Artifact.load(copy).read("check.json")
