import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batcher import (
    Batcher,
    ItemFailed,
    Outcome,
    QueueFull,
    Stopped,
    TooLate,
    _union_s,
)
from tests.batchers import POISON, Recorder, batcher_of, held, settled, until, with_batcher

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60) | st.just(POISON), min_size=1, max_size=12),
        st.sampled_from(["wait", "wait", "wait", "cancel", "late"]),
    ),
    max_size=12,
)


@given(REQUESTS, st.integers(1, 3))
def test_every_item_comes_back_once_and_in_order_whatever_arrives_fails_or_leaves(
    requests: list[tuple[list[int], str]], streams: int
) -> None:
    run = Recorder()

    async def one(
        batcher: Batcher[int, int], items: list[int], fate: str
    ) -> Outcome[int] | BaseException:
        if fate == "late":
            await asyncio.sleep(0.001)
        task = asyncio.create_task(batcher.submit(items))
        if fate == "cancel":
            await asyncio.sleep(0)
            task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        return answer

    async def story(batcher: Batcher[int, int]) -> None:
        answers = await asyncio.gather(*(one(batcher, *request) for request in requests))
        for (items, fate), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Outcome):
                assert answer.results == [item * item for item in items]
                assert POISON not in items
            elif isinstance(answer, ItemFailed):
                assert items[answer.index] == POISON
            else:
                assert isinstance(answer, asyncio.CancelledError)
                assert fate == "cancel"
        assert batcher.queued_tokens == 0
        assert (await batcher.submit([7])).results == [49]

    asyncio.run(with_batcher(batcher_of(run, streams=streams, min_split_tokens=1), story))
    for batch in run.batches:
        assert len(batch) == 1 or sum(map(abs, batch)) <= 100


async def test_a_lone_request_leaves_at_once() -> None:
    async def story(batcher: Batcher[int, int]) -> None:
        outcome = await batcher.submit([5])
        assert outcome.results == [25]

    await with_batcher(batcher_of(Recorder()), story)


async def test_what_arrives_while_the_engine_runs_gathers_into_one_batch() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        others = [asyncio.create_task(batcher.submit([n])) for n in (10, 11, 12)]
        await settled()
        run.gate.set()
        await asyncio.gather(first, *others)
        assert [sorted(batch) for batch in run.batches] == [[1], [10, 11, 12]]

    await with_batcher(batcher_of(run), story)


async def test_as_many_batches_run_at_once_as_there_are_streams() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        others = [asyncio.create_task(batcher.submit([80])) for _ in range(4)]
        await until(lambda: len(run.batches) == 3)
        await settled()
        assert batcher.queued_tokens == 2 * 80
        run.gate.set()
        assert all(outcome.results == [6400] for outcome in await asyncio.gather(*others))
        await first

    await with_batcher(batcher_of(run, streams=3), story)


async def test_a_lane_goes_on_while_the_event_loop_is_busy() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        other = asyncio.create_task(batcher.submit([80, 90]))
        await settled()
        run.gate.set()
        latest = time.perf_counter() + 10
        while len(run.batches) < 3 and time.perf_counter() < latest:
            time.sleep(0.001)  # noqa: ASYNC251 - nothing else in the loop has a turn
        assert run.batches == [[1], [80], [90]]
        await asyncio.gather(first, other)

    await with_batcher(batcher_of(run), story)


async def test_a_batch_leaves_the_other_streams_their_share_of_what_waits_and_runs() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        run.gate.clear()
        eight = [asyncio.create_task(batcher.submit([6])) for _ in range(8)]
        await until(lambda: len(run.batches) == 2)
        assert [len(batch) for batch in run.batches] == [4, 4]
        two_more = [asyncio.create_task(batcher.submit([6])) for _ in range(2)]
        await settled()
        run.gate.set()
        await asyncio.gather(*eight, *two_more)
        # 12 waited and 24 or 48 ran: a share of 18 or more, so they go together.
        assert [len(batch) for batch in run.batches] == [4, 4, 2]

    await with_batcher(batcher_of(run, streams=2, min_split_tokens=1), story)


