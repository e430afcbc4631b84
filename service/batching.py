"""The queue and the batch former. It knows neither text nor numpy nor HTTP.

While a batch runs, the next one gathers: there is no timer, and a lone request leaves at once.

- Turns: the requests that wait form a ring, and each batch starts from the oldest item of the next
  one. So a request of thousands of items holds nobody for longer than a batch, and every item is
  reached, whatever else arrives.
- Filling: the batch takes the items nearest in length to that one, whosever they are, while the
  cost (tokens, plus attention over padded rows) stays within the budget.
- Faults: a batch that raises is run again in halves, until the one item that raises is alone; its
  request fails, and the others get their results.
- A run that does not come back cannot be stopped in its thread. All callers fail, the batcher
  says that it is dead, and the process has to be ended.
"""

import asyncio
import bisect
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFull(Exception):
    """The queue holds as many tokens as it may."""


class Stopped(Exception):
    """The batcher has been closed, or a run did not come back."""


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
        run_s: Seconds from then until its last batch ended.
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
    first_start: float | None = None


@dataclass(eq=False)
class _Entry(Generic[Item, Result]):
    """One item that waits or runs."""

    item: Item
    length: int
    index: int
    request: _Request[Item, Result]
    queued: bool = True


class Batcher(Generic[Item, Result]):
    """Runs items in batches, one batch at a time, in a thread of its own.

    Args:
        run: Takes a batch and returns one result per item, or raises.
        length: Tokens of an item.
        max_cost: Budget of a batch; a single item may exceed it.
        pair_cost: Cost of one pair in the padded attention product, in tokens.
        max_queue: Tokens that may wait.
        timeout_s: A run that takes longer is taken for hung.
        on_hang: Called once when that happens.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        *,
        max_cost: float,
        pair_cost: float,
        max_queue: int,
        timeout_s: float,
        on_hang: Callable[[], None],
    ) -> None:
        self._run = run
        self._length = length
        self._max_cost = max_cost
        self._pair_cost = pair_cost
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._ring: deque[_Request[Item, Result]] = deque()
        self._by_length: list[_Entry[Item, Result]] = []
        self._open: set[_Request[Item, Result]] = set()
        self._queued_tokens = 0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "engine")
        self._worker: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether submitted items will be run."""
        return self._worker is not None and not self._worker.done()

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a batch."""
        return self._queued_tokens

    def start(self) -> None:
        """Begin to run batches, in the running event loop."""
        self._worker = asyncio.create_task(self._work(), name="batcher")

    async def close(self) -> None:
        """Fail whoever still waits, and end."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, items: Sequence[Item]) -> Outcome[Result]:
        """Return the results of the items, when all have been run.

        A caller that is cancelled takes its waiting items out of the queue.

        Raises:
            QueueFull: They do not fit into the queue; none has been taken.
            ItemFailed: The run raises on one of them; the others are dropped.
            Stopped: The batcher does not run, or stopped before they had been.
        """
        if not self.is_alive:
            raise Stopped
        lengths = [self._length(item) for item in items]
        if self._queued_tokens and self._queued_tokens + sum(lengths) > self._max_queue:
            raise QueueFull
        loop = asyncio.get_running_loop()
        request: _Request[Item, Result] = _Request(
            loop.create_future(), time.perf_counter(), missing=len(items)
        )
        for index, (item, length) in enumerate(zip(items, lengths, strict=True)):
            entry = _Entry(item, length, index, request)
            request.waiting.append(entry)
            bisect.insort(self._by_length, entry, key=_entry_length)
        self._queued_tokens += sum(lengths)
        self._ring.append(request)
        self._open.add(request)
        self._wake.set()
        try:
            await request.done
        finally:
            self._open.discard(request)
            self._drop(request)
        started = request.first_start or request.submitted
        return Outcome(
            [request.results[index] for index in range(len(items))],
            queue_s=started - request.submitted,
            run_s=time.perf_counter() - started,
        )

    async def _work(self) -> None:
        try:
            while True:
                await self._wake.wait()
                batch = self._form()
                if not batch:
                    self._wake.clear()
                    continue
                now = time.perf_counter()
                for entry in batch:
                    entry.request.first_start = entry.request.first_start or now
                if not await self._run_halving(batch):
                    self._on_hang()
                    return
        finally:
            for request in self._open:
                if not request.done.done():
                    request.done.set_exception(Stopped())

    def _form(self) -> list[_Entry[Item, Result]]:
        """Take the next batch out of the queue."""
        while self._ring and not self._ring[0].waiting:
            self._ring.popleft()
        if not self._ring:
            return []
        first = self._ring[0].waiting[0]
        self._ring.rotate(-1)
        batch, tokens, longest = [first], first.length, first.length
        # The window [low, high) around the first item grows towards the nearer length.
        place = self._place(first)
        low, high = place, place + 1
        while low > 0 or high < len(self._by_length):
            shorter = self._by_length[low - 1] if low > 0 else None
            longer = self._by_length[high] if high < len(self._by_length) else None
            take_longer = shorter is None or (
                longer is not None and longer.length - first.length <= first.length - shorter.length
            )
            entry = longer if take_longer else shorter
            if entry is None or not self._fits(
                tokens + entry.length, max(longest, entry.length), len(batch) + 1
            ):
                break
            batch.append(entry)
            tokens, longest = tokens + entry.length, max(longest, entry.length)
            low, high = (low, high + 1) if take_longer else (low - 1, high)
        del self._by_length[low:high]
        for entry in batch:
            entry.queued = False
        for request in {id(entry.request): entry.request for entry in batch}.values():
            request.waiting = deque(entry for entry in request.waiting if entry.queued)
        self._queued_tokens -= tokens
        return batch

    def _fits(self, tokens: int, longest: int, rows: int) -> bool:
        return tokens + self._pair_cost * rows * longest**2 <= self._max_cost

    def _place(self, entry: _Entry[Item, Result]) -> int:
        """Where the entry stands in the list by length."""
        place = bisect.bisect_left(self._by_length, entry.length, key=_entry_length)
        return self._by_length.index(entry, place)

    async def _run_halving(self, batch: Sequence[_Entry[Item, Result]]) -> bool:
        """Run the batch and hand out its results; False if the run did not come back."""
        batch = [entry for entry in batch if not entry.request.done.done()]
        if not batch:
            return True
        loop = asyncio.get_running_loop()
        run = loop.run_in_executor(self._thread, self._run_all, [entry.item for entry in batch])
        finished, _ = await asyncio.wait([run], timeout=self._timeout_s)
        if not finished:
            return False
        error = run.exception()
        if error is None:
            for entry, result in zip(batch, run.result(), strict=True):
                entry.request.results[entry.index] = result
                entry.request.missing -= 1
                if not entry.request.missing and not entry.request.done.done():
                    entry.request.done.set_result(None)
            return True
        if len(batch) == 1:
            failure = ItemFailed(batch[0].index)
            failure.__cause__ = error
            if not batch[0].request.done.done():
                batch[0].request.done.set_exception(failure)
            return True
        middle = len(batch) // 2
        return await self._run_halving(batch[:middle]) and await self._run_halving(batch[middle:])

    def _run_all(self, items: Sequence[Item]) -> Sequence[Result]:
        results = self._run(items)
        if len(results) != len(items):
            raise ValueError(f"the run gave {len(results)} results for {len(items)} items")
        return results

    def _drop(self, request: _Request[Item, Result]) -> None:
        """Take what is left of a request out of the queue."""
        for entry in request.waiting:
            entry.queued = False
            del self._by_length[self._place(entry)]
            self._queued_tokens -= entry.length
        request.waiting.clear()


def _entry_length(entry: _Entry[Item, Result]) -> int:
    return entry.length
