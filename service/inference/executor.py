"""Work in threads, up to a total size."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class ExecutorFull(Exception):
    """The total size of the work in progress has reached its limit."""


class BoundedExecutor:
    """Runs work in threads and refuses work beyond a limit.

    Args:
        limit: Total size of the work in progress. Work that finds none is accepted at any size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Return the result of the work.

        A thread cannot be stopped: work counts until its thread has finished, even if its caller
        was cancelled before.

        Raises:
            ExecutorFull: The work does not fit.
        """
        if self._size and self._size + size > self._limit:
            raise ExecutorFull
        self._size += size
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(lambda _: self._release(size))
        return await asyncio.shield(thread)

    def _release(self, size: int) -> None:
        self._size -= size
