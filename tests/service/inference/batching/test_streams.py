"""Several batchers on the streams of one pool."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batching.batch_former import Batch
from service.inference.batching.batcher import Batcher, Outcome, Stopped
from service.inference.batching.runs import ItemFailed
from service.inference.batching.streams import Clock, StreamPool
from tests.batchers import (
    POISON,
    Gates,
    ManualClock,
    Recorder,
    batcher_of,
    held,
    settled,
    started,
    submit,
)
from tests.eventually import HANG_S, eventually, eventually_async


def square(items: Sequence[int]) -> Sequence[int]:
    return [item * item for item in items]


class Log:
    """Runs of several batchers, each of which takes as long as a test says.

    Attributes:
        runs: Name of the batcher and item of each run.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.runs: list[tuple[str, int]] = []
        self._clock = clock
        self._gate = threading.Event()
        self._gate.set()

    def run(self, name: str, seconds: float) -> Callable[[Sequence[int]], Sequence[int]]:
        def run(items: Sequence[int]) -> Sequence[int]:
            assert self._gate.wait(HANG_S)
            self.runs += [(name, item) for item in items]
            self._clock.advance_in_thread(seconds)
            return items

        return run

    async def of(self, requests: dict[Batcher[int, int], list[int]]) -> list[str]:
        """Submit requests, of which none ends before all are queued; return the runs' names."""
        self.runs.clear()
        self._gate.clear()
        tasks = [submit(batcher, *items) for batcher, items in requests.items()]
        await settled()
        self._gate.set()
        await asyncio.gather(*tasks)
        return [name for name, _ in self.runs]


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 1.0), (1.0, 4.0), (4.0, 1.0), (4.0, 2.0)])
async def test_time_of_a_stream_is_divided_by_share(share: float, seconds: float) -> None:
    log = Log(clock := ManualClock())
    pool = StreamPool(1, clock)
    first = batcher_of(log.run("first", seconds), max_cost=1, pool=pool, share=share)
    second = batcher_of(log.run("second", 1.0), max_cost=1, pool=pool)
    async with started(first, second):
        names = await log.of({first: [5] * 40, second: [5] * 40})
    times = {"first": 0.0, "second": 0.0}
    durations = {"first": seconds, "second": 1.0}
    for name in names:
        times[name] += durations[name]
        # At most one batch ahead of the other, in virtual time.
        assert -1.0 <= times["first"] / share - times["second"] <= seconds / share
        if 40 in (times["first"] / seconds, times["second"]):
            break
    assert len(names) == 80


async def test_flood_delays_a_batch_of_another_batcher_by_one_batch() -> None:
    run, pool = Recorder(), StreamPool(1)
    flooded, other = batcher_of(run, pool=pool), batcher_of(run, pool=pool)
    async with started(flooded, other):
        first = await held(run, flooded)
        many = submit(flooded, *[50] * 100)
        await settled()
        request = submit(other, 7)
        await settled()
        run.gate.set()
        await asyncio.gather(first, many, request)
    assert run.batches[:2] == [[1], [7]]


async def test_spare_stream_runs_a_small_batch_beside_a_flood_of_another_batcher() -> None:
    run, pool = Recorder(), StreamPool(1, has_spare=True)
    flooded, other = batcher_of(run, pool=pool), batcher_of(square, pool=pool)
    async with started(flooded, other):
        first = await held(run, flooded)
        many = submit(flooded, *[50] * 100)
        for _ in range(3):
            assert (await other.submit([7])).results == [49]
        assert run.batches == [[1]]
        run.gate.set()
        await asyncio.gather(first, many)


async def test_spare_stream_runs_no_batch_of_a_batcher_that_runs_one() -> None:
    gates, pool = Gates(), StreamPool(1, has_spare=True)
    batcher = batcher_of(gates, streams=3, max_cost=1, pool=pool)
    async with started(batcher):
        requests = [submit(batcher, 1), submit(batcher, 2)]
        await eventually_async(lambda: gates.begun == [1])
        await eventually_async(lambda: len(pool._idle) == 1)  # the spare stream has looked
        assert gates.begun == [1]
        gates.open(1, 2)
        await asyncio.gather(*requests)


async def test_spare_stream_takes_no_large_queue() -> None:
    run, clock = Recorder(), ManualClock()
    log = Log(clock)
    pool = StreamPool(1, clock, has_spare=True)
    flooded = batcher_of(run, pool=pool)
    other = batcher_of(log.run("other", 0.007), pool=pool)
    async with started(flooded, other):
        first = await held(run, flooded)
        await other.submit([7])  # 1 ms per token
        await eventually_async(lambda: not other.running)
        large = submit(other, 21)
        await settled()
        await eventually_async(lambda: len(pool._idle) == 1)  # the spare stream has looked
        assert other.queued_tokens == 21
        run.gate.set()
        await asyncio.gather(first, large)


