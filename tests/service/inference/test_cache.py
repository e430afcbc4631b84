"""The cache of results in front of a batcher."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from service.inference.batcher import Outcome
from service.inference.cache import ResultCache
from service.inference.metrics import CacheMetrics
from service.inference.runs import ItemFailed
from tests.batchers import POISON, Recorder, batcher_of, settled, with_batcher
from tests.eventually import HANG_S

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 8) | st.just(POISON), min_size=1, max_size=6),
        st.sampled_from(["wait", "wait", "wait", "cancel", "later"]),
    ),
    max_size=12,
)
Cache = ResultCache[int, int]


def cached(
    run: Recorder,
    scenario: Callable[[Cache], Awaitable[None]],
    max_bytes: int = 1000,
    size: Callable[[int], int] = lambda _: 6,
) -> dict[str, float]:
    """Run a scenario with a cache; return its counters."""
    registry = CollectorRegistry()

    async def with_cache() -> None:
        batcher = batcher_of(run, max_cost=30)
        cache = ResultCache(
            batcher,
            key=lambda item: item.to_bytes(4, "big", signed=True),
            length=abs,
            sealed=lambda result: (result, size(result)),
            max_bytes=max_bytes,
            metrics=CacheMetrics(registry),
        )
        async with asyncio.timeout(HANG_S):
            await with_batcher(batcher, lambda _: scenario(cache))

    asyncio.run(with_cache())
    counts = {
        result: registry.get_sample_value("vitrine_cache_items_total", {"result": result})
        for result in ("hit", "shared", "miss")
    }
    counts["saved"] = registry.get_sample_value("vitrine_cache_saved_tokens_total")
    return {name: value or 0.0 for name, value in counts.items()}


def computed(run: Recorder) -> list[int]:
    return sorted(item for batch in run.batches for item in batch)


@given(REQUESTS, st.sampled_from([5, 20, 1000]))
def test_every_request_gets_the_results_of_its_own_items(
    requests: list[tuple[list[int], str]], max_bytes: int
) -> None:
    run = Recorder()

    async def one(cache: Cache, items: list[int], fate: str) -> Outcome[int] | BaseException:
        if fate == "later":
            await settled()
        task = asyncio.create_task(cache.submit(items))
        if fate == "cancel":
            await asyncio.sleep(0)
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome

    async def scenario(cache: Cache) -> None:
        outcomes = await asyncio.gather(*(one(cache, *request) for request in requests))
        for (items, fate), outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Outcome):
                assert outcome.results == [item * item for item in items]
                assert outcome.cache_s is not None
                assert min(outcome.cache_s, outcome.queue_s, outcome.run_s) >= 0
            elif isinstance(outcome, ItemFailed):
                assert items[outcome.index] == POISON
            else:
                assert isinstance(outcome, asyncio.CancelledError)
                assert fate == "cancel"
        assert cache.size <= max_bytes

    cached(run, scenario, max_bytes)


def test_repeated_items_run_once() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        assert (await cache.submit([3, 4, 3])).results == [9, 16, 9]
        assert (await cache.submit([4, 5, 3])).results == [16, 25, 9]

    counts = cached(run, scenario)
    assert computed(run) == [3, 4, 5]
    assert counts == {"hit": 2, "shared": 1, "miss": 3, "saved": 3 + 4 + 3}


async def in_flight(run: Recorder, cache: Cache, items: list[int]) -> "asyncio.Task[Outcome[int]]":
    """Submit items, and return while the engine computes them, before it ends."""
    run.gate.clear()
    task = asyncio.create_task(cache.submit(items))
    await settled()
    return task


def test_equal_items_in_flight_are_computed_once() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        first = await in_flight(run, cache, [3])
        others = [asyncio.create_task(cache.submit(items)) for items in ([3], [3, 4], [3])]
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(first, *others)
        assert [outcome.results for outcome in outcomes] == [[9], [9], [9, 16], [9]]

    counts = cached(run, scenario)
    assert computed(run) == [3, 4]
    assert counts == {"hit": 0, "shared": 3, "miss": 2, "saved": 9}


def test_request_does_not_wait_for_one_with_more_tokens() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        large = await in_flight(run, cache, [3, 20])
        small = asyncio.create_task(cache.submit([3]))
        await settled()
        # The next small request shares the small request's.
        last = asyncio.create_task(cache.submit([3]))
        await settled()
        run.gate.set()
        assert (await small).results == (await last).results == [9]
        await large
        assert cache.size == 2 * 10  # the second result replaces the first

    cached(run, scenario)
    assert computed(run) == [3, 3, 20]


def test_interactive_request_does_not_wait_for_a_bulk_request() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        run.gate.clear()
        bulk = asyncio.create_task(cache.submit([3], priority="bulk"))
        await settled()
        interactive = asyncio.create_task(cache.submit([3]))
        await settled()
        another = asyncio.create_task(cache.submit([3], priority="bulk"))
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(bulk, interactive, another)
        assert [outcome.results for outcome in outcomes] == [[9]] * 3

    counts = cached(run, scenario)
    assert computed(run) == [3, 3]
    assert counts["shared"] == 1


def test_item_of_a_cancelled_request_is_computed_for_those_who_wait() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        first = await in_flight(run, cache, [3])
        others = [asyncio.create_task(cache.submit([3])) for _ in range(3)]
        await settled()
        first.cancel()
        await settled()
        run.gate.set()
        outcomes = await asyncio.gather(*others)
        assert [outcome.results for outcome in outcomes] == [[9]] * 3

    cached(run, scenario)
    assert computed(run) in ([3], [3, 3])


def test_failure_of_an_item_concerns_those_who_wait_for_it_alone() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        first = await in_flight(run, cache, [5, POISON])
        same = asyncio.create_task(cache.submit([6, POISON]))
        other = asyncio.create_task(cache.submit([6, 5]))
        await settled()
        run.gate.set()
        for task in (first, same):
            with pytest.raises(ItemFailed) as failure:
                await task
            assert failure.value.index == 1
        assert (await other).results == [36, 25]
        with pytest.raises(ItemFailed):
            await cache.submit([POISON])  # failures are not cached

    cached(run, scenario)


def test_least_recently_used_results_are_evicted() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        for item in (1, 2, 3, 1, 4, 1, 2):
            await cache.submit([item])
            assert cache.size <= 30

    cached(run, scenario, max_bytes=35)
    assert [item for batch in run.batches for item in batch] == [1, 2, 3, 4, 2]


def test_result_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    run = Recorder()

    async def scenario(cache: Cache) -> None:
        for item in (2, 7, 2, 7):
            assert (await cache.submit([item])).results == [item * item]
        assert cache.size == 4 + 4

    cached(run, scenario, max_bytes=40, size=lambda result: result)
    assert [item for batch in run.batches for item in batch] == [2, 7, 7]