async def test_times_are_those_of_waiting_and_of_running() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        waiting = asyncio.create_task(batcher.submit([9]))
        await asyncio.sleep(0.05)
        run.gate.set()
        held_outcome, waited = await asyncio.gather(first, waiting)
        assert waited.queue_s >= 0.05
        assert held_outcome.run_s >= 0.05

    await with_batcher(batcher_of(run), story)


async def test_time_between_the_batches_of_a_request_is_time_in_the_queue() -> None:
    begun, between = threading.Event(), threading.Event()

    def run(items: Sequence[int]) -> list[int]:
        if 50 in items:
            begun.set()
            between.wait(10)
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        # In turns: 80, then 50, then 90.
        split = asyncio.create_task(batcher.submit([80, 90]))
        other = asyncio.create_task(batcher.submit([50]))
        await until(begun.is_set)
        await asyncio.sleep(0.05)
        between.set()
        outcome, held_up = await asyncio.gather(split, other)
        assert outcome.queue_s >= held_up.run_s >= 0.05

    await with_batcher(batcher_of(run), story)


def test_time_that_two_batches_run_at_once_counts_once() -> None:
    assert _union_s([(1.0, 3.0), (2.0, 4.0), (2.5, 2.6), (6.0, 7.0)]) == 4.0
    assert _union_s([]) == 0.0


async def test_the_age_of_the_queue_is_that_of_what_has_made_no_progress() -> None:
    gates = {1: threading.Event(), 80: threading.Event()}
    begun: list[int] = []

    def run(items: Sequence[int]) -> list[int]:
        begun.extend(items)
        for item in items:
            if item in gates:
                gates[item].wait(10)
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        assert batcher.oldest_s == 0
        first = asyncio.create_task(batcher.submit([1]))
        await until(lambda: begun == [1])
        submitted = time.perf_counter()
        split = asyncio.create_task(batcher.submit([80, 90]))
        await asyncio.sleep(0.05)
        assert batcher.oldest_s > 0
        progressed = time.perf_counter()
        gates[1].set()
        await until(lambda: begun == [1, 80])
        age = batcher.oldest_s  # of 90, since 80 began
        assert submitted + 0.05 <= progressed <= time.perf_counter() - age
        gates[80].set()
        await asyncio.gather(first, split)
        assert batcher.oldest_s == 0

    await with_batcher(batcher_of(run), story)


async def test_a_request_larger_than_a_batch_is_split_and_joined() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        items = [7, 80, 3, 99, 20, 150, 5] * 20
        assert (await batcher.submit(items)).results == [item * item for item in items]
        assert len(run.batches) > 20
        assert [150] in run.batches

    await with_batcher(batcher_of(run), story)


async def test_a_huge_request_holds_a_small_one_for_two_batches_at_most() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        huge = asyncio.create_task(batcher.submit([50] * 500))
        await settled()
        small = asyncio.create_task(batcher.submit([2]))
        await settled()
        run.gate.set()
        await small
        assert next(i for i, batch in enumerate(run.batches) if 2 in batch) <= 2
        await asyncio.gather(first, huge)

    await with_batcher(batcher_of(run), story)


async def test_nothing_to_run_is_an_error() -> None:
    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ValueError, match="there are no items"):
            await batcher.submit([])

    await with_batcher(batcher_of(Recorder()), story)


async def test_cancelled_callers_leave_the_queue() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        leaving = asyncio.create_task(batcher.submit([77, 78]))
        staying = asyncio.create_task(batcher.submit([50]))
        await settled()
        leaving.cancel()
        await settled()
        assert batcher.queued_tokens == 50
        run.gate.set()
        await asyncio.gather(first, staying)
        assert not any({77, 78} & set(batch) for batch in run.batches)

    await with_batcher(batcher_of(run), story)


async def test_a_caller_that_leaves_during_its_run_harms_nobody() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        for item in (1, POISON):
            run.gate.clear()
            seen = len(run.batches)
            leaving = asyncio.create_task(batcher.submit([item]))
            await until(lambda seen=seen: len(run.batches) > seen)  # type: ignore[misc]
            leaving.cancel()
            await settled()
            run.gate.set()
            assert (await batcher.submit([6])).results == [36]

    await with_batcher(batcher_of(run), story)


