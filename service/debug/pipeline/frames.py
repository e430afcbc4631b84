"""Message frames between the service and its gradient process.

A frame is the length of its body, as a big-endian integer of four bytes, followed by the body: a
job or reply in JSON, or an array or file that belongs to a reply. Pickle is not used, because
unpickling can execute code chosen by the sender.
"""

import asyncio
from typing import IO

_LENGTH_BYTES = 4


def frame(body: bytes) -> bytes:
    """Return the frame of a body: the length of the body, then the body."""
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
