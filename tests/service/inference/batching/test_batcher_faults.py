import asyncio
import threading
from collections.abc import Sequence

import pytest

from service.inference.batching.batch_former import Batch, BatchFormer
from service.inference.batching.batcher import Outcome, Stopped
from service.inference.batching.runs import ItemFailed, RunBroken
from tests.batchers import (
    POISON,
    ManualClock,
    Recorder,
    batcher_of,
    held,
    settled,
    started,
    submit,
)
from tests.eventually import HANG_S, eventually, eventually_async


async def test_failing_item_fails_only_its_own_request() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        good = [submit(batcher, n, n + 1) for n in (2, 4, 6, 8)]
        bad = submit(batcher, 3, 5, POISON, 9)
        await settled()
        run.gate.set()
        with pytest.raises(ItemFailed) as failure:
            await bad
        assert failure.value.index == 2
        assert isinstance(failure.value.__cause__, ValueError)
        assert [(await task).results for task in good] == [
            [n * n, (n + 1) ** 2] for n in (2, 4, 6, 8)
        ]
        await first


async def test_other_items_of_a_failed_request_are_not_run_again() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        bad = asyncio.create_task(batcher.submit([POISON, *[7] * 13]))
        await settled()
        run.gate.set()
        with pytest.raises(ItemFailed):
            await bad
        await first
        assert (await batcher.submit([3])).results == [9]
        # Once as a whole; then the halves with the poison, and nothing of the other halves.
        ran = [len(batch) for batch in run.batches[1:-1]]
        assert ran == sorted(ran, reverse=True)


async def test_queued_items_of_a_failed_request_are_dropped() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        with pytest.raises(ItemFailed):
            await batcher.submit([POISON, *[50] * 20])
        assert (await batcher.submit([3])).results == [9]
        assert run.batches == [[POISON, 50], [POISON], [3]]


async def test_hanging_run_fails_all_requests_and_calls_on_stop() -> None:
    run = Recorder()
    stop_errors: list[BaseException] = []
    clock = ManualClock()
    batcher = batcher_of(run, streams=2, timeout_s=10, on_stop=stop_errors.append, clock=clock)
    batcher.start()
    assert batcher.is_alive
    running = await held(run, batcher)
    beside = submit(batcher, 99)
    await eventually_async(lambda: len(run.batches) == 2)
    waiting = submit(batcher, 9)
    await clock.advance(10)
    await clock.advance(1)  # the runs do not end when they are cancelled
    for task in (running, beside, waiting):
        with pytest.raises(Stopped):
            await task
    assert [str(error) for error in stop_errors] == ["a batch did not return within 10 s"]
    assert not batcher.is_alive
    with pytest.raises(Stopped):
        await batcher.submit([1])
    run.gate.set()
    await batcher.close()
    assert len(stop_errors) == 1


@pytest.mark.parametrize("good_batches", [0, 1], ids=["in the event loop", "in a stream"])
async def test_defect_of_the_batcher_fails_all_requests_and_calls_on_stop(
    monkeypatch: pytest.MonkeyPatch, good_batches: int
) -> None:
    stop_errors: list[BaseException] = []
    batcher = batcher_of(Recorder(), on_stop=stop_errors.append)
    form = BatchFormer.form
    formed: list[object] = []

    def break_down(former: BatchFormer[object], now: float) -> Batch[object]:
        if len(formed) == good_batches:
            raise ZeroDivisionError
        formed.append(batch := form(former, now))
        return batch

    monkeypatch.setattr(BatchFormer, "form", break_down)
    batcher.start()
    with pytest.raises(Stopped):
        await batcher.submit([60, 60])
    assert [type(error) for error in stop_errors] == [ZeroDivisionError]
    await batcher.close()


@pytest.mark.parametrize("results", [[], [1, 2, 3]])
async def test_run_with_wrong_number_of_results_fails_its_request(results: list[int]) -> None:
    batcher = batcher_of(lambda _: results)
    async with started(batcher):
        with pytest.raises(ItemFailed):
            await batcher.submit([4, 5])


async def test_panic_in_a_run_fails_only_its_own_request() -> None:
    class Panic(BaseException):
        """Like a panic of a Rust extension, which is not an Exception."""

    def run(items: Sequence[int]) -> list[int]:
        if POISON in items:
            raise Panic
        return list(items)

    batcher = batcher_of(run)
    async with started(batcher):
        with pytest.raises(ItemFailed):
            await batcher.submit([POISON])
        assert (await batcher.submit([3])).results == [3]


