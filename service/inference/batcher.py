"""The batcher, which queues the items of requests and runs them in batches.

A stream runs one batch at a time, in a thread; there are as many streams as batches that can run
concurrently. A run is one call of the batch function. While all streams are busy, queued items
accumulate: there is no timer, and a request that finds an idle stream starts immediately. A stream
forms its next batch in its thread, because a round trip through a busy event loop would leave a
core idle.

Ownership: while a stream runs, only its thread changes its state, and the event loop only reads it.
Of a request, the threads change only `progressed` and `runs`; the event loop changes all other
fields.

- Failures: a batch whose run raises is bisected until the failing item is alone. The request of
  this item fails, and the other requests get their results. If the probe, a run on known good
  items, fails too, the engine is broken: all callers fail, the batcher stops and `on_stop` is
  called.
- Timeouts: the time limit of a run is `timeout_s`, or ten times the run's expected duration if that
  is longer. Beyond the limit the run is cancelled, which makes it raise. If it still does not
  return, the batcher stops as it does for a broken engine, because a thread cannot be killed.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from service.inference.batch_former import Batch, BatchFormer
from service.inference.cache import CacheCounts

Item = TypeVar("Item")
Result = TypeVar("Result")

# A run may take this many times its expected duration: the host may be busy, and the cost of a row
# is an estimate.
_MARGIN = 10

# Seconds to wait until a cancelled run returns. It stops at the graph's next operator.
_CANCEL_S = 1.0


class Clock:
    """A monotonic clock. Tests pass a clock that they advance by hand."""

    def now(self) -> float:
        """Return the monotonic time, in seconds."""
        return time.perf_counter()

    async def wait(self, future: asyncio.Future[Any], timeout_s: float) -> None:
        """Wait until the future is done, for at most `timeout_s` seconds."""
        await asyncio.wait([future], timeout=timeout_s)


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


class RunBroken(Exception):
    """The batch function fails on known good inputs too: the engine is broken."""


class ItemFailed(Exception):
    """The batch function fails on one item.

    Attributes:
        index: Index of the item in its request.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"the batch function failed on item {index}")
        self.index = index


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


@dataclass(eq=False)
class _Request(Generic[Result]):
    """State of one call of `Batcher.submit`.

    Attributes:
        done: Future that completes when all items have results, or with an error.
        submitted: Time of submission; all times are in seconds, on the monotonic clock.
        missing: Number of items without a result.
        on_result: Called with an item's index and result, in the event loop.
        results: Results by index of the item.
        runs: Start and end time of each run with items of this request.
        progressed: Start time of the latest batch with items of this request; before the first
            batch, the submission time.
        finished: Time of the latest result.
    """

    done: asyncio.Future[None]
    submitted: float
    missing: int
    on_result: Callable[[int, Result], None]
    results: dict[int, Result] = field(default_factory=dict)
    runs: list[tuple[float, float]] = field(default_factory=list)
    progressed: float = field(init=False)
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.progressed = self.submitted


@dataclass(eq=False, slots=True)
class RequestItem(Generic[Item, Result]):
    """One item of a request, and its index in the request."""

    item: Item
    index: int
    request: _Request[Result]


@dataclass(eq=False)
class _Stream(Generic[Item, Result]):
    """State of one stream, which runs one batch at a time.

    Attributes:
        batch: The running batch; an empty batch while the stream is idle.
        began: Start time of the latest run: a whole batch, a part of a failed batch, or the probe.
        limit_s: Seconds after which the latest run is cancelled.
        cancellations: Number of cancellations by the batcher before the latest run began.
        recent_s: Sum of the durations of successful batches, in seconds. Older batches count less:
            the sum decays by 10 % per batch.
        recent_tokens: Sum of the tokens of the batches in `recent_s`, with the same decay.
        recent_cost: Sum of the costs of the batches in `recent_s`, with the same decay.
    """

    batch: Batch[RequestItem[Item, Result]] = field(default_factory=Batch)
    began: float = 0.0
    limit_s: float = 0.0
    cancellations: int = 0
    recent_s: float = 0.0
    recent_tokens: float = 0.0
    recent_cost: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """The error of a run that raised.

    Attributes:
        error: The raised error.
        is_own: Whether the run itself failed or took too long; False: it was cancelled because the
            run of another stream took too long.
    """

    error: BaseException
    is_own: bool


