"""The artifact: the directory that export writes and the service reads. Standard library only.

    manifest.json     what it is, and the SHA-256 of every other file
    model.onnx        the graph for CPUs, and one for GPUs beside it where that was asked for
    tokenizer.json    text to token ids; truncates nothing, pads nothing
    check.json        token ids and the vectors that PyTorch gives them, for the self-check
    twin/             the source folder's weights and config, for gradient work (may be absent)

It is written under a temporary name and renamed when complete. A reader gets the bytes whose hash
it has seen, so a file that was changed, linked in or cut short is refused.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECK = "check.json"
TWIN = "twin"


class ArtifactError(Exception):
    """An artifact that is not complete, not intact or not of a known format."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One ONNX file of an artifact.

    Attributes:
        file: Its name in the directory.
        target: The hardware that it is made for, "cpu" or "cuda".
        dtype: Of its weights, "float32" or "float16".
        opset: Of the default ONNX domain.
        parity: Worst differences from PyTorch measured at export, by name; None where the
            target's hardware was not there.
    """

    file: str
    target: str
    dtype: str
    opset: int
    parity: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an artifact is.

    Attributes:
        name: What answers call the model.
        source: The folder name, package or hub id that it was exported from.
        revision: Of the source, where it has one.
        family: `model_type` of the source.
        weights_sha256: File of the source -> hash.
        width: Numbers in a vector.
        vocab_size: Token ids are below it.
        max_tokens: Longest row, special tokens included.
        pooling: Poolings, side by side.
        include_prompt: Whether pooling counts the tokens of a prompt.
        normalize: Whether the model's vectors have unit length.
        prompts: Name -> text put before an input.
        default_prompt: Name of the prompt used where none is asked for.
        graphs: The ONNX files.
        files: Relative path -> SHA-256, of every file but the manifest.
        versions: Library -> version that made the artifact.
    """

    name: str
    source: str
    revision: str | None
    family: str
    weights_sha256: Mapping[str, str]
    width: int
    vocab_size: int
    max_tokens: int
    pooling: tuple[str, ...]
    include_prompt: bool
    normalize: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    graphs: tuple[Graph, ...]
    files: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Check:
    """Rows of token ids, and the vector that PyTorch in float32 gives each."""

    rows: list[list[int]]
    vectors: list[list[float]]


@dataclass(frozen=True)
class Artifact:
    """A directory that was found to hold what its manifest lists."""

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> "Artifact":
        """Return the artifact in the directory `path`.

        Contents are hashed when they are read, by `read`.

        Raises:
            ArtifactError: It is not an artifact, of another format, or not exactly the files that
                its manifest lists.
        """
        if not (path / MANIFEST).is_file():
            raise ArtifactError(f"{path} is not an artifact: it has no {MANIFEST}")
        manifest = _parse(_read_regular(path, MANIFEST))
        present = {
            str(file.relative_to(path)) for file in path.rglob("*") if not _is_directory(file)
        }
        listed = {MANIFEST, *manifest.files}
        for problem, names in (("lacks", listed - present), ("has an unlisted", present - listed)):
            if names:
                raise ArtifactError(f"the artifact {path.name} {problem} file {min(names)}")
        return cls(path, manifest)

    def read(self, name: str) -> bytes:
        """Return the content of a listed file.

        Raises:
            ArtifactError: It is not listed, not a regular file, or not what the manifest says.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"the artifact {self.path.name} does not list {name}")
        content = _read_regular(self.path, name)
        if hashlib.sha256(content).hexdigest() != self.manifest.files[name]:
            raise ArtifactError(
                f"{name} in the artifact {self.path.name} is not the file that was exported: "
                "its SHA-256 differs from the manifest's. Export again"
            )
        return content

    def graph(self, target: str) -> Graph:
        """Return the graph made for `target`.

        Raises:
            ArtifactError: There is none.
        """
        for graph in self.manifest.graphs:
            if graph.target == target:
                return graph
        raise ArtifactError(
            f"the artifact {self.path.name} has no graph for {target}; "
            f"export it with --target {target}"
        )

    def check(self) -> Check:
        """Return the check inputs.

        Raises:
            ArtifactError: They cannot be read.
        """
        try:
            return Check(**json.loads(self.read(CHECK)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{CHECK} is not readable: {error}") from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes `path` when the block ends without an error.

    Raises:
        ArtifactError: `path` is there already.
    """
    if path.exists():
        raise ArtifactError(f"{path} is there already; remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    # mkdtemp opens it to its owner alone; who serves it may be another user.
    temporary.chmod(0o755)
    try:
        yield temporary
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder`, by relative path."""
    return {
        str(file.relative_to(folder)): sha256(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` into `folder`."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", "utf-8")


def write_check(folder: Path, check: Check) -> None:
    """Write the check inputs into `folder`."""
    (folder / CHECK).write_text(json.dumps(asdict(check)), "utf-8")


def _parse(content: bytes) -> Manifest:
    try:
        given: dict[str, Any] = json.loads(content)
        if given.pop("format", None) != FORMAT:
            raise ArtifactError(f"{MANIFEST} is not of format {FORMAT}; export again")
        given["graphs"] = tuple(Graph(**graph) for graph in given["graphs"])
        given["pooling"] = tuple(given["pooling"])
        given["files"] = dict(given["files"])
        return Manifest(**given)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Manifest))
        raise ArtifactError(f"{MANIFEST} is not readable ({error}); it needs {names}") from error


def _is_directory(file: Path) -> bool:
    return stat.S_ISDIR(file.lstat().st_mode)


def _read_regular(folder: Path, name: str) -> bytes:
    """Return the content of a regular file that lies in the folder and nowhere else besides."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError(f"{name} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ArtifactError(f"{name} is a link or not a regular file")
        return stream.read()