async def test_batch_that_the_spare_stream_may_not_take_runs_after_the_spare_stream() -> None:
    flood, small, clock = Recorder(), Recorder(), ManualClock()
    pool = StreamPool(1, clock, has_spare=True)
    flooded = batcher_of(flood, streams=1, pool=pool)

    def run(items: Sequence[int]) -> Sequence[int]:
        clock.advance_in_thread(sum(items) / 1000)
        return small(items)

    other = batcher_of(run, streams=1, pool=pool)
    async with started(flooded, other):
        first = await held(flood, flooded)
        on_spare = await held(small, other)
        flood.gate.set()
        await first
        await eventually_async(lambda: not flooded.running)
        large = submit(other, 50, 50)
        await settled()
        # The other stream has found the batcher at its limit.
        await eventually_async(lambda: len(pool._idle) == 1)
        small.gate.set()
        await asyncio.wait_for(asyncio.gather(on_spare, large), HANG_S)


async def test_idle_batcher_collects_no_credit() -> None:
    log = Log(clock := ManualClock())
    pool = StreamPool(1, clock)
    busy = batcher_of(log.run("busy", 1.0), max_cost=1, pool=pool)
    idle = batcher_of(log.run("idle", 1.0), max_cost=1, pool=pool)
    async with started(busy, idle):
        await busy.submit([5] * 50)
        names = await log.of({busy: [5] * 20, idle: [5] * 20})
    for start in range(36):
        assert {"busy", "idle"} == {*names[start : start + 3]}


async def test_batcher_that_joins_a_busy_pool_starts_at_its_virtual_time() -> None:
    log = Log(clock := ManualClock())
    pool = StreamPool(1, clock)
    busy = batcher_of(log.run("busy", 1.0), max_cost=1, pool=pool)
    new = batcher_of(log.run("new", 1.0), max_cost=1, pool=pool)
    async with started(busy):
        await busy.submit([5] * 50)
        async with started(new):
            names = await log.of({busy: [5] * 20, new: [5] * 20})
    assert names[:30].count("busy") in (14, 15, 16)


async def test_running_batches_count_by_their_expected_duration() -> None:
    gates, clock = Gates(), ManualClock()
    pool = StreamPool(2, clock)
    first = batcher_of(gates, streams=2, max_cost=1, cost_s=1, pool=pool)
    second = batcher_of(gates, streams=2, max_cost=1, cost_s=1, pool=pool)
    async with started(first, second):
        requests = [submit(first, 1, 2, 3, 4)]
        await eventually_async(lambda: sorted(gates.begun) == [1, 2])
        requests.append(submit(second, 11, 12, 13, 14))
        await settled()
        await clock.advance(12)
        gates.open(1)
        await eventually_async(lambda: sorted(gates.begun) == [1, 2, 11])
        gates.open(2)
        # The batch of 11 has taken no time yet, but is expected to.
        await eventually_async(lambda: sorted(gates.begun) == [1, 2, 3, 11])
        gates.open(3, 4, 11, 12, 13, 14)
        await asyncio.gather(*requests)


async def test_batcher_runs_no_more_batches_at_a_time_than_its_own_limit() -> None:
    gates, others = Gates(), Gates()
    pool = StreamPool(3)
    limited = batcher_of(gates, streams=1, max_cost=1, pool=pool)
    other = batcher_of(others, streams=3, max_cost=1, pool=pool)
    async with started(limited, other):
        requests = [submit(limited, 1, 2, 3)]
        await eventually_async(lambda: gates.begun == [1])
        requests.append(submit(other, 11, 12, 13, 14))
        await eventually_async(lambda: sorted(others.begun) == [11, 12])
        await settled()
        assert gates.begun == [1]
        gates.open(1, 2, 3)
        others.open(11, 12, 13, 14)
        await asyncio.gather(*requests)


