import asyncio
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batching.batcher import (
    Batcher,
    Outcome,
    QueueFull,
    Stopped,
    TooLate,
    _union_s,
)
from service.inference.batching.runs import ItemFailed
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

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60) | st.just(POISON), min_size=1, max_size=12),
        st.sampled_from(["wait", "wait", "wait", "cancel", "late"]),
    ),
    max_size=12,
)


@given(REQUESTS, st.integers(1, 3))
def test_every_item_returns_once_and_in_order_despite_failures_and_cancellations(
    requests: list[tuple[list[int], str]], streams: int
) -> None:
    run = Recorder()

    async def one(
        batcher: Batcher[int, int], items: list[int], fate: str
    ) -> Outcome[int] | BaseException:
        if fate == "late":
            await settled()
        task = submit(batcher, *items)
        if fate == "cancel":
            await asyncio.sleep(0)
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome

    async def scenario() -> None:
        batcher = batcher_of(run, streams=streams, min_split_tokens=1)
        async with started(batcher):
            outcomes = await asyncio.gather(*(one(batcher, *request) for request in requests))
            for (items, fate), outcome in zip(requests, outcomes, strict=True):
                if isinstance(outcome, Outcome):
                    assert outcome.results == [item * item for item in items]
                    assert POISON not in items
                elif isinstance(outcome, ItemFailed):
                    assert items[outcome.index] == POISON
                else:
                    assert isinstance(outcome, asyncio.CancelledError)
                    assert fate == "cancel"
            assert batcher.queued_tokens == 0
            assert (await batcher.submit([7])).results == [49]

    asyncio.run(scenario())
    for batch in run.batches:
        assert len(batch) == 1 or sum(map(abs, batch)) <= 100


async def test_each_stream_runs_one_batch_at_a_time() -> None:
    run = Recorder()
    batcher = batcher_of(run, streams=3)
    async with started(batcher):
        first = await held(run, batcher)
        others = [submit(batcher, 80) for _ in range(4)]
        await eventually_async(lambda: len(run.batches) == 3)
        await settled()
        assert batcher.queued_tokens == 2 * 80
        run.gate.set()
        assert all(outcome.results == [6400] for outcome in await asyncio.gather(*others))
        await first


async def test_stream_runs_further_batches_while_the_event_loop_is_blocked() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        other = submit(batcher, 80, 90)
        await settled()
        run.gate.set()
        eventually(lambda: run.batches == [[1], [80], [90]])  # blocks the event loop
        await asyncio.gather(first, other)


async def test_outcome_reports_queue_time_and_run_time() -> None:
    run = Recorder()
    clock = ManualClock()
    batcher = batcher_of(run, clock=clock)
    async with started(batcher):
        first = await held(run, batcher)
        second = submit(batcher, 9)
        await clock.advance(5)
        run.gate.set()
        first_outcome, second_outcome = await asyncio.gather(first, second)
        assert (first_outcome.queue_s, first_outcome.run_s) == (0, 5)
        assert (second_outcome.queue_s, second_outcome.run_s) == (5, 0)


async def test_time_between_batches_of_a_request_counts_as_queue_time() -> None:
    gates, clock = Gates(), ManualClock()
    batcher = batcher_of(gates, clock=clock)
    async with started(batcher):
        first = submit(batcher, 1)
        await eventually_async(lambda: gates.begun == [1])
        # In turns: 80, then 50, then 90.
        split = submit(batcher, 80, 90)
        other = submit(batcher, 50)
        await settled()
        gates.open(1, 80, 90)
        await eventually_async(lambda: gates.begun == [1, 80, 50])
        await clock.advance(5)
        gates.open(50)
        _, split_outcome, other_outcome = await asyncio.gather(first, split, other)
        assert (split_outcome.queue_s, split_outcome.run_s) == (5, 0)
        assert (other_outcome.queue_s, other_outcome.run_s) == (0, 5)


def test_overlapping_runs_count_once_in_the_run_time() -> None:
    assert _union_s([(1.0, 3.0), (2.0, 4.0), (2.5, 2.6), (6.0, 7.0)]) == 4.0
    assert _union_s([]) == 0.0


async def test_oldest_queued_age_restarts_when_a_request_progresses() -> None:
    gates, clock = Gates(), ManualClock()
    batcher = batcher_of(gates, clock=clock)
    async with started(batcher):
        assert batcher.oldest_s == 0
        first = submit(batcher, 1)
        await eventually_async(lambda: gates.begun == [1])
        split = submit(batcher, 80, 90)
        await clock.advance(5)
        assert batcher.oldest_s == 5
        gates.open(1)
        await eventually_async(lambda: gates.begun == [1, 80])
        await clock.advance(2)
        assert batcher.oldest_s == 2  # of 90, since 80 began
        gates.open(80, 90)
        await asyncio.gather(first, split)
        assert batcher.oldest_s == 0


async def test_submit_without_items_raises_value_error() -> None:
    batcher = batcher_of(Recorder())
    async with started(batcher):
        with pytest.raises(ValueError, match="there are no items"):
            await batcher.submit([])


async def test_cancelled_request_is_removed_from_the_queue() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        leaving = submit(batcher, 77, 78)
        staying = submit(batcher, 50)
        await settled()
        leaving.cancel()
        await settled()
        assert batcher.queued_tokens == 50
        run.gate.set()
        await asyncio.gather(first, staying)
        assert not any({77, 78} & set(batch) for batch in run.batches)


async def test_request_cancelled_during_its_run_affects_no_other() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        for item in (1, POISON):
            run.gate.clear()
            seen = len(run.batches)
            leaving = submit(batcher, item)
            await eventually_async(lambda seen=seen: len(run.batches) > seen)  # type: ignore[misc]
            leaving.cancel()
            await settled()
            run.gate.set()
            assert (await batcher.submit([6])).results == [36]


