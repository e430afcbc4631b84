"""The artifacts of models that are named by folder, package or hub id: exported once.

    NAME/KEY/               artifact; the key is a hash of the model's content and of the export's
                            version and options
    NAME/commits/REVISION   commit of a revision of a hub model when it was last exported
    NAME/lock               locked during an export

An export runs in a child process, because it imports torch. It writes into a hidden folder, from
which the complete artifact is renamed. The child inherits the lock, which so outlives a killed
parent.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, BinaryIO, Literal
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.artifact import Artifact, sync
from models.engines import Precision
from models.export.sources import SourceError, content_sha256, resolve_locally
from models.local_path import is_url
from models.manifest import FORMAT, MANIFEST, ArtifactError
from models.printable import printable
from service.signals import exit_on

log = logging.getLogger("vitrine.export")

# Start of the line with which the command says why it fails.
_FAILURE = "vitrine-export: "
# Start of the name of an artifact while another one takes its place.
_OLD = ".old-"


def artifact_of(
    name: Path,
    engine: str,
    precision: Precision,
    cache: Path | None,
    *,
    refresh: bool = False,
    may_export: bool = True,
) -> Path:
    """Return the path of a model's artifact, which is exported if it is not in the cache.

    Args:
        name: Artifact, model folder, installed package or hub id.
        engine: Name of the engine that will run it.
        precision: Precision of the engine.
        cache: Folder of the cache; None: that of the environment.
        refresh: Whether to export again what the cache has, from the newest commit of a hub model.
        may_export: Whether the model may be exported: nobody has signed what a start exports.

    Raises:
        ArtifactError: The model cannot be found or exported, or may not; the message has the
            remedy.
        OSError: A file of the model, or of the cache, cannot be read.
    """
    if not (name / MANIFEST).is_file():
        options = _export_options(engine, precision)
        entry = _entry(str(name), options, cache or _default_cache())
        return entry.artifact(refresh=refresh, may_export=may_export)
    if refresh:
        log.warning("%s is an artifact, which --refresh does not export again", name)
    return name


def expanded(path: object) -> object:
    """Return a path with the home directory in place of `~`, as a shell would have replaced it.

    Raises:
        ValueError: It is a URL, or the home directory is unknown.
    """
    if isinstance(path, str) and is_url(path):
        raise ValueError(f"{path} is a URL; give the path of a file or folder")
    if not (isinstance(path, str) and path.startswith("~")):
        return path
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"the home directory of {path} is unknown") from error


def absolute_if_local(name: object) -> object:
    """Return the path of a folder as absolute, so that none is mistaken for a hub id.

    Raises:
        ValueError: It is empty or a URL, or the home or working directory that it begins with is
            unknown.
    """
    if name == "":  # as a path, it would be the working directory
        raise ValueError("the name of the model is empty")
    if isinstance(name, str) and is_url(name):
        raise ValueError(f"{name} is a URL; a model is a folder, an installed package or a hub id")
    if not (isinstance(name, str) and name.startswith(".")):
        return expanded(name)
    try:
        return Path(name).absolute()
    except OSError as error:
        raise ValueError(f"the working directory of {name} was deleted") from error


def model_path(text: str) -> Path:
    """Return the path or name of a model, see `absolute_if_local`.

    Raises:
        ArgumentTypeError: See `absolute_if_local`.
    """
    try:
        return Path(str(absolute_if_local(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# A path in a file of variables, as of Compose or systemd, has not passed a shell.
LocalPath = Annotated[Path, BeforeValidator(expanded)]


class _Models(BaseModel):
    cache: LocalPath | Literal[""] | None = None
    verify: LocalPath | None = None


class _ModelsSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="VITRINE_", env_nested_delimiter="__", extra="ignore"
    )

    models: _Models = _Models()


def _models_settings() -> _Models:
    """Return settings `models` of the environment, for commands without settings.

    Raises:
        ArtifactError: A variable is invalid, or looks like one of them that is misspelt.
    """
    known = [f"VITRINE_MODELS__{name}".upper() for name in _Models.model_fields]
    for name in os.environ.keys() - {*known}:
        if similar := get_close_matches(name, known, n=1, cutoff=0.9):
            raise ArtifactError(f"{name} is not a setting; did you mean {similar[0]}?")
    try:
        return _ModelsSettings().models
    except ValueError as error:
        raise ArtifactError("VITRINE_MODELS, or a variable that it begins, is invalid") from error


def required_signer() -> Path | None:
    """Return the setting `models.verify` of the environment.

    Raises:
        ArtifactError: The variable is invalid.
    """
    file = _models_settings().verify
    if file == Path():  # of an empty variable
        raise ArtifactError("VITRINE_MODELS__VERIFY is empty; it must be a file, or not be set")
    return None if file is None else file.absolute()  # Ray's workers run in other folders


def _default_cache() -> Path:
    if folder := _models_settings().cache:
        return folder
    # Relative values are invalid: https://specifications.freedesktop.org/basedir-spec
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (home if home.is_absolute() else Path.home() / ".cache") / "vitrine"
    except RuntimeError as error:
        raise ArtifactError(
            "this user has no home directory for a cache of exported models: set "
            "VITRINE_MODELS__CACHE to a folder"
        ) from error


def _export_options(engine: str, precision: Precision) -> tuple[str, ...]:
    """Return the options of `vitrine-export` for an engine; "auto" selects one on CPU."""
    if engine == "cuda" or precision == "float16":
        return "--target", "cuda", "--dtype", "float16" if precision == "float16" else "float32"
    return ("--precision", "int8") if precision == "int8" else ()


@dataclass(frozen=True)
class _CachedModel:
    """A model in the cache.

    Attributes:
        model: Folder, package or hub id.
        revision: Branch, tag or commit of a hub model; None: the model is local.
        content: Hash of a local model's files; None: the model is on the hub.
        options: Options of the export.
        folder: Folder in the cache.
    """

    model: str
    revision: str | None
    content: str | None
    options: Sequence[str]
    folder: Path

    def artifact(self, *, refresh: bool, may_export: bool) -> Path:
        """Return the path of the artifact, after an export if `refresh` or if there is none."""
        if not refresh and (path := self._find()):
            return path
        if not may_export:
            raise ArtifactError(
                f"{self.model} is no signed artifact, which models.verify requires: run vitrine "
                f"export {self.model} --out FOLDER --sign KEY, and name FOLDER"
            )
        # SIGTERM and SIGHUP would leave the child process.
        with exit_on(signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._lock() as lock:
            # Another process may have exported the model meanwhile.
            if not refresh and (path := self._find()):
                return path
            commit = None if refresh else self._commit()  # of another version of the export
            return self._export(commit or self.revision, lock)

    def _find(self) -> Path | None:
        content = self.content or self._commit()
        path = self._path(content) if content else None
        return path if path and path.exists() else None

    def _path(self, content: str) -> Path:
        key = json.dumps([content, version("vitrine"), FORMAT, self.options])
        return self.folder / hashlib.sha256(key.encode()).hexdigest()[:16]

    def _commit_file(self) -> Path:
        return self.folder / "commits" / quote(self.revision or "", safe="")

    def _commit(self) -> str | None:
        file = self._commit_file()
        return file.read_text() if file.is_file() else None

    @contextmanager
    def _lock(self) -> Iterator[BinaryIO]:
        """Lock the model in the cache; errors of the block are those of writing to the cache."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    log.info("waiting for another process, which exports %s", self.model)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                yield lock
        except OSError as error:
            raise ArtifactError(
                f"the cache {self.folder} cannot be written ({error.strerror}): set "
                "VITRINE_MODELS__CACHE to a folder that this user may write"
            ) from error

    def _export(self, revision: str | None, lock: BinaryIO) -> Path:
        """Export the model, while the lock is held."""
        for left in self.folder.glob(".*"):  # by a killed export
            replaced = self.folder / left.name.removeprefix(_OLD)
            if left.name.startswith(_OLD) and not replaced.exists():
                left.rename(replaced)
            else:
                shutil.rmtree(left, ignore_errors=True)
        log.info("exporting %s, once, to %s", printable(self.model), self.folder)
        options = (*self.options, *(("--revision", revision) if revision else ()))
        with TemporaryDirectory(prefix=".", dir=self.folder) as name:
            work = Path(name)
            try:
                _run([*options, "--out", str(work / "new"), "--", self.model], work, lock)
            except ArtifactError as error:
                # A mistyped path can look like a hub id.
                place = ", which is no folder or package here," if self.revision else ""
                raise ArtifactError(f"{self.model}{place} cannot be exported: {error}") from error
            return self._publish(work)

    def _publish(self, work: Path) -> Path:
        """Move an artifact to its place in the cache, and return its path."""
        commit = Artifact.load(work / "new").manifest.revision
        path = self._path(self.content or str(commit))
        old = path.with_name(_OLD + path.name)
        if path.exists():
            path.rename(old)
        (work / "new").rename(path)
        shutil.rmtree(old, ignore_errors=True)
        if self.revision:
            (work / "commit").write_text(str(commit))
            sync(work / "commit")
            self._commit_file().parent.mkdir(exist_ok=True)
            (work / "commit").rename(self._commit_file())
        return path