async def test_closing_a_batcher_affects_no_other() -> None:
    gates, cancelled = Gates(), threading.Event()
    pool = StreamPool(2)

    def run(_: Sequence[int]) -> Sequence[int]:
        assert cancelled.wait(HANG_S)
        raise ValueError("cancelled")

    other_cancelled = threading.Event()
    other = batcher_of(gates, max_cost=1, pool=pool, cancel=other_cancelled.set)
    closed = batcher_of(run, max_cost=1, pool=pool, cancel=cancelled.set)
    async with started(closed, other, stops=1):
        failing = [submit(closed, 5), submit(closed, 6)]
        await settled()
        staying = [submit(other, 1), submit(other, 2)]
        await eventually_async(lambda: gates.begun == [1])
        await closed.close()
        for task in failing:
            with pytest.raises(Stopped):
                await task
        with pytest.raises(Stopped):
            await closed.submit([7])
        gates.open(1, 2, 3)
        assert [(await task).results for task in staying] == [[1], [2]]
        assert (await other.submit([3])).results == [3]
        assert gates.begun == [1, 2, 3]
        assert not other_cancelled.is_set()


async def test_pool_ends_its_threads_after_the_last_batcher_and_can_be_used_again() -> None:
    def engine_threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("engine")}

    before = engine_threads()
    pool = StreamPool(2)
    first, second = batcher_of(Recorder(), pool=pool), batcher_of(Recorder(), pool=pool)
    for _ in range(2):
        async with started(first):
            async with started(second):
                await asyncio.gather(submit(first, 5), submit(second, 5))
            assert engine_threads() - before
            assert (await first.submit([6])).results == [36]
        await eventually_async(lambda: engine_threads() <= before)


async def test_failing_item_of_a_batcher_affects_no_other() -> None:
    bad, good, pool = Recorder(), Recorder(), StreamPool(1)
    failing, other = batcher_of(bad, pool=pool), batcher_of(good, pool=pool)
    async with started(failing, other):
        first = await held(bad, failing)
        poisoned = submit(failing, 2, POISON)
        requests = [submit(other, item) for item in (60, 61, 62)]
        await settled()
        bad.gate.set()
        with pytest.raises(ItemFailed) as raised:
            await poisoned
        assert raised.value.index == 1
        assert [(await task).results for task in requests] == [[3600], [3721], [3844]]
        await first
    assert good.batches == [[60], [61], [62]]


async def test_cancelled_run_of_a_batcher_is_no_cancellation_of_another() -> None:
    cancelled, begun, fails = threading.Event(), threading.Event(), threading.Event()
    runs: list[int] = []

    def slow(_: Sequence[int]) -> Sequence[int]:
        assert cancelled.wait(HANG_S)
        raise ValueError("cancelled")

    def faulty(items: Sequence[int]) -> Sequence[int]:
        runs.extend(items)
        begun.set()
        assert fails.wait(HANG_S)
        raise ValueError("poison")

    clock = ManualClock()
    pool = StreamPool(2, clock)
    timed_out = batcher_of(slow, timeout_s=5, cancel=cancelled.set, pool=pool)
    other = batcher_of(faulty, timeout_s=50, pool=pool)
    async with started(timed_out, other):
        late, failing = submit(timed_out, 5), submit(other, 6)
        await eventually_async(begun.is_set)
        await clock.advance(5)
        with pytest.raises(ItemFailed):
            await late
        fails.set()
        with pytest.raises(ItemFailed):
            await failing
    assert runs == [6]  # its own failure: not repeated


async def test_shorter_limit_of_another_batcher_cancels_no_run() -> None:
    run, clock, cancelled = Recorder(), ManualClock(), threading.Event()
    pool = StreamPool(1, clock)
    patient = batcher_of(run, timeout_s=50, cancel=cancelled.set, pool=pool)
    hasty = batcher_of(square, timeout_s=5, pool=pool)
    async with started(patient, hasty):
        first = await held(run, patient)
        for _ in range(2):
            waits = clock.waits
            await clock.advance(6)
            await eventually_async(lambda: clock.waits > waits)  # noqa: B023 - awaited here
        assert not cancelled.is_set()
        run.gate.set()
        assert (await first).results == [1]


async def test_hanging_run_stops_its_batcher_and_the_others_get_a_new_thread() -> None:
    gate, threads = threading.Event(), list[int]()
    hanging_threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def hang(items: Sequence[int]) -> Sequence[int]:
        hanging_threads.append(threading.current_thread())
        assert gate.wait(HANG_S)
        return items

    def run(items: Sequence[int]) -> Sequence[int]:
        threads.append(threading.get_ident())
        return items

    clock = ManualClock()
    pool = StreamPool(1, clock)
    hanging = batcher_of(hang, timeout_s=5, on_stop=errors.append, pool=pool)
    other = batcher_of(run, max_cost=1, pool=pool)
    async with started(hanging, other, stops=1):
        lost = submit(hanging, 5)
        await eventually_async(lambda: hanging_threads)
        waiting = submit(other, 1, 2)
        await clock.advance(5)
        await clock.advance(1)  # the run does not end when it is cancelled
        with pytest.raises(Stopped):
            await lost
        assert [str(error) for error in errors] == ["a batch did not return within 5 s"]
        assert (hanging.is_alive, other.is_alive) == (False, True)
        assert (await waiting).results == [1, 2]
        gate.set()
        (thread,) = hanging_threads
        await eventually_async(lambda: not thread.is_alive())
        assert (await other.submit([3])).results == [3]
    assert len(set(threads)) == 1
    assert thread.ident not in threads


