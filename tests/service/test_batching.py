import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batching import Batcher, ItemFailed, Outcome, QueueFull, RunBroken, Stopped

POISON = -1


class Recorder:
    """A run that squares its items, remembers its batches, and raises on a poisoned one."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.gate.wait(10)
        if POISON in items:
            raise ValueError("poison")
        return [item * item for item in items]


def batcher_of(
    run: Callable[[Sequence[int]], Sequence[int]],
    *,
    lanes: int = 1,
    max_cost: float = 100,
    min_share: int = 100,
    overhead: int = 10,
    pair_cost: float = 0.0,
    max_queue: int = 10**9,
    timeout_s: float = 10,
    on_stop: Callable[[BaseException], None] = lambda error: pytest.fail(f"stopped: {error}"),
    probe: Callable[[], object] = lambda: None,
    cancel: Callable[[], None] = lambda: None,
) -> Batcher[int, int]:
    return Batcher(
        run,
        abs,
        probe=probe,
        cancel=cancel,
        lanes=lanes,
        max_cost=max_cost,
        min_share=min_share,
        overhead=overhead,
        pair_cost=pair_cost,
        max_queue=max_queue,
        timeout_s=timeout_s,
        on_stop=on_stop,
    )


async def with_batcher(
    batcher: Batcher[int, int], story: Callable[[Batcher[int, int]], Awaitable[None]]
) -> None:
    batcher.start()
    try:
        await asyncio.wait_for(story(batcher), 20)
    finally:
        await batcher.close()


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 60) | st.just(POISON), min_size=1, max_size=12),
        st.sampled_from(["wait", "wait", "wait", "cancel", "late"]),
    ),
    max_size=12,
)


@given(REQUESTS, st.integers(1, 3))
def test_every_item_comes_back_once_and_in_order_whatever_arrives_fails_or_leaves(
    requests: list[tuple[list[int], str]], lanes: int
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

    asyncio.run(with_batcher(batcher_of(run, lanes=lanes, min_share=1), story))
    for batch in run.batches:
        assert len(batch) == 1 or sum(map(abs, batch)) <= 100


async def held(run: Recorder, batcher: Batcher[int, int]) -> "asyncio.Task[Outcome[int]]":
    """Occupy the engine with a first item, so that what follows has to queue."""
    run.gate.clear()
    task = asyncio.create_task(batcher.submit([1]))
    await until(lambda: bool(run.batches))
    return task


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def settled() -> None:
    """Let every task run until it waits for something other than the loop."""
    for _ in range(5):
        await asyncio.sleep(0)


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


async def test_as_many_batches_run_at_once_as_there_are_lanes() -> None:
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

    await with_batcher(batcher_of(run, lanes=3), story)


async def test_a_batch_leaves_the_other_lanes_their_share_of_what_waits_and_runs() -> None:
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

    await with_batcher(batcher_of(run, lanes=2, min_share=1), story)


async def test_what_would_make_too_small_shares_goes_in_one_batch() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        await asyncio.gather(*(batcher.submit([6]) for _ in range(8)))
        assert [len(batch) for batch in run.batches] == [6, 2]

    await with_batcher(batcher_of(run, lanes=2, min_share=33), story)


async def test_similar_lengths_go_together_from_the_oldest_on() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        lengths = (40, 5, 41, 6, 42, 7)
        others = [asyncio.create_task(batcher.submit([n])) for n in lengths]
        await settled()
        run.gate.set()
        await asyncio.gather(first, *others)
        assert [sorted(batch) for batch in run.batches[1:]] == [[40, 41], [5, 6, 7, 42]]

    await with_batcher(batcher_of(run), story)


async def test_the_nearer_length_is_taken_first_be_it_shorter_or_longer() -> None:
    async def batches_of(*lengths: int) -> list[list[int]]:
        run = Recorder()

        async def story(batcher: Batcher[int, int]) -> None:
            first = await held(run, batcher)
            others = [asyncio.create_task(batcher.submit([n])) for n in lengths]
            await settled()
            run.gate.set()
            await asyncio.gather(first, *others)

        await with_batcher(batcher_of(run), story)
        return [sorted(batch) for batch in run.batches[1:]]

    assert await batches_of(30, 29, 60) == [[29, 30], [60]]
    assert await batches_of(40, 10, 55) == [[40, 55], [10]]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.001, 0.02]),
)
def test_no_batch_costs_more_than_its_budget(lengths: list[int], pair_cost: float) -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        other = asyncio.create_task(batcher.submit(lengths))
        await settled()
        run.gate.set()
        await asyncio.gather(first, other)

    asyncio.run(with_batcher(batcher_of(run, pair_cost=pair_cost), story))
    for batch in run.batches:
        cost = sum(batch) + pair_cost * len(batch) * max(batch) ** 2
        assert len(batch) == 1 or cost <= 100


async def test_items_of_a_length_run_in_the_order_in_which_they_came() -> None:
    class Tagged(int):
        """An item of a length, with a name."""

        name: str

        @classmethod
        def of(cls, length: int, name: str) -> "Tagged":
            item = cls(length)
            item.name = name
            return item

    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        items = {who: [Tagged.of(30, f"{who}{i}") for i in range(4)] for who in "ab"}
        others = [asyncio.create_task(batcher.submit(items[who])) for who in "ab"]
        await settled()
        run.gate.set()
        await asyncio.gather(first, *others)
        # Three fit. The second batch is b's turn: its oldest, then whatever has waited longest.
        names = [[item.name for item in batch] for batch in run.batches[1:]]  # type: ignore[attr-defined]
        assert names == [["a0", "a1", "a2"], ["b0", "a3", "b1"], ["b2", "b3"]]

    await with_batcher(batcher_of(run), story)


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


async def test_padded_attention_counts_towards_the_cost() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        other = asyncio.create_task(batcher.submit([10] * 8))
        await settled()
        run.gate.set()
        await asyncio.gather(first, other)
        # 2 rows cost 20 + 2 * 100 * 0.2 = 60; a third would make it 90, a fourth 120.
        assert [len(batch) for batch in run.batches[1:]] == [3, 3, 2]

    await with_batcher(batcher_of(run, pair_cost=0.2), story)


@pytest.mark.parametrize(
    ("overhead", "batches"), [(1, [[30], [4], [29]]), (8, [[29, 30], [4]]), (18, [[4, 29, 30]])]
)
async def test_no_item_joins_a_batch_that_costs_it_more_than_one_of_its_own(
    overhead: int, batches: list[list[int]]
) -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        others = [asyncio.create_task(batcher.submit([n])) for n in (30, 4, 29)]
        await settled()
        run.gate.set()
        await asyncio.gather(first, *others)
        # Beside 30, attention makes 29 cost 18.0 instead of 16.8, and 4 instead of 0.3.
        assert [sorted(batch) for batch in run.batches[1:]] == batches

    batcher = batcher_of(run, max_cost=1000, overhead=overhead, pair_cost=0.02)
    await with_batcher(batcher, story)


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
        assert not huge.done()
        await asyncio.gather(first, huge)

    await with_batcher(batcher_of(run), story)


async def test_an_unusual_length_does_not_starve_under_a_stream_of_others() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        odd = asyncio.create_task(batcher.submit([95]))
        stream: set[asyncio.Task[Outcome[int]]] = set()
        for _ in range(200):
            stream.add(asyncio.create_task(batcher.submit([5])))
            if odd.done():
                break
            await asyncio.sleep(0)
        await odd
        await asyncio.gather(*stream)
        assert next(i for i, batch in enumerate(run.batches) if 95 in batch) <= 1

    await with_batcher(batcher_of(run), story)


async def test_only_the_request_with_the_guilty_item_fails() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        good = [asyncio.create_task(batcher.submit([n, n + 1])) for n in (2, 4, 6, 8)]
        bad = asyncio.create_task(batcher.submit([3, 5, POISON, 9]))
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

    await with_batcher(batcher_of(run), story)


async def test_a_guilty_item_far_into_a_request_is_named() -> None:
    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ItemFailed) as failure:
            await batcher.submit([5] * 170 + [POISON] + [5] * 40)
        assert failure.value.index == 170

    await with_batcher(batcher_of(Recorder()), story)


async def test_what_has_failed_is_not_run_any_further() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
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

    await with_batcher(batcher_of(run), story)


async def test_nothing_to_run_is_an_error() -> None:
    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ValueError, match="there is no item"):
            await batcher.submit([])

    await with_batcher(batcher_of(Recorder()), story)


async def test_a_large_queue_is_left_and_filled_in_time_linear_in_ones_own_items() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        first = await held(run, batcher)
        crowd = [asyncio.create_task(batcher.submit([1] * 2000)) for _ in range(100)]
        await settled()
        for task in crowd:  # minutes, were each removal a search through the queue
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert batcher.queued_tokens == 0
        run.gate.set()
        await first

    await with_batcher(batcher_of(run), story)


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

    await with_batcher(batcher_of(run, max_queue=100), story)


async def test_a_run_that_does_not_come_back_fails_all_callers_and_then_says_so() -> None:
    run = Recorder()
    told: list[BaseException] = []
    batcher = batcher_of(run, lanes=2, timeout_s=0.1, on_stop=told.append)
    batcher.start()
    assert batcher.is_alive
    running = await held(run, batcher)
    beside = asyncio.create_task(batcher.submit([99]))
    await until(lambda: len(run.batches) == 2)
    waiting = asyncio.create_task(batcher.submit([9]))
    for task in (running, beside, waiting):
        with pytest.raises(Stopped):
            await task
    assert [str(error) for error in told] == ["a batch did not come back within 0.1 s"]
    assert not batcher.is_alive
    with pytest.raises(Stopped):
        await batcher.submit([1])
    run.gate.set()
    await batcher.close()
    assert len(told) == 1


async def test_a_defect_of_the_batcher_fails_all_callers_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[BaseException] = []
    batcher = batcher_of(Recorder(), on_stop=told.append)

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(batcher, "_form", broken)
    batcher.start()
    with pytest.raises(Stopped):
        await batcher.submit([1])
    assert [type(error) for error in told] == [ZeroDivisionError]
    await batcher.close()


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


@pytest.mark.parametrize("results", [[], [1, 2, 3]])
async def test_a_run_with_the_wrong_number_of_results_is_a_failure(results: list[int]) -> None:
    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ItemFailed):
            await batcher.submit([4, 5])

    await with_batcher(batcher_of(lambda _: results), story)


async def test_even_a_panic_in_the_run_fails_that_item_alone() -> None:
    class Panic(BaseException):
        """What a Rust extension raises when it panics is no Exception."""

    def run(items: Sequence[int]) -> list[int]:
        if POISON in items:
            raise Panic
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ItemFailed):
            await batcher.submit([POISON])
        assert (await batcher.submit([3])).results == [3]

    await with_batcher(batcher_of(run), story)


async def test_it_tells_how_long_what_waits_will_take() -> None:
    def slow(items: Sequence[int]) -> list[int]:
        time.sleep(0.01 * sum(items))
        return list(items)

    batcher = batcher_of(slow, max_cost=1, max_queue=20)

    async def story(batcher: Batcher[int, int]) -> None:
        assert batcher.drain_s == 0
        await batcher.submit([1, 2, 3])
        assert not batcher.is_full
        waiting = asyncio.create_task(batcher.submit([2] * 11))
        while batcher.queued_tokens != 20:
            await asyncio.sleep(0)
        assert batcher.is_full
        assert 0.2 <= batcher.drain_s < 1.0
        await waiting
        assert batcher.drain_s == 0

    await with_batcher(batcher, story)


async def test_a_run_that_raises_on_anything_stops_the_batcher_and_says_so() -> None:
    told: list[BaseException] = []

    def broken(*_: object) -> list[int]:
        raise ValueError("gone")

    async def story(batcher: Batcher[int, int]) -> None:
        asked = [asyncio.create_task(batcher.submit([i, i + 1])) for i in range(1, 9)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in done} == {Stopped}
        assert not batcher.is_alive
        with pytest.raises(Stopped):
            await batcher.submit([1])

    await with_batcher(batcher_of(broken, lanes=2, probe=broken, on_stop=told.append), story)
    assert [type(error) for error in told] == [RunBroken]
    assert isinstance(told[0].__cause__, ValueError)


async def test_a_run_that_takes_too_long_is_cancelled_and_only_its_request_fails() -> None:
    cancelled = threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        if POISON in items:
            assert cancelled.wait(10)
            cancelled.clear()
            raise ValueError("cancelled")
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        asked = [asyncio.create_task(batcher.submit([i])) for i in (1, 2, POISON, 3)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(outcome) for outcome in done] == [Outcome, Outcome, ItemFailed, Outcome]
        assert batcher.is_alive

    await with_batcher(batcher_of(slow, timeout_s=0.05, cancel=cancelled.set), story)


async def test_what_is_cancelled_for_the_sake_of_another_lane_is_run_again() -> None:
    cancelled, runs = threading.Event(), []

    def slow(items: Sequence[int]) -> list[int]:
        runs.append(list(items))
        if items == [POISON]:
            assert cancelled.wait(10)
            raise ValueError("cancelled")
        if runs.count([7]) == 1:
            assert cancelled.wait(10)
            raise ValueError("cancelled")
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        poisoned = asyncio.create_task(batcher.submit([POISON]))
        await until(lambda: runs == [[POISON]])
        await asyncio.sleep(1.0)
        assert (await batcher.submit([7])).results == [7]
        with pytest.raises(ItemFailed):
            await poisoned

    batcher = batcher_of(slow, lanes=2, max_cost=1, timeout_s=2.0, cancel=cancelled.set)
    await with_batcher(batcher, story)
    assert runs.count([7]) == 2
