"""The artifact: the directory written by export and read by the service. Standard library only.

    manifest.json     description of the artifact, with the SHA-256 of every other file
    model.onnx        graph for onnxruntime on CPUs; model.openvino.onnx for OpenVINO
    model.weights     weights of both; engines map this file into memory
    tokenizer.json    tokenizer, without truncation and padding
    check.json        inputs of the self-check, their token ids, and PyTorch's vectors for them
    query_weights.npy weights of queries, of a sparse model that only looks them up (optional)
    embeddings.npy    vector of each token, of a static model, which has no graph
    calibration.json  ranges of the vectors' dimensions, for quantised vectors (optional)
    spaces/           maps of queries into the spaces of other models (optional)
    model.sig         signature of all other files, which the manifest does not list (optional)
    source/           weights and config of the reference model, for gradients (optional)

With `--target cuda` there are model.cuda.onnx and model.cuda.weights as well, and with
`--precision int8` model.int8.onnx and model.int8.weights, for OpenVINO.

An artifact is written to a temporary directory, which is renamed when complete. It has regular
files and folders only, and exactly those of its manifest. A file is rejected when it is read if its
SHA-256 differs from the manifest's. Where a signature is required, it is verified before the
manifest is parsed, so the manifest's hashes are signed ones. Engines keep the weights mapped: files
of an artifact in use must not be changed in place.
"""

import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from models.artifact_rules import check_manifest, check_self_check
from models.json_reader import parse_json
from models.manifest import (
    CALIBRATION,
    CHECK,
    FORMAT,
    MANIFEST,
    QUERY_WEIGHTS,
    SIGNATURE,
    SIMILARITIES,
    TOKENIZER,
    ArtifactError,
    Check,
    Graph,
    Manifest,
)
from models.printable import printable
from models.typed_json import describe, read_dataclass

if TYPE_CHECKING:  # needs cryptography
    from cryptography.hazmat.primitives.asymmetric import ec

    from models.signing import Signature

# Maximum size of files that are read into memory, in bytes. The largest known tokenizer.json has
# 33 MB.
_MAX_BYTES = {
    MANIFEST: 4 * 2**20,
    TOKENIZER: 64 * 2**20,
    CHECK: 32 * 2**20,
    QUERY_WEIGHTS: 65 * 2**20,
    CALIBRATION: 32 * 2**20,
    SIGNATURE: 8 * 2**20,
}