async def test_hanging_run_that_returns_takes_no_further_batch() -> None:
    gate, gates, ran = threading.Event(), Gates(), threading.Event()

    def hang(items: Sequence[int]) -> Sequence[int]:
        ran.set()
        assert gate.wait(HANG_S)
        return items

    clock = ManualClock()
    pool = StreamPool(1, clock)
    hanging = batcher_of(hang, timeout_s=5, pool=pool)
    other = batcher_of(gates, max_cost=1, streams=2, timeout_s=500, pool=pool)
    async with started(hanging, other, stops=1):
        lost = submit(hanging, 5)
        await eventually_async(ran.is_set)
        await clock.advance(5)
        await clock.advance(1)
        with pytest.raises(Stopped):
            await lost
        waiting = submit(other, 1, 2)
        await eventually_async(lambda: gates.begun == [1])
        threads = threading.active_count()
        gate.set()  # one stream: 2 waits for 1
        await eventually_async(lambda: threading.active_count() < threads)
        assert gates.begun == [1]
        gates.open(1, 2)
        await waiting


async def test_closed_batcher_is_released_while_the_stream_is_busy() -> None:
    gates, clock = Gates(), ManualClock()
    pool = StreamPool(1, clock)
    other = batcher_of(gates, max_cost=1, timeout_s=500, pool=pool)
    closed = batcher_of(gates, max_cost=1, timeout_s=5, pool=pool)
    async with started(other):
        closed.start()
        await clock.advance(2)
        first = submit(closed, 1)
        await eventually_async(lambda: gates.begun == [1])
        second = submit(other, 2)
        await clock.advance(3)  # the event loop looks at 1, and waits for its time limit
        gates.open(1)  # the thread goes on with 2
        await first
        await eventually_async(lambda: gates.begun == [1, 2])
        await closed.close()
        released = weakref.ref(closed._runner)
        del closed, first
        gc.collect()
        assert released() is None
        gates.open(2)
        await second


async def test_defect_of_a_batcher_affects_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def break_down(_: float) -> Batch[object]:
        calls.append(1)
        raise ZeroDivisionError

    errors: list[BaseException] = []
    pool = StreamPool(1)
    broken = batcher_of(Recorder(), on_stop=errors.append, pool=pool)
    other = batcher_of(Recorder(), pool=pool)
    monkeypatch.setattr(broken._former, "form", break_down)
    async with started(broken, other, stops=1):
        failing, good = submit(broken, 5), submit(other, 6)
        with pytest.raises(Stopped):
            await failing
        assert (await good).results == [36]
        calls.clear()
        assert (await other.submit([7])).results == [49]
        assert not calls
    assert [type(error) for error in errors] == [ZeroDivisionError]


@pytest.mark.parametrize(
    ("share", "first_s", "second_s"),
    [
        (1.0, 30 + 10, 10 + 10),  # the first has all streams after the second has run
        (2.0, 30 + 10, 10 + 10 * 2),  # in the time of 10 s of the second, 20 s of the first run
        (6.0, 30 + 30 / 6, 10 + 30),
    ],
)
async def test_drain_time_includes_the_share_of_the_other_batchers(
    share: float, first_s: float, second_s: float
) -> None:
    run = Recorder()
    pool = StreamPool(1)
    first, second = batcher_of(run, pool=pool, share=share), batcher_of(run, pool=pool)
    async with started(first, second):
        running = await held(run, first)
        for batcher in (first, second):
            batcher._runner._recent_s = batcher._runner._recent_tokens = 1.0
        waiting = [submit(first, 30), submit(second, 10)]
        await settled()
        assert (first.drain_s, second.drain_s) == (first_s, second_s)
        run.gate.set()
        await asyncio.gather(running, *waiting)


async def test_drain_time_of_a_limited_batcher_is_at_least_that_of_its_own_streams() -> None:
    run = Recorder()
    pool = StreamPool(2)
    batcher = batcher_of(run, streams=1, pool=pool)
    async with started(batcher):
        running = await held(run, batcher)
        batcher._runner._recent_s = batcher._runner._recent_tokens = 1.0
        waiting = submit(batcher, 30)
        await settled()
        assert batcher.drain_s == 30
        run.gate.set()
        await asyncio.gather(running, waiting)