async def test_run_that_fails_on_the_probe_stops_the_batcher_and_calls_on_stop() -> None:
    stop_errors: list[BaseException] = []

    def broken(*_: object) -> list[int]:
        raise ValueError("gone")

    batcher = batcher_of(broken, streams=2, probe=broken, on_stop=stop_errors.append)
    async with started(batcher, stops=1):
        requests = [submit(batcher, i, i + 1) for i in range(1, 9)]
        done = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(error) for error in done} == {Stopped}
        with pytest.raises(Stopped):
            await batcher.submit([1])
    assert [type(error) for error in stop_errors] == [RunBroken]
    assert isinstance(stop_errors[0].__cause__, ValueError)


@pytest.mark.parametrize("max_cost", [100, 1], ids=["in one batch", "one batch after the other"])
async def test_slow_run_is_cancelled_and_fails_only_its_own_request(
    max_cost: int,
) -> None:
    cancelled, clock = threading.Event(), ManualClock()

    def slow(items: Sequence[int]) -> list[int]:
        clock.advance_in_thread(0.1)
        if POISON in items:
            clock.advance_in_thread(10)
            assert cancelled.wait(HANG_S)
            cancelled.clear()
            raise ValueError("cancelled")
        return list(items)

    batcher = batcher_of(slow, max_cost=max_cost, timeout_s=10, cancel=cancelled.set, clock=clock)
    async with started(batcher):
        requests = [submit(batcher, i) for i in (1, 2, POISON, 3)]
        done = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(outcome) for outcome in done] == [Outcome, Outcome, ItemFailed, Outcome]


async def test_run_cancelled_because_of_another_stream_is_repeated() -> None:
    cancelled, runs = threading.Event(), []

    def slow(items: Sequence[int]) -> list[int]:
        runs.append(list(items))
        if items == [POISON]:
            assert cancelled.wait(HANG_S)
            raise ValueError("cancelled")
        if runs.count([7]) == 1:
            assert cancelled.wait(HANG_S)
            raise ValueError("cancelled")
        return list(items)

    clock = ManualClock()
    batcher = batcher_of(
        slow, streams=2, max_cost=1, timeout_s=2, cancel=cancelled.set, clock=clock
    )
    async with started(batcher):
        poisoned = submit(batcher, POISON)
        await eventually_async(lambda: runs == [[POISON]])
        await clock.advance(1)
        cancelled_with_it = submit(batcher, 7)
        await eventually_async(lambda: runs == [[POISON], [7]])
        await clock.advance(1)
        assert (await cancelled_with_it).results == [7]
        with pytest.raises(ItemFailed):
            await poisoned
    assert runs.count([7]) == 2


async def test_probe_cancelled_because_of_another_stream_is_repeated() -> None:
    cancelled, begun, probes = threading.Event(), threading.Event(), 0

    def run(items: Sequence[int]) -> list[int]:
        if items == [5]:
            begun.set()
            assert cancelled.wait(HANG_S)
        raise ValueError("poison, or cancelled")

    def probe() -> None:
        nonlocal probes
        probes += 1
        if probes == 1:
            assert cancelled.wait(HANG_S)
            raise ValueError("cancelled")

    clock = ManualClock()
    batcher = batcher_of(
        run,
        streams=2,
        min_split_tokens=1,
        probe=probe,
        timeout_s=2,
        cancel=cancelled.set,
        clock=clock,
    )
    async with started(batcher):
        hanging = submit(batcher, 5)
        await eventually_async(begun.is_set)
        await clock.advance(1)
        failing = submit(batcher, POISON)
        await eventually_async(lambda: probes == 1)
        await clock.advance(1)
        with pytest.raises(ItemFailed):
            await failing
        with pytest.raises(ItemFailed):
            await hanging
        assert probes == 3


async def test_timeout_applies_to_each_batch_separately() -> None:
    cancelled, clock = threading.Event(), ManualClock()

    def run(items: Sequence[int]) -> list[int]:
        eventually(lambda: clock.waits)
        clock.advance_in_thread(0.5)
        if clock.now() in (5, 10):  # the timer that was set for an earlier batch has expired
            eventually(lambda: clock.waits > clock.now() / 5)
        return list(items)

    batcher = batcher_of(run, max_cost=1, timeout_s=5, cancel=cancelled.set, clock=clock)
    async with started(batcher):
        assert len((await batcher.submit([1] * 24)).results) == 24
        assert not cancelled.is_set()


