"""The cache of results, and batchers behind it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from service.inference.batching.batcher import Batcher, Outcome
from service.inference.batching.cache import CacheCounts, ResultCache
from service.inference.batching.cached_batcher import CachedBatcher
from service.inference.batching.runs import ItemFailed
from service.inference.results.metrics import CacheMetrics
from service.inference.results.vectors import Stages
from tests.batchers import POISON, Recorder, batcher_of, settled, started
from tests.eventually import HANG_S

MODELS = 2
# Model, items and fate of each request.
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, MODELS - 1),
        st.lists(st.integers(1, 8) | st.just(POISON), min_size=1, max_size=6),
        st.sampled_from(["wait", "wait", "wait", "cancel", "later"]),
    ),
    max_size=12,
)
Cached = CachedBatcher[int, int]


def behind(cache: ResultCache[int], batcher: Batcher[int, int], prefix: bytes = b"") -> Cached:
    """Return the batcher behind a cache in which an item and its result have ten bytes."""
    return CachedBatcher(
        batcher,
        cache,
        key=lambda item: prefix + item.to_bytes(4, "big", signed=True),
        length=abs,
        copy_read_only=lambda result: (result, 6),
    )


def run_cached(
    run: Recorder,
    scenario: Callable[[Cached, ResultCache[int]], Awaitable[None]],
    max_bytes: int = 1000,
) -> dict[str, float]:
    """Run a scenario with a batcher behind a cache; return the metrics of the cache."""
    cache: ResultCache[int] = ResultCache(max_bytes)

    async def with_cache() -> None:
        batcher = batcher_of(run, max_cost=30)
        async with asyncio.timeout(HANG_S):
            async with started(batcher):
                await scenario(behind(cache, batcher), cache)

    asyncio.run(with_cache())
    registry = CollectorRegistry()
    registry.register(CacheMetrics(cache))
    counts = {
        result: registry.get_sample_value("vitrine_cache_items_total", {"result": result})
        for result in ("hit", "shared", "miss")
    }
    counts["saved"] = registry.get_sample_value("vitrine_cache_saved_tokens_total")
    assert registry.get_sample_value("vitrine_cache_bytes") == cache.size
    return {name: -1.0 if value is None else value for name, value in counts.items()}


def computed(run: Recorder) -> list[int]:
    return sorted(item for batch in run.batches for item in batch)


def results_of(model: int, items: Sequence[int]) -> list[int]:
    """Return the result of each item, which is another one for each model."""
    if POISON in items:
        raise ValueError("poison")
    return [item * item + 100 * model for item in items]


async def outcome_of(model: Cached, items: list[int], fate: str) -> Outcome[int] | BaseException:
    if fate == "later":
        await settled()
    task = asyncio.create_task(model.submit(items))
    if fate == "cancel":
        await asyncio.sleep(0)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


def check(
    outcome: Outcome[int] | BaseException, model: int, items: Sequence[int], fate: str
) -> None:
    if isinstance(outcome, ItemFailed):
        assert items[outcome.index] == POISON
    elif isinstance(outcome, BaseException):
        assert isinstance(outcome, asyncio.CancelledError)
        assert fate == "cancel"
    else:
        assert outcome.results == results_of(model, items)
        counts = outcome.cache_counts
        assert counts is not None
        assert counts.hits + counts.shared + counts.misses == len(items)
        assert outcome.cache_s is not None
        assert min(outcome.cache_s, outcome.queue_s, outcome.run_s) >= 0


@given(REQUESTS, st.sampled_from([5, 25, 1000]))
def test_every_request_gets_the_results_of_its_own_items_and_model(
    requests: list[tuple[int, list[int], str]], max_bytes: int
) -> None:
    cache: ResultCache[int] = ResultCache(max_bytes)

    async def scenario() -> None:
        batchers = [batcher_of(partial(results_of, i), max_cost=30) for i in range(MODELS)]
        models = [behind(cache, batcher, bytes([i])) for i, batcher in enumerate(batchers)]
        for batcher in batchers:
            batcher.start()
        async with asyncio.timeout(HANG_S):
            outcomes = await asyncio.gather(
                *(outcome_of(models[i], items, fate) for i, items, fate in requests)
            )
        for batcher in batchers:
            await batcher.close()
        for outcome, request in zip(outcomes, requests, strict=True):
            check(outcome, *request)
        assert cache.size <= max_bytes

    asyncio.run(scenario())


def test_repeated_items_run_once() -> None:
    run = Recorder()

    async def scenario(model: Cached, _: ResultCache[int]) -> None:
        assert (await model.submit([3, 4, 3])).results == [9, 16, 9]
        assert (await model.submit([4, 5, 3])).results == [16, 25, 9]

    counts = run_cached(run, scenario)
    assert computed(run) == [3, 4, 5]
    assert counts == {"hit": 2, "shared": 1, "miss": 3, "saved": 3 + 4 + 3}


async def in_flight(run: Recorder, model: Cached, items: list[int]) -> "asyncio.Task[Outcome[int]]":
    """Submit items, and return while the engine computes them, before it ends."""
    run.gate.clear()
    task = asyncio.create_task(model.submit(items))
    await settled()
    return task


def test_equal_items_in_flight_are_computed_once() -> None:
    run = Recorder()

    async def scenario(model: Cached, _: ResultCache[int]) -> None:
        first = await in_flight(run, model, [3])
        others = [asyncio.create_task(model.submit(items)) for items in ([3], [3, 4], [3])]
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(first, *others)
        assert [outcome.results for outcome in outcomes] == [[9], [9], [9, 16], [9]]

    counts = run_cached(run, scenario)
    assert computed(run) == [3, 4]
    assert counts == {"hit": 0, "shared": 3, "miss": 2, "saved": 9}


def test_request_does_not_wait_for_one_with_more_tokens() -> None:
    run = Recorder()

    async def scenario(model: Cached, cache: ResultCache[int]) -> None:
        large = await in_flight(run, model, [3, 20])
        small = asyncio.create_task(model.submit([3]))
        await settled()
        # The next small request shares the small request's.
        last = asyncio.create_task(model.submit([3]))
        await settled()
        run.gate.set()
        assert (await small).results == (await last).results == [9]
        await large
        assert cache.size == 2 * 10

    run_cached(run, scenario)
    assert computed(run) == [3, 3, 20]


def test_interactive_request_does_not_wait_for_a_bulk_request() -> None:
    run = Recorder()

    async def scenario(model: Cached, _: ResultCache[int]) -> None:
        run.gate.clear()
        bulk = asyncio.create_task(model.submit([3], priority="bulk"))
        await settled()
        interactive = asyncio.create_task(model.submit([3]))
        await settled()
        another = asyncio.create_task(model.submit([3], priority="bulk"))
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(bulk, interactive, another)
        assert [outcome.results for outcome in outcomes] == [[9]] * 3

    counts = run_cached(run, scenario)
    assert computed(run) == [3, 3]
    assert counts["shared"] == 1


def test_item_of_a_cancelled_request_is_computed_for_those_who_wait() -> None:
    run = Recorder()

    async def scenario(model: Cached, _: ResultCache[int]) -> None:
        first = await in_flight(run, model, [3])
        others = [asyncio.create_task(model.submit([3])) for _ in range(3)]
        await settled()
        first.cancel()
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(*others)
        assert [outcome.results for outcome in outcomes] == [[9]] * 3

    run_cached(run, scenario)
    assert computed(run) in ([3], [3, 3])


def test_failure_of_an_item_concerns_those_who_wait_for_it_alone() -> None:
    run = Recorder()

    async def scenario(model: Cached, _: ResultCache[int]) -> None:
        first = await in_flight(run, model, [5, POISON])
        same = asyncio.create_task(model.submit([6, POISON]))
        other = asyncio.create_task(model.submit([6, 5]))
        await settled()
        run.gate.set()
        for task in (first, same):
            with pytest.raises(ItemFailed) as failure:
                await task
            assert failure.value.index == 1
        assert (await other).results == [36, 25]
        with pytest.raises(ItemFailed):
            await model.submit([POISON])  # failures are not cached

    run_cached(run, scenario)


def test_item_computed_twice_keeps_its_first_result() -> None:
    run = Recorder()
    # Each run gives another result, as engines may for a row in another batch.
    results = iter(range(100))

    def other_results(items: Sequence[int]) -> list[int]:
        run(items)
        return [next(results) for _ in items]

    async def with_cache() -> None:
        cache: ResultCache[int] = ResultCache(1000)
        batcher = batcher_of(other_results, max_cost=20)
        batcher.start()
        model = behind(cache, batcher)
        large = await in_flight(run, model, [20, 3])
        small = asyncio.create_task(model.submit([3]))
        await settled()
        run.gate.set()
        (own,) = (await small).results
        assert [own, (await large).results[1]] == [(await model.submit([3])).results[0]] * 2
        await batcher.close()

    asyncio.run(with_cache())
    assert computed(run) == [3, 3, 20]


def test_least_recently_used_results_are_evicted() -> None:
    run = Recorder()

    async def scenario(model: Cached, cache: ResultCache[int]) -> None:
        for item in (1, 2, 3, 1, 4, 1, 2):
            await model.submit([item])
            assert cache.size <= 30

    run_cached(run, scenario, max_bytes=35)
    assert [item for batch in run.batches for item in batch] == [1, 2, 3, 4, 2]


def test_result_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache: ResultCache[int] = ResultCache(40)
    cache.put(b"a", 1, 20)
    cache.put(b"b", 2, 40)
    assert (cache.get(b"a"), cache.get(b"b"), cache.size) == (1, None, 21)


def test_metrics_are_zero_at_first() -> None:
    async def scenario(_: Cached, cache: ResultCache[int]) -> None:
        assert cache.size == 0

    assert run_cached(Recorder(), scenario) == {"hit": 0, "shared": 0, "miss": 0, "saved": 0}


def test_stages_of_two_passes_add_up() -> None:
    counts = CacheCounts(hits=1, shared=2, misses=3, saved_tokens=4)
    cached = Stages({"infer": 1.0, "cache": 0.5}, counts)
    both = cached + Stages({"infer": 2.0, "explain": 3.0})
    assert both == {"infer": 3.0, "cache": 0.5, "explain": 3.0}
    assert both.cache_counts == counts
    assert (cached + cached).cache_counts == CacheCounts(2, 4, 6, 8)
