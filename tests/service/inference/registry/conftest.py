"""Registries of small models, artifacts that are watched, and loads that are held."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from models.engines import weight_bytes
from models.manifest import ArtifactError
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry import memory
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec

ONE_THREAD = ModelOptions(threads=1)


def spec(artifact: Artifact | Path, name: str, *aliases: str) -> ModelSpec:
    path = artifact if isinstance(artifact, Path) else artifact.path
    return ModelSpec(path=path, aliases=aliases, options=replace(ONE_THREAD, name=name))


def specs(artifact: Artifact, names: str) -> list[ModelSpec]:
    """Return models with one artifact, whose names are the letters."""
    return [spec(artifact, name) for name in names]


@asynccontextmanager
async def opened(*specs: ModelSpec, **options: Any) -> AsyncIterator[ModelRegistry]:  # noqa: ANN401
    registry = ModelRegistry(**options)
    await registry.open(specs)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def watched(
    specs: Callable[[], Sequence[ModelSpec]],
    **options: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[ModelRegistry, ModelWatch]]:
    """Serve models whose artifacts are watched."""
    registry = ModelRegistry(**options)
    watch = ModelWatch(registry, specs)
    await watch.open()
    try:
        yield registry, watch
    finally:
        await registry.close()


def loaded(registry: ModelRegistry) -> list[str]:
    """Return the names of the models in memory."""
    return [status.name for status in registry.statuses() if status.model is not None]


class HeldLoads:
    """Counts the loads of models, and holds them until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str | None] = []
        self.models: list[Model] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        monkeypatch.setattr(memory, "open_model", self._open)

    async def _open(self, path: Path, options: ModelOptions, **arguments: Any) -> Model:  # noqa: ANN401 - those of `open_model`
        self.started.append(options.name)
        await self.may_end.wait()
        self.models.append(await open_model(path, options, **arguments))
        return self.models[-1]

    async def fail(self, _path: Path, options: ModelOptions, **_: object) -> Model:
        self.started.append(options.name)
        await self.may_end.wait()
        raise ArtifactError("the artifact is damaged")


@pytest.fixture
def size(small_artifact: Artifact) -> int:
    """Size of the weights of the small model, in bytes."""
    return weight_bytes(small_artifact)


@pytest.fixture
def broken(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of the small model's artifact without weights."""
    copy = tmp_path / "broken"
    shutil.copytree(small_artifact.path, copy)
    (copy / "model.weights").write_bytes(b"")
    return copy