class Batcher(Generic[Item, Result]):
    """Runs items in batches; each stream runs one batch at a time, in a thread.

    Args:
        run: Batch function: takes a batch of items and returns one result per item, or raises. It
            is called concurrently, from the threads of all streams.
        length: Returns the number of tokens of an item.
        former: Queue that forms the batches.
        probe: Calls the batch function on known good items, to tell a bad item from a broken
            engine.
        cancel: Makes all runs in flight raise.
        max_queue_tokens: Maximum number of queued tokens. An empty queue accepts a request of any
            size.
        timeout_s: Seconds after which a run is cancelled. A run may always take ten times its
            expected duration.
        cost_s: Expected seconds per unit of a batch's cost, until a stream has completed a batch.
        on_stop: Called with the error when the batcher stops because of a failure, after all
            pending requests have failed.
        clock: Clock; None: the system's monotonic clock.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        former: BatchFormer[RequestItem[Item, Result]],
        *,
        probe: Callable[[], object],
        cancel: Callable[[], None],
        max_queue_tokens: int,
        timeout_s: float,
        cost_s: float,
        on_stop: Callable[[BaseException], None],
        clock: Clock | None = None,
    ) -> None:
        self._run = run
        self._length = length
        self._former = former
        self._probe = probe
        self._cancel = cancel
        self._cancellations = 0
        self._max_queue_tokens = max_queue_tokens
        self._timeout_s = timeout_s
        self._cost_s = cost_s
        self._on_stop = on_stop
        self._clock = clock or Clock()
        self._streams: list[_Stream[Item, Result]] = [_Stream() for _ in range(former.streams)]
        self._threads = ThreadPoolExecutor(former.streams, "engine")
        self._open: set[_Request[Result]] = set()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_alive(self) -> bool:
        """Whether the batcher is running: started, and neither closed nor failed."""
        return self._worker is not None and not self._worker.done()

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
    def drain_s(self) -> float:
        """Estimated seconds until the queue is empty; 0 before the first batch has ended."""
        return self.queued_tokens * self._seconds_per_token

    @property
    def _seconds_per_token(self) -> float:
        tokens = sum(stream.recent_tokens for stream in self._streams)
        if not tokens:
            return 0.0
        return sum(stream.recent_s for stream in self._streams) / tokens / len(self._streams)

    @property
    def is_full(self) -> bool:
        """Whether the queue accepts no more items."""
        return self.queued_tokens >= self._max_queue_tokens

    def start(self) -> None:
        """Start the batcher in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._worker = asyncio.create_task(self._work(), name="batcher")
        self._worker.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Fail all pending requests with `Stopped`, cancel the runs in flight, and stop."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        self._cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def submit(
        self,
        items: Sequence[Item],
        timeout_s: float | None = None,
        on_result: Callable[[int, Result], None] = lambda _index, _result: None,
    ) -> Outcome[Result]:
        """Queue the items of a request, and return their results once all items have run.

        If the caller is cancelled, its queued items are removed.

        Args:
            items: Items of the request; at least one.
            timeout_s: Seconds until the caller's deadline, which is checked on submission only;
                None: no deadline.
            on_result: Called with the index and the result of each item as soon as it has run.

        Raises:
            ValueError: There are no items.
            QueueFull: The items do not fit into the queue; none was queued.
            TooLate: The items are estimated to take longer than `timeout_s`; none was queued.
            ItemFailed: The batch function fails on one of the items; the other items of the
                request are dropped.
            Stopped: The batcher is not running, or stopped before all items had run.
        """
        if not items:
            raise ValueError("there are no items")
        if not self.is_alive:
            raise Stopped
        lengths = [self._length(item) for item in items]
        # An empty queue accepts a request of any size, which is split into batches.
        if self.queued_tokens and self.queued_tokens + sum(lengths) > self._max_queue_tokens:
            raise QueueFull
        if timeout_s is not None:
            self._check_deadline(sum(lengths), timeout_s)
        request: _Request[Result] = _Request(
            self._loop.create_future(), self._clock.now(), len(items), on_result
        )
        self._open.add(request)
        entries = [RequestItem(item, index, request) for index, item in enumerate(items)]
        queued = self._former.add(entries, lengths)
        self._wake.set()
        try:
            await request.done
        finally:
            self._open.discard(request)
            self._former.remove(queued)
        run_s = _union_s(request.runs)
        return Outcome(
            [request.results[index] for index in range(len(items))],
            queue_s=request.finished - request.submitted - run_s,
            run_s=run_s,
        )

    def _check_deadline(self, tokens: int, timeout_s: float) -> None:
        # An empty queue accepts any request: if a slow start has made the measured throughput too
        # low, only further runs can correct it.
        per_token_s = self._seconds_per_token
        if not self.queued_tokens or (self.queued_tokens + tokens) * per_token_s <= timeout_s:
            return
        needed_s = (self._former.tokens_ahead(tokens) + tokens) * per_token_s
        if needed_s > timeout_s:
            raise TooLate(needed_s - timeout_s)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:  # if one stream fails, all are cancelled
            for stream in self._streams:
                tasks.create_task(self._run_batches(stream))

    def _stopped(self, worker: asyncio.Task[None]) -> None:
        for request in self._open:
            if not request.done.done():
                request.done.set_exception(Stopped())
        error = None if worker.cancelled() else worker.exception()
        if error is not None:
            self._on_stop(error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error)

    async def _run_batches(self, stream: _Stream[Item, Result]) -> None:
        while True:
            self._next_batch(stream)
            if stream.batch.items:
                failure = await self._in_thread(stream, self._run_until_queue_is_empty, stream)
                if failure is not None:
                    await self._bisect(stream, stream.batch.items, failure)
            else:
                self._wake.clear()
                await self._wake.wait()

    def _next_batch(self, stream: _Stream[Item, Result]) -> None:
        stream.batch = self._former.form(stream.batch)
        self._begin(stream)
        for entry in stream.batch.items:
            entry.request.progressed = stream.began

    def _begin(self, stream: _Stream[Item, Result]) -> None:
        cost_s = stream.recent_s / stream.recent_cost if stream.recent_cost else self._cost_s
        stream.limit_s = max(self._timeout_s, _MARGIN * cost_s * stream.batch.cost)
        stream.began, stream.cancellations = self._clock.now(), self._cancellations

    def _run_until_queue_is_empty(self, stream: _Stream[Item, Result]) -> BaseException | None:
        """Run batches until none is left for the stream, or a run fails; return the run's error."""
        while stream.batch.items:
            error = _error_of(self._run_entries, stream.batch.items)
            if error is not None:
                return error
            stream.recent_s = 0.9 * stream.recent_s + self._clock.now() - stream.began
            stream.recent_tokens = 0.9 * stream.recent_tokens + stream.batch.tokens
            stream.recent_cost = 0.9 * stream.recent_cost + stream.batch.cost
            self._next_batch(stream)
        return None

    def _run_entries(self, entries: Sequence[RequestItem[Item, Result]]) -> None:
        """Run the entries whose requests are still pending, and deliver the results."""
        pending = [entry for entry in entries if not entry.request.done.done()]
        if not pending:
            return
        requests = {entry.request for entry in pending}
        began = self._clock.now()
        try:
            results = self._run([entry.item for entry in pending])
        finally:
            span = (began, self._clock.now())
            for request in requests:
                request.runs.append(span)
        if len(results) != len(pending):
            raise ValueError(
                f"the batch function returned {len(results)} results for {len(pending)} items"
            )
        self._loop.call_soon_threadsafe(self._deliver, pending, results)

    def _deliver(
        self, entries: Sequence[RequestItem[Item, Result]], results: Sequence[Result]
    ) -> None:
        now = self._clock.now()
        for entry, result in zip(entries, results, strict=True):
            request = entry.request
            request.results[entry.index] = result
            request.on_result(entry.index, result)
            request.missing -= 1
            request.finished = now
            if not request.missing and not request.done.done():
                request.done.set_result(None)

    async def _bisect(
        self,
        stream: _Stream[Item, Result],
        entries: Sequence[RequestItem[Item, Result]],
        failure: _Failure,
    ) -> None:
        """Fail the request of the item on which the batch function fails; run the other items.

        Raises:
            TimeoutError: A run did not return, even after its cancellation.
            RunBroken: The batch function fails on the probe too.
        """
        if not failure.is_own:
            await self._run_again(stream, entries)
        elif len(entries) > 1:
            middle = len(entries) // 2
            await self._run_again(stream, entries[:middle])
            await self._run_again(stream, entries[middle:])
        else:
            await self._check_run(stream)
            (entry,) = entries
            error = ItemFailed(entry.index)
            error.__cause__ = failure.error
            if not entry.request.done.done():
                entry.request.done.set_exception(error)

    async def _run_again(
        self, stream: _Stream[Item, Result], entries: Sequence[RequestItem[Item, Result]]
    ) -> None:
        failure = await self._in_thread(stream, _error_of, self._run_entries, entries)
        if failure is not None:
            await self._bisect(stream, entries, failure)

    async def _check_run(self, stream: _Stream[Item, Result]) -> None:
        """Raise `RunBroken` if the batch function fails on the probe too."""
        while (failure := await self._in_thread(stream, _error_of, self._probe)) is not None:
            if failure.is_own:
                raise RunBroken("the engine fails on an input of the self-check") from failure.error

    async def _in_thread(
        self,
        stream: _Stream[Item, Result],
        work: Callable[..., BaseException | None],
        *arguments: object,
    ) -> _Failure | None:
        """Call `work` in a thread, and return the failure of its run, if any.

        `work` returns the error that a run raised, or None. An error that `work` itself raises is a
        defect of the batcher and propagates.

        Raises:
            TimeoutError: A run did not return, even after its cancellation.
        """
        self._begin(stream)
        runs = self._loop.run_in_executor(self._threads, work, *arguments)
        took_too_long = False
        while not runs.done():
            began, limit_s = stream.began, stream.limit_s
            await self._clock.wait(runs, began + limit_s - self._clock.now())
            if runs.done() or stream.began > began:
                continue
            self._cancel()
            self._cancellations += 1  # after `_cancel`: aborted runs have a lower count
            await self._clock.wait(runs, _CANCEL_S)
            took_too_long = stream.began == began
            if took_too_long and not runs.done():
                raise TimeoutError(f"a batch did not return within {limit_s:g} s")
        error = runs.result()
        if error is None:
            return None
        is_own = took_too_long or self._cancellations == stream.cancellations
        return _Failure(error, is_own)


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total duration that the time spans cover, in seconds; overlaps count once."""
    covered, end = 0.0, 0.0
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return covered


def _error_of(work: Callable[..., object], *arguments: object) -> BaseException | None:
    """Call `work`, and return the error that it raises, if any."""
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException
        return error
    return None
