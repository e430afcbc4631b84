"""The registry under random interleavings of requests, swaps, deletions and replaced artifacts.

Models are stand-ins that take some turns of the event loop to load and to close. Artifacts are real
folders, which are replaced by a rename, as an operator does it.
"""

import asyncio
import itertools
import random
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from models.artifact import Artifact, write_manifest
from models.manifest import CHECK, TOKENIZER, ArtifactError, Manifest
from service.inference.batching.streams import Clock
from service.inference.errors import InvalidInput, VitrineError
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions
from service.inference.registry import memory, registry
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec, read_artifact

BUDGET = 100
# Sizes of weights in bytes: two of some models fit; one of the last never does.
SIZES = (20, 30, 45, 60, 90, 120)
NAMES = "abc"


class StandIn:
    """A model that is in memory until it is closed."""

    quality = None
    created = 0

    def __init__(self, world: "World", name: str, version: str, size: int, number: int) -> None:
        self.world = world
        self.name = name
        self.version = version
        self.number = number
        self.closes = 0
        self.artifact = SimpleNamespace(manifest=world.manifest)
        self.batcher = SimpleNamespace(is_alive=True)
        self.engine = SimpleNamespace(name="onnxruntime", precision="float32", weight_bytes=size)

    async def close(self) -> None:
        self.closes += 1
        self.batcher.is_alive = False
        await self.world.turns()
        self.world.in_memory.remove(self)


