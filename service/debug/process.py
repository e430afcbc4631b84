"""The service's end of its gradient process, which it starts, watches, kills and replaces."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from service.debug import frames
from service.debug.frames import Message
from service.errors import DeadlineExceeded, InvalidInput, NotReady, Overloaded, ServiceError
from service.logs import LogFormat
from service.settings import DebugSettings

log = logging.getLogger("vitrine")

# To import torch and read the weights.
_START_S = 120.0


def worker_command(artifact: Path, device: str, log: LogFormat) -> list[str]:
    """Return what starts the gradient process of an artifact."""
    # -P: a folder named models in the current directory is not ours.
    return [sys.executable, "-P", "-m", "service.debug.worker", str(artifact), device, log]


class GradientProcess:
    """A child process that is there from its first job on, and runs one job at a time.

    A job in torch cannot be stopped, so the process is killed when its deadline has passed or its
    client has gone; the next job gets a new one.

    Args:
        command: Starts it; see `worker_command`.
        settings: How many may wait, for how long, and after how many jobs it is replaced.
    """

    def __init__(self, command: Sequence[str], settings: DebugSettings) -> None:
        self._command = command
        self._settings = settings
        self._turn = asyncio.Lock()
        self._callers = 0
        self._process: asyncio.subprocess.Process | None = None
        self._jobs = 0
        self._opened: Message = {}
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def run(self, job: Message) -> Message:
        """Return the answer to a job, `{"answer", "nonfinite", "vectors", "wall_ms"}`.

        Raises:
            Overloaded: As many wait already as may.
            NotReady: The process cannot be started, or it died.
            DeadlineExceeded: The job took too long.
            InvalidInput: The twin cannot do what was asked.
            ServiceError: The job failed.
        """
        if self._callers > self._settings.max_waiting:
            raise Overloaded("the gradient process is busy; try again later", code="busy")
        self._callers += 1
        try:
            async with self._turn:
                reply = await self._exchange(job)
        finally:
            self._callers -= 1
        if "refused" in reply:
            refused = reply["refused"]
            raise InvalidInput(refused["detail"], code=refused["code"], pointer=refused["field"])
        if "failed" in reply:
            raise ServiceError(reply["failed"], code="gradients_failed")
        return reply

    async def start(self) -> Message:
        """Start the process if it does not run, and return what it says of its twin.

        Raises:
            NotReady: It cannot be started.
        """
        if self.pid is None:  # else it may be busy, and need not be asked
            async with self._turn:
                await self._running()
        return self._opened

    async def close(self) -> None:
        """End the process for good, whatever it does."""
        self._closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process, self._jobs = self._process, None, 0
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _exchange(self, job: Message) -> Message:
        process = await self._running()
        assert process.stdin is not None  # noqa: S101 - it was started with pipes
        assert process.stdout is not None  # noqa: S101
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                process.stdin.write(frames.encode(job))
                await process.stdin.drain()
                reply = await frames.receive(process.stdout)
        except TimeoutError:
            await self._kill()
            raise DeadlineExceeded(
                f"the job took longer than {self._settings.deadline_s:g} s; ask for less"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._kill()
            log.error("the gradient process died, with status %s", process.returncode)
            raise NotReady(
                "the gradient process died; the next request starts a new one",
                code="gradients_unavailable",
            ) from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        self._jobs += 1
        # Before memory that a job has left behind can add up.
        if self._jobs >= self._settings.max_jobs:
            await self._kill()
        return reply

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self.pid is not None:
            return self._process
        if self._closed:
            raise NotReady("the service is stopping", code="gradients_unavailable")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe)
        self._process, self._jobs = process, 0
        assert process.stdout is not None  # noqa: S101 - it was started with a pipe
        try:
            async with asyncio.timeout(_START_S):
                opened = await frames.receive(process.stdout)
        except (TimeoutError, asyncio.IncompleteReadError):
            await self._kill()
            raise NotReady(
                "the gradient process did not start; its log says why",
                code="gradients_unavailable",
            ) from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        if "failed" in opened:
            await self._kill()
            raise NotReady(
                "gradients cannot be taken here; the log says why", code="gradients_unavailable"
            )
        self._opened = opened
        log.info("the gradient process %d has opened the twin", process.pid)
        return process
