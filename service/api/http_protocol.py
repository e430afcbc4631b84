"""HTTP/1.1 on one connection: uvicorn's protocol, which parses with llhttp, made strict.

- One request at a time: input behind a complete request stays unparsed, in a bounded buffer, until
  the response has been sent. uvicorn parses as many pipelined requests as arrive.
- `Upgrade` is ignored, as RFC 9110 (7.8) asks of a server that offers none. httptools stops at such
  a request and drops its body, or takes a body in a later segment for the next request.
- A request that breaks the protocol reaches the application with `PROTOCOL_ERROR` in its state,
  so that it is answered in turn, counted and logged as any other. Nothing behind it is parsed.
- A response to a request whose body has not arrived in full closes the connection. The rest of the
  body is discarded within bounds first: closing with unread input makes the kernel send a reset,
  which may reach the client before the response.
- Trailers are ignored. uvicorn appends them to the headers.
- Head and body of a response leave in one write: a process killed between two writes would leave
  half a response behind, which no gateway can retry.
"""

import asyncio
import urllib.parse
from typing import Any, ClassVar, cast

import httptools
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api.errors import HeadTooLarge, Malformed
from service.inference.errors import VitrineError

# Key in the `state` of an ASGI scope: the VitrineError to answer with.
PROTOCOL_ERROR = "protocol_error"

# Input since the latest piece of a body: a head, trailers, chunk extensions.
_MAX_OVERHEAD_BYTES = 65_536
# Unparsed input behind the request in flight; beyond it the socket is not read.
_MAX_HELD_BYTES = 65_536
# Input discarded before a connection with an unread body is closed: twice the largest body allowed
# by default, so that its client can finish sending and read the response.
_LINGER_BYTES = 2**23
_LINGER_S = 2.0
# Connections whose rest is read at a time; that of others stays unread, and costs nothing.
_MAX_DRAINED = 8
# Input parsed at once, and the least of a chunked body: at most that much of a pipelined request
# behind the body is parsed with it.
_PART_BYTES = 16_384
_CHUNKED_PART_BYTES = 1024

_CODING = b"transfer-encoding"
_END_OF_HEAD = b"\r\n\r\n"
_NOT_HTTP = "the input is not an HTTP/1.1 request"


