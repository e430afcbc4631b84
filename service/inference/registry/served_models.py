"""Served models: their specifications, their state, and the requests that wait for them."""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from pathlib import Path

from models.artifact import Artifact
from models.engines import weight_bytes
from models.manifest import MANIFEST, ArtifactError, Manifest
from models.printable import printable
from service.inference.model.model import Model
from service.inference.model.opening import DEFAULT_OPTIONS, ModelOptions
from service.inference.registry.model_names import name_problem
from service.inference.registry.model_version import Lease, ModelVersion
from service.inference.results.metrics import ModelMetrics

log = logging.getLogger("vitrine")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to serve.

    Attributes:
        path: Folder of its artifact.
        aliases: Other names of the model in requests.
        options: Runtime options; `options.name` is the model's name.
    """

    path: Path
    aliases: tuple[str, ...] = ()
    options: ModelOptions = DEFAULT_OPTIONS


def specs_in(folder: Path, options: ModelOptions) -> list[ModelSpec]:
    """Return the models of the artifacts in a folder, each with the name of its own folder.

    Hidden folders, and folders without a manifest, are ignored. Those that cannot be read, or whose
    name cannot be that of a model, are skipped, and logged the first time.

    Raises:
        ArtifactError: The folder cannot be read, or has no artifact.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be read: {error.strerror}") from error
    paths = []
    for path in entries:
        if path.name.startswith("."):
            continue
        try:
            (path / MANIFEST).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            _log_skipped(path, f"it cannot be read: {error.strerror}")
            continue
        if problem := name_problem(path.name):
            _log_skipped(path, f"its name {problem}")
        else:
            paths.append(path)
    if not paths:
        raise ArtifactError(f"{folder} has no folder with an artifact of vitrine-export")
    return [ModelSpec(path=path, options=replace(options, name=path.name)) for path in paths]


def read_artifact(spec: ModelSpec) -> tuple[Artifact, int]:
    """Return the artifact of a model, and the size of its file of weights in bytes.

    Raises:
        ArtifactError: The artifact is incomplete or invalid.
        EngineError: The engine is unknown or unavailable on this machine.
    """
    artifact = Artifact.load(spec.path, spec.options.verify)
    return artifact, weight_bytes(artifact, spec.options.engine, spec.options.precision)


@lru_cache(maxsize=1024)  # a watched folder is read again and again
def _log_skipped(path: Path, problem: str) -> None:
    log.error("skipping the folder %s: %s", printable(str(path)), problem)


@dataclass(frozen=True)
class ModelStatus:
    """State of a served model.

    Attributes:
        name: Name of the model.
        aliases: Other names of the model.
        path: Folder of its artifact.
        created: Modification time of the artifact, as a Unix timestamp in seconds.
        is_default: Whether it serves requests that name no model.
        manifest: Manifest of its artifact.
        weight_bytes: Size of its file of weights, in bytes.
        model: The version that is served; None: the model is not loaded.
        leases: Number of requests in flight.
    """

    name: str
    aliases: tuple[str, ...]
    path: Path
    created: int
    is_default: bool
    manifest: Manifest
    weight_bytes: int
    model: Model | None
    leases: int


@dataclass(eq=False, kw_only=True)
class RegisteredModel:
    """A served model, which may be loaded.

    Attributes:
        name: Name of the model.
        spec: Specification of the version that is served, or is loaded next.
        created: Modification time of its artifact, as a Unix timestamp in seconds.
        manifest: Manifest on whose outputs, width and similarity clients rely.
        size: Size of its file of weights, in bytes, when it was last read.
        metrics: Metrics of all versions.
        version: The loaded version; None: the model is not loaded.
        loading: Task that loads the model for requests; None: the model is not being loaded.
        waiting: Futures of the requests that wait for the model, each with a lease of its own;
            None: the model was replaced or deleted.
        retry_at: Time before which the model is not loaded again, because a load has failed.
    """

    name: str
    spec: ModelSpec
    created: int
    manifest: Manifest
    size: int
    metrics: ModelMetrics
    version: ModelVersion | None = None
    loading: asyncio.Task[None] | None = None
    waiting: list[asyncio.Future[Lease | None]] = field(default_factory=list)
    retry_at: float = -inf

    @property
    def is_busy(self) -> bool:
        """Whether requests use the loaded version."""
        return self.version is not None and self.version.leases > 0

    def answer(self) -> None:
        """Give waiting requests a lease, or None if the model is not loaded."""
        for waiting in self.waiting:
            if not waiting.done():
                version = self.version
                waiting.set_result(None if version is None else version.lease())
        self.waiting = []

    def status(self, *, is_default: bool) -> ModelStatus:
        """Return the state of the model."""
        version = self.version
        model, leases = (version.model, version.leases) if version else (None, 0)
        return ModelStatus(
            self.name,
            self.spec.aliases,
            self.spec.path,
            self.created,
            is_default,
            self.manifest,
            self.size,
            model,
            leases,
        )