class World:
    """A registry of stand-ins, the folders of their artifacts, and what may happen to both.

    Args:
        folder: Folder for the artifacts.
        manifest: Manifest of a model.
        seed: Seed of everything that is random.
    """

    def __init__(self, folder: Path, manifest: Manifest, seed: int) -> None:
        self.folder = folder
        self.draw = random.Random(seed)  # noqa: S311 - not for secrets
        graph = next(graph for graph in manifest.graphs if graph.engine == "onnxruntime")
        files = dict.fromkeys((graph.file, graph.weights, TOKENIZER, CHECK), "0" * 64)
        self.manifest = replace(manifest, graphs=(graph,), files=files)
        self.versions = itertools.count()
        self.opened: list[StandIn] = []
        self.in_memory: list[StandIn] = []
        # Those that need not fit: versions that are being replaced, and those of artifacts that
        # were replaced by larger ones at the last moment, which must not be served.
        self.replaced: set[StandIn] = set()
        self.surprises: set[StandIn] = set()
        self.measured: dict[Path, int] = {}
        self.served: dict[str, int] = {}
        self.now = 0.0
        clock = cast(Clock, SimpleNamespace(now=lambda: self.now))
        self.registry = ModelRegistry(default="a", max_bytes=BUDGET, clock=clock)
        self.watch = ModelWatch(self.registry, self.specs)

    def spec(self, name: str) -> ModelSpec:
        options = ModelOptions(name=name, engine="onnxruntime")
        return ModelSpec(path=self.folder / name, options=options)

    def specs(self) -> list[ModelSpec]:
        return [self.spec(path.name) for path in sorted(self.folder.glob("[!.]*"))]

    def write(self, name: str, size: int | None = None) -> None:
        """Write an artifact, in place of the one that is there."""
        new, old = self.folder / ".new", self.folder / ".old"
        new.mkdir()
        (new / "model.onnx").write_text(f"{name}{next(self.versions)}")
        (new / "model.weights").write_bytes(b"0" * (size or self.draw.choice(SIZES)))
        for file in (TOKENIZER, CHECK):
            (new / file).touch()
        write_manifest(new, self.manifest)
        if (self.folder / name).exists():
            (self.folder / name).rename(old)
        new.rename(self.folder / name)
        shutil.rmtree(old, ignore_errors=True)

    async def turns(self) -> None:
        for _ in range(self.draw.randrange(6)):
            self.check_memory()
            await asyncio.sleep(0)

    async def in_turns(self, work: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - as `to_thread`
        await self.turns()
        result = work(*arguments)
        await self.turns()
        return result

    def inspect(self, spec: ModelSpec) -> tuple[Artifact, int]:
        artifact, size = read_artifact(spec)
        self.measured[spec.path] = size
        return artifact, size

    async def open_model(self, path: Path, options: ModelOptions, **_: object) -> Model:
        assert options.name is not None
        entry = self.registry._entries.get(options.name)
        if entry is not None and entry.version is not None:
            self.replaced.add(cast(StandIn, entry.version.model))
        await self.turns()
        size = (path / "model.weights").stat().st_size
        version = (path / "model.onnx").read_text()
        model = StandIn(self, options.name, version, size, len(self.opened))
        self.opened.append(model)
        self.in_memory.append(model)
        if size > self.measured[path]:
            self.surprises.add(model)
        await self.turns()
        return cast(Model, model)

    def check_memory(self) -> None:
        """Check that weights in memory are within the budget, and that versions close once."""
        entries = self.registry._entries.values()
        served: set[object] = {
            entry.version.model for entry in entries if entry.version is not None
        }
        counted = [
            model
            for model in self.in_memory
            if model not in self.replaced and (model not in self.surprises or model in served)
        ]
        assert sum(model.engine.weight_bytes for model in counted) <= BUDGET
        assert all(model.closes <= 1 for model in self.opened)

    async def request(self, name: str) -> None:
        """Use a model, which is open meanwhile and no older than those served before."""
        oldest = self.served.get(name, -1)
        with await self.registry.lease(name) as leased:
            model = cast(StandIn, leased)
            assert model.name == name
            assert model.number >= oldest
            assert not model.closes
            assert model.engine.weight_bytes <= BUDGET
            await self.turns()
            assert not model.closes or not self.registry.is_open

    async def swap(self, name: str, *, is_compared: bool, is_refused: bool) -> None:
        """Load the artifact that is in a model's folder, with a comparison if there is a model."""

        async def compare(served: Model, new: Model) -> None:
            await self.turns()
            for model in (served, new):
                assert not cast(StandIn, model).closes or not self.registry.is_open
            if is_refused:
                raise InvalidInput("they differ")

        check = compare if is_compared else None
        model, _ = await self.registry.load(self.spec(name), check)
        self.served[name] = max(self.served.get(name, -1), cast(StandIn, model).number)

    async def scan(self) -> None:
        await self.watch.scan()

    async def delete(self, name: str) -> None:
        await self.registry.unload(name)

    def anything(self) -> Coroutine[Any, Any, Any]:
        name = self.draw.choice(NAMES)
        match self.draw.randrange(12):
            case 0 | 1:
                is_compared, is_refused = self.draw.random() < 0.7, self.draw.random() < 0.3
                return self.swap(name, is_compared=is_compared, is_refused=is_refused)
            case 2:
                self.write(name)
                return self.scan()
            case 3:
                self.write(name)  # and nobody tells the service
                return self.request(name)
            case 4:
                return self.delete(name)
            case _:
                return self.request(name)

    async def live(self, count: int) -> None:
        """Do many things at once; some are given up."""
        tasks: list[asyncio.Task[None]] = []
        for _ in range(count):
            tasks.append(asyncio.create_task(self.anything()))
            if self.draw.random() < 0.1:
                self.draw.choice(tasks).cancel()
            if self.draw.random() < 0.1:
                self.now += 10.0  # models that could not be loaded may be loaded again
            await self.turns()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            expected = VitrineError, ArtifactError, ValueError, asyncio.CancelledError
            if result is not None and not isinstance(result, expected):
                raise result


@contextmanager
def world(folder: Path, manifest: Manifest, seed: int) -> Iterator[World]:
    world = World(folder, manifest, seed)
    for name, size in zip(NAMES, (30, 45, 60), strict=True):
        world.write(name, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "open_model", world.open_model)
        for module in (memory, registry):
            patch.setattr(module, "read_artifact", world.inspect)
        patch.setattr(asyncio, "to_thread", world.in_turns)
        yield world


@pytest.mark.parametrize("seed", range(25))
async def test_any_interleaving_keeps_the_budget_and_closes_each_version_once(
    small_artifact: Artifact, tmp_path: Path, seed: int
) -> None:
    with world(tmp_path, small_artifact.manifest, seed) as own:
        await own.watch.open()
        await own.live(40)
        # All requests have ended: each model is served from the artifact that is there now.
        await own.scan()
        for name in NAMES:
            own.now += 10.0
            size = (tmp_path / name / "model.weights").stat().st_size
            if size <= BUDGET and own.registry.spec_of(name) is not None:
                with await own.registry.lease(name) as model:
                    assert model.version == (tmp_path / name / "model.onnx").read_text()
        await own.registry.close()
        assert [model.closes for model in own.opened] == [1] * len(own.opened)
        assert not own.in_memory


@pytest.mark.parametrize("seed", range(25, 40))
async def test_registry_that_closes_amid_anything_closes_each_version_once(
    small_artifact: Artifact, tmp_path: Path, seed: int
) -> None:
    with world(tmp_path, small_artifact.manifest, seed) as own:
        await own.watch.open()
        living = asyncio.create_task(own.live(25))
        for _ in range(own.draw.randrange(300)):
            await asyncio.sleep(0)
        await own.registry.close()
        await living
        assert [model.closes for model in own.opened] == [1] * len(own.opened)
        assert not own.in_memory
