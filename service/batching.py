"""The queue and the batch former. It knows neither text nor numpy nor HTTP.

There are as many lanes as batches can run at once. While all are taken, the next batch gathers:
there is no timer, and a request that finds a lane free leaves at once.

- Turns: the requests that wait form a ring, and each batch starts from the oldest item of the next
  one. So a request of thousands of items holds nobody for longer than a batch, and every item is
  reached, whatever else arrives.
- Filling: the batch takes the items nearest in length to that one, whosever they are and the oldest
  first, while the cost (tokens, plus attention over padded rows) stays within the budget, and none
  costs more there than it would in a batch of its own.
- Sharing: a batch is full once it has a lane's share of all that waits and runs. Otherwise the lane
  that comes first would take everything, and the others would be left with what trickles in.
- Faults: a batch that raises is run again in halves, until the one item that raises is alone; its
  request fails, and the others get their results. If what ran before raises as well then, it is not
  the item's fault: all callers fail, the batcher stops, and whoever started it is told.
- A run that takes too long is cancelled, which makes it raise. One that does not come back even so
  cannot be stopped in its thread, and stops the batcher too.
"""

import asyncio
import bisect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Done = TypeVar("Done")

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
class _Request(Generic[Item, Result]):
    """One call of `submit`."""

    done: asyncio.Future[None]
    submitted: float
    missing: int
    waiting: deque["_Entry[Item, Result]"] = field(default_factory=deque)
    results: dict[int, Result] = field(default_factory=dict)
    started: float | None = None
    finished: float = 0.0


@dataclass(eq=False, slots=True)
class _Entry(Generic[Item, Result]):
    """One item; it leaves the queue by being marked, and is skipped where it still stands."""

    item: Item
    length: int
    index: int
    request: _Request[Item, Result]
    queued: bool = True


