"""An answer leaves in one piece."""

import asyncio
from collections.abc import Iterable

from service.server import Joined


class Wire(asyncio.Transport):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written.append(b"".join(list_of_data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_head_and_body_are_written_at_once_and_in_order() -> None:
    wire = Wire()
    joined = Joined(wire)
    for _ in range(2):
        joined.write(b"head ")
        joined.write(b"body")
        await asyncio.sleep(0)
    assert wire.written == [b"head body", b"head body"]


async def test_what_was_written_before_it_is_closed_arrives_and_nothing_after() -> None:
    wire = Wire()
    joined = Joined(wire)
    joined.write(b"last")
    joined.close()
    assert (wire.written, joined.is_closing()) == ([b"last"], True)
    joined.write(b"late")
    await asyncio.sleep(0)
    assert wire.written == [b"last"]
