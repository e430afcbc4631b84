"""The registry of models: names, leases, swaps, loads on demand and the memory budget."""

import asyncio
import errno
import gc
import os
import random
import re
import shutil
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from models.artifact import Artifact
from models.engines import weight_bytes
from models.identity import identity_of
from models.manifest import MANIFEST, SOURCE, ArtifactError
from service.api.errors import headers_of
from service.inference.errors import InvalidInput, NotReady, UnknownModel
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry import memory
from service.inference.registry.memory import ModelMemory
from service.inference.registry.model_version import Lease, ModelVersion
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec, specs_in
from service.inference.results.metrics import InferenceMetrics
from tests.batchers import ManualClock
from tests.eventually import eventually_async
from tests.hostile_artifacts import copy_of, edit

ONE_THREAD = ModelOptions(threads=1)


def spec(artifact: Artifact, name: str, *aliases: str) -> ModelSpec:
    return ModelSpec(path=artifact.path, aliases=aliases, options=replace(ONE_THREAD, name=name))


@asynccontextmanager
async def opened(*specs: ModelSpec, **options: Any) -> AsyncIterator[ModelRegistry]:  # noqa: ANN401
    registry = ModelRegistry(**options)
    await registry.open(specs)
    try:
        yield registry
    finally:
        await registry.close()


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


async def test_model_is_found_by_name_and_alias(
    small_artifact: Artifact, other_artifact: Artifact
) -> None:
    async with opened(spec(small_artifact, "a", "first"), spec(other_artifact, "b")) as registry:
        for name, expected in (("a", "a"), ("first", "a"), ("b", "b")):
            with await registry.lease(name) as model:
                assert model.name == expected
        assert [status.name for status in registry.statuses()] == ["a", "b"]


async def test_unknown_name_lists_the_served_models(small_artifact: Artifact) -> None:
    async with opened(spec(small_artifact, "b"), spec(small_artifact, "a")) as registry:
        with pytest.raises(UnknownModel, match=r"^unknown model; served models: a, b$"):
            await registry.lease("c")


async def test_only_model_is_the_default(small_artifact: Artifact) -> None:
    async with opened(spec(small_artifact, "a")) as registry:
        with await registry.lease() as model:
            assert model.name == "a"
        await registry.load(spec(small_artifact, "b"))
        with await registry.lease() as model:
            assert model.name == "a"


async def test_several_models_without_a_default_require_a_name(small_artifact: Artifact) -> None:
    async with opened(spec(small_artifact, "a"), spec(small_artifact, "b")) as registry:
        with pytest.raises(InvalidInput, match="model is required; served models: a, b") as caught:
            await registry.lease()
    assert (caught.value.code, caught.value.pointer) == ("model_required", "/model")


async def test_default_may_be_an_alias(small_artifact: Artifact) -> None:
    specs = spec(small_artifact, "a"), spec(small_artifact, "b", "second")
    async with opened(*specs, default="second") as registry:
        with await registry.lease() as model:
            assert model.name == "b"


@pytest.mark.parametrize(
    ("names", "default", "message"),
    [
        ((("a",), ("a",)), None, "two models have the name 'a'"),
        ((("a",), ("b", "a")), None, "two models have the name 'a'"),
        ((("a", "x"), ("b", "x")), None, "two models have the name 'x'"),
        ((("a",), ("b",)), "c", "the default model 'c' is not a served model"),
    ],
)
async def test_ambiguous_names_are_refused(
    names: tuple[tuple[str, ...], ...], default: str | None, message: str, small_artifact: Artifact
) -> None:
    registry = ModelRegistry(default=default)
    with pytest.raises(ValueError, match=message):
        await registry.open([spec(small_artifact, *each) for each in names])
    await registry.close()


async def test_registry_that_is_not_open_is_not_ready(small_artifact: Artifact) -> None:
    registry = ModelRegistry()
    with pytest.raises(NotReady, match="loading"):
        await registry.lease()
    await registry.open([spec(small_artifact, "a")])
    await registry.close()
    with pytest.raises(NotReady):
        await registry.lease()


