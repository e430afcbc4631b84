"""The streams of a device, which run the batches of all its models.

A stream runs one batch at a time, in a thread. A batch that finds an idle stream starts at once,
unless its runner withholds it for a moment (`Runner.retry_s`). The stream's thread takes each batch
itself, because a round trip through a busy event loop would leave a core idle. The event loop
watches its time limits, and recovers failed batches.

- Fairness: streams are shared by weighted fair queueing. Each runner has a virtual time, which
  advances by the duration of its batches divided by its share. The runner with the smallest virtual
  time is next, if it has a batch and runs fewer batches than its own limit. A flood of one runner
  therefore delays a batch of another one until a stream has ended its batch. Priorities order the
  requests of one runner only: with them, the bulk requests of a model could use up its share, or
  its interactive requests the share of another model.
- Spare stream: a pool can have one more stream than cores. It runs a batch of a runner whose
  batches all wait while other runners use the other streams, if its queue takes at most 20 ms. The
  operating system then divides the cores among the batches, which delays the small one less than
  waiting for the end of another batch. Runners with more work get no spare stream, because more
  threads than cores cost throughput.
- No credit: when a batch starts, the virtual time of its runner is at least that of the latest
  start. Time during which a runner was idle, or at its limit, is not made up for.
- Expected durations: they count when a batch starts, and are corrected when it ends. Otherwise a
  runner would get all streams until the first of its batches has ended.
- Time limits: beyond its limit, a run is cancelled, which makes it raise. If it still does not
  return, its runner is stopped. A thread cannot be killed: it is abandoned, and a new thread takes
  its place for the other runners. It ends when the run returns, and the process cannot exit
  normally before.

Ownership: only its thread changes the state of a stream, and the event loop only reads it, except
while it recovers a failed batch. The lock guards the members, the choice of batches, and the sets
of streams and of idle ones.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any, Protocol
from weakref import ref

from service.inference.batching.batch_former import Batch

# A run may take this many times its expected duration: the host may be busy, and the cost of a row
# is an estimate.
_MARGIN = 10

# Maximum duration of a runner's queued items that the spare stream takes, in seconds.
_SPARE_S = 0.02

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


@dataclass(frozen=True)
class Failure:
    """The error of a run that raised.

    Attributes:
        error: The raised error.
        is_own: Whether the run itself failed or took too long; False: it was cancelled together
            with another run.
    """

    error: BaseException
    is_own: bool


# Calls a function in the thread of a stream. The function returns the error that a run raised, or
# None. An error that the function itself raises is a defect and propagates.
RunInThread = Callable[..., Awaitable[Failure | None]]


class Runner(Protocol):
    """The batches of one model, and how to run them.

    Attributes:
        streams: Maximum number of batches that run at a time.
        share: Weight in the division of the streams' time among runners.
        timeout_s: Seconds after which a run is cancelled. A run may always take ten times its
            expected duration.
        cancellations: Number of calls of `cancel` so far.
    """

    streams: int
    share: float
    timeout_s: float
    cancellations: int

    @property
    def has_queued(self) -> bool:
        """Whether items are queued."""

    @property
    def queued_s(self) -> float:
        """Estimated seconds that the queued items take on one stream."""

    def form(self, now: float) -> Batch[Any]:
        """Remove the next batch from the queue, and return it; an empty batch if there is none.

        Args:
            now: The time, in seconds.
        """

    def expected_s(self, batch: Batch[Any]) -> float:
        """Return the expected duration of a batch, in seconds."""

    def run(self, batch: Batch[Any]) -> None:
        """Run a batch, in the thread of a stream; raise if a run fails."""

    def record(self, batch: Batch[Any], seconds: float) -> None:
        """Record the duration of a batch that has run. Calls do not overlap."""

    def release(self, batch: Batch[Any], now: float) -> None:
        """Count the batch as running no longer."""

    def retry_s(self, now: float) -> float:
        """Return the seconds until `form` may return a batch that it withholds now; inf: none."""

    async def recover(self, batch: Batch[Any], failure: Failure, run: RunInThread) -> None:
        """Run what can be run of a failed batch, in the same stream, and fail the rest."""

    def cancel(self) -> None:
        """Make all runs in flight raise."""

    def stop(self, error: BaseException) -> None:
        """Fail all items. It is called if a run hangs, or on a defect."""


@dataclass(eq=False)
class _Member:
    """A runner and its use of the streams.

    Attributes:
        runner: The runner.
        running: Number of batches of the runner that streams run.
        virtual_s: Virtual time of the runner, in seconds.
    """

    runner: Runner
    running: int = 0
    virtual_s: float = 0.0


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Run:
    """One run on a stream: a whole batch, a part of a failed batch, or the probe.

    Attributes:
        member: Owner of the batch.
        batch: The whole batch.
        started: Start time of the batch.
        expected_s: Expected duration of the batch, in seconds.
        limit_s: Seconds after which the run is cancelled.
        began: Start time of the run.
        cancellations: Number of cancellations by the runner before the run began.
    """

    member: _Member
    batch: Batch[Any]
    started: float
    expected_s: float
    limit_s: float
    began: float
    cancellations: int


@dataclass(eq=False)
class _Stream:
    """State of one stream.

    Attributes:
        is_spare: Whether it is the spare stream; see the module docstring.
        ended: Completes with the error of a run that fails; for another run of a failed batch, with
            its error or None.
        run: The latest run of the stream's batch; None without a batch.
        thread: The stream's thread.
    """

    is_spare: bool
    ended: asyncio.Future[BaseException | None]
    run: _Run | None = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "engine"))


class StreamPool:
    """The streams of a device. Their threads end when the last runner leaves.

    All runners join in the same event loop.

    Args:
        streams: Number of streams, without the spare one.
        clock: Clock; None: the system's monotonic clock.
        has_spare: Whether there is a spare stream; see the module docstring.
    """

    def __init__(
        self, streams: int, clock: Clock | None = None, *, has_spare: bool = False
    ) -> None:
        self.streams = streams
        self._has_spare = has_spare
        self.clock = clock or Clock()
        self._members: list[_Member] = []
        self._virtual_s = 0.0  # virtual time of the latest start of a batch
        self._streams: set[_Stream] = set()  # streams that may take batches
        self._supervisors: list[asyncio.Task[None]] = []
        self._idle: deque[_Stream] = deque()  # the spare stream is the first
        self._retry: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop

    def join(self, runner: Runner) -> None:
        """Run the batches of a runner from now on."""
        with self._lock:
            self._members.append(_Member(runner))
        if not self._supervisors:
            self._loop = asyncio.get_running_loop()
            self._supervisors = [
                self._loop.create_task(self._supervise(is_spare=index < 0), name="stream")
                for index in range(-self._has_spare, self.streams)
            ]

    async def leave(self, runner: Runner) -> None:
        """Start no further batch of a runner; without any other runner, end the threads."""
        with self._lock:
            self._members = [member for member in self._members if member.runner is not runner]
            if self._members:
                return
            self._streams.clear()
            self._idle.clear()
        tasks, self._supervisors = self._supervisors, []
        if self._retry is not None:
            tasks, self._retry = [*tasks, self._retry], None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def running(self, runner: Runner) -> list[tuple[Batch[Any], float]]:
        """Return the batches of a runner that streams run now, and their ages in seconds."""
        with self._lock:
            runs = [stream.run for stream in self._streams if stream.run is not None]
        now = self.clock.now()
        return [(run.batch, now - run.started) for run in runs if run.member.runner is runner]

    def wake(self) -> None:
        """Let an idle stream look for a batch. Called after items were queued."""
        with self._lock:  # a stream that finds no batch is idle before it releases the lock
            self._wake_one()

    def _rest(self, stream: _Stream) -> None:
        """Count a stream as idle. The lock is held."""
        (self._idle.appendleft if stream.is_spare else self._idle.append)(stream)

    def _wake_one(self) -> None:
        """Let an idle stream look for a batch, if there is one. The lock is held."""
        if not (self._idle and any(member.runner.has_queued for member in self._members)):
            return
        stream = self._idle[-1]
        if stream.is_spare and any(own.run is None for own in self._streams if own is not stream):
            return  # a stream that was woken looks first, and then wakes the spare one
        stream.thread.submit(self._run_batches, stream)
        self._idle.pop()  # not before: the thread may fail to start

    def finish_s(self, runner: Runner, work_s: float) -> float:
        """Estimate the seconds until queued work of a runner has run.

        Meanwhile, every other runner gets its share of the streams until its queue is empty.

        Args:
            runner: The runner.
            work_s: Seconds that the work takes on one stream.
        """
        others = [member.runner for member in self._members if member.runner is not runner]
        others_s = sum(min(other.queued_s, work_s * other.share / runner.share) for other in others)
        streams = min(runner.streams, self.streams)
        return max(work_s / streams, (work_s + others_s) / self.streams)

    async def _supervise(self, *, is_spare: bool) -> None:
        """Watch a stream, and replace it if its thread hangs."""
        while True:
            stream = _Stream(is_spare, self._loop.create_future())
            with self._lock:
                self._streams.add(stream)
                self._rest(stream)
                self._wake_one()
            try:
                while stream in self._streams:
                    await self._watch(stream)
            finally:
                with self._lock:  # `wake` gives an idle stream work under the lock
                    stream.thread.shutdown(wait=False, cancel_futures=True)

    async def _watch(self, stream: _Stream) -> None:
        """Let a stream run batches until a run fails, and recover what can run of that batch."""
        try:
            failure = await self._failure(stream)
            if failure is not None and (failed := stream.run) is not None:
                run_again = partial(self._run_again, stream, failed)
                await failed.member.runner.recover(failed.batch, failure, run_again)
        except Exception as error:  # stops the owner of the batch, and no other
            if stream.run is None:
                raise
            stream.run.member.runner.stop(error)
        if stream in self._streams:
            stream.ended = self._loop.create_future()
            stream.thread.submit(self._run_batches, stream)

    def _take(self, stream: _Stream, *, has_run: bool) -> _Run | None:
        """Release the batch of a stream and take the next one; without any, the stream is idle.

        Args:
            stream: The stream, in whose thread this is called.
            has_run: Whether the stream's batch has run without an error.
        """
        with self._lock:
            now = self.clock.now()
            if (ended := stream.run) is not None:
                member = ended.member
                if has_run:
                    member.runner.record(ended.batch, now - ended.began)
                member.running -= 1
                member.virtual_s += (now - ended.started - ended.expected_s) / member.runner.share
                member.runner.release(ended.batch, now)
            # Set once: the event loop reads it without the lock.
            run = stream.run = self._next(stream, now)
            # Another stream may find a batch too. The last batch of the spare stream may have kept
            # its runner at the limit, and it may not take what the runner has queued since.
            if run is not None or stream.is_spare:
                self._wake_one()
            if run is None and stream in self._streams:
                # At the same time: later, a stream that found only items to wait for would not wait
                # for them, but for `wake`, which may never come.
                retry_s = min((own.runner.retry_s(now) for own in self._members), default=inf)
                self._rest(stream)
                if retry_s < inf:
                    self._loop.call_soon_threadsafe(self._wake_after, retry_s)
        return run

    def _next(self, stream: _Stream, now: float) -> _Run | None:
        """Start the next batch of a stream, if any. The lock is held."""
        members = self._members if stream in self._streams else ()
        for member in sorted(members, key=attrgetter("virtual_s")):
            runner = member.runner
            if member.running == runner.streams or not runner.has_queued:
                continue
            if stream.is_spare and (member.running or runner.queued_s > _SPARE_S):
                continue
            try:
                batch = runner.form(now)
            except Exception as error:  # noqa: BLE001 - a defect of one runner
                self._loop.call_soon_threadsafe(runner.stop, error)
                continue
            if batch.items:
                return self._start(member, batch, now)
        return None

    def _start(self, member: _Member, batch: Batch[Any], now: float) -> _Run:
        runner = member.runner
        expected_s = runner.expected_s(batch)
        limit_s = max(runner.timeout_s, _MARGIN * expected_s)
        self._virtual_s = max(self._virtual_s, member.virtual_s)
        member.virtual_s = self._virtual_s + expected_s / runner.share
        member.running += 1
        return _Run(member, batch, now, expected_s, limit_s, now, runner.cancellations)

    def _run_batches(self, stream: _Stream) -> None:
        """Run batches, in the thread of a stream, until there is none or a run fails."""
        ended = stream.ended
        try:
            run = self._take(stream, has_run=False)
            while run is not None:
                error = error_of(run.member.runner.run, run.batch)
                if error is not None:
                    self._loop.call_soon_threadsafe(_complete, ended, error)
                    return
                run = self._take(stream, has_run=True)
        except Exception as defect:  # noqa: BLE001 - the event loop raises it
            self._loop.call_soon_threadsafe(_fail, ended, defect)

    def _wake_after(self, seconds: float) -> None:
        """Wake an idle stream after some seconds, or earlier."""

        async def wake() -> None:
            await self.clock.wait(self._loop.create_future(), seconds)
            self._retry = None
            self.wake()

        # A stream that is woken too early begins a further wait.
        if self._retry is None and self._supervisors:
            self._retry = self._loop.create_task(wake(), name="retry")

    async def _run_again(
        self,
        stream: _Stream,
        failed: _Run,
        work: Callable[..., BaseException | None],
        *arguments: object,
    ) -> Failure | None:
        """Begin another run of a failed batch; see `RunInThread`."""
        cancellations = failed.member.runner.cancellations
        stream.run = replace(failed, began=self.clock.now(), cancellations=cancellations)
        stream.ended = ended = self._loop.create_future()

        def run() -> None:
            try:
                error = work(*arguments)
            except Exception as defect:  # noqa: BLE001 - the event loop raises it
                self._loop.call_soon_threadsafe(_fail, ended, defect)
            else:
                self._loop.call_soon_threadsafe(_complete, ended, error)

        stream.thread.submit(run)
        return await self._failure(stream)

    async def _failure(self, stream: _Stream) -> Failure | None:
        """Wait for the end of a stream's runs, and apply the time limit to each of them.

        Returns:
            How a run failed; None: another run of a failed batch has not.

        Raises:
            TimeoutError: A run did not return, even after its cancellation.
        """
        ended = stream.ended
        took_too_long = False
        while not ended.done():
            run = stream.run
            looked_at = None if run is None else ref(run)
            # A run that begins meanwhile has at least the shortest of these limits.
            wait_s = min((own.runner.timeout_s for own in self._members), default=_CANCEL_S)
            left_s = inf if run is None else run.began + run.limit_s - self.clock.now()
            del run  # it would keep the batch and its model in memory after its end
            await self.clock.wait(ended, min(wait_s, left_s))
            run = stream.run
            if ended.done() or run is None or left_s > wait_s or ref(run) != looked_at:
                continue
            run.member.runner.cancel()
            await self.clock.wait(ended, _CANCEL_S)
            with self._lock:
                took_too_long = stream.run is run
                if took_too_long and not ended.done():
                    self._streams.discard(stream)
                    raise TimeoutError(f"a batch did not return within {run.limit_s:g} s")
        error = await ended
        run = stream.run  # that of the error; the thread may have begun it since the last look
        if error is None or run is None:
            return None
        is_own = took_too_long or run.cancellations == run.member.runner.cancellations
        return Failure(error, is_own)


def error_of(work: Callable[..., object], *arguments: object) -> BaseException | None:
    """Call a function, and return the error that it raises, if any."""
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException
        return error
    return None


def _complete(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():
        ended.set_result(error)


def _fail(ended: asyncio.Future[BaseException | None], defect: Exception) -> None:
    if not ended.done():
        ended.set_exception(defect)
