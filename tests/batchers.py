"""Batchers of numbers, whose length is their size, for tests of `service.inference.batcher`."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from service.inference.batch_former import BatchFormer
from service.inference.batcher import Batcher, Outcome

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
    streams: int = 1,
    max_cost: float = 100,
    min_split_tokens: int = 100,
    max_queue_tokens: int = 10**9,
    timeout_s: float = 10,
    on_stop: Callable[[BaseException], None] = lambda _: None,
    probe: Callable[[], object] = lambda: None,
    cancel: Callable[[], None] = lambda: None,
) -> Batcher[int, int]:
    return Batcher(
        run,
        abs,
        BatchFormer(
            streams=streams,
            max_cost=max_cost,
            min_split_tokens=min_split_tokens,
            fixed_cost=10,
            pair_cost=0.0,
        ),
        probe=probe,
        cancel=cancel,
        max_queue_tokens=max_queue_tokens,
        timeout_s=timeout_s,
        on_stop=on_stop,
    )


async def with_batcher(
    batcher: Batcher[int, int],
    story: Callable[[Batcher[int, int]], Awaitable[None]],
    *,
    stops: bool = False,
) -> None:
    batcher.start()
    try:
        await asyncio.wait_for(story(batcher), 20)
        assert batcher.is_alive != stops
    finally:
        await batcher.close()


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