async def test_full_queue_raises_queue_full_until_it_has_room() -> None:
    run = Recorder()
    batcher = batcher_of(run, max_queue_tokens=100)
    async with started(batcher):
        first = await held(run, batcher)
        waiting = submit(batcher, 60)
        await settled()
        with pytest.raises(QueueFull):
            await batcher.submit([41])
        fits = submit(batcher, 40)
        await settled()
        run.gate.set()
        await asyncio.gather(first, waiting, fits)
        # An empty queue accepts a request of any size, which is split.
        assert len((await batcher.submit([60, 60])).results) == 2


async def test_close_cancels_the_runs_in_flight_and_fails_all_requests() -> None:
    run = Recorder()
    batcher = batcher_of(run, cancel=run.gate.set)
    batcher.start()
    requests = [await held(run, batcher), submit(batcher, 9)]
    await settled()
    await batcher.close()
    assert run.gate.is_set()
    for request in requests:
        with pytest.raises(Stopped):
            await request


async def test_drain_time_follows_from_the_measured_throughput() -> None:
    gate, clock = threading.Event(), ManualClock()

    def a_second_per_token(items: Sequence[int]) -> list[int]:
        gate.wait(HANG_S)
        clock.advance_in_thread(sum(items))
        return list(items)

    batcher = batcher_of(a_second_per_token, max_cost=1, max_queue_tokens=20, clock=clock)

    async with started(batcher):
        assert batcher.drain_s == 0
        gate.set()
        await batcher.submit([1, 2, 3])
        assert not batcher.is_full("interactive")
        gate.clear()
        waiting = asyncio.create_task(batcher.submit([2] * 11))
        await eventually_async(lambda: batcher.queued_tokens == 20)
        assert batcher.is_full("interactive")
        assert batcher.drain_s == pytest.approx(20)
        gate.set()
        await waiting
        assert batcher.drain_s == 0


def set_throughput_to_one_token_per_second(batcher: Batcher[int, int]) -> Batcher[int, int]:
    """Set the throughput that the batcher has measured."""
    batcher._runner._recent_s = batcher._runner._recent_tokens = 5.0
    return batcher


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_request_after_its_deadline_times_out_and_is_not_queued(timeout_s: float) -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        with pytest.raises(TimeoutError):
            await batcher.submit([2], timeout_s=timeout_s)
        first = await held(run, batcher)
        set_throughput_to_one_token_per_second(batcher)
        waiting = submit(batcher, 60)
        await settled()
        with pytest.raises(TimeoutError):
            await batcher.submit([2], timeout_s=timeout_s)
        assert batcher.queued_tokens == 60
        run.gate.set()
        await asyncio.gather(first, waiting)
    assert run.batches == [[1], [60]]


async def test_request_that_would_miss_its_deadline_raises_too_late() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        set_throughput_to_one_token_per_second(batcher)
        waiting = submit(batcher, 60)
        await settled()
        with pytest.raises(TooLate) as raised:
            await batcher.submit([20], timeout_s=30)  # after 20 of the 60, in turns
        assert raised.value.late_s == 10
        in_time = asyncio.create_task(batcher.submit([20], timeout_s=41))
        endless = submit(batcher, 20)
        await settled()
        assert batcher.queued_tokens == 60 + 20 + 20
        run.gate.set()
        await asyncio.gather(first, waiting, in_time, endless)


async def test_empty_queue_accepts_a_request_whatever_its_deadline() -> None:
    # Otherwise one slow run would refuse everything, and no further run would correct the figure.
    batcher = batcher_of(Recorder())
    async with started(batcher):
        set_throughput_to_one_token_per_second(batcher)
        assert (await batcher.submit([20], timeout_s=1)).results == [400]
        assert batcher.drain_s == 0


async def test_two_streams_halve_the_drain_time() -> None:
    run = Recorder()
    batcher = batcher_of(run, streams=2)
    async with started(batcher):
        run.gate.clear()
        running = [submit(batcher, 90) for _ in range(2)]
        await eventually_async(lambda: len(run.batches) == 2)
        set_throughput_to_one_token_per_second(batcher)
        waiting = submit(batcher, 60)
        await settled()
        assert batcher.drain_s == 30
        run.gate.set()
        await asyncio.gather(*running, waiting)


async def test_queue_full_of_bulk_requests_accepts_interactive_ones() -> None:
    run = Recorder()
    batcher = batcher_of(run, max_queue_tokens=100)
    async with started(batcher):
        first = await held(run, batcher)
        bulk = submit(batcher, 60, 50, priority="bulk")
        await settled()
        assert (batcher.is_full("bulk"), batcher.is_full("interactive")) == (True, False)
        with pytest.raises(QueueFull):
            await batcher.submit([1], priority="bulk")
        interactive = submit(batcher, 70)
        await settled()
        with pytest.raises(QueueFull):
            await batcher.submit([31])
        run.gate.set()
        await asyncio.gather(first, bulk, interactive)


async def test_deadline_of_an_interactive_request_does_not_count_all_bulk_requests() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    async with started(batcher):
        first = await held(run, batcher)
        set_throughput_to_one_token_per_second(batcher)
        bulk = asyncio.create_task(batcher.submit([60] * 10, priority="bulk"))
        await settled()
        with pytest.raises(TooLate) as raised:
            await batcher.submit([18], timeout_s=19)
        assert raised.value.late_s == 18 + 18 // 9 - 19
        interactive = asyncio.create_task(batcher.submit([18], timeout_s=20))
        await settled()
        with pytest.raises(TooLate):
            await batcher.submit([18], timeout_s=18 + 18 + 17, priority="bulk")
        run.gate.set()
        await asyncio.gather(first, bulk, interactive)
