"""Frames between the service and its gradient process: four bytes of length, then JSON.

Never pickles: whoever writes a pickle decides what its reader executes.
"""

import asyncio
from typing import IO

_LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    """Return a body with its length before it."""
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def receive(stream: asyncio.StreamReader) -> bytes:
    """Return the next body of a stream.

    Raises:
        asyncio.IncompleteReadError: The other end has closed it.
    """
    length = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big")
    return await stream.readexactly(length)


def read(file: IO[bytes]) -> bytes | None:
    """Return the next body of a file, or None at its end."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    return file.read(int.from_bytes(length, "big"))
