"""Detection of new, changed and deleted artifacts of the served models."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from models.artifact import ArtifactError
from models.engines import EngineError
from service.inference.errors import VitrineError
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec

log = logging.getLogger("vitrine")

# Name, modification time in ns, inode and size of each file of an artifact.
_Signature = frozenset[tuple[str, int, int, int]]


class ModelWatch:
    """Loads artifacts that are new or have changed, and unloads models whose artifact is gone.

    An artifact changes by being replaced: its folder is renamed away, and another one renamed to
    its place. A version that cannot be loaded is logged and tried again when it changes.

    Args:
        registry: The served models.
        find: Returns the models to serve; called in a thread.
    """

    def __init__(self, registry: ModelRegistry, find: Callable[[], Sequence[ModelSpec]]) -> None:
        self._registry = registry
        self._find = find
        self._seen: dict[Path, _Signature] = {}
        self._names: dict[Path, str] = {}
        self._missing: set[Path] = set()
        self._scanning = asyncio.Lock()

    async def open(self) -> None:
        """Open the registry, whose artifacts count as seen."""
        specs = await asyncio.to_thread(self._find)
        # Before they are read, so that a later change is noticed.
        self._seen = {spec.path: _signature(spec.path) for spec in specs if spec.path.is_dir()}
        await self._registry.open(specs)
        self._names = {status.path: status.name for status in self._registry.statuses()}

    async def scan(self, *, is_patient: bool = False) -> None:
        """Load new and changed artifacts, and unload models whose artifact is gone.

        Args:
            is_patient: Whether an artifact is gone only if the previous scan missed it too. It may
                be missing for a moment while another one takes its place.
        """
        async with self._scanning:
            try:
                specs = {spec.path: spec for spec in await asyncio.to_thread(self._find)}
            except (ArtifactError, OSError, ValueError) as error:
                log.error("cannot read the artifacts: %s", error)
                return
            # First, because loads take time, in which artifacts may return.
            missing = self._names.keys() - specs.keys()
            for path in missing & self._missing if is_patient else missing:
                await self._remove(path)
            self._missing = missing
            for path, spec in specs.items():
                await self._update(path, spec)

    async def run(self, every_s: float) -> None:
        """Scan until cancelled, with a pause between scans.

        Args:
            every_s: Pause in seconds.
        """
        while True:
            await asyncio.sleep(every_s)
            await self.scan(is_patient=True)

    async def _update(self, path: Path, spec: ModelSpec) -> None:
        name = self._names.get(path, spec.options.name)
        try:
            signature = _signature(path)
            if self._seen.get(path) == signature:
                return
            self._seen[path] = signature
            named = replace(spec, options=replace(spec.options, name=name))
            model = await self._registry.update(named)
        except FileNotFoundError:
            if self._seen.pop(path, None) is not None:
                log.error("the artifact %s is gone; its model stays in service", path)
            return
        except (ArtifactError, EngineError, OSError, ValueError) as error:
            log.error("cannot load %s: %s", path, error)
            return
        except asyncio.CancelledError:
            raise
        except VitrineError as error:  # such as a version of another width
            log.error("cannot load %s: %s", path, error)
            return
        except BaseException:
            log.exception("cannot load %s", path)
            return
        if model is not None:
            self._names[path] = model.name
            log.info("serving version %s of the model %s", model.version, model.name)
        elif name is not None:
            self._names[path] = name
            log.info("the next request for the model %s loads its new artifact", name)

    async def _remove(self, path: Path) -> None:
        name = self._names.pop(path)
        self._seen.pop(path, None)
        try:
            if not await self._registry.unload(name, path):
                return  # deleted, or replaced by an artifact elsewhere
        except VitrineError as error:
            log.error("cannot unload the model %s: %s", name, error)
            return
        log.info("stopped serving the model %s, whose artifact is gone", name)


def _signature(path: Path) -> _Signature:
    states = {file.name: file.stat() for file in path.iterdir()}
    return frozenset(
        (name, state.st_mtime_ns, state.st_ino, state.st_size) for name, state in states.items()
    )
