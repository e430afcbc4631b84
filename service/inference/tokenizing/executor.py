"""An executor that calls functions in threads, and limits the total size of concurrent work."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class ExecutorFull(Exception):
    """The work would exceed the executor's limit on concurrent work."""


class BoundedExecutor:
    """Calls functions in threads, and refuses calls beyond a limit on concurrent work.

    Args:
        limit: Maximum total size of the work in progress, in a unit that the callers choose. An
            idle executor accepts work of any size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Call `work` in a thread and return its result.

        A thread cannot be stopped, so work counts towards the limit until its thread has finished,
        even if the caller was cancelled earlier.

        Args:
            work: Function to call.
            size: Size of the work, in the unit of the limit.

        Raises:
            ExecutorFull: The work in progress and this work would exceed the limit together.
        """
        if self._size and self._size + size > self._limit:
            raise ExecutorFull
        self._size += size
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(lambda _: self._release(thread, size))
        return await asyncio.shield(thread)

    def _release(self, thread: asyncio.Future[Result], size: int) -> None:
        self._size -= size
        if not thread.cancelled():
            thread.exception()  # retrieved: a cancelled caller gets no other error
