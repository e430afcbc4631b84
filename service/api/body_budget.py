"""The memory that request bodies in flight may take together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.inference.errors import Overloaded

# Maximum size in bytes of a body that does not count: the server buffers this much for every
# connection anyway.
FREE_BYTES = 65_536


class BodyBudget:
    """Limits the total memory of request bodies that are being read and parsed.

    Without a limit, every connection could keep a large incomplete body in memory until the
    timeout.

    Args:
        limit: Maximum total size, in bytes, of all bodies larger than 64 KiB. A single body may
            exceed it while no other is reserved.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    @property
    def used(self) -> int:
        """Total size of the reservations, in bytes."""
        return self._used

    @contextmanager
    def reservation(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that raises the reservation of one body to a number of bytes.

        The function raises `Overloaded` if the bodies together would exceed the budget. The
        reservation is released at the end of the context.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            more = size - reserved
            if size <= FREE_BYTES or more <= 0:
                return
            if self._used > reserved and self._used + more > self._limit:
                raise Overloaded("too many large request bodies are being read; try again later")
            self._used += more
            reserved = size

        try:
            yield reserve
        finally:
            self._used -= reserved
