"""The versions of models in memory: loaded within a budget, and unloaded to make room.

A model that does not fit is loaded in place of the least recently used models.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter

from service.inference.batching.cache import ResultCache
from service.inference.batching.devices import Devices
from service.inference.errors import InvalidInput, NotReady
from service.inference.model.opening import log_stop, open_model
from service.inference.registry.compatibility import check_replacement
from service.inference.registry.model_version import ModelVersion
from service.inference.registry.served_models import RegisteredModel, read_artifact
from service.inference.results.vectors import RowResults

log = logging.getLogger("vitrine")


class ModelMemory:
    """The loaded versions of the served models, within a memory budget.

    All methods run in the event loop. `load` is called by one task at a time.

    Args:
        max_bytes: Memory budget for weights, in bytes; 0: no limit. While a new version of a model
            loads, the weights of both versions are in memory.
        cache: Cache of results that the models share; None: no cache.
        on_stop: Called with the error if the batcher of a served model stops because of a failure,
            such as a broken engine; None: the error is logged.

    Attributes:
        has_budget: Whether there is a budget, so that the order of uses counts.
        closing: Replaced and unloaded versions that finish their requests.
        is_closed: Whether loads are refused.
    """

    def __init__(
        self,
        max_bytes: int,
        cache: ResultCache[RowResults] | None,
        on_stop: Callable[[BaseException], None] | None,
    ) -> None:
        self._max_bytes = max_bytes
        self.has_budget = max_bytes > 0
        self._cache: ResultCache[RowResults] = cache or ResultCache(0)
        self._on_stop = on_stop or log_stop
        self._devices = Devices()
        # As keys; with a budget, the most recently used models are last.
        self._loaded: dict[RegisteredModel, None] = {}
        self.closing: set[ModelVersion] = set()
        self.is_closed = False
        self._has_closed = asyncio.Event()

    def check_size(self, name: str, size: int) -> None:
        """Raise `ValueError` if the weights of a model, of `size` bytes, exceed the budget."""
        if self.has_budget and size > self._max_bytes:
            raise ValueError(
                f"the model {name!r} has {size} bytes of weights; the budget is "
                f"{self._max_bytes} bytes"
            )

    def check_not_closed(self) -> None:
        """Raise `NotReady` if loads are refused."""
        if self.is_closed:
            raise NotReady("the models are closed")

    def fits(
        self,
        size: int,
        keep: RegisteredModel | None = None,
        closed: Collection[ModelVersion] = (),
    ) -> bool:
        """Return whether `size` more bytes fit into the budget.

        Args:
            size: Size of the weights, in bytes.
            keep: Model whose loaded version does not count; None: none.
            closed: Closing versions that do not count.
        """
        closing = self.closing.difference(closed)
        versions = [entry.version for entry in self._others(keep)]
        used = sum(version.size for version in (*versions, *closing) if version is not None)
        return not self.has_budget or used + size <= self._max_bytes

    async def load(
        self, entry: RegisteredModel, keep: RegisteredModel | None = None
    ) -> ModelVersion:
        """Load a version of a model, which is not served yet, within the memory budget.

        The artifact may be replaced by a larger one while other models finish their requests.

        Args:
            entry: The model.
            keep: Model whose loaded version does not count and stays; None: none.

        Raises:
            ArtifactError: The artifact is incomplete or invalid, or was modified after its export.
            EngineError: The engine is unavailable, or fails the self-check.
            InvalidInput: The artifact is no longer compatible with the manifest of `entry`.
            NotReady: Loads are refused.
            ValueError: The model exceeds the memory budget.
        """
        if not self.has_budget:
            return await self._open(entry)
        room = 0
        while (size := (await asyncio.to_thread(read_artifact, entry.spec))[1]) > room:
            self.check_size(entry.name, size)
            await self._make_room(size, keep)
            room = size
        version = await self._open(entry)
        if version.size > room:  # replaced in the last moment
            await version.close()
            return await self.load(entry, keep)
        return version

    def serve(self, entry: RegisteredModel, version: ModelVersion) -> None:
        """Answer the requests for a model with a loaded version from now on."""
        model = version.model
        entry.version, entry.size, entry.created = version, version.size, model.created
        self._loaded[entry] = None
        # At once, because the next load might unload the model again.
        entry.answer()
        entry.metrics.loaded_bytes.set(version.size)
        entry.metrics.set_info(
            version=model.version,
            engine=model.engine.name,
            precision=model.engine.precision,
        )
        entry.metrics.set_quality(model.quality.measures if model.quality else {})

    def mark_used(self, entry: RegisteredModel) -> None:
        """Make a loaded model the most recently used one."""
        self._loaded[entry] = self._loaded.pop(entry)

    def unload(self, entry: RegisteredModel) -> None:
        """Unload a model; its version finishes its requests."""
        entry.metrics.loaded_bytes.set(0)
        entry.metrics.clear_info()
        self.retire(entry)

    def retire(self, entry: RegisteredModel) -> None:
        """Close the version of a model after its last lease; the model is not loaded then."""
        version, entry.version = entry.version, None
        assert version is not None  # noqa: S101 - checked by the callers
        del self._loaded[entry]
        entry.metrics.unloads.inc()
        self.closing.add(version)
        version.retire(self._forget)

    async def close(self) -> None:
        """Close all versions, also those that finish their requests."""
        versions = [entry.version for entry in self._loaded if entry.version is not None]
        self._loaded.clear()
        for version in (*versions, *self.closing):
            await version.close()

    async def _open(self, entry: RegisteredModel) -> ModelVersion:
        """Load a version of a model, which is not served yet, whatever its size."""
        self.check_not_closed()
        try:
            model = await open_model(
                entry.spec.path,
                entry.spec.options,
                metrics=entry.metrics,
                cache=self._cache,
                on_stop=partial(self._report_stop, entry),
                devices=self._devices,
            )
        except BaseException:
            entry.metrics.loads["failed"].inc()
            raise
        try:
            # The artifact of an unloaded model can have been replaced.
            check_replacement(entry.manifest, model.artifact.manifest)
        except InvalidInput:
            entry.metrics.loads["failed"].inc()
            await model.close()
            raise
        if self.is_closed:
            await model.close()
        self.check_not_closed()
        entry.metrics.loads["loaded"].inc()
        return ModelVersion(model)

    def _report_stop(self, entry: RegisteredModel, error: BaseException) -> None:
        # The failure of a version that is not served concerns nobody but its load.
        is_served = entry.version is not None and not entry.version.model.batcher.is_alive
        report = self._on_stop if is_served else log_stop
        report(error)

    async def _make_room(self, size: int, keep: RegisteredModel | None) -> None:
        """Unload the least recently used models until `size` bytes fit into the memory budget."""
        while not self.fits(size, keep):
            # The least recently used model without requests in flight, if there is one.
            victim = min(self._others(keep), key=attrgetter("is_busy"), default=None)
            # Versions that close before the victim's would, and may leave room enough.
            is_slow = victim is None or victim.is_busy
            sooner = [version for version in self.closing if is_slow or not version.leases]
            if victim is not None and not self.fits(size, keep, sooner):
                log.info("unloading the model %s to make room", victim.name)
                self.unload(victim)
            self._has_closed.clear()
            await self._has_closed.wait()

    def _forget(self, version: ModelVersion) -> None:
        """Count a version as closed, which may leave room for a load."""
        self.closing.discard(version)
        self._has_closed.set()

    def _others(self, keep: RegisteredModel | None) -> list[RegisteredModel]:
        """Return the models in memory except `keep`, the least recently used first."""
        return [entry for entry in self._loaded if entry is not keep]