async def test_swap_serves_the_new_version_and_closes_the_old_after_its_last_lease(
    small_artifact: Artifact, other_artifact: Artifact
) -> None:
    async with opened(spec(small_artifact, "a")) as registry:
        first, second = await registry.lease("a"), await registry.lease("a")
        old = first.model
        expected = (await old.encode("a text")).vectors
        new, previous = await registry.load(spec(other_artifact, "a"))
        assert previous is old
        with await registry.lease("a") as model:
            assert model is new
        assert not np.array_equal((await new.encode("a text")).vectors, expected)
        first.release()
        first.release()  # no effect
        np.testing.assert_array_equal((await old.encode("a text")).vectors, expected)
        second.release()
        await eventually_async(lambda: not old.batcher.is_alive)
        assert new.batcher.is_alive


async def test_weights_of_a_replaced_version_are_freed_without_the_garbage_collector(
    small_artifact: Artifact,
) -> None:
    # The service freezes loaded objects, so the garbage collector never frees them.
    async with opened(spec(small_artifact, "a")) as registry:
        old = registry.current()
        references = [weakref.ref(run) for run in old.engine.runs]
        del old
        gc.collect()
        gc.disable()
        try:
            await registry.load(spec(small_artifact, "a"))
            await eventually_async(lambda: [r() for r in references] == [None] * len(references))
        finally:
            gc.enable()


async def test_broken_artifact_leaves_the_old_version_serving(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small_artifact.path, broken)
    (broken / "model.onnx").write_bytes(b"not a graph")
    async with opened(spec(small_artifact, "a")) as registry:
        old = registry.current()
        with pytest.raises(ArtifactError):
            await registry.load(ModelSpec(path=broken, options=replace(ONE_THREAD, name="a")))
        assert registry.current() is old
        await old.encode("a text")


async def test_failed_check_closes_the_new_version_and_leaves_the_old_one_serving(
    small_artifact: Artifact, other_artifact: Artifact
) -> None:
    tested: list[Model] = []

    async def check(served: Model, new: Model) -> None:
        assert served.batcher.is_alive
        await new.encode("a text")
        tested.append(new)
        raise InvalidInput("they differ")

    async with opened(spec(small_artifact, "a")) as registry:
        old = registry.current()
        with pytest.raises(InvalidInput, match="they differ"):
            await registry.load(spec(other_artifact, "a"), check)
        assert registry.current() is old
        assert not tested[0].batcher.is_alive


async def test_deleted_model_is_unknown_and_its_requests_finish(small_artifact: Artifact) -> None:
    specs = spec(small_artifact, "a"), spec(small_artifact, "b", "alias")
    async with opened(*specs, default="a") as registry:
        lease = await registry.lease("b")
        await registry.unload("alias")
        for name in ("b", "alias"):
            with pytest.raises(UnknownModel):
                await registry.lease(name)
        await lease.model.encode("a text")
        lease.release()
        await eventually_async(lambda: not lease.model.batcher.is_alive)


async def test_default_model_cannot_be_deleted(small_artifact: Artifact) -> None:
    async with opened(spec(small_artifact, "a")) as registry:
        with pytest.raises(InvalidInput, match="the default model cannot be deleted"):
            await registry.unload("a")
        with await registry.lease() as model:
            await model.encode("a text")


async def test_budget_loads_only_the_models_that_fit(small_artifact: Artifact, size: int) -> None:
    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs, max_bytes=2 * size) as registry:
        loaded = {status.name: status.model is not None for status in registry.statuses()}
        assert loaded == {"a": True, "b": True, "c": False}


async def test_budget_below_one_model_is_refused(small_artifact: Artifact, size: int) -> None:
    registry = ModelRegistry(max_bytes=size - 1)
    with pytest.raises(ValueError, match=f"{size} bytes of weights; the budget is"):
        await registry.open([spec(small_artifact, "a")])
    await registry.close()


async def test_load_on_demand_unloads_the_least_recently_used_model(
    small_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs, max_bytes=2 * size) as registry:
        for name, expected in (("a", "ab"), ("c", "ac"), ("b", "bc"), ("a", "ab")):
            with await registry.lease(name) as model:
                await model.encode("a text")
            loaded = [s.name for s in registry.statuses() if s.model is not None]
            assert loaded == list(expected)