async def test_run_that_returns_late_despite_cancellation_keeps_its_results() -> None:
    clock, stop_errors = ManualClock(), list[BaseException]()
    waits = list[int]()  # at each cancellation

    def run(items: Sequence[int]) -> list[int]:
        if items == [7]:
            eventually(lambda: clock.waits)
            clock.advance_in_thread(5)
            eventually(lambda: waits and clock.waits == waits[0] + 1)  # it should end now
        elif items == [8]:
            clock.advance_in_thread(1)  # after this time a cancelled run would count as hanging
            eventually(lambda: clock.waits == waits[0] + 2 or stop_errors)
        return list(items)

    batcher = batcher_of(
        run,
        max_cost=1,
        timeout_s=5,
        cancel=lambda: waits.append(clock.waits),
        on_stop=stop_errors.append,
        clock=clock,
    )
    async with started(batcher):
        assert (await batcher.submit([7, 8, 9])).results == [7, 8, 9]


async def test_run_hit_by_a_late_cancellation_is_repeated() -> None:
    released, begun, hit = threading.Event(), threading.Event(), threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        if items == [7]:
            clock.advance_in_thread(5)
            assert released.wait(HANG_S)
        elif not begun.is_set():
            begun.set()
            assert hit.wait(HANG_S)
            raise ValueError("cancelled")
        return list(items)

    def cancel() -> None:  # 7 has just returned, and 8 begins
        released.set()
        assert begun.wait(HANG_S)
        hit.set()

    clock = ManualClock()
    batcher = batcher_of(slow, max_cost=1, timeout_s=5, cancel=cancel, clock=clock)
    async with started(batcher):
        assert (await batcher.submit([7, 8])).results == [7, 8]


async def test_run_started_during_a_cancellation_is_repeated() -> None:
    released, begun, hit = threading.Event(), threading.Event(), threading.Event()
    poison_begun, five_begun, clock = threading.Event(), threading.Event(), ManualClock()

    def slow(items: Sequence[int]) -> list[int]:
        if items == [5]:
            five_begun.set()
            assert released.wait(HANG_S)
        elif items == [POISON]:
            poison_begun.set()
            assert hit.wait(HANG_S)
            raise ValueError("cancelled")
        elif not begun.is_set():
            begun.set()
            assert hit.wait(HANG_S)
            raise ValueError("cancelled")
        return list(items)

    def cancel() -> None:
        released.set()
        assert begun.wait(HANG_S)
        hit.set()

    batcher = batcher_of(
        slow, streams=2, max_cost=1, min_split_tokens=1, timeout_s=2, cancel=cancel, clock=clock
    )
    async with started(batcher):
        poisoned = submit(batcher, POISON)
        await eventually_async(poison_begun.is_set)
        await clock.advance(1)
        others = submit(batcher, 5, 8)
        await eventually_async(five_begun.is_set)
        await clock.advance(1)
        assert (await others).results == [5, 8]
        with pytest.raises(ItemFailed):
            await poisoned


@pytest.mark.parametrize(
    ("cost_s", "is_measured", "limit_s"),
    [
        (0.0, False, 10),  # the timeout
        (0.5, False, 10 * 0.5 * 50),  # the expected duration, from the start
        (0.5, True, 10 * 2.0 * 50),  # the expected duration, from the runs so far
    ],
)
async def test_long_run_is_cancelled_after_ten_times_its_expected_duration(
    cost_s: float, is_measured: bool, limit_s: float
) -> None:
    cancelled, clock, begun = threading.Event(), ManualClock(), threading.Event()

    def run(items: Sequence[int]) -> list[int]:
        if items == [40]:
            begun.set()
            assert cancelled.wait(HANG_S)
            raise ValueError("cancelled")
        clock.advance_in_thread(2.0 * (10 + sum(items)))
        return list(items)

    batcher = batcher_of(run, timeout_s=10, cost_s=cost_s, cancel=cancelled.set, clock=clock)
    async with started(batcher):
        if is_measured:
            await batcher.submit([1])
        request = submit(batcher, 40)
        await eventually_async(begun.is_set)
        await clock.advance(limit_s - 1)
        assert not cancelled.is_set()
        await clock.advance(1)
        with pytest.raises(ItemFailed):
            await request
        assert cancelled.is_set()
