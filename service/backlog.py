"""Long work in threads, of which so much is taken and no more."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class BacklogFull(Exception):
    """So much is under way that more would only wait, and take memory meanwhile."""


class Backlog:
    """Work that is under way in threads, or waits for one.

    Args:
        most: The sizes of all of it together; work that finds none is taken whatever its size.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Return what the work returns.

        It counts until its thread is done with it, even if its caller has left by then: a thread
        cannot be stopped.

        Raises:
            BacklogFull: There is no room for it.
        """
        if self._size and self._size + size > self._most:
            raise BacklogFull
        self._size += size
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(lambda _: self._leave(size))
        return await asyncio.shield(thread)

    def _leave(self, size: int) -> None:
        self._size -= size
