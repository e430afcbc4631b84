"""Batchers of numbers, whose length is their size, for tests of `service.inference.batching`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from service.inference.batching.batch_former import BatchFormer
from service.inference.batching.batcher import Batcher, Outcome
from service.inference.batching.streams import Clock, StreamPool
from service.inference.call_options import Priority
from tests.eventually import HANG_S, eventually_async

POISON = -1


class ManualClock(Clock):
    """A clock that stands still until a test advances it.

    Attributes:
        waits: Number of calls of `wait` so far.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: dict[asyncio.Future[None], float] = {}
        self._loop = asyncio.get_running_loop()
        self.waits = 0

    def now(self) -> float:
        return self._now

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        expired: asyncio.Future[None] = self._loop.create_future()
        self._timers[expired] = self._now + timeout_s
        self.waits += 1
        self._expire()
        await asyncio.wait([future, expired], return_when=asyncio.FIRST_COMPLETED)
        del self._timers[expired]

    async def advance(self, seconds: float) -> None:
        """Let every task reach its next wait, advance the clock, and do the former again."""
        await settled()
        self._now += seconds
        self._expire()
        await settled()

    def advance_in_thread(self, seconds: float) -> None:
        """Advance the clock from a thread."""
        self._now += seconds
        self._loop.call_soon_threadsafe(self._expire)

    def _expire(self) -> None:
        for expired, due in self._timers.items():
            if due <= self._now and not expired.done():
                expired.set_result(None)


class Recorder:
    """A run that squares its items, remembers its batches, and raises on a poisoned one."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        assert self.gate.wait(HANG_S)
        if POISON in items:
            raise ValueError("poison")
        return [item * item for item in items]


class Gates:
    """Runs that wait, each until a test opens the gate of its item.

    Attributes:
        begun: Items of the runs that have begun, in their order.
    """

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._gates: dict[int, threading.Event] = {}

    def __call__(self, items: Sequence[int]) -> Sequence[int]:
        (item,) = items
        gate = self._gates.setdefault(item, threading.Event())
        self.begun.append(item)
        assert gate.wait(HANG_S)
        return items

    def open(self, *items: int) -> None:
        for item in items:
            self._gates.setdefault(item, threading.Event()).set()


def batcher_of(
    run: Callable[[Sequence[int]], Sequence[int]],
    *,
    streams: int = 1,
    max_cost: float = 100,
    min_split_tokens: int = 100,
    max_queue_tokens: int = 10**9,
    timeout_s: float = 10,
    cost_s: float = 0.0,
    pair_cost: float = 0.0,
    on_stop: Callable[[BaseException], None] = lambda _: None,
    probe: Callable[[], object] = lambda: None,
    cancel: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
    pool: StreamPool | None = None,
    share: float = 1.0,
) -> Batcher[int, int]:
    return Batcher(
        run,
        abs,
        BatchFormer(
            streams=streams,
            max_cost=max_cost,
            min_split_tokens=min_split_tokens,
            fixed_cost=10,
            long_row=400,
            attention_cost=lambda length: pair_cost * length**2,
        ),
        pool or StreamPool(streams, clock),
        share=share,
        probe=probe,
        cancel=cancel,
        max_queue_tokens=max_queue_tokens,
        timeout_s=timeout_s,
        cost_s=cost_s,
        on_stop=on_stop,
    )


@asynccontextmanager
async def started(*batchers: Batcher[int, int], stops: int = 0) -> AsyncIterator[None]:
    """Run the batchers within the block; at its end all but `stops` of them are alive."""
    for batcher in batchers:
        batcher.start()
    try:
        yield
        assert sum(not batcher.is_alive for batcher in batchers) == stops
    finally:
        for batcher in batchers:
            await batcher.close()


def submit(
    batcher: Batcher[int, int], *items: int, priority: Priority = "interactive"
) -> "asyncio.Task[Outcome[int]]":
    return asyncio.create_task(batcher.submit(items, priority=priority))


async def held(run: Recorder, batcher: Batcher[int, int]) -> "asyncio.Task[Outcome[int]]":
    """Occupy the engine with a first item, so that what follows has to queue."""
    run.gate.clear()
    task = submit(batcher, 1)
    await eventually_async(lambda: run.batches)
    return task


async def settled() -> None:
    """Let every task run until it waits for something other than the loop."""
    for _ in range(10):
        await asyncio.sleep(0)