def _entry(name: str, options: Sequence[str], cache: Path) -> _CachedModel:
    """Return the entry of a model.

    Raises:
        ArtifactError: The folder does not exist or has no checkpoint that could be exported.
    """
    model, _, revision = name.partition("@")
    try:
        source = resolve_locally(name)
        if source is None and revision and (source := resolve_locally(model)) is not None:
            kind = source.source.partition(" ")[0]
            raise SourceError(f"a revision is for hub models; {model} is a {kind}")
    except SourceError as error:
        raise ArtifactError(str(error)) from error
    if source is not None:
        folder = cache / _file_name(source.name)
        return _CachedModel(name, None, content_sha256(source.folder), options, folder)
    return _CachedModel(model, revision or "main", None, options, cache / _file_name(model))


def _file_name(model: str) -> str:
    return quote(os.fsencode(model.replace("/", "--")), safe="")


def _run(arguments: Sequence[str], work: Path, lock: BinaryIO) -> None:
    """Run `vitrine-export` in a child process, and log its output.

    Args:
        arguments: Arguments of the command.
        work: Folder for temporary files, which a killed process leaves.
        lock: Lock that the process inherits.

    Raises:
        ArtifactError: The export cannot be started, or has failed.
    """
    failure = ""
    try:
        process = subprocess.Popen(  # noqa: S603 - the names of models are arguments, after "--"
            # -P keeps Python from importing a folder named "models" in the current directory.
            [sys.executable, "-P", "-m", "models.export", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[lock.fileno()],
            process_group=0,  # SIGINT of a terminal is for this process, which kills the child
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TMPDIR": str(work)},
        )
    except OSError as error:
        raise ArtifactError(f"vitrine-export cannot be started: {error.strerror}") from error
    with process as child:
        assert child.stdout is not None  # noqa: S101 - it was started with a pipe
        try:
            for line in child.stdout:
                if line.startswith(_FAILURE):
                    failure = line.removeprefix(_FAILURE).rstrip()
                else:
                    log.info("%s", line.rstrip())
        except BaseException:
            child.kill()
            raise
    if child.returncode == -signal.SIGKILL:
        raise ArtifactError(
            "vitrine-export was killed, as the system does when memory is short: run it where "
            "there is more, with --out FOLDER, and serve a copy of FOLDER"
        )
    if child.returncode:
        raise ArtifactError(
            failure or f"vitrine-export ended with status {child.returncode}; see the log"
        )
