"""Running the batches of one model, and what happens if a run fails.

A run is one call of the batch function.

- Failures: a batch whose run raises is bisected until the failing item is alone. The request of
  this item fails, and the other requests get their results. If the probe, a run on known good
  items, fails too, the engine is broken: all callers fail, the batcher stops and `on_stop` is
  called.
- Cancellations: they abort all runs of the model, on all streams. A run that was cancelled because
  of another one is repeated.

Of a request, the threads change only `progressed` and `runs`; the event loop changes all other
fields.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.inference.batching.batch_former import Batch, BatchFormer
from service.inference.batching.streams import Clock, Failure, RunInThread, error_of

Item = TypeVar("Item")
Result = TypeVar("Result")


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


@dataclass(eq=False)
class Request(Generic[Result]):
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
    request: Request[Result]


class BatchRunner(Generic[Item, Result]):
    """Runs the batches of one model; the `Runner` of its streams.

    Args:
        run: Batch function: takes a batch of items and returns one result per item, or raises. It
            is called concurrently, from the threads of several streams.
        former: Queue that forms the batches.
        share: Weight in the division of the streams' time among models.
        probe: Calls the batch function on known good items, to tell a bad item from a broken
            engine.
        cancel: Makes all runs in flight raise.
        timeout_s: Seconds after which a run is cancelled. A run may always take ten times its
            expected duration.
        cost_s: Expected seconds per unit of a batch's cost, until a batch has run.
        clock: Clock of the streams.
        on_stop: Called with the error if a run hangs, the probe fails, or on a defect.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        former: BatchFormer[RequestItem[Item, Result]],
        *,
        share: float,
        probe: Callable[[], object],
        cancel: Callable[[], None],
        timeout_s: float,
        cost_s: float,
        clock: Clock,
        on_stop: Callable[[BaseException], None],
    ) -> None:
        self.streams = former.streams
        self.share = share
        self.timeout_s = timeout_s
        self.cancellations = 0
        self.stop = on_stop
        self.release = former.release
        self.retry_s = former.retry_s
        self._run = run
        self._former = former
        self._probe = probe
        self._cancel = cancel
        self._cost_s = cost_s
        self._clock = clock
        # Sums over the batches that have run: seconds on one stream, tokens, and costs. Older
        # batches count less: the sums decay by 10 % per batch of each stream.
        self._recent_s = self._recent_tokens = self._recent_cost = 0.0
        self._decay = 1 - 0.1 / former.streams

    @property
    def token_s(self) -> float:
        """Measured seconds per token on one stream; 0 before the first batch has ended."""
        return self._recent_s / self._recent_tokens if self._recent_tokens else 0.0

    @property
    def has_queued(self) -> bool:
        """Whether items are queued."""
        return self._former.tokens > 0

    @property
    def queued_s(self) -> float:
        """Estimated seconds that the queued items take on one stream."""
        return self._former.tokens * self.token_s

    def form(self, now: float) -> Batch[RequestItem[Item, Result]]:
        """Remove the next batch from the queue, and return it; see `Runner.form`."""
        batch = self._former.form(now)
        for entry in batch.items:
            entry.request.progressed = now
        return batch

    def expected_s(self, batch: Batch[RequestItem[Item, Result]]) -> float:
        """Return the expected duration of a batch, in seconds."""
        cost_s = self._recent_s / self._recent_cost if self._recent_cost else self._cost_s
        return cost_s * batch.cost

    def record(self, batch: Batch[RequestItem[Item, Result]], seconds: float) -> None:
        """Record the duration of a batch that has run. Calls do not overlap."""
        self._recent_s = self._decay * self._recent_s + seconds
        self._recent_tokens = self._decay * self._recent_tokens + batch.tokens
        self._recent_cost = self._decay * self._recent_cost + batch.cost

    def cancel(self) -> None:
        """Make all runs in flight raise."""
        self._cancel()
        self.cancellations += 1  # after `_cancel`: aborted runs have a lower count

    def run(self, batch: Batch[RequestItem[Item, Result]]) -> None:
        """Run a batch, and deliver the results; raise if the run fails."""
        self._run_entries(batch.items)

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
        loop = pending[0].request.done.get_loop()
        loop.call_soon_threadsafe(self._deliver, pending, results)

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

    async def recover(
        self, batch: Batch[RequestItem[Item, Result]], failure: Failure, run: RunInThread
    ) -> None:
        """Fail the request of the item on which the batch function fails; run the other items.

        Raises:
            RunBroken: The batch function fails on the probe too.
            Exception: Any error of `run`.
        """
        await self._bisect(batch.items, failure, run)

    async def _bisect(
        self,
        entries: Sequence[RequestItem[Item, Result]],
        failure: Failure,
        run: RunInThread,
    ) -> None:
        if not failure.is_own:
            await self._run_again(entries, run)
        elif len(entries) > 1:
            middle = len(entries) // 2
            await self._run_again(entries[:middle], run)
            await self._run_again(entries[middle:], run)
        else:
            await self._check_run(run)
            (entry,) = entries
            error = ItemFailed(entry.index)
            error.__cause__ = failure.error
            if not entry.request.done.done():
                entry.request.done.set_exception(error)

    async def _run_again(
        self, entries: Sequence[RequestItem[Item, Result]], run: RunInThread
    ) -> None:
        failure = await run(error_of, self._run_entries, entries)
        if failure is not None:
            await self._bisect(entries, failure, run)

    async def _check_run(self, run: RunInThread) -> None:
        """Raise `RunBroken` if the batch function fails on the probe too."""
        while (failure := await run(error_of, self._probe)) is not None:
            if failure.is_own:
                raise RunBroken("the engine fails on an input of the self-check") from failure.error