async def test_a_full_queue_refuses_and_takes_again_when_it_has_room() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        waiting = asyncio.create_task(batcher.submit([60]))
        await settled()
        with pytest.raises(QueueFull):
            await batcher.submit([41])
        fits = asyncio.create_task(batcher.submit([40]))
        await settled()
        run.gate.set()
        await asyncio.gather(first, waiting, fits)
        # An empty queue takes any request: a large one is split, not refused.
        assert len((await batcher.submit([60, 60])).results) == 2

    await with_batcher(batcher_of(run, max_queue_tokens=100), story)


async def test_closing_fails_whoever_waits() -> None:
    run = Recorder()
    batcher = batcher_of(run)
    batcher.start()
    running = await held(run, batcher)
    waiting = asyncio.create_task(batcher.submit([9]))
    await settled()
    await batcher.close()
    for task in (running, waiting):
        with pytest.raises(Stopped):
            await task
    run.gate.set()


async def test_closing_cancels_what_runs() -> None:
    run = Recorder()
    batcher = batcher_of(run, cancel=run.gate.set)
    batcher.start()
    running = await held(run, batcher)
    await batcher.close()
    assert run.gate.is_set()
    with pytest.raises(Stopped):
        await running


async def test_it_tells_how_long_what_waits_will_take() -> None:
    gate = threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        gate.wait(10)
        time.sleep(0.01 * sum(items))
        return list(items)

    batcher = batcher_of(slow, max_cost=1, max_queue_tokens=20)

    async def story(batcher: Batcher[int, int]) -> None:
        assert batcher.drain_s == 0
        gate.set()
        await batcher.submit([1, 2, 3])
        assert not batcher.is_full
        gate.clear()
        waiting = asyncio.create_task(batcher.submit([2] * 11))
        await until(lambda: batcher.queued_tokens == 20)
        assert batcher.is_full
        assert 0.2 <= batcher.drain_s < 1.0
        gate.set()
        await waiting
        assert batcher.drain_s == 0

    await with_batcher(batcher, story)


def at_a_second_per_token(batcher: Batcher[int, int]) -> Batcher[int, int]:
    """Let the batcher have measured that."""
    for stream in batcher._streams:
        stream.recent_s, stream.recent_tokens = 5.0, 5.0
    return batcher


async def test_items_that_would_be_late_are_refused_at_once() -> None:
    run = Recorder()
    batcher = batcher_of(run)

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        at_a_second_per_token(batcher)
        waiting = asyncio.create_task(batcher.submit([60]))
        await settled()
        with pytest.raises(TooLate) as raised:
            await batcher.submit([20], timeout_s=30)  # after 20 of the 60, in turns
        assert raised.value.late_s == 10
        in_time = asyncio.create_task(batcher.submit([20], timeout_s=41))
        endless = asyncio.create_task(batcher.submit([20]))
        await settled()
        assert batcher.queued_tokens == 60 + 20 + 20
        run.gate.set()
        await asyncio.gather(first, waiting, in_time, endless)

    await with_batcher(batcher, story)


async def test_an_empty_queue_takes_items_whatever_their_deadline() -> None:
    # Or one slow start would have everything refused, and nothing would ever show that it is over.
    async def story(batcher: Batcher[int, int]) -> None:
        at_a_second_per_token(batcher)
        assert (await batcher.submit([20], timeout_s=1)).results == [400]
        assert batcher.drain_s == 0

    await with_batcher(batcher_of(Recorder()), story)


async def test_two_streams_drain_the_queue_in_half_the_time() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        run.gate.clear()
        running = [asyncio.create_task(batcher.submit([90])) for _ in range(2)]
        await until(lambda: len(run.batches) == 2)
        at_a_second_per_token(batcher)
        waiting = asyncio.create_task(batcher.submit([60]))
        await settled()
        assert batcher.drain_s == 30
        run.gate.set()
        await asyncio.gather(*running, waiting)

    await with_batcher(batcher_of(run, streams=2), story)
