"""The registry of models: names, leases, swaps and metrics."""

import asyncio
import gc
import random
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from models.artifact import Artifact
from models.manifest import ArtifactError
from service.inference.errors import InvalidInput, NotReady, UnknownModel
from service.inference.model.model import Model
from service.inference.model.opening import open_model
from service.inference.registry.model_version import Lease, ModelVersion
from service.inference.registry.registry import ModelRegistry
from service.inference.results.metrics import InferenceMetrics
from tests.eventually import eventually_async
from tests.service.inference.registry.conftest import ONE_THREAD, HeldLoads, opened, spec, specs


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
    async with opened(*specs(small_artifact, "ab")) as registry:
        with pytest.raises(InvalidInput, match="model is required; served models: a, b") as caught:
            await registry.lease()
    assert (caught.value.code, caught.value.pointer) == ("model_required", "/model")


async def test_default_may_be_an_alias(small_artifact: Artifact) -> None:
    own = spec(small_artifact, "a"), spec(small_artifact, "b", "second")
    async with opened(*own, default="second") as registry:
        with await registry.lease() as model:
            assert model.name == "b"


@pytest.mark.parametrize(
    ("names", "default", "message"),
    [
        ((("a",), ("a",)), None, "two models have the name 'a'"),
        ((("a",), ("b", "a")), None, "two models have the name 'a'"),
        ((("a", "x"), ("b", "x")), None, "two models have the name 'x'"),
        ((("a", "x", "x"),), None, "a model has the alias 'x' twice"),
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
    small_artifact: Artifact, broken: Path
) -> None:
    async with opened(spec(small_artifact, "a")) as registry:
        old = registry.current()
        with pytest.raises(ArtifactError):
            await registry.load(spec(broken, "a"))
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
    own = spec(small_artifact, "a"), spec(small_artifact, "b", "alias")
    async with opened(*own, default="a") as registry:
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
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
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
    async with opened(*specs(small_artifact, "ab"), max_bytes=size) as registry:
        waiting = asyncio.create_task(registry.lease("b"))  # while the versions load

        async def compare(old: Model, _: Model) -> None:
            with await waiting as model:
                assert model is old

        new, old = await registry.load(spec(other_artifact, "b"), compare)
        assert old is not None
        await eventually_async(lambda: not old.batcher.is_alive)
        with await registry.lease("b") as model:
            assert model is new


async def test_model_deleted_during_its_load_is_unknown(
    small_artifact: Artifact, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = HeldLoads(monkeypatch)
    async with opened(*specs(small_artifact, "ab"), default="a", max_bytes=size) as registry:
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

    async with opened(*specs(small_artifact, "ab"), max_bytes=size, metrics=metrics) as registry:
        (await registry.lease("b")).release()
        assert value("vitrine_model_loads_total", model="a", result="loaded") == 1
        assert value("vitrine_model_unloads_total", model="a") == 1
        assert value("vitrine_model_loaded_bytes", model="a") == 0
        assert value("vitrine_model_loaded_bytes", model="b") == size


@pytest.mark.parametrize("seed", range(3))
async def test_metrics_are_those_of_the_served_models(
    small_artifact: Artifact, broken: Path, seed: int
) -> None:
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
                    await registry.load(spec(path, name))
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
    small_artifact: Artifact, broken: Path
) -> None:
    prometheus = CollectorRegistry()
    metrics = InferenceMetrics(prometheus, longest_s=120.0)
    async with opened(spec(small_artifact, "a"), metrics=metrics) as registry:
        with pytest.raises(ArtifactError):
            await registry.load(spec(broken, "a"))
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
