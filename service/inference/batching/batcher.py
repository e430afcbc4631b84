"""The batcher, which queues the items of requests until a stream runs them in batches.

While all streams are busy, queued items accumulate; a request that finds an idle stream starts
immediately. `batch_former` forms the batches, `streams` chooses the model whose batch is next, and
`runs` runs the batches.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.inference.batching.batch_former import BatchFormer
from service.inference.batching.cache import CacheCounts
from service.inference.batching.runs import BatchRunner, Request, RequestItem
from service.inference.batching.streams import StreamPool
from service.inference.call_options import Priority

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFull(Exception):
    """The items do not fit into the queue."""


class TooLate(Exception):
    """At the current throughput, the items would finish after their deadline.

    Attributes:
        late_s: Estimated delay beyond the deadline, in seconds.
    """

    def __init__(self, late_s: float) -> None:
        super().__init__(f"the items would exceed their deadline by {late_s:.3g} s")
        self.late_s = late_s


class Stopped(Exception):
    """The batcher is not running: not started, closed, or stopped because of a failure."""


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """Results and timing of one request.

    Attributes:
        results: One result per item, in the order of the items.
        queue_s: Seconds from submission to completion during which no item was running.
        run_s: Seconds during which at least one item was running.
        cache_s: Seconds of lookups in the cache, and of waits for items of other requests; None: no
            cache.
        cache_counts: Counts of the items in the cache; None: no cache.
    """

    results: list[Result]
    queue_s: float
    run_s: float
    cache_s: float | None = None
    cache_counts: CacheCounts | None = None


class Batcher(Generic[Item, Result]):
    """Runs items of one model in batches, on streams that it shares with other batchers.

    Args:
        run: Batch function: takes a batch of items and returns one result per item, or raises. It
            is called concurrently, from the threads of several streams.
        length: Returns the number of tokens of an item.
        former: Queue that forms the batches. Its `streams` limit how many run concurrently.
        pool: Streams that run the batches.
        share: Weight in the division of the streams' time among batchers.
        probe: Calls the batch function on known good items, to tell a bad item from a broken
            engine.
        cancel: Makes all runs in flight raise.
        max_queue_tokens: Maximum number of queued tokens of each priority. An empty queue accepts a
            request of any size.
        timeout_s: Seconds after which a run is cancelled. A run may always take ten times its
            expected duration.
        cost_s: Expected seconds per unit of a batch's cost, until a batch has run.
        on_stop: Called with the error when the batcher stops because of a failure, after all
            pending requests have failed.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        former: BatchFormer[RequestItem[Item, Result]],
        pool: StreamPool,
        *,
        share: float,
        probe: Callable[[], object],
        cancel: Callable[[], None],
        max_queue_tokens: int,
        timeout_s: float,
        cost_s: float,
        on_stop: Callable[[BaseException], None],
    ) -> None:
        self._length = length
        self._former = former
        self._pool = pool
        self._clock = pool.clock
        self._runner: BatchRunner[Item, Result] = BatchRunner(
            run,
            former,
            share=share,
            probe=probe,
            cancel=cancel,
            timeout_s=timeout_s,
            cost_s=cost_s,
            clock=pool.clock,
            on_stop=self._stop,
        )
        self._max_queue_tokens = max_queue_tokens
        self._on_stop = on_stop
        self._open: set[Request[Result]] = set()
        self._is_alive = False
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_alive(self) -> bool:
        """Whether the batcher is running: started, and neither closed nor failed."""
        return self._is_alive

    @property
    def queued_tokens(self) -> int:
        """Number of queued tokens."""
        return self._former.tokens

    @property
    def oldest_s(self) -> float:
        """Longest wait of a queued request for its next batch, in seconds; 0 for an empty queue."""
        waiting = [entry.request.progressed for entry in self._former.oldest_items()]
        return max(0.0, self._clock.now() - min(waiting)) if waiting else 0.0

    @property
    def running(self) -> list[tuple[int, int, float]]:
        """Rows, tokens and age in seconds of each batch that runs now."""
        batches = self._pool.running(self._runner)
        return [(len(batch.items), batch.tokens, age_s) for batch, age_s in batches]

    @property
    def drain_s(self) -> float:
        """Estimated seconds until the queue is empty; 0 before the first batch has ended."""
        return self._finish_s(self.queued_tokens)

    def _finish_s(self, tokens: int) -> float:
        return self._pool.finish_s(self._runner, tokens * self._runner.token_s)

    def is_full(self, priority: Priority) -> bool:
        """Return whether the queue accepts no more items of a priority."""
        return self._former.tokens_of(priority) >= self._max_queue_tokens

    def start(self) -> None:
        """Start the batcher in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pool.join(self._runner)
        self._is_alive = True

    async def close(self) -> None:
        """Fail all pending requests with `Stopped`, cancel the runs in flight, and stop.

        Raises:
            RuntimeError: The running event loop is not that of `start`.
        """
        self._check_loop()
        self._end()
        self._runner.cancel()
        await self._pool.leave(self._runner)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "a model is called in the event loop in which it was opened, and this is another "
                "one; SyncModel is called in any"
            )

    def _stop(self, error: BaseException) -> None:
        if self._is_alive:  # several streams may report errors
            self._end()
            self._on_stop(error)

    def _end(self) -> None:
        self._is_alive = False
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(Stopped())

    async def submit(
        self,
        items: Sequence[Item],
        *,
        timeout_s: float | None = None,
        on_result: Callable[[int, Result], None] = lambda _index, _result: None,
        priority: Priority = "interactive",
    ) -> Outcome[Result]:
        """Queue the items of a request, and return their results once all items have run.

        If the caller is cancelled, its queued items are removed.

        Args:
            items: Items of the request; at least one.
            timeout_s: Seconds until the caller's deadline; None: no deadline.
            on_result: Called with the index and the result of each item as soon as it has run.
            priority: Priority of the items; see `batch_former`.

        Raises:
            ValueError: There are no items.
            RuntimeError: The running event loop is not that of `start`.
            QueueFull: The items do not fit into the queue; none was queued.
            TooLate: The items are estimated to take longer than `timeout_s`; none was queued.
            ItemFailed: The batch function fails on one of the items; the other items of the
                request are dropped.
            Stopped: The batcher is not running, or stopped before all items had run.
            TimeoutError: The deadline has passed.
        """
        if not items:
            raise ValueError("there are no items")
        if not self.is_alive:
            raise Stopped
        self._check_loop()
        if timeout_s is not None and timeout_s <= 0:
            raise TimeoutError
        lengths = [self._length(item) for item in items]
        # An empty queue accepts a request of any size, which is split into batches.
        queued_tokens = self._former.tokens_of(priority)
        if queued_tokens and queued_tokens + sum(lengths) > self._max_queue_tokens:
            raise QueueFull
        if timeout_s is not None:
            self._check_deadline(sum(lengths), timeout_s, priority)
        request: Request[Result] = Request(
            self._loop.create_future(), self._clock.now(), len(items), on_result
        )
        self._open.add(request)
        entries = [RequestItem(item, index, request) for index, item in enumerate(items)]
        queued = self._former.add(entries, lengths, priority)
        expiry = None
        if timeout_s is not None:
            expiry = self._loop.call_later(timeout_s, _expire, request.done)
        try:
            self._pool.wake()
            await request.done
        finally:
            if expiry is not None:
                expiry.cancel()
            self._open.discard(request)
            self._former.remove(queued)
        run_s = _union_s(request.runs)
        return Outcome(
            [request.results[index] for index in range(len(items))],
            queue_s=request.finished - request.submitted - run_s,
            run_s=run_s,
        )

    def _check_deadline(self, tokens: int, timeout_s: float, priority: Priority) -> None:
        # An empty queue accepts any request: if a slow start has made the measured throughput too
        # low, only further runs can correct it.
        queued_tokens = self.queued_tokens
        if not queued_tokens or self._finish_s(queued_tokens + tokens) <= timeout_s:
            return
        needed_s = self._finish_s(self._former.tokens_ahead(tokens, priority) + tokens)
        if needed_s > timeout_s:
            raise TooLate(needed_s - timeout_s)


def _expire(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_exception(TimeoutError())


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total duration that the time spans cover, in seconds; overlaps count once."""
    covered, end = 0.0, 0.0
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return covered
