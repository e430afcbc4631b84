"""Frames between the service and its gradient process: a four-byte length, then JSON.

JSON instead of pickle, because unpickling executes code that the sender chooses.
"""

import asyncio
from typing import IO

_LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    """Return a body prefixed with its length."""
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def receive(stream: asyncio.StreamReader) -> bytes:
    """Read the next frame of a stream and return its body.

    Raises:
        asyncio.IncompleteReadError: The sender closed the stream before the end of the frame.
    """
    length = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big")
    return await stream.readexactly(length)


def read(file: IO[bytes]) -> bytes | None:
    """Read the next frame of a file and return its body, or None at the end of the file."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    return file.read(int.from_bytes(length, "big"))
