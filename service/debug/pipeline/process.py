"""The gradient process: a child process that the service starts, kills and restarts."""

import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from models.artifact import Artifact
from service.debug.pipeline import frames
from service.debug.pipeline.messages import (
    REPLY,
    Completed,
    Done,
    Job,
    Opened,
    Refused,
    Reply,
    encode_job,
)
from service.inference.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    Overloaded,
    VitrineError,
)
from service.logs import LogFormat
from service.settings import DebugSettings

log = logging.getLogger("vitrine")

# OpenMP's threads sleep while they wait for each other. On a busy host, they would spend the little
# CPU time that the process gets on spinning: a job of 0.02 s then needs more than 0.7 s.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
# Timeout in seconds for startup: importing torch and loading the weights.
_START_S = 120.0
# Share of a CPU below which a job is slow because others keep the CPUs busy.
_BUSY = 0.5


def worker_command(
    artifact: Path, device: str, log: LogFormat, verify: Path | None = None
) -> list[str]:
    """Return the command that starts the gradient process for an artifact.

    With `verify`, the process verifies the signature again: it reads the manifest for itself.
    """
    # -P keeps Python from importing a folder named "models" in the current directory.
    command = [sys.executable, "-P", "-m", "service.debug.child", str(artifact), device, log]
    return command if verify is None else [*command, str(verify)]


