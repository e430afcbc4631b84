"""Loads on demand within the memory budget."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from service.api.errors import headers_of
from service.inference.errors import NotReady
from service.inference.model.model import Model
from service.inference.registry import memory
from service.inference.registry.memory import ModelMemory
from service.inference.registry.registry import ModelRegistry
from tests.batchers import ManualClock
from tests.eventually import eventually_async
from tests.service.inference.registry.conftest import HeldLoads, loaded, opened, spec, specs


async def test_budget_loads_only_the_models_that_fit(small_artifact: Artifact, size: int) -> None:
    async with opened(*specs(small_artifact, "abc"), max_bytes=2 * size) as registry:
        assert loaded(registry) == ["a", "b"]


async def test_budget_below_one_model_is_refused(small_artifact: Artifact, size: int) -> None:
    registry = ModelRegistry(max_bytes=size - 1)
    with pytest.raises(ValueError, match=f"{size} bytes of weights; the budget is"):
        await registry.open([spec(small_artifact, "a")])
    await registry.close()


async def test_load_on_demand_unloads_the_least_recently_used_model(
    small_artifact: Artifact, size: int
) -> None:
    async with opened(*specs(small_artifact, "abc"), max_bytes=2 * size) as registry:
        for name, expected in (("a", "ab"), ("c", "ac"), ("b", "bc"), ("a", "ab")):
            with await registry.lease(name) as model:
                await model.encode("a text")
            assert loaded(registry) == list(expected)


async def test_requests_for_an_unloaded_model_share_one_load(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:

        async def encode() -> int:
            with await registry.lease("b") as model:
                return len((await model.encode("a text")).vectors)

        assert await asyncio.gather(*(encode() for _ in range(100))) == [1] * 100
        assert loads.started == ["a", "b"]


async def test_busy_model_is_unloaded_only_after_its_requests(
    small_artifact: Artifact, size: int
) -> None:
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
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
    async with opened(*specs(small_artifact, "ab"), max_bytes=size, load_s=0.01) as registry:
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
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
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
    clock = ManualClock()
    own = spec(small_artifact, "a"), spec(folder, "b")
    async with opened(*own, max_bytes=size, clock=clock) as registry:
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
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
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
    async with opened(*specs(small_artifact, "abc"), max_bytes=size) as registry:

        async def encode(name: str) -> str:
            with await registry.lease(name) as model:
                await model.encode("a text")
                return model.name

        for _ in range(3):
            assert await asyncio.gather(*map(encode, "bcbc")) == ["b", "c", "b", "c"]


async def test_idle_model_is_unloaded_before_a_busy_one(
    small_artifact: Artifact, size: int
) -> None:
    async with opened(*specs(small_artifact, "abc"), max_bytes=2 * size) as registry:
        with await registry.lease("a"):
            (await registry.lease("b")).release()
            (await registry.lease("c")).release()
            assert loaded(registry) == ["a", "c"]


async def test_load_waits_for_no_version_whose_room_it_does_not_need(
    small_artifact: Artifact, other_artifact: Artifact, size: int
) -> None:
    async with opened(*specs(small_artifact, "ab"), max_bytes=3 * size) as registry:
        await registry.register([spec(small_artifact, "c")])
        with await registry.lease("a"):
            await registry.load(spec(other_artifact, "a"))
            (await registry.lease("c")).release()  # in place of b, which is idle
            assert registry.closing == 1
            assert loaded(registry) == ["a", "c"]


async def test_no_busy_model_is_unloaded_if_a_closing_version_leaves_room(
    small_artifact: Artifact, other_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    fits = ModelMemory.fits

    def recorded(*arguments: Any) -> bool:  # noqa: ANN401 - those of `fits`
        checks.append(fits(*arguments))
        return checks[-1]

    async with opened(*specs(small_artifact, "ab"), max_bytes=3 * size) as registry:
        await registry.register([spec(small_artifact, "c")])
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

    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
        new, _ = await registry.load(spec(other_artifact, "b"), compare)
        assert compared == [(compared[0][0], new.version)]
        assert compared[0][0] != new.version