async def test_requests_for_an_unloaded_model_share_one_load(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size) as registry:

        async def encode() -> int:
            with await registry.lease("b") as model:
                return len((await model.encode("a text")).vectors)

        assert await asyncio.gather(*(encode() for _ in range(100))) == [1] * 100
        assert loads.started == ["a", "b"]


async def test_busy_model_is_unloaded_only_after_its_requests(
    small_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size) as registry:
        busy = await registry.lease("a")
        waiting = asyncio.create_task(registry.lease("b"))
        await eventually_async(lambda: registry.statuses()[0].model is None)
        await busy.model.encode("a text")
        assert not waiting.done()
        busy.release()
        with await waiting as model:
            assert model.name == "b"
            assert not busy.model.batcher.is_alive


async def test_wait_for_a_load_is_bounded_and_does_not_cancel_the_load(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size, load_s=0.01) as registry:
        loads.may_end.clear()
        with pytest.raises(NotReady, match=r"not ready within 0\.01 s") as caught:
            await registry.lease("b")
        assert caught.value.code == "model_loading"
        loads.may_end.set()
        await eventually_async(lambda: registry.statuses()[1].model is not None)
        with await registry.lease("b", timeout_s=10) as model:
            assert model.name == "b"
        assert loads.started == ["a", "b"]


async def test_cancelled_request_does_not_cancel_the_load_of_others(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size) as registry:
        loads.may_end.clear()
        first, second = (asyncio.create_task(registry.lease("b")) for _ in range(2))
        await eventually_async(lambda: loads.started == ["a", "b"])
        first.cancel()
        await asyncio.wait([first])
        loads.may_end.set()
        (await second).release()
    assert first.cancelled()


async def test_failed_load_on_demand_is_reported_and_tried_again(
    small_artifact: Artifact, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "b"
    shutil.copytree(small_artifact.path, folder)
    specs = spec(small_artifact, "a"), ModelSpec(path=folder, options=replace(ONE_THREAD, name="b"))
    clock = ManualClock()
    async with opened(*specs, max_bytes=size, clock=clock) as registry:
        graph = (folder / "model.onnx").read_bytes()
        (folder / "model.onnx").write_bytes(b"not a graph")
        with pytest.raises(NotReady, match="cannot be loaded; see the log") as caught:
            await registry.lease("b")
        assert caught.value.code == "load_failed"
        assert headers_of(caught.value) == {"Retry-After": "10"}
        assert "cannot load the model b" in caplog.text
        (folder / "model.onnx").write_bytes(graph)
        (await registry.lease("a")).release()
        await clock.advance(3.5)
        with pytest.raises(NotReady, match="cannot be loaded; see the log") as caught:
            await registry.lease("b")
        assert headers_of(caught.value) == {"Retry-After": "7"}
        assert registry.statuses()[0].model is not None  # the failed load did not unload it again
        await clock.advance(6.5)
        (await registry.lease("b")).release()


async def test_failed_load_fails_all_its_requests_and_is_not_repeated_for_each(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size) as registry:
        loads.may_end.clear()
        monkeypatch.setattr(memory, "open_model", loads.fail)
        requests = [asyncio.create_task(registry.lease("b")) for _ in range(10)]
        await eventually_async(lambda: loads.started == ["a", "b"])
        tasks = [repr(task.get_coro()) for task in asyncio.all_tasks()]
        assert sum("ModelRegistry._load" in task for task in tasks) == 1
        loads.may_end.set()
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(result) for result in results} == {NotReady}
        for _ in range(20):  # iterations of the event loop, in which another load would start
            await asyncio.sleep(0)
        assert loads.started == ["a", "b"]


async def test_models_that_do_not_fit_together_are_leased_before_they_are_unloaded(
    small_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs, max_bytes=size) as registry:

        async def encode(name: str) -> str:
            with await registry.lease(name) as model:
                await model.encode("a text")
                return model.name

        for _ in range(3):
            assert await asyncio.gather(*map(encode, "bcbc")) == ["b", "c", "b", "c"]