class Batcher(Generic[Item, Result]):
    """Runs items in batches, each lane one batch at a time, in a thread of its own.

    Args:
        run: Takes a batch and returns one result per item, or raises. Called from all lanes.
        probe: Runs what has been run before, to tell a bad item from a run that is broken.
        cancel: Makes the runs that are under way raise.
        length: Tokens of an item.
        lanes: Batches that run at once.
        max_cost: Budget of a batch; a single item may exceed it.
        min_share: Tokens below which what waits is not divided among the lanes.
        overhead: Cost of a batch before that of its items, in tokens.
        pair_cost: Cost of one pair in the padded attention product, in tokens.
        max_queue: Tokens that may wait.
        timeout_s: A run that takes longer is cancelled.
        on_stop: Told why the batcher has stopped, after its callers have been; not told by `close`.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        *,
        probe: Callable[[], object],
        cancel: Callable[[], None],
        lanes: int,
        max_cost: float,
        min_share: int,
        overhead: int,
        pair_cost: float,
        max_queue: int,
        timeout_s: float,
        on_stop: Callable[[BaseException], None],
    ) -> None:
        self._run = run
        self._length = length
        self._probe = probe
        self._cancel = cancel
        self._cancellations = 0
        self._max_cost = max_cost
        self._min_share = min_share
        self._overhead = overhead
        self._pair_cost = pair_cost
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._on_stop = on_stop
        self._ring: deque[_Request[Item, Result]] = deque()
        self._by_length: dict[int, deque[_Entry[Item, Result]]] = {}
        self._open: set[_Request[Item, Result]] = set()
        self._queued_tokens = 0
        self._running_tokens = 0
        self._recent_s = self._recent_tokens = 0.0
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(lanes, "engine")
        self._lanes = lanes
        self._worker: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether submitted items will be run."""
        return self._worker is not None and not self._worker.done()

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a batch."""
        return self._queued_tokens

    @property
    def oldest_s(self) -> float:
        """Seconds that the oldest request has waited of which nothing has been run; or else 0."""
        waiting = [request.submitted for request in self._open if request.started is None]
        return time.perf_counter() - min(waiting) if waiting else 0.0

    @property
    def drain_s(self) -> float:
        """Seconds until what waits has been run, at the speed of late; 0 before the first batch."""
        if not self._recent_tokens:
            return 0.0
        return self._queued_tokens * self._recent_s / self._recent_tokens / self._lanes

    @property
    def is_full(self) -> bool:
        """Whether nothing more is taken, however small."""
        return self._queued_tokens >= self._max_queue

    def start(self) -> None:
        """Begin to run batches, in the running event loop."""
        self._worker = asyncio.create_task(self._work(), name="batcher")
        self._worker.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Fail whoever still waits, and end."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
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
        if self._queued_tokens and self._queued_tokens + sum(lengths) > self._max_queue:
            raise QueueFull
        request: _Request[Item, Result] = _Request(
            asyncio.get_running_loop().create_future(), time.perf_counter(), missing=len(items)
        )
        for index, (item, length) in enumerate(zip(items, lengths, strict=True)):
            entry = _Entry(item, length, index, request)
            request.waiting.append(entry)
            self._by_length.setdefault(length, deque()).append(entry)
        self._queued_tokens += sum(lengths)
        self._ring.append(request)
        self._open.add(request)
        self._wake.set()
        try:
            await request.done
        finally:
            self._open.discard(request)
            self._take(request.waiting)
        started = request.started or request.submitted
        return Outcome(
            [request.results[index] for index in range(len(items))],
            queue_s=started - request.submitted,
            run_s=request.finished - started,
        )

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as lanes:  # where one fails, all end
            for _ in range(self._lanes):
                lanes.create_task(self._run_batches())

    async def _run_batches(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._form()
            if not batch:
                self._wake.clear()
                continue
            now = time.perf_counter()
            for entry in batch:
                entry.request.started = entry.request.started or now
            tokens = sum(entry.length for entry in batch)
            self._running_tokens += tokens
            await self._run_halving(batch)
            self._running_tokens -= tokens
            # Of the latest ten batches, mostly.
            self._recent_s = 0.9 * self._recent_s + time.perf_counter() - now
            self._recent_tokens = 0.9 * self._recent_tokens + tokens

    def _stopped(self, worker: asyncio.Task[None]) -> None:
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(Stopped())
        error = None if worker.cancelled() else worker.exception()
        if error is not None:
            self._on_stop(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)

    def _form(self) -> list[_Entry[Item, Result]]:
        """Take the next batch out of the queue."""
        first = self._next_turn()
        if first is None:
            self._by_length.clear()  # what still stands there has been taken
            return []
        share = max(self._min_share, (self._queued_tokens + self._running_tokens) / self._lanes)
        batch = [first]
        tokens = longest = first.length
        cost = self._cost(tokens, 1, longest)
        for entry in self._nearest(first):
            if tokens >= share:
                break
            tokens, longest = tokens + entry.length, max(longest, entry.length)
            before, cost = cost, self._cost(tokens, len(batch) + 1, longest)
            alone = self._overhead + self._cost(entry.length, 1, entry.length)
            if cost > self._max_cost or cost - before > alone:
                break
            batch.append(entry)
        self._take(batch)
        return batch

    def _cost(self, tokens: int, rows: int, longest: int) -> float:
        return tokens + self._pair_cost * rows * longest**2

    def _next_turn(self) -> _Entry[Item, Result] | None:
        """Return the oldest item of the request whose turn it is."""
        while self._ring:
            request = self._ring.popleft()
            while request.waiting and not request.waiting[0].queued:
                request.waiting.popleft()
            if request.waiting:
                self._ring.append(request)
                return request.waiting[0]
        return None

    def _nearest(self, first: _Entry[Item, Result]) -> Iterator[_Entry[Item, Result]]:
        """Give the other items that wait, the nearest in length first."""
        lengths = sorted(self._by_length)
        high = bisect.bisect_left(lengths, first.length)
        low = high - 1
        while low >= 0 or high < len(lengths):
            take_longer = low < 0 or (
                high < len(lengths) and lengths[high] - first.length <= first.length - lengths[low]
            )
            length = lengths[high] if take_longer else lengths[low]
            low, high = (low, high + 1) if take_longer else (low - 1, high)
            entries = self._by_length[length]
            while entries and not entries[0].queued:
                entries.popleft()
            if not entries:
                del self._by_length[length]
            yield from (entry for entry in entries if entry.queued and entry is not first)

    def _take(self, entries: Sequence[_Entry[Item, Result]]) -> None:
        """Mark entries as no longer queued."""
        for entry in entries:
            if entry.queued:
                entry.queued = False
                self._queued_tokens -= entry.length

    async def _run_halving(self, batch: Sequence[_Entry[Item, Result]]) -> None:
        """Run the batch and hand out its results.

        Raises:
            TimeoutError: The run did not come back.
            RunBroken: It raises on anything.
        """
        batch = [entry for entry in batch if not entry.request.done.done()]
        if not batch:
            return
        cancellations = self._cancellations
        run, took_too_long = await self._in_thread(
            partial(self._run_all, [entry.item for entry in batch])
        )
        error = run.exception()
        if error is None:
            self._hand_out(batch, run.result())
        elif len(batch) > 1:
            middle = len(batch) // 2
            await self._run_halving(batch[:middle])
            await self._run_halving(batch[middle:])
        elif self._cancellations > cancellations and not took_too_long:
            await self._run_halving(batch)  # another lane's batch took too long
        else:
            await self._check_run()
            failure = ItemFailed(batch[0].index)
            failure.__cause__ = error
            if not batch[0].request.done.done():
                batch[0].request.done.set_exception(failure)

    async def _check_run(self) -> None:
        """Raise if it is not the item's fault that the run raises."""
        for _ in range(2):  # another lane may cancel it once
            probe, _ = await self._in_thread(self._probe)
            error = probe.exception()
            if error is None:
                return
        raise RunBroken("it fails on its own check inputs") from error

    async def _in_thread(self, work: Callable[[], Done]) -> tuple[asyncio.Future[Done], bool]:
        """Return a finished run, and whether it was cancelled for the time that it took.

        Raises:
            TimeoutError: It did not come back.
        """
        run = asyncio.get_running_loop().run_in_executor(self._threads, work)
        finished, _ = await asyncio.wait([run], timeout=self._timeout_s)
        if finished:
            return run, False
        self._cancellations += 1
        self._cancel()
        finished, _ = await asyncio.wait([run], timeout=_CANCEL_S)
        if not finished:
            raise TimeoutError(f"a batch did not come back within {self._timeout_s:g} s")
        return run, True

    def _run_all(self, items: Sequence[Item]) -> Sequence[Result]:
        results = self._run(items)
        if len(results) != len(items):
            raise ValueError(f"the run gave {len(results)} results for {len(items)} items")
        return results

    def _hand_out(self, batch: Sequence[_Entry[Item, Result]], results: Sequence[Result]) -> None:
        now = time.perf_counter()
        for entry, result in zip(batch, results, strict=True):
            request = entry.request
            request.results[entry.index] = result
            request.missing -= 1
            request.finished = now
            if not request.missing and not request.done.done():
                request.done.set_result(None)
