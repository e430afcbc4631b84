"""Detection of new, changed and deleted artifacts of the served models."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from models.engines import EngineError
from models.manifest import MANIFEST, ArtifactError
from service.inference.errors import VitrineError
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec

log = logging.getLogger("vitrine")

# Path, modification time in ns, inode and size of each file and folder of an artifact.
_Signature = frozenset[tuple[str, int, int, int]]
# Folder of an artifact and name of the model, or None for the artifact's own name: several models
# can have the same artifact, such as in two precisions.
_Key = tuple[Path, str | None]


class ModelWatch:
    """Loads artifacts that are new or have changed, and unloads models whose artifact is gone.

    An artifact changes by being replaced: its folder is renamed away, and another one renamed to
    its place. A version that cannot be loaded is logged, and tried again when it changes or at the
    next scan that is not patient.

    Args:
        registry: The served models.
        find: Returns the models to serve; called in a thread.
    """

    def __init__(self, registry: ModelRegistry, find: Callable[[], Sequence[ModelSpec]]) -> None:
        self._registry = registry
        self._find = find
        self._seen: dict[_Key, _Signature] = {}
        self._names: dict[_Key, str] = {}
        self._missing: set[_Key] = set()
        self._failed: set[_Key] = set()
        self._scanning = asyncio.Lock()

    async def open(self) -> None:
        """Open the registry, whose artifacts count as seen."""
        async with self._scanning:
            specs = await asyncio.to_thread(self._find)
            # Before they are read, so that a later change is noticed.
            self._seen = {_key(spec): _signature(spec.path) for spec in specs if spec.path.is_dir()}
            names = await self._registry.open(specs)
            self._names = dict(zip(map(_key, specs), names, strict=True))

    async def scan(self, *, is_patient: bool = False) -> None:
        """Load new and changed artifacts, and unload models whose artifact is gone.

        Before `open` it does nothing: that reads all artifacts.

        Args:
            is_patient: Whether an artifact is gone only if the previous scan missed it too, and one
                that could not be loaded is tried again only when it has changed. It may be missing
                for a moment while another one takes its place.
        """
        async with self._scanning:
            if not self._registry.is_open:
                return
            try:
                specs = {_key(spec): spec for spec in await asyncio.to_thread(self._find)}
            except (ArtifactError, OSError, ValueError) as error:
                log.error("cannot read the artifacts: %s", error)
                return
            # First, because loads take time, in which artifacts may return.
            missing = {key for key in self._names.keys() - specs.keys() if _is_gone(key[0])}
            for key in missing & self._missing if is_patient else missing:
                await self._remove(key)
            self._missing = missing
            if not is_patient:
                for key in self._failed:
                    self._seen.pop(key, None)
            for key, spec in specs.items():
                await self._update(key, spec)

    async def run(self, every_s: float) -> None:
        """Scan until cancelled, with a pause between scans.

        Args:
            every_s: Pause in seconds.
        """
        while True:
            await asyncio.sleep(every_s)
            await self.scan(is_patient=True)

    async def _update(self, key: _Key, spec: ModelSpec) -> None:
        path = spec.path
        name = self._names.get(key, spec.options.name)
        try:
            signature = _signature(path)
            if self._seen.get(key) == signature:
                return
            self._seen[key] = signature
            self._failed.add(key)
            named = replace(spec, options=replace(spec.options, name=name))
            model = await self._registry.update(named)
            self._failed.discard(key)
        except FileNotFoundError:
            if self._seen.pop(key, None) is not None:
                end = "its model stays in service" if key in self._names else "it was not loaded"
                log.error("the artifact %s is gone; %s", path, end)
            return
        except (ArtifactError, EngineError, OSError, ValueError, VitrineError) as error:
            log.error("cannot load %s: %s", path, error)
            return
        except asyncio.CancelledError:
            raise
        except BaseException:
            log.exception("cannot load %s", path)
            return
        if model is not None:
            self._names[key] = model.name
            log.info("serving version %s of the model %s", model.version, model.name)
        elif name is not None:
            self._names[key] = name
            log.info("the next request for the model %s loads its new artifact", name)

    async def _remove(self, key: _Key) -> None:
        name = self._names.pop(key)
        self._seen.pop(key, None)
        try:
            if not await self._registry.unload(name, key[0]):
                return  # deleted, or replaced by an artifact elsewhere
        except VitrineError as error:
            log.error("cannot unload the model %s: %s", name, error)
            return
        log.info("stopped serving the model %s, whose artifact is gone", name)


def _key(spec: ModelSpec) -> _Key:
    return spec.path, spec.options.name


def _is_gone(path: Path) -> bool:
    """Return whether there is no artifact, rather than one that cannot be read for a moment."""
    try:
        (path / MANIFEST).stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _signature(path: Path) -> _Signature:
    files = [file for entry in path.iterdir() for file in (entry, *entry.rglob("*"))]
    states = {str(file.relative_to(path)): file.lstat() for file in files}
    return frozenset(
        (name, state.st_mtime_ns, state.st_ino, state.st_size) for name, state in states.items()
    )
