"""The served models by name: loaded at startup or on demand, replaced and unloaded at run time.

A request leases a version of a model, and a version closes when its last lease is released. A new
version is loaded beside the old one and then takes its place at once, so each request sees one
version. All methods run in the event loop.

With a memory budget, a model that does not fit is loaded by the first request for it. Only one
model loads at a time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from service.inference.batching.cache import ResultCache
from service.inference.batching.streams import Clock
from service.inference.errors import InvalidInput, NotReady, UnknownModel
from service.inference.model.model import Model
from service.inference.registry.compatibility import check_replacement
from service.inference.registry.memory import ModelMemory
from service.inference.registry.model_names import NameConflict, check_name
from service.inference.registry.model_version import Lease
from service.inference.registry.served_models import (
    ModelSpec,
    ModelStatus,
    RegisteredModel,
    read_artifact,
)
from service.inference.results.metrics import InferenceMetrics, ModelMetrics
from service.inference.results.vectors import RowResults
from service.request_trace import TRACE

log = logging.getLogger("vitrine")

# Seconds after a failed load on demand in which the model is not loaded again. A load unloads other
# models, so requests for a broken model would keep them from being served.
_RETRY_S = 10.0


class ModelRegistry:
    """The served models by name; see the module docstring.

    Args:
        default: Name of the model for requests that name none; None: the model with which the
            registry is opened, or no model if there are several.
        max_bytes: Memory budget for weights, in bytes; 0: no limit. While a new version of a model
            loads, the weights of both versions are in memory.
        load_s: Maximum time in seconds that a request waits for its model to load.
        metrics: Metrics of all models; None: new metrics in a separate registry.
        cache: Cache of results that the models share; None: no cache.
        check_path: Called with each name and alias; raises `ValueError` if the path of another
            route has it.
        on_stop: Called with the error if the batcher of a model stops because of a failure, such as
            a broken engine; None: the error is logged.
        clock: Clock; None: the system's monotonic clock.
    """

    def __init__(
        self,
        *,
        default: str | None = None,
        max_bytes: int = 0,
        load_s: float = 30.0,
        metrics: InferenceMetrics | None = None,
        cache: ResultCache[RowResults] | None = None,
        check_path: Callable[[str], None] = lambda _name: None,
        on_stop: Callable[[BaseException], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._default = default
        self._load_s = load_s
        self._metrics = metrics or InferenceMetrics(CollectorRegistry(), longest_s=120.0)
        self._check_path = check_path
        self._memory = ModelMemory(max_bytes, cache, on_stop)
        self._entries: dict[str, RegisteredModel] = {}
        self._model_metrics: dict[str, ModelMetrics] = {}
        self._names: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self._is_open = False
        self._clock = clock or Clock()

    async def open(self, specs: Sequence[ModelSpec]) -> list[str]:
        """Load the models, in their order; with a memory budget, as many as fit.

        Args:
            specs: See `register`.

        Returns:
            The name of each model.

        Raises:
            ArtifactError: An artifact was modified after its export.
            EngineError: The engine fails the self-check of a model.
            Exception: Any error of `register`, under the same conditions.
        """
        async with self._changing:
            names = await self.register(specs)
            for entry in tuple(self._entries.values()):
                if self._memory.fits(entry.size):
                    self._memory.serve(entry, await self._memory.load(entry))
        self._is_open = True
        return names

    async def register(self, specs: Sequence[ModelSpec]) -> list[str]:
        """Read the manifests of the models and check their names, without loading the models.

        Args:
            specs: Models to serve. Without `options.name`, the name is the artifact's.

        Returns:
            The name of each model.

        Raises:
            ArtifactError: An artifact is incomplete or invalid.
            EngineError: An engine is unknown or unavailable on this machine.
            ValueError: A name or alias is invalid, refused by `check_path`, that of two models or
                given twice, the default model is unknown, or a model exceeds the memory budget.
        """
        names = []
        for spec in specs:
            entry = await self._read(spec)
            if entry.name in self._entries:
                raise ValueError(
                    f"two models have the name {entry.name!r}; every name must be unique"
                )
            self._replace(entry)
            names.append(entry.name)
        if self._default is not None:
            if self._default not in self._names:
                raise ValueError(f"the default model {self._default!r} is not a served model")
            self._default = self._names[self._default]
        elif len(self._entries) == 1:
            (self._default,) = self._entries
        return names

    async def close(self) -> None:
        """Close all models, and fail pending calls with `NotReady`."""
        self._is_open, self._memory.is_closed = False, True
        entries = tuple(self._entries.values())
        self._entries.clear()
        self._names.clear()
        loads = [entry.loading for entry in entries if entry.loading is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        for entry in entries:  # of loads that were cancelled before they began
            entry.answer()
        await self._memory.close()

    @property
    def is_open(self) -> bool:
        """Whether the models have been loaded, and the registry is not closed."""
        return self._is_open

    def resolve(self, name: str | None) -> str:
        """Return the name of a model for its name or alias, or for None the default model's.

        Raises:
            InvalidInput: `name` is None and there is no default model.
            UnknownModel: No model has this name.
            NotReady: The models are loading, or the registry is closed.
        """
        if not self._is_open:
            raise NotReady("the model is loading")
        requested = self._default if name is None else name
        resolved = self._names.get(requested or "")
        if resolved is not None:
            return resolved
        served = ", ".join(sorted(self._entries)) or "none"
        if requested is None:
            raise InvalidInput(
                f"model is required; served models: {served}",
                code="model_required",
                pointer="/model",
            )
        raise UnknownModel(f"unknown model; served models: {served}", pointer="/model")

    def current(self, name: str | None = None) -> Model:
        """Return the served version of a model, without a lease.

        Raises:
            NotReady: The model is not loaded.
            VitrineError: Any error of `resolve`, under the same conditions.
        """
        version = self._entries[self.resolve(name)].version
        if version is None:
            raise NotReady("the model is not loaded", code="model_loading")
        return version.model

    def check_alive(self) -> None:
        """Raise `NotReady` if the models are loading, or the engine of one of them has stopped."""
        if not self._is_open:
            raise NotReady("the model is loading")
        versions = (entry.version for entry in self._entries.values())
        if not all(version.model.batcher.is_alive for version in versions if version is not None):
            raise NotReady("the engine has stopped; this process will exit")

    def statuses(self) -> list[ModelStatus]:
        """Return the state of each served model, ordered by name."""
        return [
            entry.status(is_default=name == self._default)
            for name, entry in sorted(self._entries.items())
        ]

    def spec_of(self, name: str) -> ModelSpec | None:
        """Return the specification of a model by its name or alias; None: no such model."""
        entry = self._entries.get(self._names.get(name, name))
        return None if entry is None else entry.spec

    def leases_of_loaded_models(self) -> list[Lease]:
        """Return a lease of each loaded model. They do not count as uses of the models."""
        versions = [entry.version for entry in self._entries.values()]
        return [version.lease() for version in versions if version is not None]

    @property
    def closing(self) -> int:
        """Number of replaced or unloaded versions that finish their requests."""
        return len(self._memory.closing)

    async def lease(self, name: str | None = None, timeout_s: float | None = None) -> Lease:
        """Return a lease of a model, which is loaded first if necessary.

        Args:
            name: Name or alias of the model; None: the default model.
            timeout_s: Deadline in seconds for the load; None: only the registry's own limit.

        Raises:
            NotReady: The model did not load in time, or cannot be loaded; or the engine of a loaded
                model has stopped.
            VitrineError: Any error of `resolve`, under the same conditions.
        """
        entry = self._entries[self.resolve(name)]
        if entry.version is None:
            return await self._lease_when_loaded(name, timeout_s)
        if not entry.version.model.batcher.is_alive:
            raise NotReady("the engine has stopped; this process will exit")
        if self._memory.has_budget:
            self._memory.mark_used(entry)
        return entry.version.lease()

    async def load(
        self,
        spec: ModelSpec,
        check: Callable[[Model, Model], Awaitable[None]] | None = None,
        *,
        allow_incompatible: bool = False,
    ) -> tuple[Model, Model | None]:
        """Load a model, or a new version beside the version that is served, and serve it.

        Args:
            spec: The model; `options.name` is its name, or that of the served model to replace.
            check: Called with the served version, which is loaded first if necessary, and the new
                version, which is not served if this raises. Not called for a new model.
            allow_incompatible: Whether the new version may break clients of the served one; see
                `compatibility.incompatibilities`.

        Returns:
            The new version, and the previous one, or None if it was not loaded.

        Raises:
            ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
            EngineError: The engine is unavailable, or fails the self-check.
            InvalidInput: The new version is incompatible with the served one.
            NotReady: The registry is closed.
            NameConflict: An alias is the name or alias of another model, or is given twice.
            ValueError: The name or an alias is invalid or refused by `check_path`, or the model
                exceeds the memory budget.
            Exception: Any error of `check`.
        """
        async with self._changing:
            return await self._load_and_replace(spec, check, allow_incompatible=allow_incompatible)

    async def update(self, spec: ModelSpec) -> Model | None:
        """Serve the artifact that is now in the folder of a model, at once or when it is loaded.

        Aliases and options of a served model stay. Returns the new version; None: the model is not
        loaded, and the next request for it loads the artifact. Arguments and errors are those of
        `load`.
        """
        async with self._changing:
            old = self._entries.get(spec.options.name or "")
            if old is not None:  # a request may have set others than the settings
                spec = replace(old.spec, path=spec.path)
            if old is not None and old.version is None:
                entry = await self._read(spec)
                check_replacement(old.manifest, entry.manifest)
                self._replace(entry)
                return None
            model, _ = await self._load_and_replace(spec, None, allow_incompatible=False)
            return model

    async def _load_and_replace(
        self,
        spec: ModelSpec,
        check: Callable[[Model, Model], Awaitable[None]] | None,
        *,
        allow_incompatible: bool,
    ) -> tuple[Model, Model | None]:
        """Load a version and serve it; see `load`."""
        entry = await self._read(spec)
        old = self._entries.get(entry.name)
        if old is not None and not allow_incompatible:
            check_replacement(old.manifest, entry.manifest)
        if check is not None and old is not None and old.version is None:
            self._memory.serve(old, await self._memory.load(old))
        try:
            version = await self._memory.load(entry, keep=old)
        except BaseException:
            if old is None:
                self._remove_metrics(entry.name)
            raise
        previous = old.version if old is not None else None
        try:
            if check is not None and previous is not None:
                await check(previous.model, version.model)
            self._memory.check_not_closed()
        except BaseException:
            await version.close()
            raise
        self._replace(entry)
        self._memory.serve(entry, version)
        if old is not None and previous is not None:
            self._memory.retire(old)
        return version.model, None if previous is None else previous.model

    async def unload(self, name: str, path: Path | None = None) -> bool:
        """Stop serving a model. Requests in flight finish.

        Args:
            name: Name or alias of the model.
            path: Folder of its artifact; a model that has another one by now is kept. None: any.

        Returns:
            Whether the model was served until now.

        Raises:
            InvalidInput: The model is the default model.
            VitrineError: Any error of `resolve`, under the same conditions.
        """
        async with self._changing:
            if path is not None and ((spec := self.spec_of(name)) is None or spec.path != path):
                return False
            name = self.resolve(name)
            if name == self._default:
                raise InvalidInput(
                    "the default model cannot be deleted", code="default_model", pointer="/model"
                )
            entry = self._entries.pop(name)
            self._names = {key: value for key, value in self._names.items() if value != name}
            entry.answer()
            if entry.version is not None:
                self._memory.unload(entry)
            self._remove_metrics(name)
            return True

    async def _lease_when_loaded(self, name: str | None, timeout_s: float | None) -> Lease:
        """Wait until the model is loaded, and return a lease; see `lease`."""
        limit_s = self._load_s if timeout_s is None else min(timeout_s, self._load_s)
        try:
            async with asyncio.timeout(limit_s):
                # Again if the model was replaced or deleted meanwhile.
                while (entry := self._entries[self.resolve(name)]).version is None:
                    lease = await self._load_on_demand(entry)
                    if lease is not None:
                        if (trace := TRACE.get()) is not None:
                            trace.stages.append(("load", time.perf_counter()))
                        return lease
        except TimeoutError:
            raise NotReady(
                f"the model is loading; it was not ready within {limit_s:g} s",
                code="model_loading",
            ) from None
        return entry.version.lease()

    async def _load_on_demand(self, entry: RegisteredModel) -> Lease | None:
        """Wait until a model is loaded, and return a lease; all callers wait for the same load.

        None: the model was replaced or deleted before it was loaded.

        Raises:
            NotReady: The model cannot be loaded.
        """
        if (retry_after_s := entry.retry_at - self._clock.now()) > 0:
            raise _load_error(retry_after_s)
        waiting: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(waiting)
        if entry.loading is None:
            # In a context of its own, because the load is not part of the request's trace.
            entry.loading = asyncio.create_task(self._load(entry), context=Context())
        try:
            return await waiting
        except asyncio.CancelledError:
            # The caller may be cancelled after the load has ended.
            is_answered = not waiting.cancelled() and waiting.exception() is None
            if is_answered and (lease := waiting.result()) is not None:
                lease.release()
            raise

    async def _load(self, entry: RegisteredModel) -> None:
        """Load a model, unless its requests were answered meanwhile."""
        try:
            async with self._changing:
                if entry.waiting:
                    self._memory.serve(entry, await self._memory.load(entry))
        except asyncio.CancelledError:
            raise
        except BaseException:
            log.exception("cannot load the model %s", entry.name)
            entry.retry_at = self._clock.now() + _RETRY_S
            for waiting in entry.waiting:
                if not waiting.done():
                    waiting.set_exception(_load_error(_RETRY_S))
        finally:
            entry.answer()
            entry.loading = None

    async def _read(self, spec: ModelSpec) -> RegisteredModel:
        """Read the manifest of a model, and return the entry of the model, not loaded."""
        artifact, size = await asyncio.to_thread(read_artifact, spec)
        name = spec.options.name or artifact.manifest.name
        options = replace(spec.options, name=name)
        for alias in (name, *spec.aliases):
            check_name(alias)
            self._check_path(alias)
            if self._names.get(alias, name) != name:
                raise NameConflict(
                    alias, f"two models have the name {alias!r}; every name must be unique"
                )
            if spec.aliases.count(alias) > 1:
                raise NameConflict(alias, f"a model has the alias {alias!r} twice")
        self._memory.check_size(name, size)
        if name not in self._model_metrics:
            self._model_metrics[name] = ModelMetrics(self._metrics, name)
        return RegisteredModel(
            name=name,
            spec=replace(spec, options=options),
            created=int(artifact.path.stat().st_mtime),
            manifest=artifact.manifest,
            size=size,
            metrics=self._model_metrics[name],
        )

    def _remove_metrics(self, name: str) -> None:
        """Remove the metrics of a model that is not served, which would stay for ever."""
        del self._model_metrics[name]
        self._metrics.remove(name)

    def _replace(self, entry: RegisteredModel) -> None:
        old = self._entries.pop(entry.name, None)
        self._entries[entry.name] = entry
        if old is not None:
            old.answer()
        others = {key: value for key, value in self._names.items() if value != entry.name}
        self._names = others | dict.fromkeys((entry.name, *entry.spec.aliases), entry.name)


def _load_error(retry_after_s: float) -> NotReady:
    return NotReady("the model cannot be loaded; see the log", retry_after_s, code="load_failed")
