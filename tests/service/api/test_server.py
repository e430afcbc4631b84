"""Head and body of a response leave in one piece."""

import asyncio
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from service.api.http_protocol import CoalescingTransport, HttpProtocol


class Wire(asyncio.Transport):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False
        self.is_read = True

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written.append(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def protocol_of(wire: Wire, app: ASGIApp) -> HttpProtocol:
    config = uvicorn.Config(app, log_config=None)
    protocol = HttpProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(wire)
    return protocol


async def no_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Serve nothing."""


def coalescing(wire: Wire) -> CoalescingTransport:
    """A transport whose protocol has nothing left to read."""
    protocol = protocol_of(wire, no_app)
    assert isinstance(protocol.transport, CoalescingTransport)
    return protocol.transport


async def test_head_and_body_are_written_at_once_and_in_order() -> None:
    wire = Wire()
    joined = coalescing(wire)
    for _ in range(2):
        joined.write(b"head ")
        joined.write(b"body")
        await asyncio.sleep(0)
    assert wire.written == [b"head body", b"head body"]


async def test_what_was_written_before_it_is_closed_arrives_and_nothing_after() -> None:
    wire = Wire()
    joined = coalescing(wire)
    joined.write(b"last")
    joined.close()
    assert (wire.written, joined.is_closing()) == ([b"last"], True)
    joined.write(b"late")
    await asyncio.sleep(0)
    assert wire.written == [b"last"]


async def test_a_connection_is_not_read_while_enough_input_is_held() -> None:
    begun: asyncio.Queue[str] = asyncio.Queue()
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begun.put(scope["path"])
        while (await receive()).get("more_body"):
            pass
        receiving = asyncio.ensure_future(receive())  # as who waits for a disconnect
        await go_on.wait()
        receiving.cancel()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    wire = Wire()
    protocol = protocol_of(wire, app)
    protocol.data_received(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await begun.get() == "/1"
    many = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(2, 3000))
    protocol.data_received(many[:60_000])
    assert wire.is_read
    protocol.data_received(many[60_000:])
    assert not wire.is_read
    await asyncio.sleep(0)
    assert begun.empty()
    go_on.set()
    assert [await begun.get() for _ in range(2, 3000)] == [f"/{i}" for i in range(2, 3000)]
    assert wire.is_read
    protocol.connection_lost(None)