async def test_requests_of_several_batchers_run_while_the_event_loop_is_blocked() -> None:
    first, second, pool = Recorder(), Recorder(), StreamPool(1)
    one, other = batcher_of(first, pool=pool), batcher_of(second, pool=pool)
    async with started(one, other):
        running = await held(first, one)
        waiting = [submit(one, 80), submit(other, 90)]
        await settled()
        first.gate.set()
        eventually(lambda: (first.batches, second.batches) == ([[1], [80]], [[90]]))
        await asyncio.gather(running, *waiting)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(1, 60) | st.just(POISON), min_size=1, max_size=8),
            st.sampled_from(["wait", "wait", "wait", "cancel", "close"]),
        ),
        max_size=12,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_item_returns_once_whatever_happens_to_other_batchers(
    requests: list[tuple[int, list[int], str]], streams: int, limit: int, has_spare: bool
) -> None:
    closed = {number for number, _, fate in requests if fate == "close"}

    async def one(batcher: Batcher[int, int], items: list[int], fate: str) -> None:
        task = submit(batcher, *items)
        await asyncio.sleep(0)
        if fate == "cancel":
            task.cancel()
        elif fate == "close":
            await batcher.close()
        await asyncio.wait([task])
        if task.cancelled():
            assert fate == "cancel"
        elif isinstance(error := task.exception(), ItemFailed):
            assert items[error.index] == POISON
        elif error is not None:
            assert isinstance(error, Stopped)
            assert batchers.index(batcher) in closed
        else:
            assert task.result().results == [item * item for item in items]

    async def scenario() -> None:
        async with started(*batchers, stops=len(closed)):
            await asyncio.gather(*(one(batchers[n], items, fate) for n, items, fate in requests))
            assert [batcher.queued_tokens for batcher in batchers] == [0, 0, 0]
            for number in {0, 1, 2} - closed:
                assert (await batchers[number].submit([7])).results == [49]

    pool = StreamPool(streams, has_spare=has_spare)
    batchers = [
        batcher_of(Recorder(), streams=limit, min_split_tokens=1, pool=pool) for _ in range(3)
    ]
    asyncio.run(scenario())


async def test_idle_stream_takes_the_withheld_bulk_items_when_their_time_has_come() -> None:
    clock = ManualClock()
    recorder, pool = Recorder(), StreamPool(1, clock)
    batcher = batcher_of(recorder, pool=pool)

    async def run(item: int) -> None:
        assert (await batcher.submit([item])).results == [item**2]
        await eventually_async(lambda: len(pool._idle) == 1)

    async def withheld(item: int) -> "asyncio.Task[Outcome[int]]":
        waits = clock.waits
        task = asyncio.create_task(batcher.submit([item], priority="bulk"))
        await eventually_async(lambda: clock.waits > waits)
        return task

    async with started(batcher):
        await run(5)
        bulk = await withheld(6)
        await clock.advance(0.009)
        assert recorder.batches == [[5]]
        await clock.advance(0.002)
        assert (await bulk).results == [36]
        await run(7)
        bulk = await withheld(8)
        await clock.advance(0.002)
        # Interactive items come meanwhile, and the moment begins anew.
        await run(9)
        waits = clock.waits
        await clock.advance(0.009)
        await eventually_async(lambda: clock.waits > waits)
        assert recorder.batches[-1] == [9]
        await clock.advance(0.002)
        assert (await bulk).results == [64]


class PassingClock(Clock):
    """A clock on which some time passes between any two looks at it. Short waits are over."""

    def __init__(self, step_s: float) -> None:
        self._now = 0.0
        self._step_s = step_s

    def now(self) -> float:
        self._now += self._step_s
        return self._now

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        await asyncio.wait([future], timeout=0 if timeout_s < 1 else None)


@pytest.mark.parametrize("step_ms", range(1, 11))
async def test_bulk_items_run_if_their_wait_ends_while_a_stream_looks_at_the_queue(
    step_ms: int,
) -> None:
    run = Recorder()
    batcher = batcher_of(run, pool=StreamPool(1, PassingClock(step_ms / 1000)))
    async with started(batcher):
        first = await held(run, batcher)
        bulk = asyncio.ensure_future(batcher.submit([6], priority="bulk"))
        await settled()
        run.gate.set()
        await first
        await asyncio.wait_for(bulk, HANG_S)
    assert run.batches == [[1], [6]]
