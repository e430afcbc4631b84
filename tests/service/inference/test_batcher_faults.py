import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from service.inference.batch_former import Batch, BatchFormer
from service.inference.batcher import Batcher, ItemFailed, Outcome, RunBroken, Stopped
from tests.batchers import POISON, Recorder, batcher_of, held, settled, until, with_batcher


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


async def test_what_still_waits_of_a_request_that_has_failed_is_not_run() -> None:
    run = Recorder()

    async def story(batcher: Batcher[int, int]) -> None:
        with pytest.raises(ItemFailed):
            await batcher.submit([POISON, *[50] * 20])
        assert (await batcher.submit([3])).results == [9]
        assert run.batches == [[POISON, 50], [POISON], [3]]

    await with_batcher(batcher_of(run), story)


async def test_a_run_that_does_not_come_back_fails_all_callers_and_then_says_so() -> None:
    run = Recorder()
    told: list[BaseException] = []
    batcher = batcher_of(run, streams=2, timeout_s=0.1, on_stop=told.append)
    batcher.start()
    assert batcher.is_alive
    running = await held(run, batcher)
    beside = asyncio.create_task(batcher.submit([99]))
    await until(lambda: len(run.batches) == 2)
    waiting = asyncio.create_task(batcher.submit([9]))
    for task in (running, beside, waiting):
        with pytest.raises(Stopped):
            await task
    assert [str(error) for error in told] == ["a batch did not return within 0.1 s"]
    assert not batcher.is_alive
    with pytest.raises(Stopped):
        await batcher.submit([1])
    run.gate.set()
    await batcher.close()
    assert len(told) == 1


@pytest.mark.parametrize("good_batches", [0, 1], ids=["in the event loop", "in a stream"])
async def test_a_defect_of_the_batcher_fails_all_callers_and_is_told(
    monkeypatch: pytest.MonkeyPatch, good_batches: int
) -> None:
    told: list[BaseException] = []
    batcher = batcher_of(Recorder(), on_stop=told.append)
    form = BatchFormer.form
    formed: list[object] = []

    def break_down(former: BatchFormer[object], ended: Batch[object]) -> Batch[object]:
        if len(formed) == good_batches:
            raise ZeroDivisionError
        formed.append(batch := form(former, ended))
        return batch

    monkeypatch.setattr(BatchFormer, "form", break_down)
    batcher.start()
    with pytest.raises(Stopped):
        await batcher.submit([60, 60])
    assert [type(error) for error in told] == [ZeroDivisionError]
    await batcher.close()


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


async def test_a_run_that_raises_on_anything_stops_the_batcher_and_says_so() -> None:
    told: list[BaseException] = []

    def broken(*_: object) -> list[int]:
        raise ValueError("gone")

    async def story(batcher: Batcher[int, int]) -> None:
        asked = [asyncio.create_task(batcher.submit([i, i + 1])) for i in range(1, 9)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in done} == {Stopped}
        with pytest.raises(Stopped):
            await batcher.submit([1])

    batcher = batcher_of(broken, streams=2, probe=broken, on_stop=told.append)
    await with_batcher(batcher, story, stops=True)
    assert [type(error) for error in told] == [RunBroken]
    assert isinstance(told[0].__cause__, ValueError)


@pytest.mark.parametrize("max_cost", [100, 1], ids=["in one batch", "one batch after the other"])
async def test_a_run_that_takes_too_long_is_cancelled_and_only_its_request_fails(
    max_cost: int,
) -> None:
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

    await with_batcher(
        batcher_of(slow, max_cost=max_cost, timeout_s=0.05, cancel=cancelled.set), story
    )


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

    batcher = batcher_of(slow, streams=2, max_cost=1, timeout_s=2.0, cancel=cancelled.set)
    await with_batcher(batcher, story)
    assert runs.count([7]) == 2


async def test_a_probe_that_is_cancelled_for_the_sake_of_another_lane_is_run_again() -> None:
    cancelled, begun, probes = threading.Event(), threading.Event(), 0

    def run(items: Sequence[int]) -> list[int]:
        if items == [5]:
            begun.set()
            assert cancelled.wait(10)
        raise ValueError("poison, or cancelled")

    def probe() -> None:
        nonlocal probes
        probes += 1
        if probes == 1:
            assert cancelled.wait(10)
            raise ValueError("cancelled")

    async def story(batcher: Batcher[int, int]) -> None:
        hanging = asyncio.create_task(batcher.submit([5]))
        await until(begun.is_set)
        await asyncio.sleep(1.0)
        with pytest.raises(ItemFailed):
            await batcher.submit([POISON])
        with pytest.raises(ItemFailed):
            await hanging
        assert probes == 3

    batcher = batcher_of(
        run, streams=2, min_split_tokens=1, probe=probe, timeout_s=2.0, cancel=cancelled.set
    )
    await with_batcher(batcher, story)


async def test_each_of_many_batches_has_the_whole_time_for_itself() -> None:
    cancelled = threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        time.sleep(0.1)
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        assert len((await batcher.submit([1] * 10)).results) == 10
        assert not cancelled.is_set()

    await with_batcher(batcher_of(slow, max_cost=1, timeout_s=0.5, cancel=cancelled.set), story)


async def test_a_run_that_comes_back_late_and_unharmed_is_not_taken_for_one_that_does_not() -> None:
    def slow(items: Sequence[int]) -> list[int]:
        time.sleep(0.4 if items == [7] else 0.05)
        return list(items)

    async def story(batcher: Batcher[int, int]) -> None:
        # What follows it in its stream takes longer than a cancelled run may.
        assert len((await batcher.submit([7] + [1] * 30)).results) == 31

    await with_batcher(batcher_of(slow, max_cost=1, timeout_s=0.2), story)


async def test_what_a_late_cancellation_hits_is_run_again() -> None:
    released, begun, hit = threading.Event(), threading.Event(), threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        if items == [7]:
            assert released.wait(10)
        elif not begun.is_set():
            begun.set()
            assert hit.wait(10)
            raise ValueError("cancelled")
        return list(items)

    def cancel() -> None:  # 7 has come back just before, and 8 begins
        released.set()
        assert begun.wait(10)
        hit.set()

    async def story(batcher: Batcher[int, int]) -> None:
        assert (await batcher.submit([7, 8])).results == [7, 8]

    await with_batcher(batcher_of(slow, max_cost=1, timeout_s=0.1, cancel=cancel), story)


async def test_what_begins_during_a_cancellation_is_run_again() -> None:
    released, begun, hit = threading.Event(), threading.Event(), threading.Event()

    def slow(items: Sequence[int]) -> list[int]:
        if items == [5]:
            assert released.wait(10)
        elif items == [POISON]:
            assert hit.wait(10)
            raise ValueError("cancelled")
        elif not begun.is_set():
            begun.set()
            assert hit.wait(10)
            raise ValueError("cancelled")
        return list(items)

    def cancel() -> None:
        released.set()
        assert begun.wait(10)
        hit.set()

    async def story(batcher: Batcher[int, int]) -> None:
        poisoned = asyncio.create_task(batcher.submit([POISON]))
        await asyncio.sleep(0.3)
        assert (await batcher.submit([5, 8])).results == [5, 8]
        with pytest.raises(ItemFailed):
            await poisoned

    batcher = batcher_of(
        slow, streams=2, max_cost=1, min_split_tokens=1, timeout_s=2.0, cancel=cancel
    )
    await with_batcher(batcher, story)