class GradientProcess:
    """A child process that starts on first use and runs one job at a time.

    The process has the reference model of one artifact. A job for another one restarts it.

    A job in torch cannot be cancelled. So the process is killed if a job exceeds its deadline or
    the client of the job disconnects. The next job starts a new process. A start belongs to no
    caller: it goes on for the next one if its first caller's deadline passes.

    Args:
        command: Returns the command that starts the process for an artifact; see `worker_command`.
        settings: Settings of the gradient routes.

    Attributes:
        artifact: Artifact of the latest process; None before the first one.
    """

    def __init__(self, command: Callable[[Path], Sequence[str]], settings: DebugSettings) -> None:
        self._command = command
        self._settings = settings
        self._turn = asyncio.Lock()
        self._callers = 0
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self.artifact: Artifact | None = None
        self._jobs = 0
        self._opened: Opened | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None if the process is not running."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def run(self, artifact: Artifact, job: Job) -> Completed:
        """Run a job on the reference model of an artifact, and return its result, vectors and file.

        Raises:
            Overloaded: `settings.max_waiting` callers are already queued.
            NotReady: The process could not be started, could not load the reference model or died
                during the job, the artifact was replaced, or the service is stopping.
            DeadlineExceeded: The job exceeded `settings.deadline_s`.
            InvalidInput: A field of the job is invalid.
            VitrineError: The job raised an unexpected exception.
        """
        async with self._own_turn():
            reply = await self._exchange(artifact, job)
        match reply:
            case Completed():
                return reply
            case Refused():
                raise InvalidInput(reply.detail, code=reply.code, pointer=reply.pointer)
        raise VitrineError("the gradient job failed; see the log", code="gradients_failed")

    async def start(self, artifact: Artifact) -> Opened:
        """Start the process for an artifact, and return its description.

        Raises:
            Overloaded: The process must be started, and `settings.max_waiting` callers are already
                queued.
            NotReady: The process could not be started or could not load the reference model, the
                artifact was replaced, or the service is stopping.
        """
        # Does not wait for the current job: a process that runs jobs has sent its description.
        if self.pid is None or self._opened is None or self.artifact != artifact:
            async with self._own_turn():
                await self._ready_process(artifact)
        assert self._opened is not None  # noqa: S101 - `_ready_process` waits for it
        return self._opened

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        """Wait for the callers before this one, at most `settings.max_waiting`."""
        if self._callers > self._settings.max_waiting:
            raise Overloaded("the gradient process is busy; try again later", code="busy")
        self._callers += 1
        try:
            async with self._turn:
                yield
        finally:
            self._callers -= 1

    async def close(self) -> None:
        """Kill the process. Later jobs raise `NotReady` instead of starting a new process."""
        self._closed = True
        await self._kill()

    async def _kill(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        process, self._process, self._opened, self._jobs = self._process, None, None, 0
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _exchange(self, artifact: Artifact, job: Job) -> Reply | Completed:
        process = await self._ready_process(artifact)
        assert process.stdin is not None  # noqa: S101 - it was started with pipes
        assert process.stdout is not None  # noqa: S101
        used_before_s = cpu_s(process.pid)
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                process.stdin.write(frames.frame(encode_job(job)))
                await process.stdin.drain()
                reply: Reply | Completed = REPLY.validate_json(await frames.receive(process.stdout))
                if isinstance(reply, Done):
                    vectors = await frames.receive(process.stdout)
                    reply = Completed(reply, vectors, await frames.receive(process.stdout))
        except TimeoutError:
            used_s = cpu_s(process.pid) - used_before_s
            await self._kill()
            raise _job_too_long(self._settings.deadline_s, used_s) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._kill()
            log.error("the gradient process died with exit status %s", process.returncode)
            raise _unavailable(
                "the gradient process died; the next request starts a new one"
            ) from None
        except BaseException:
            # Cancellation or a malformed reply. The next job would read the rest of this reply.
            await self._kill()
            raise
        self._jobs += 1
        # A new process starts with the next job, so memory leaks do not add up.
        if self._jobs >= self._settings.max_jobs:
            await self._kill()
        return reply

    async def _ready_process(self, artifact: Artifact) -> asyncio.subprocess.Process:
        """Return the process for an artifact, once it has loaded the reference model."""
        starting = self._starting
        has_ended = starting is not None and starting.done() and self.pid is None
        if starting is None or self.artifact != artifact or has_ended:
            await self._kill()
            if self._closed:
                raise _unavailable("the service is stopping")
            self.artifact = artifact
            starting = self._starting = asyncio.create_task(self._start(artifact))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():  # by `close`
                raise _unavailable("the service is stopping") from None
            raise  # the caller is cancelled, and the start goes on

    async def _start(self, artifact: Artifact) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(artifact.path),
                stdin=pipe,
                stdout=pipe,
                env=_ENVIRONMENT | os.environ,
            )
        except OSError as error:  # for example, no free file descriptor or memory
            log.error("the gradient process could not be started: %s", error)
            raise _unavailable("the gradient process could not be started; see the log") from None
        self._process = process
        assert process.stdout is not None  # noqa: S101 - it was started with a pipe
        try:
            async with asyncio.timeout(_START_S):
                opened = REPLY.validate_json(await frames.receive(process.stdout))
            if not isinstance(opened, Opened):
                raise _unavailable(
                    "the gradient process could not load the reference model; see the log"
                )
            # The served version stays in memory when its folder is replaced.
            if opened.manifest_sha256 != artifact.manifest.sha256:
                raise _unavailable(
                    "the folder of the served version has another artifact, whose gradients would "
                    "be those of another model"
                )
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            await process.wait()
            log.error("the gradient process ended during its start: %s", type(error).__name__)
            if isinstance(error, (TimeoutError, asyncio.IncompleteReadError)):
                raise _unavailable(
                    "the gradient process timed out or exited during startup; see the log"
                ) from None
            raise
        self._opened = opened
        log.info("the gradient process %d has loaded the reference model", process.pid)
        return process


def _unavailable(detail: str) -> NotReady:
    return NotReady(detail, code="gradients_unavailable")


def _job_too_long(deadline_s: float, used_s: float) -> DeadlineExceeded:
    """Return the error of a job beyond its deadline, which says whether the host was too busy."""
    exceeded = f"the job exceeded its deadline of {deadline_s:g} s"
    if used_s < _BUSY * deadline_s:
        return DeadlineExceeded(
            f"{exceeded}; the host was busy, and the job got {used_s:.1f} s of CPU time"
        )
    return DeadlineExceeded(
        f"{exceeded}; use fewer or shorter texts, fewer evaluations or fewer samples"
    )


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; NaN if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # macOS has no /proc
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
