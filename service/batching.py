"""Lanes that run batches, and the requests whose items are in them.

There are as many lanes as batches can run at once. While all are taken, the next batch gathers:
there is no timer, and a request that finds a lane free leaves at once. A lane that has run a batch
takes the next one in its own thread, because the way through a busy event loop leaves a core idle.

While its thread runs, a lane is the thread's, and the event loop only reads of it. Of a request, a
thread sets when it was started; its results and its future are the event loop's.

- Faults: a batch that raises is run again in halves, until the one item that raises is alone; its
  request fails, and the others get their results. If what ran before raises as well then, it is not
  the item's fault: all callers fail, the batcher stops, and whoever started it is told.
- A run that takes too long is cancelled, which makes it raise. One that does not come back even so
  cannot be stopped in its thread, and stops the batcher too.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.batch_former import Batch, BatchFormer

Item = TypeVar("Item")
Result = TypeVar("Result")

# A run that is cancelled ends at its next operator.
_CANCEL_S = 1.0


class QueueFull(Exception):
    """The queue holds as many tokens as it may."""


class Stopped(Exception):
    """The batcher does not run: it was closed, the run is broken or hangs, or it has a defect."""


class RunBroken(Exception):
    """The run raises on what it has run before."""


class ItemFailed(Exception):
    """The run raises on this item alone.

    Attributes:
        index: Of the item in its request.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the run raises on item {index}")
        self.index = index


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The results of a request, in the order of its items.

    Attributes:
        results: One for each item.
        queue_s: Seconds until its first batch started.
        run_s: Seconds from then until its last result was there.
    """

    results: list[Result]
    queue_s: float
    run_s: float


@dataclass(eq=False)
class _Request(Generic[Result]):
    """One call of `submit`."""

    done: asyncio.Future[None]
    submitted: float
    missing: int
    results: dict[int, Result] = field(default_factory=dict)
    started: float | None = None
    finished: float = 0.0


@dataclass(eq=False, slots=True)
class Entry(Generic[Item, Result]):
    """One item of a request, and where its result goes."""

    item: Item
    index: int
    request: _Request[Result]


@dataclass(eq=False)
class _Lane(Generic[Item, Result]):
    """Runs one batch at a time.

    Attributes:
        batch: The one that runs; an empty one while nothing waits.
        began: When the latest run did, of a batch, of a part of one or of the probe.
        cancellations: How many there had been by then.
        recent_s: Seconds that the latest ten batches without a fault took, mostly.
        recent_tokens: Tokens of these.
    """

    batch: Batch[Entry[Item, Result]] = field(default_factory=Batch)
    began: float = 0.0
    cancellations: int = 0
    recent_s: float = 0.0
    recent_tokens: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """Why a run raised.

    Attributes:
        is_own: Not because it was cancelled when another lane's run took too long.
    """

    error: BaseException
    is_own: bool


class Batcher(Generic[Item, Result]):
    """Runs items in batches, each lane one batch at a time, in a thread of its own.

    Args:
        run: Takes a batch and returns one result per item, or raises. Called from all lanes.
        probe: Runs what has been run before, to tell a bad item from a run that is broken.
        cancel: Makes the runs that are under way raise.
        length: Tokens of an item.
        former: The queue, which knows how many lanes there are.
        max_queue: Tokens that may wait.
        timeout_s: A run that takes longer is cancelled.
        on_stop: Told why the batcher has stopped, after its callers have been; not told by `close`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        former: BatchFormer[Entry[Item, Result]],
        *,
        probe: Callable[[], object],
        cancel: Callable[[], None],
        max_queue: int,
        timeout_s: float,
        on_stop: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._length = length
        self._former = former
        self._probe = probe
        self._cancel = cancel
        self._cancellations = 0
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._on_stop = on_stop
        self._lanes: list[_Lane[Item, Result]] = [_Lane() for _ in range(former.lanes)]
        self._threads = ThreadPoolExecutor(former.lanes, "engine")
        self._open: set[_Request[Result]] = set()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_alive(self) -> bool:
        """Whether submitted items will be run."""
        return self._worker is not None and not self._worker.done()

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a batch."""
        return self._former.tokens

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest request has waited of which nothing has been run; or else 0."""
        waiting = [request.submitted for request in self._open if request.started is None]
        return time.perf_counter() - min(waiting) if waiting else 0.0

    @property
    def drain_s(self) -> float:
        """Seconds until what waits has been run, at the speed of late; 0 before the first batch."""
        tokens = sum(lane.recent_tokens for lane in self._lanes)
        if not tokens:
            return 0.0
        seconds = sum(lane.recent_s for lane in self._lanes)
        return self.queued_tokens * seconds / tokens / len(self._lanes)

    @property
    def is_full(self) -> bool:
        """Whether nothing more is taken, however small."""
        return self.queued_tokens >= self._max_queue

    def start(self) -> None:
        """Begin to run batches, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._worker = asyncio.create_task(self._work(), name="batcher")
        self._worker.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Fail whoever still waits, make what runs raise, and end."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        self._cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def submit(self, items: Sequence[Item]) -> Outcome[Result]:
        """Return the results of the items, when all have been run.

        A caller that is cancelled takes its waiting items out of the queue.

        Raises:
            ValueError: There is no item.
            QueueFull: They do not fit into the queue; none has been taken.
            ItemFailed: The run raises on one of them; the others are dropped.
            Stopped: The batcher does not run, or stopped before they had been.
        """
        if not items:
            raise ValueError("there is no item")
        if not self.is_alive:
            raise Stopped
        lengths = [self._length(item) for item in items]
        # A request that finds the queue empty is taken whatever its size: it will be split.
        if self.queued_tokens and self.queued_tokens + sum(lengths) > self._max_queue:
            raise QueueFull
        request: _Request[Result] = _Request(
            self._loop.create_future(), time.perf_counter(), missing=len(items)
        )
        self._open.add(request)
        entries = [Entry(item, index, request) for index, item in enumerate(items)]
        places = self._former.add(entries, lengths)
        self._wake.set()
        try:
            await request.done
        finally:
            self._open.discard(request)
            self._former.remove(places)
        started = request.started or request.submitted
        return Outcome(
            [request.results[index] for index in range(len(items))],
            queue_s=started - request.submitted,
            run_s=request.finished - started,
        )

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # where one fails, all end
            for lane in self._lanes:
                tasks.create_task(self._run_batches(lane))

    def _stopped(self, worker: asyncio.Task[None]) -> None:
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(Stopped())
        error = None if worker.cancelled() else worker.exception()
        if error is not None:
            self._on_stop(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)

    async def _run_batches(self, lane: _Lane[Item, Result]) -> None:
        while True:
            self._next_batch(lane)
            if lane.batch.items:
                failure = await self._in_thread(lane, self._run_while_any_wait, lane)
                if failure is not None:
                    await self._part(lane, lane.batch.items, failure)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _next_batch(self, lane: _Lane[Item, Result]) -> None:
        lane.batch = self._former.form(lane.batch)
        self._begin(lane)
        for entry in lane.batch.items:
            entry.request.started = entry.request.started or lane.began

    def _begin(self, lane: _Lane[Item, Result]) -> None:
        lane.began, lane.cancellations = time.perf_counter(), self._cancellations

    def _run_while_any_wait(self, lane: _Lane[Item, Result]) -> BaseException | None:
        """Run the lane's batch and then what waits; return what a run raises."""
        while lane.batch.items:
            error = _error_of(self._run_entries, lane.batch.items)
            if error is not None:
                return error
            lane.recent_s = 0.9 * lane.recent_s + time.perf_counter() - lane.began
            lane.recent_tokens = 0.9 * lane.recent_tokens + lane.batch.tokens
            self._next_batch(lane)
        return None

    def _run_entries(self, entries: Sequence[Entry[Item, Result]]) -> None:
        """Run those whose callers still wait, and have their results handed out."""
        wanted = [entry for entry in entries if not entry.request.done.done()]
        if not wanted:
            return
        results = self._run([entry.item for entry in wanted])
        if len(results) != len(wanted):
            raise ValueError(f"the run gave {len(results)} results for {len(wanted)} items")
        self._loop.call_soon_threadsafe(self._hand_out, wanted, results)

    def _hand_out(self, entries: Sequence[Entry[Item, Result]], results: Sequence[Result]) -> None:
        now = time.perf_counter()
        for entry, result in zip(entries, results, strict=True):
            request = entry.request
            request.results[entry.index] = result
            request.missing -= 1
            request.finished = now
            if not request.missing and not request.done.done():
                request.done.set_result(None)

    async def _part(
        self, lane: _Lane[Item, Result], entries: Sequence[Entry[Item, Result]], failure: _Failure
    ) -> None:
        """Fail the one that the run raises on, and run the others.

        Raises:
            TimeoutError: A run did not come back.
            RunBroken: It raises on anything.
        """
        if not failure.is_own:
            await self._run_again(lane, entries)
        elif len(entries) > 1:
            middle = len(entries) // 2
            await self._run_again(lane, entries[:middle])
            await self._run_again(lane, entries[middle:])
        else:
            await self._check_run(lane)
            (entry,) = entries
            error = ItemFailed(entry.index)
            error.__cause__ = failure.error
            if not entry.request.done.done():
                entry.request.done.set_exception(error)

    async def _run_again(
        self, lane: _Lane[Item, Result], entries: Sequence[Entry[Item, Result]]
    ) -> None:
        failure = await self._in_thread(lane, _error_of, self._run_entries, entries)
        if failure is not None:
            await self._part(lane, entries, failure)

    async def _check_run(self, lane: _Lane[Item, Result]) -> None:
        """Raise if it is not the item's fault that the run raises."""
        while (failure := await self._in_thread(lane, _error_of, self._probe)) is not None:
            if failure.is_own:
                raise RunBroken("it fails on its own check inputs") from failure.error

    async def _in_thread(
        self,
        lane: _Lane[Item, Result],
        work: Callable[..., BaseException | None],
        *arguments: object,
    ) -> _Failure | None:
        """Let a thread run one batch, or several one after the other; return how it fails.

        The work returns what a run raises; what it raises itself is a defect, and passed on.

        Raises:
            TimeoutError: A run did not come back.
        """
        self._begin(lane)
        runs = self._loop.run_in_executor(self._threads, work, *arguments)
        took_too_long = False
        while not runs.done():
            began = lane.began
            await asyncio.wait([runs], timeout=began + self._timeout_s - time.perf_counter())
            if runs.done() or lane.began > began:
                continue
            self._cancel()
            self._cancellations += 1  # after it: whatever it made raise has begun with fewer
            await asyncio.wait([runs], timeout=_CANCEL_S)
            took_too_long = lane.began == began
            if took_too_long and not runs.done():
                raise TimeoutError(f"a batch did not come back within {self._timeout_s:g} s")
        error = runs.result()
        if error is None:
            return None
        is_own = took_too_long or self._cancellations == lane.cancellations
        return _Failure(error, is_own)


def _error_of(work: Callable[..., object], *arguments: object) -> BaseException | None:
    """Return what it raises; a panic is no Exception."""
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - it is returned
        return error
    return None