async def test_idle_model_is_unloaded_before_a_busy_one(
    small_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs, max_bytes=2 * size) as registry:
        with await registry.lease("a"):
            (await registry.lease("b")).release()
            (await registry.lease("c")).release()
            loaded = [s.name for s in registry.statuses() if s.model is not None]
            assert loaded == ["a", "c"]


async def test_load_waits_for_no_version_whose_room_it_does_not_need(
    small_artifact: Artifact, other_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs[:2], max_bytes=3 * size) as registry:
        await registry.register(specs[2:])
        with await registry.lease("a"):
            await registry.load(spec(other_artifact, "a"))
            (await registry.lease("c")).release()  # in place of b, which is idle
            assert registry.closing == 1
            loaded = [s.name for s in registry.statuses() if s.model is not None]
            assert loaded == ["a", "c"]


async def test_no_busy_model_is_unloaded_if_a_closing_version_leaves_room(
    small_artifact: Artifact, other_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    fits = ModelMemory.fits

    def recorded(*arguments: Any) -> bool:  # noqa: ANN401 - those of `fits`
        checks.append(fits(*arguments))
        return checks[-1]

    specs = [spec(small_artifact, name) for name in "abc"]
    async with opened(*specs[:2], max_bytes=3 * size) as registry:
        await registry.register(specs[2:])
        closing = await registry.lease("a")
        await registry.load(spec(other_artifact, "a"))
        with await registry.lease("a"), await registry.lease("b"):
            monkeypatch.setattr(ModelMemory, "fits", recorded)
            request = asyncio.create_task(registry.lease("c"))
            await eventually_async(lambda: False in checks)
            closing.release()
            (await request).release()
            assert all(status.model is not None for status in registry.statuses())


async def test_new_version_of_an_unloaded_model_is_compared_with_the_old_one(
    small_artifact: Artifact, other_artifact: Artifact, size: int
) -> None:
    compared: list[tuple[str, str]] = []

    async def compare(old: Model, new: Model) -> None:
        compared.append((old.version, new.version))

    specs = spec(small_artifact, "a"), spec(small_artifact, "b")
    async with opened(*specs, max_bytes=size) as registry:
        new, _ = await registry.load(spec(other_artifact, "b"), compare)
        assert compared == [(compared[0][0], new.version)]
        assert compared[0][0] != new.version


async def test_load_that_ends_after_the_registry_is_closed_closes_its_model(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    registry = ModelRegistry()
    await registry.open([spec(small_artifact, "a")])
    loads.may_end.clear()
    loading = asyncio.create_task(registry.load(spec(small_artifact, "b")))
    await eventually_async(lambda: loads.started == ["a", "b"])
    await registry.close()
    loads.may_end.set()
    with pytest.raises(NotReady, match="the models are closed"):
        await loading
    assert [model.batcher.is_alive for model in loads.models] == [False, False]


async def test_registry_that_closes_before_a_load_begins_answers_its_requests(
    small_artifact: Artifact, size: int
) -> None:
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size) as registry:
        waiting = asyncio.create_task(registry.lease("b"))
        await asyncio.sleep(0)  # it creates the task of the load, whose turn is the next
        await registry.close()
        with pytest.raises(NotReady, match=r"^the model is loading$"):
            await waiting


async def test_registry_that_closes_during_a_comparison_closes_both_versions(
    small_artifact: Artifact, other_artifact: Artifact
) -> None:
    compared: list[Model] = []

    async def compare(old: Model, new: Model) -> None:
        compared.extend((old, new))
        await registry.close()

    registry = ModelRegistry()
    await registry.open([spec(small_artifact, "a")])
    with pytest.raises(NotReady, match="the models are closed"):
        await registry.load(spec(other_artifact, "a"), compare)
    assert [model.batcher.is_alive for model in compared] == [False, False]
    with pytest.raises(NotReady):
        await registry.lease("a")


async def test_retired_version_closes_once_and_gives_no_leases(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await open_model(small_artifact.path, ONE_THREAD)
    closes: list[Model] = []
    close = Model.close

    async def counted(self: Model) -> None:
        closes.append(self)
        await close(self)

    monkeypatch.setattr(Model, "close", counted)
    version = ModelVersion(model)
    lease = version.lease()
    version.retire(lambda _: None)
    with pytest.raises(RuntimeError, match="a retired version gives no leases"):
        version.lease()
    lease.release()
    await asyncio.gather(version.close(), version.close())
    assert closes == [model]


async def test_requests_of_an_unloaded_model_are_answered_during_its_comparison(
    small_artifact: Artifact, other_artifact: Artifact, size: int
) -> None:
    specs = spec(small_artifact, "a"), spec(small_artifact, "b")
    async with opened(*specs, max_bytes=size) as registry:
        waiting = asyncio.create_task(registry.lease("b"))  # while the versions load

        async def compare(old: Model, _: Model) -> None:
            with await waiting as model:
                assert model is old

        new, old = await registry.load(spec(other_artifact, "b"), compare)
        assert old is not None
        await eventually_async(lambda: not old.batcher.is_alive)
        with await registry.lease("b") as model:
            assert model is new


@asynccontextmanager
async def watched(folder: Path, **options: Any) -> AsyncIterator[tuple[ModelRegistry, ModelWatch]]:  # noqa: ANN401
    """Serve the artifacts in a folder, which are watched."""
    registry = ModelRegistry(default="a", **options)
    watch = ModelWatch(registry, lambda: specs_in(folder, ONE_THREAD))
    await watch.open()
    try:
        yield registry, watch
    finally:
        await registry.close()


def replace_folder(folder: Path, artifact: Artifact) -> None:
    new = folder.with_name(f".new-{folder.name}")
    shutil.copytree(artifact.path, new)
    old = folder.rename(folder.with_name(f".old-{folder.name}"))
    new.rename(folder)
    shutil.rmtree(old)


@pytest.fixture
def two(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A folder with the small model's artifact twice, of which the budget allows one."""
    for name in "ab":
        shutil.copytree(small_artifact.path, tmp_path / name)
    return tmp_path


async def test_all_models_of_a_replaced_artifact_are_loaded_again_with_their_own_options(
    two: Path, other_artifact: Artifact
) -> None:
    shared = two / "b"
    options = {
        "wide": replace(ONE_THREAD, name="wide", share=3.0),
        "slow": replace(ONE_THREAD, name="slow", share=0.5),
        None: ONE_THREAD,  # has the name of the artifact
    }
    specs = [
        ModelSpec(path=shared, aliases=(f"alias of {name}",), options=own)
        for name, own in options.items()
    ]
    registry = ModelRegistry(default="wide")
    watch = ModelWatch(registry, lambda: specs)
    await watch.open()
    try:
        before = {status.name: status.aliases for status in registry.statuses()}
        replace_folder(shared, other_artifact)
        await watch.scan()
        assert {status.name: status.aliases for status in registry.statuses()} == before
        for name in before:
            own = registry.spec_of(name)
            assert own is not None
            assert own.options.share == options.get(name, ONE_THREAD).share
            identity = registry.current(name).identity
            assert identity == identity_of(other_artifact, "onnxruntime", "float32")
    finally:
        await registry.close()


async def test_artifact_that_could_not_be_loaded_is_tried_again_by_a_scan_that_is_not_patient(
    two: Path, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> Model:
        raise OSError(errno.EMFILE, "Too many open files")

    async with watched(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        with monkeypatch.context() as patch:
            patch.setattr(memory, "open_model", fail)
            await watch.scan(is_patient=True)
        await watch.scan(is_patient=True)
        assert registry.spec_of("c") is None
        await watch.scan()
        assert registry.current("c").name == "c"


async def test_new_artifact_that_is_gone_during_its_load_is_not_said_to_be_in_service(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def remove(path: Path, *_: object, **__: object) -> Model:
        shutil.rmtree(path)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    async with watched(two) as (registry, watch):
        shutil.copytree(two / "b", two / "c")
        monkeypatch.setattr(memory, "open_model", remove)
        await watch.scan()
        assert registry.spec_of("c") is None
        assert f"the artifact {two / 'c'} is gone; it was not loaded" in caplog.text


async def test_artifact_is_loaded_once_the_last_file_of_its_folders_is_complete(
    two: Path, other_artifact: Artifact
) -> None:
    async with watched(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        nested = two / "c" / SOURCE / "1_Pooling" / "config.json"
        content = nested.read_bytes()
        nested.unlink()
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        nested.write_bytes(content)
        await watch.scan(is_patient=True)  # another scan tries failed artifacts in any case
        assert [status.name for status in registry.statuses()] == ["a", "b", "c"]


async def test_model_whose_artifact_cannot_be_read_stays_in_service(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(two) as (registry, watch):
        (two / "b").rename(two / ".b")
        (two / "b").symlink_to("b")  # reading it fails with ELOOP, for every user
        for _ in range(3):
            await watch.scan(is_patient=True)
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        assert f"{two / 'b'}: it cannot be read: Too many levels" in caplog.text
        (two / "b").unlink()
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a"]


async def test_scans_before_the_models_are_open_load_nothing_twice(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ModelRegistry(default="a")
    watch = ModelWatch(registry, lambda: specs_in(two, ONE_THREAD))
    loads: list[Path] = []

    async def count(path: Path, options: ModelOptions, **arguments: Any) -> Model:  # noqa: ANN401 - those of `open_model`
        loads.append(path)
        return await open_model(path, options, **arguments)

    monkeypatch.setattr(memory, "open_model", count)
    try:
        await watch.scan()
        await asyncio.gather(watch.open(), watch.scan())
        assert loads == [two / "a", two / "b"]
        assert registry.is_open
    finally:
        await registry.close()


@pytest.mark.parametrize("parent", [".", SOURCE])
async def test_broken_link_in_a_new_artifact_is_logged_by_its_name(
    two: Path, other_artifact: Artifact, caplog: pytest.LogCaptureFixture, parent: str
) -> None:
    async with watched(two) as (registry, watch):
        shutil.copytree(other_artifact.path, two / "c")
        (two / "c" / parent / "link").symlink_to(two / "nowhere")
        await watch.scan()
        assert [status.name for status in registry.statuses()] == ["a", "b"]
        name = Path(parent, "link")
        assert f"{name} in the artifact c is a symbolic link" in caplog.text


async def test_artifact_replaced_while_a_request_loads_its_model_is_served(
    two: Path, other_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, may_end = asyncio.Event(), asyncio.Event()

    async def hold(path: Path, options: ModelOptions, **arguments: Any) -> Model:  # noqa: ANN401 - those of `open_model`
        model = await open_model(path, options, **arguments)
        opened.set()
        await may_end.wait()
        return model

    async with watched(two, max_bytes=size) as (registry, watch):
        monkeypatch.setattr(memory, "open_model", hold)
        waiting = asyncio.create_task(registry.lease("b"))
        await opened.wait()
        replace_folder(two / "b", other_artifact)
        scanning = asyncio.create_task(watch.scan())
        await asyncio.wait([scanning], timeout=0.1)  # it waits for the load
        may_end.set()
        with await waiting as old:
            pass
        await scanning
        with await registry.lease("b") as model:
            assert model.version != old.version


async def test_new_artifact_of_an_unloaded_model_has_its_own_size_and_is_tried_at_once(
    two: Path, other_artifact: Artifact, size: int
) -> None:
    (two / "b" / "model.onnx").write_bytes(b"not a graph")
    async with watched(two, max_bytes=2 * size - 1) as (registry, watch):
        with pytest.raises(NotReady, match="cannot be loaded"):
            await registry.lease("b")
        replace_folder(two / "b", other_artifact)
        await watch.scan()
        with await registry.lease("b") as model:  # within the pause after a failed load
            assert model.artifact.path == two / "b"
        (await registry.lease("a")).release()
        weights = two / "b" / "model.weights"
        replace_folder(two / "b", other_artifact)
        with weights.open("ab") as file:
            file.write(bytes(100))
        await watch.scan()
        assert [status.weight_bytes for status in registry.statuses()] == [size, size + 100]


async def test_model_whose_artifact_is_gone_is_kept_if_it_has_another_one_by_now(
    two: Path, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    async with watched(two) as (registry, watch):
        loads.may_end.clear()
        loading = asyncio.create_task(registry.load(spec(other_artifact, "b")))
        await eventually_async(lambda: len(loads.started) == 3)
        shutil.rmtree(two / "b")
        scanning = asyncio.create_task(watch.scan())
        await asyncio.sleep(0)
        loads.may_end.set()
        new, _ = await loading
        await scanning
        assert registry.current("b") is new


async def test_model_deleted_during_its_load_is_unknown(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, default="a", max_bytes=size) as registry:
        loads.may_end.clear()
        waiting = asyncio.create_task(registry.lease("b"))
        await eventually_async(lambda: loads.started == ["a", "b"])
        deleting = asyncio.create_task(registry.unload("b"))
        loads.may_end.set()
        await deleting
        lease = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(lease, Lease):  # the request was served before the model was deleted
            lease.release()
        else:
            assert isinstance(lease, UnknownModel)
        with pytest.raises(UnknownModel):
            await registry.lease("b")


async def test_metrics_show_loads_unloads_and_loaded_bytes(
    small_artifact: Artifact, size: int
) -> None:
    prometheus = CollectorRegistry()
    metrics = InferenceMetrics(prometheus, longest_s=120.0)

    def value(name: str, **labels: str) -> float | None:
        return prometheus.get_sample_value(name, labels)

    specs = [spec(small_artifact, name) for name in "ab"]
    async with opened(*specs, max_bytes=size, metrics=metrics) as registry:
        (await registry.lease("b")).release()
        assert value("vitrine_model_loads_total", model="a", result="loaded") == 1
        assert value("vitrine_model_unloads_total", model="a") == 1
        assert value("vitrine_model_loaded_bytes", model="a") == 0
        assert value("vitrine_model_loaded_bytes", model="b") == size


@pytest.mark.parametrize("seed", range(3))
async def test_metrics_are_those_of_the_served_models(
    small_artifact: Artifact, tmp_path: Path, seed: int
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small_artifact.path, broken)
    (broken / "model.weights").write_bytes(b"")
    prometheus = CollectorRegistry()

    def labelled() -> set[str]:
        samples = (sample for family in prometheus.collect() for sample in family.samples)
        return {sample.labels["model"] for sample in samples}

    rng = random.Random(seed)  # noqa: S311
    async with opened(
        spec(small_artifact, "a"),
        default="a",
        metrics=InferenceMetrics(prometheus, longest_s=120.0),
    ) as registry:
        for _ in range(12):
            name = rng.choice("abc")
            path = rng.choice([small_artifact.path, small_artifact.path, broken])
            served = {status.name for status in registry.statuses()}
            if rng.random() < 0.4 and name in served - {"a"}:
                with await registry.lease(name) as model:
                    await registry.unload(name)
                    await model.encode("a request in flight")
            else:
                with suppress(ArtifactError):
                    await registry.load(replace(spec(small_artifact, name), path=path))
            assert labelled() == {status.name for status in registry.statuses()}


async def test_metrics_of_a_new_model_that_waits_for_memory_end_with_its_load(
    small_artifact: Artifact, size: int
) -> None:
    prometheus = CollectorRegistry()
    metrics = InferenceMetrics(prometheus, longest_s=120.0)
    async with opened(spec(small_artifact, "a"), max_bytes=size, metrics=metrics) as registry:
        with await registry.lease("a"):
            loading = asyncio.create_task(registry.load(spec(small_artifact, "b")))
            await eventually_async(lambda: registry.closing == 1)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        value = prometheus.get_sample_value
        assert value("vitrine_inputs_received_total", {"model": "a"}) == 0
        assert value("vitrine_inputs_received_total", {"model": "b"}) is None


async def test_failed_load_of_a_served_model_is_counted(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small_artifact.path, broken)
    (broken / "model.weights").write_bytes(b"")
    prometheus = CollectorRegistry()
    metrics = InferenceMetrics(prometheus, longest_s=120.0)
    async with opened(spec(small_artifact, "a"), metrics=metrics) as registry:
        with pytest.raises(ArtifactError):
            await registry.load(replace(spec(small_artifact, "a"), path=broken))
        labels = {"model": "a", "result": "failed"}
        assert prometheus.get_sample_value("vitrine_model_loads_total", labels) == 1


async def test_name_or_alias_that_is_refused_is_not_served(small_artifact: Artifact) -> None:
    def check_name(name: str) -> None:
        if name == "bad":
            raise ValueError("no model may have this name")

    async with opened(spec(small_artifact, "a"), check_path=check_name) as registry:
        for refused in (spec(small_artifact, "bad"), spec(small_artifact, "b", "good", "bad")):
            with pytest.raises(ValueError, match="no model may have this name"):
                await registry.load(refused)
        assert [status.name for status in registry.statuses()] == ["a"]
    with pytest.raises(ValueError, match="no model may have this name"):
        async with opened(spec(small_artifact, "bad"), check_path=check_name):
            pass


async def test_queue_metrics_of_a_new_version_survive_the_close_of_the_old_one(
    small_artifact: Artifact,
) -> None:
    prometheus = CollectorRegistry()
    async with opened(
        spec(small_artifact, "a"), metrics=InferenceMetrics(prometheus, longest_s=120.0)
    ) as registry:
        old = registry.current()
        new, _ = await registry.load(spec(small_artifact, "a"))
        await eventually_async(lambda: not old.batcher.is_alive)
        assert new.metrics._queues == [new.batcher]


def test_folder_of_artifacts_names_models_by_their_folders(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    for name in ("x", "y", ".hidden"):
        shutil.copytree(small_artifact.path, tmp_path / name)
    (tmp_path / "not an artifact").mkdir()
    found = [(spec.path, spec.options.name) for spec in specs_in(tmp_path, ONE_THREAD)]
    assert found == [(tmp_path / "x", "x"), (tmp_path / "y", "y")]


def test_folders_whose_names_are_invalid_are_skipped_and_logged_once(
    small_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [b"a\nCRITICAL b\x1b[31m", "\u202ec".encode()]
    if sys.platform != "darwin":  # where names of files are Unicode
        bad.append(b"\xff\xfe")
    shutil.copytree(small_artifact.path, tmp_path / "good")
    for name in bad:
        shutil.copytree(small_artifact.path, tmp_path / os.fsdecode(name))
    for _ in range(3):
        assert [spec.options.name for spec in specs_in(tmp_path, ONE_THREAD)] == ["good"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(bad)
    assert all(message.isprintable() for message in messages)
    assert r"a\nCRITICAL b\x1b[31m: its name must have printable characters only" in caplog.text


def test_folder_that_cannot_be_read_is_skipped_and_logged(
    small_artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(small_artifact.path, tmp_path / "good")
    (tmp_path / "loop").symlink_to("loop")
    assert [spec.options.name for spec in specs_in(tmp_path, ONE_THREAD)] == ["good"]
    assert f"skipping the folder {tmp_path / 'loop'}: it cannot be read: Too many" in caplog.text


@pytest.mark.parametrize("place", ["name", "alias", "manifest"])
@pytest.mark.parametrize("name", ["a\nb", "\u202ea", " "])
async def test_invalid_name_of_a_model_is_refused_wherever_it_is(
    small_artifact: Artifact, tmp_path: Path, name: str, place: str
) -> None:
    path = copy_of(small_artifact.path, tmp_path / "copy")
    if place == "manifest":
        edit(path, MANIFEST, name=name)
    own = {"name": name, "alias": "valid", "manifest": None}[place]
    aliases = (name,) if place == "alias" else ()
    spec = ModelSpec(path=path, aliases=aliases, options=ModelOptions(name=own))
    with pytest.raises(ValueError, match=re.escape(f"the name {name!r} of a model must")):
        await ModelRegistry().register([spec])


def test_folder_without_artifacts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="has no folder with an artifact"):
        specs_in(tmp_path, ONE_THREAD)