class CoalescingTransport(asyncio.Transport):
    """Sends what is written within one turn of the event loop in one piece.

    Args:
        transport: Transport of the connection.
        protocol: Told to close in place of the transport.
    """

    def __init__(self, transport: asyncio.Transport, protocol: "HttpProtocol") -> None:
        super().__init__()
        self._transport = transport
        self._protocol = protocol
        self._pending: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data together with whatever else is written before the loop's next turn."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(data)

    def flush(self) -> None:
        """Send pending data now."""
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)

    def close(self) -> None:
        """Close the connection once pending data has been sent; see `HttpProtocol.close`."""
        self.flush()
        self._protocol.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._protocol.is_lingering or self._transport.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection over."""
        self._transport.set_protocol(protocol)


class _FlowControl(FlowControl):
    """Reads the connection no further while enough unparsed input is held."""

    def __init__(self, transport: asyncio.Transport, protocol: "HttpProtocol") -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.holds_enough:
            super().resume_reading()


class _Cycle(RequestResponseCycle):
    """A request and its response."""

    async def send(self, message: ASGISendEvent) -> None:
        if self.more_body and not self.response_started:
            self.keep_alive = False
        await super().send(message)

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        error: VitrineError | None = self.scope["state"].get(PROTOCOL_ERROR)
        if error is not None and message["type"] == "http.request":
            raise error
        return message


class HttpProtocol(HttpToolsProtocol):
    """Serves one connection; see the module."""

    _drained: ClassVar[set["HttpProtocol"]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._connection: asyncio.Transport | None = None
        self._held = bytearray()
        self._overhead_bytes = 0
        self._body_bytes_left: int | None = 0  # None: chunked
        self._in_head = True
        self._is_refused = False
        self._linger: asyncio.TimerHandle | None = None
        self._discarded_bytes = 0

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to serve a connection."""
        super().connection_made(transport)
        self._connection = transport
        self.transport = CoalescingTransport(transport, self)
        self.flow = _FlowControl(transport, self)

    def data_received(self, data: bytes) -> None:
        """Parse the data, as far as no request is in flight."""
        self._unset_keepalive_if_required()
        if self._is_refused or self.is_lingering:
            self._discard(len(data))
        else:
            self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that its client has disconnected."""
        self._held.clear()
        self._drained.discard(self)
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)

    # What uvicorn's server and request cycle call.

    def shutdown(self) -> None:
        """Close at once, or after the response in flight."""
        if self.is_lingering:
            self._abandon()
        else:
            super().shutdown()

    def close(self) -> None:
        """Close the connection, after a bounded rest of the input if it is incomplete."""
        assert self._connection is not None  # noqa: S101 - it was made
        if self._connection.is_closing() or self.is_lingering:
            return
        is_body_unread = self.cycle is not None and self.cycle.more_body
        if not (is_body_unread or self._held or self._is_refused):
            self._connection.close()
            return
        self._held.clear()
        if self.cycle is not None:
            self.cycle.body.clear()
        self._linger = self.loop.call_later(_LINGER_S, self._abandon)
        if self._connection.can_write_eof():
            self._connection.write_eof()
        if len(self._drained) < _MAX_DRAINED:
            self._drained.add(self)
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    @property
    def is_lingering(self) -> bool:
        """Whether the last response has been sent and the rest of the input is discarded."""
        return self._linger is not None

    @property
    def holds_enough(self) -> bool:
        """Whether no more unparsed input may be held."""
        return len(self._held) > _MAX_HELD_BYTES

    def on_response_complete(self) -> None:
        """Start the next request that has arrived meanwhile."""
        held, self._held = bytes(self._held), bytearray()
        super().on_response_complete()
        if held and not self.transport.is_closing():
            self.data_received(held)

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind the one in flight."""
        if self.parser.should_upgrade():
            return  # it is parsed again without its Upgrade header
        version = self.parser.get_http_version()
        target = httptools.parse_url(self.url)
        raw_path = target.path or b"/"
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(raw_path.decode("ascii"))
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = target.query or b""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            self._set_error(Malformed(_NOT_HTTP))
        elif hosts > 1 or (hosts == 0 and version == "1.1"):
            self._set_error(Malformed(f"the request has {hosts} Host headers; 1 is required"))
        elif any(name == _CODING and value.lower() != b"chunked" for name, value in self.headers):
            self._set_error(Malformed("the transfer coding must be chunked"))
        elif target.schema is not None:  # RFC 9112, 3.2.2: the target's host counts
            self._replace_host(target)
        self._in_head = False
        self._overhead_bytes = 0
        self._body_bytes_left = self._declared_bytes()
        is_valid = PROTOCOL_ERROR not in self.scope["state"]
        keep_alive = is_valid and version != "1.0" and self.parser.should_keep_alive()
        self._begin(self._new_cycle(keep_alive))

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body to the application."""
        self._overhead_bytes = 0
        if self._body_bytes_left:
            self._body_bytes_left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Tell the application that the body is complete."""
        if self.parser.should_upgrade():
            return
        self._body_bytes_left = 0
        self._overhead_bytes = 0
        super().on_message_complete()

    # Parsing.

    @property
    def _is_answering(self) -> bool:
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _hold(self, data: bytes) -> None:
        self._held += data
        if self.holds_enough:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of a request, and hold what is behind it."""
        start = 0
        while start < len(data) and not self._is_answering:
            end = self._end_of_part(data, start)
            self._overhead_bytes += end - start
            if self._overhead_bytes > _MAX_OVERHEAD_BYTES and not self._body_bytes_left:
                self._refuse(
                    HeadTooLarge(f"the head of the request exceeds {_MAX_OVERHEAD_BYTES} bytes")
                )
                return
            try:
                self.parser.feed_data(data if end - start == len(data) else data[start:end])
            except httptools.HttpParserUpgrade as upgrade:
                end = start + upgrade.args[0]
                if not self._parse_without_upgrade():
                    return
            except httptools.HttpParserError:
                self._refuse(Malformed(_NOT_HTTP))
                return
            start = end
        if start < len(data):
            self._hold(data[start:])

    def _end_of_part(self, data: bytes, start: int) -> int:
        """Return where to stop parsing, so that no second request is begun."""
        limit = min(start + _PART_BYTES, len(data))
        if self._body_bytes_left:
            return min(start + self._body_bytes_left, limit)
        # Heads and chunked bodies both end in an empty line.
        least = _CHUNKED_PART_BYTES if self._body_bytes_left is None else 0
        end = data.find(_END_OF_HEAD, start + least, limit)
        return limit if end < 0 else end + len(_END_OF_HEAD)

    def _parse_without_upgrade(self) -> bool:
        """Parse the head once more, without its Upgrade header; return whether it is a request."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(Malformed("CONNECT is not supported"))
            return False
        head = [method + b" " + self.url + b" HTTP/" + version.encode()]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            self.parser.feed_data(b"\r\n".join(head) + _END_OF_HEAD)
        except httptools.HttpParserError:
            self._refuse(Malformed(_NOT_HTTP))
            return False
        return True

    def _declared_bytes(self) -> int | None:
        """Return the bytes of the body, or None if it is chunked."""
        for name, value in self.headers:
            if name == b"content-length":
                return int(value)
            if name == _CODING:
                return None
        return 0

    def _replace_host(self, target: Any) -> None:  # noqa: ANN401 - untyped in httptools
        port = b"" if target.port is None else b":%d" % target.port
        self.headers[:] = [header for header in self.headers if header[0] != b"host"]
        self.headers.append((b"host", target.host + port))

    # Requests and refusals.

    def _new_cycle(self, keep_alive: bool) -> _Cycle:
        return _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _begin(self, cycle: _Cycle) -> None:
        in_flight, self.cycle = self.cycle, cycle
        if in_flight is None or in_flight.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))

    def _set_error(self, error: VitrineError) -> None:
        self.scope["state"][PROTOCOL_ERROR] = error

    def _refuse(self, error: VitrineError) -> None:
        """Answer a request that breaks the protocol, in turn, and discard all further input."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            self._set_error(error)
            cycle.message_event.set()
            return
        self.on_message_begin()
        self.scope |= {"method": "GET", "path": "", "raw_path": b"", "query_string": b""}
        self._set_error(error)
        cycle = self._new_cycle(keep_alive=False)
        cycle.more_body = False
        self._begin(cycle)

    def _discard(self, count: int) -> None:
        self._discarded_bytes += count
        if self._discarded_bytes > _LINGER_BYTES:
            if self.is_lingering:
                self._abandon()
            else:
                self.flow.pause_reading()

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()


class BoundedReads(asyncio.BufferedProtocol):
    """Serves one connection, which it reads 16 KiB at a time.

    By itself uvloop reads 256 KiB of each connection before the application has a turn to refuse
    its body: 60 MB more at the peak of a thousand large bodies.

    Args:
        arguments: Those of `HttpProtocol`.
    """

    # One for all connections: what is read is copied before the event loop reads more.
    _buffer = memoryview(bytearray(16_384))

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 - uvicorn's own
        self._protocol = HttpProtocol(**arguments)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return where to read into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand over what was read."""
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve a connection."""
        self._protocol.connection_made(cast(asyncio.Transport, transport))

    def eof_received(self) -> None:
        """Let the connection be closed."""
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that its client has disconnected."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Hold the application up until the client has read more."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Let the application write again."""
        self._protocol.resume_writing()
