"""The artifact: the directory written by export and read by the service. Standard library only.

    manifest.json     description of the artifact, with the SHA-256 of every other file
    model.onnx        graph for CPUs; with `--target cuda`, model.cuda.onnx beside it
    tokenizer.json    tokenizer, without truncation and padding
    check.json        token ids and PyTorch's vectors for them, for the self-check
    source/           weights and config of the reference model, for gradients (optional)

It is written under a temporary name and renamed when complete. Readers receive exactly the bytes
that were hashed, so a changed, linked or truncated file is refused.
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

FORMAT = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECK = "check.json"
SOURCE = "source"


class ArtifactError(Exception):
    """The artifact is incomplete, corrupted or of an unknown format."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One ONNX file of an artifact.

    Attributes:
        file: File name in the directory.
        target: Target hardware, "cpu" or "cuda".
        dtype: Dtype of the weights, "float32" or "float16".
        opset: Opset version of the default ONNX domain.
        parity: Worst differences from PyTorch at export, by name; None if no engine for the target
            was available.
    """

    file: str
    target: str
    dtype: str
    opset: int
    parity: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of an artifact.

    Attributes:
        name: Name of the model in responses.
        source: Folder name, package or hub id of the checkpoint.
        revision: Revision of the source; None for a folder.
        family: `model_type` of the source.
        weights_sha256: SHA-256 of each weight file of the source, by name.
        width: Width of a row vector.
        vocab_size: Size of the vocabulary.
        max_tokens: Maximum length of a row, special tokens included.
        pooling: Names of the poolings, whose results are concatenated.
        include_prompt: Whether pooling includes the tokens of a prompt.
        normalize: Whether the model's vectors have unit length.
        prompts: Texts to prepend to an input, by name.
        default_prompt: Name of the prompt for requests without one; None: no prompt.
        graphs: ONNX files.
        files: SHA-256 of every file except the manifest, by relative path.
        versions: Versions of the exporting libraries, by name.
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
    """Inputs of the self-check and their reference outputs, from PyTorch in float32.

    Attributes:
        rows: Token ids of each row.
        outputs: Reference vectors by output name: one per row for "pooled", one per token of the
            first rows for "tokens".
    """

    rows: list[list[int]]
    outputs: dict[str, list[list[float]]]


@dataclass(frozen=True)
class Artifact:
    """A directory with exactly the files listed in its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> "Artifact":
        """Return the artifact in the directory `path`.

        Contents are hashed later, by `read`.

        Raises:
            ArtifactError: The directory is not an artifact, has another format, or does not contain
                exactly the files listed in its manifest.
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
            ArtifactError: The file is not listed, is not a regular file, or its SHA-256 differs
                from the manifest's.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"the artifact {self.path.name} does not list {name}")
        content = _read_regular(self.path, name)
        if hashlib.sha256(content).hexdigest() != self.manifest.files[name]:
            raise ArtifactError(
                f"{name} in the artifact {self.path.name} is not the exported file: "
                "its SHA-256 differs from the manifest's; export again"
            )
        return content

    def graph(self, target: str) -> Graph:
        """Return the graph for `target`.

        Raises:
            ArtifactError: The artifact has no graph for `target`.
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
            ArtifactError: The check inputs cannot be read.
        """
        try:
            return Check(**json.loads(self.read(CHECK)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{CHECK} is not readable: {error}") from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; rename it to `path` when the block ends without an error.

    Raises:
        ArtifactError: `path` already exists.
    """
    if path.exists():
        raise ArtifactError(f"{path} already exists; remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    # mkdtemp denies access to other users, and the service may run as one.
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
        values: dict[str, Any] = json.loads(content)
        if values.pop("format", None) != FORMAT:
            raise ArtifactError(f"{MANIFEST} is not of format {FORMAT}; export again")
        values["graphs"] = tuple(Graph(**graph) for graph in values["graphs"])
        values["pooling"] = tuple(values["pooling"])
        values["files"] = dict(values["files"])
        return Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Manifest))
        raise ArtifactError(f"{MANIFEST} is not readable ({error}); it needs {names}") from error


def _is_directory(file: Path) -> bool:
    return stat.S_ISDIR(file.lstat().st_mode)


def _read_regular(folder: Path, name: str) -> bytes:
    """Return the content of a regular file, without following symbolic links."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError(f"{name} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtifactError(f"{name} is not a regular file")
        return stream.read()
