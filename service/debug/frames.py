"""Frames between the service and its gradient process: four bytes of length, then JSON.

Never pickles: whoever writes a pickle decides what its reader executes.
"""

import asyncio
from typing import IO, Any

import orjson

_LENGTH_BYTES = 4
# So many numbers that JSON has not are told of, one by one.
MOST_NONFINITE = 64

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return a message as a frame. Numbers that are not finite become null."""
    body = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def receive(stream: asyncio.StreamReader) -> Message:
    """Return the next message of a stream.

    Raises:
        asyncio.IncompleteReadError: The other end has closed it.
    """
    length = int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big")
    message: Message = orjson.loads(await stream.readexactly(length))
    return message


def read(file: IO[bytes]) -> Message | None:
    """Return the next message of a file, or None at its end."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    message: Message = orjson.loads(file.read(int.from_bytes(length, "big")))
    return message
