"""The HTTP protocol on a transport without a socket."""

import asyncio
from collections.abc import Iterable

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from service.api import http_protocol
from service.api.deadline import cancel_on_disconnect
from service.api.http_protocol import CoalescingTransport, HttpProtocol
from tests.eventually import HANG_S, eventually_async


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


async def test_head_and_body_are_written_in_one_piece_and_in_order() -> None:
    wire = Wire()
    transport = coalescing(wire)
    for _ in range(2):
        transport.write(b"head ")
        transport.write(b"body")
        await asyncio.sleep(0)
    assert wire.written == [b"head body", b"head body"]


async def test_close_sends_pending_data_and_drops_later_writes() -> None:
    wire = Wire()
    transport = coalescing(wire)
    transport.write(b"last")
    transport.close()
    assert (wire.written, transport.is_closing()) == ([b"last"], True)
    transport.write(b"late")
    await asyncio.sleep(0)
    assert wire.written == [b"last"]


async def test_connection_is_not_read_while_pipelined_input_is_held() -> None:
    begun: asyncio.Queue[str] = asyncio.Queue()
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await begun.put(scope["path"])
        while (await receive()).get("more_body"):
            pass
        receiving = asyncio.ensure_future(receive())  # as a handler that waits for a disconnect
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


async def test_disconnect_is_seen_after_a_large_body() -> None:
    working = asyncio.Event()
    cancelled = asyncio.Event()

    async def work() -> None:
        working.set()
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        try:
            await cancel_on_disconnect(Request(scope, receive), work())
        except ClientDisconnect:
            cancelled.set()

    wire = Wire()
    protocol = protocol_of(wire, app)
    body = bytes(200_000)
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    protocol.data_received(head)
    await asyncio.sleep(0)  # the application waits for the body
    protocol.data_received(body)
    assert not wire.is_read
    async with asyncio.timeout(HANG_S):
        await working.wait()
    assert wire.is_read
    protocol.connection_lost(None)
    async with asyncio.timeout(HANG_S):
        await cancelled.wait()


async def test_connection_with_unread_body_is_closed_after_the_linger_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.0)
    wire = Wire()
    protocol = protocol_of(wire, refuse)
    protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    await eventually_async(lambda: wire.closed)
    assert protocol.is_lingering