@dataclass(frozen=True)
class Artifact:
    """A directory with exactly the files listed in its manifest, and perhaps their signature.

    Attributes:
        path: The directory.
        manifest: Its manifest.
        signed_by: Hint of the key that verified the signature, see `models.signing.key_hint`; None:
            no signature was required.
    """

    path: Path
    manifest: Manifest
    signed_by: str | None = None

    @classmethod
    def load(cls, path: Path, verify: str | Path | None = None) -> "Artifact":
        """Return the artifact in the directory `path`.

        File contents are verified later, by `read` and `verify`.

        Args:
            path: The directory.
            verify: PEM file with a public key, or the certificate of one, that must verify the
                signature of the manifest and of the files that it lists; None: any signature is
                ignored.

        Raises:
            ArtifactError: The directory has no manifest, the manifest is invalid or has an
                unsupported format version, or the other files differ from those that it lists. A
                file or folder is a symbolic link, or something else that is not regular. The
                signature is missing or invalid, or is one of other files. The file `verify` has
                no key.
        """
        if not (path / MANIFEST).is_file():
            raise ArtifactError(
                f"{path} is not an artifact: it has no {MANIFEST}, which vitrine-export writes"
            )
        present = set(_regular_files(path))
        with _open_regular(path, MANIFEST) as stream:
            content = _read_all(stream, MANIFEST)
        signature = None if verify is None else _signature(path, Path(verify))
        if signature is not None:
            signature.check(path.name, {MANIFEST: hashlib.sha256(content).hexdigest()})
        manifest = _parse(content)
        listed = {MANIFEST, *manifest.files}
        signed = {*signature.files} if signature else set()
        for problem, names, remedy in (
            ("lacks", (listed | signed) - present, "copy or export it again"),
            ("has an unlisted", present - listed - {SIGNATURE}, "remove it"),
        ):
            if names:
                file = printable(min(names))
                raise ArtifactError(f"the artifact {path.name} {problem} file {file}: {remedy}")
        if signature is None:
            return cls(path, manifest)
        signature.check(path.name, manifest.files)
        return cls(path, manifest, signature.hint)

    def read(self, name: str) -> bytes:
        """Return the verified content of a file.

        Raises:
            ArtifactError: The manifest does not list the file, the file is not a regular file, or
                its SHA-256 differs from the manifest's.
        """
        with self._open(name) as stream:
            content = _read_all(stream, name)
        self._check_hash(name, hashlib.sha256(content).hexdigest())
        return content

    def verify(self, name: str) -> Path:
        """Verify a file and return its path, without reading all of the file into memory.

        A change after the verification is not detected when the caller opens the file.

        Raises:
            ArtifactError: The manifest does not list the file, the file is not a regular file, or
                its SHA-256 differs from the manifest's.
        """
        with self._open(name) as stream:
            self._check_hash(name, _mapped_sha256(stream))
        return self.path / name

    def verify_all(self) -> None:
        """Verify every file that the manifest lists; see `verify`."""
        for name in self.manifest.files:
            self.verify(name)

    def sign(self, key: "ec.EllipticCurvePrivateKey", name: str) -> str:
        """Verify all files, write their signature, and return the key's hint.

        Args:
            key: Private key of a curve that `models.signing` supports.
            name: Name of the artifact in the signature, which only informs.

        Raises:
            ArtifactError: A file differs from the manifest, or the signature cannot be written.
        """
        from models.signing import key_hint, signature_of

        self.verify_all()
        files = {**self.manifest.files, MANIFEST: sha256(self.path / MANIFEST)}
        content = signature_of(files, key, name)
        # Beside the old one, which stays until it is replaced, and which copies may have links to.
        new = self.path / f"{SIGNATURE}.{os.getpid()}"
        try:
            new.write_bytes(content)
            sync(new)
            new.replace(self.path / SIGNATURE)
        except OSError as error:
            raise ArtifactError(
                f"the signature {SIGNATURE} of {name} cannot be written: {error.strerror}"
            ) from error
        finally:
            new.unlink(missing_ok=True)
        return key_hint(key.public_key())

    def _open(self, name: str) -> AbstractContextManager[BufferedReader]:
        if name not in self.manifest.files:
            raise ArtifactError(
                f"the manifest of the artifact {self.path.name} does not list {name}"
            )
        return _open_regular(self.path, name)

    def _check_hash(self, name: str, actual: str) -> None:
        if actual != self.manifest.files[name]:
            raise ArtifactError(
                f"{name} in the artifact {self.path.name} is not the exported file: "
                "its SHA-256 differs from the manifest's; export again"
            )

    def graph(self, engine: str, dtype: str | None = None) -> Graph:
        """Return the description of the graph for an engine.

        Args:
            engine: Name in `models.engines.ENGINES`.
            dtype: Dtype of the graph's weights; None: that of the engine's first graph.

        Raises:
            ArtifactError: The artifact has no such graph.
        """
        for graph in self.manifest.graphs:
            if graph.engine == engine and dtype in (None, graph.dtype):
                return graph
        kind = f"{engine} in {dtype}" if dtype else engine
        raise ArtifactError(f"the artifact {self.path.name} has no graph for {kind}")

    def graph_sha256(self, engine: str, dtype: str | None = None) -> str:
        """Return the SHA-256 of an engine's graph and weights, in hexadecimal.

        The hash is computed from the two files' hexadecimal SHA-256, concatenated, graph first.
        Arguments are those of `graph`.

        Raises:
            ArtifactError: The artifact has no such graph.
        """
        graph = self.graph(engine, dtype)
        digests = self.manifest.files[graph.file] + self.manifest.files[graph.weights]
        return hashlib.sha256(digests.encode()).hexdigest()

    def check(self) -> Check:
        """Return the inputs and reference vectors of the self-check, which are parsed once.

        Raises:
            ArtifactError: check.json cannot be read, is invalid, or differs from the exported file.
        """
        return self._check

    @cached_property
    def _check(self) -> Check:
        try:
            check = read_dataclass(Check, parse_json(self.read(CHECK)))
            check_self_check(check, self.manifest)
        except ValueError as error:
            raise ArtifactError(f"{CHECK} is invalid: {error}") from error
        return check


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `path` if the block ends without an error.

    Its files are on the disk before: after a power failure, they could be empty.

    Raises:
        ArtifactError: `path` exists, or cannot be created, or another process has made it when the
            block ends.
    """
    with folder_beside(path) as temporary:
        yield temporary
        for own in (*temporary.rglob("*"), temporary):
            sync(own)
        _refuse_existing(path)
        temporary.rename(path)
        sync(path.parent)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside a path that is to be created.

    Those that killed processes have left for the same path are removed before. A process locks its
    own, where the file system has locks of directories.

    Raises:
        ArtifactError: `path` exists, or cannot be created.
    """
    _refuse_existing(path)
    try:
        if not path.parent.exists():  # of a file, mkdir would only say that it exists
            path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}.partial"):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be created: {error.strerror}") from None
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(_locked(made))
        # It gets the name of those that are removed when it is locked.
        temporary = made.rename(f"{made}.partial")
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        # mkdtemp creates directories with mode 0700, and the service may run as another user.
        temporary.chmod(0o755)
        yield temporary


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a directory, which must not be locked.

    Raises:
        OSError: It is locked, or is no directory, or the file system has no locks of directories.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _refuse_existing(path: Path) -> None:
    """Raise ArtifactError if `path` exists, or is a link to nothing."""
    if os.path.lexists(path):
        raise ArtifactError(f"{path} already exists; remove it or choose another path")


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in `folder` and its subfolders, by relative path."""
    return {
        str(file.relative_to(folder)): sha256(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _mapped_sha256(stream: BufferedReader) -> str:
    # One call, which needs the interpreter's lock once. `file_digest` needs it for every 256 KB:
    # beside a thread that runs Python, such as one that reads a tokenizer, it took twice as long.
    if not os.fstat(stream.fileno()).st_size:  # cannot be mapped
        return hashlib.sha256().hexdigest()
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` to manifest.json in `folder`."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", "utf-8")


def write_check(folder: Path, check: Check) -> None:
    """Write the inputs and reference vectors of the self-check to check.json in `folder`."""
    (folder / CHECK).write_text(json.dumps(asdict(check)), "utf-8")


def _parse(content: bytes) -> Manifest:
    try:
        values = parse_json(content)
        if isinstance(values, dict) and (version := values.pop("format", None)) != FORMAT:
            raise ArtifactError(
                f"{MANIFEST} has format {describe(version)}; format {FORMAT} is required: "
                "export again"
            )
        manifest = read_dataclass(Manifest, values)
        check_manifest(manifest)
        _check_similarity(manifest)
    except ValueError as error:
        raise ArtifactError(f"{MANIFEST} is invalid: {error}") from error
    return manifest


def _signature(path: Path, key: Path) -> "Signature":
    """Return the verified signature of an artifact."""
    from models.signing import SignatureError, read_public_key, verify_signature

    public_key = read_public_key(key)
    if not os.path.lexists(path / SIGNATURE):
        raise ArtifactError(
            f"the artifact {path.name} has no signature {SIGNATURE}, which vitrine sign writes"
        )
    with _open_regular(path, SIGNATURE) as stream:
        content = _read_all(stream, SIGNATURE)
    try:
        return verify_signature(content, public_key)
    except SignatureError as error:
        raise ArtifactError(
            f"the signature {SIGNATURE} of the artifact {path.name} {error}"
        ) from None


def _read_all(stream: BufferedReader, name: str) -> bytes:
    """Return the content of a file, whose size is limited if the service reads it."""
    limit = _MAX_BYTES.get(name)
    content = stream.read() if limit is None else stream.read(limit + 1)
    if limit is not None and len(content) > limit:
        raise ArtifactError(f"{name} has more than {limit} bytes, the limit")
    return content


def _check_similarity(manifest: Manifest) -> None:
    allowed = SIMILARITIES.get(manifest.outputs[0], (None,))
    if manifest.similarity not in allowed:
        names = ", ".join("null" if name is None else name for name in allowed)
        raise ValueError(
            f"similarity is {manifest.similarity!r}; allowed with its outputs: {names}"
        )


def _regular_files(folder: Path) -> Iterator[str]:
    """Yield the path of each file in `folder` and its subfolders, relative to it.

    Raises:
        ArtifactError: One is a symbolic link or not regular, or a folder cannot be read.
    """
    unread = [""]
    while unread:
        parent = unread.pop()
        try:
            with os.scandir(folder / parent) as scan:
                entries = list(scan)
        except OSError as error:
            raise ArtifactError(
                f"{parent or '.'} in the artifact {folder.name} cannot be read: {error.strerror}"
            ) from error
        for entry in entries:
            name = os.path.join(parent, entry.name)
            if entry.is_dir(follow_symlinks=False):
                unread.append(name)
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                kind = "a symbolic link" if entry.is_symlink() else "not a regular file"
                raise ArtifactError(f"{name} in the artifact {folder.name} is {kind}")


@contextmanager
def _open_regular(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Open a regular file, without following symbolic links.

    Raises:
        ArtifactError: It is not regular, or cannot be opened, or be read while it is open.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ArtifactError(f"{name} is not a regular file")
        with open(descriptor, "rb") as stream:
            yield stream
    except OSError as error:
        raise ArtifactError(
            f"{name} in the artifact {folder.name} cannot be read: {error.strerror}"
        ) from error
