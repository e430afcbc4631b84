"""The HTTP/1.1 protocol of one connection: a stricter subclass of uvicorn's `HttpToolsProtocol`.

- One request at a time: input after a complete request stays unparsed, in a bounded buffer, until
  the response has been sent. uvicorn parses all pipelined requests as they arrive.
- `Upgrade` headers are ignored, as RFC 9110 (7.8) allows. By default httptools stops parsing after
  the head of a request with this header: it drops the body or, if the body arrives later, parses
  the body as the next request.
- A malformed request reaches the application, with its error in the `state` of the ASGI scope under
  the key `PROTOCOL_ERROR`. So responses stay in order, and the middleware counts and logs the
  request like any other. Input after a malformed request is not parsed.
- If a response is sent before the request body is complete, the connection is closed. A bounded
  amount of the remaining body is read and discarded first: closing with unread input makes the
  kernel send a TCP reset, which may reach the client before the response.
- Trailers are ignored, as RFC 9110 (6.5.1) allows. uvicorn appends them to the headers.
- A path that cannot be decoded, or has a control character, is malformed. uvicorn replaces invalid
  bytes, so that a gateway, which denies requests by path, would see another path than the routes.
- Head and body of a response are sent in one write: a process killed between two writes would leave
  half a response, which no gateway can retry.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast
from urllib.parse import unquote_to_bytes

import httptools
from starlette.types import Receive
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.api.errors import HeadTooLarge, Malformed
from service.inference.errors import VitrineError

# Key in the `state` of an ASGI scope: the VitrineError to respond with.
PROTOCOL_ERROR = "protocol_error"

# Maximum number of consecutive bytes without body data: a head, trailers or chunk extensions.
_MAX_OVERHEAD_BYTES = 65_536
# Size in bytes of the buffer of unparsed input after the request in flight. While the buffer is
# full, the socket is not read.
_MAX_HELD_BYTES = 65_536
# Limits on the input that is discarded before a connection with an unread body is closed, in bytes
# and in seconds. The limit in bytes is twice the default limit of a body, so that the client can
# finish sending and read the response.
_LINGER_BYTES = 2**23
_LINGER_S = 2.0
# Maximum number of closing connections whose remaining input is read and discarded. Further
# connections are not read: their input stays in the kernel.
_MAX_DRAINED = 8
# Maximum number of bytes per call of the parser, and minimum number per call in a chunked body. A
# call that parses the end of a chunked body can also parse the start of the next pipelined request.
_PART_BYTES = 16_384
_CHUNKED_PART_BYTES = 1024

_CODING = b"transfer-encoding"
_END_OF_HEAD = b"\r\n\r\n"
_NOT_HTTP = "the input is not an HTTP/1.1 request"
# The start of something else than a percent-encoding: RFC 3986, 2.1.
_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
# `$` in the pattern of a route matches before a newline too.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def decode_path(raw_path: bytes) -> str:
    """Return the percent-decoded path of a request.

    Raises:
        Malformed: The path has an invalid percent-encoding, is not UTF-8, or has a control
            character.
    """
    if _BAD_PERCENT.search(raw_path):
        raise Malformed("the path has a % that is not followed by two hexadecimal digits")
    try:
        path = unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        raise Malformed("the decoded path is not UTF-8") from None
    if _CONTROL.search(path):
        raise Malformed("the decoded path has a control character")
    return path


class CoalescingTransport(asyncio.Transport):
    """Transport that merges all writes of one event loop iteration into a single write.

    Args:
        transport: Transport of the connection.
        protocol: Protocol whose method `close` is called instead of the transport's.
    """

    def __init__(self, transport: asyncio.Transport, protocol: "HttpProtocol") -> None:
        super().__init__()
        self._transport = transport
        self._protocol = protocol
        self._pending: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data together with all other writes of this iteration of the event loop."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pending.append(data)

    def flush(self) -> None:
        """Send pending data now."""
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)

    def close(self) -> None:
        """Send pending data and close the connection; see `HttpProtocol.close`."""
        self.flush()
        self._protocol.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or closing."""
        return self._protocol.is_lingering or self._transport.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol of the underlying transport."""
        self._transport.set_protocol(protocol)


class _FlowControl(FlowControl):
    """Flow control that does not resume reading while the buffer of unparsed input is full."""

    def __init__(self, transport: asyncio.Transport, protocol: "HttpProtocol") -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.is_buffer_full:
            super().resume_reading()


class Cycle(RequestResponseCycle):
    """A request and its response.

    Attributes:
        on_disconnect: Called when the client disconnects before the end of the response.
    """

    on_disconnect: Callable[[], object] | None = None

    def watch(self, on_disconnect: Callable[[], object]) -> None:
        """Call the function if the client disconnects before the end of the response."""
        self.on_disconnect = on_disconnect
        # A large body has paused reading, and the end of a connection is seen only by reading.
        self.flow.resume_reading()

    def short_body(self, max_bytes: int) -> bytes | None:
        """Return the body if all of it has arrived, and it has at most `max_bytes`; else None."""
        is_whole = not (self.more_body or self.disconnected) and len(self.body) <= max_bytes
        return bytes(self.body) if is_whole else None

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the response; close the connection after it if the body is unread."""
        if self.more_body and not self.response_started:
            self.keep_alive = False
        await super().send(message)

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message of the request; raise the error of a malformed body."""
        message = await super().receive()
        error: VitrineError | None = self.scope["state"].get(PROTOCOL_ERROR)
        if error is not None and message["type"] == "http.request":
            raise error
        return message


def cycle_of(receive: Receive) -> Cycle | None:
    """Return the request whose messages `receive` returns; None for another HTTP protocol."""
    cycle = getattr(receive, "__self__", None)
    return cycle if isinstance(cycle, Cycle) else None


class HttpProtocol(HttpToolsProtocol):
    """Serves one connection; see the module docstring."""

    _drained: ClassVar[set["HttpProtocol"]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*args, **kwargs)
        self._connection: asyncio.Transport | None = None
        self._started: Cycle | None = None  # `cycle` can be the next request
        self._held = bytearray()
        self._overhead_bytes = 0
        self._body_bytes_left: int | None = 0  # None: the body is chunked
        self._is_refused = False
        self._linger: asyncio.TimerHandle | None = None
        self._discarded_bytes = 0

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to serve a connection."""
        super().connection_made(transport)
        self._connection = transport
        self.transport = CoalescingTransport(transport, self)
        self.flow = _FlowControl(transport, self)

    def data_received(self, data: bytes) -> None:
        """Parse the data up to the end of one request, and buffer the rest."""
        self._unset_keepalive_if_required()
        if self._is_refused or self.is_lingering:
            self._discard(len(data))
        else:
            self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that the client has disconnected."""
        self._held.clear()
        self._drained.discard(self)
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(exc)
        cycle = self._started
        if cycle is None or cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.on_disconnect is not None:
            cycle.on_disconnect()

    # Called by uvicorn's server and request cycle.

    def shutdown(self) -> None:
        """Close the connection now or, if a request is in flight, after its response."""
        if self.is_lingering:
            self._abandon()
        else:
            super().shutdown()

    def close(self) -> None:
        """Discard a bounded amount of remaining input, then close the connection."""
        assert self._connection is not None  # noqa: S101 - connection_made was called
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
        """Whether the last response has been sent and the remaining input is being discarded."""
        return self._linger is not None

    @property
    def is_buffer_full(self) -> bool:
        """Whether the buffer of unparsed input is full."""
        return len(self._held) > _MAX_HELD_BYTES

    def on_response_complete(self) -> None:
        """Start the next pipelined request, if one has arrived."""
        held, self._held = bytes(self._held), bytearray()
        super().on_response_complete()
        if held and not self.transport.is_closing():
            self.data_received(held)

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; white space after its value is not part of it: RFC 9110, 5.5."""
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind the request in flight."""
        if self.parser.should_upgrade():
            return  # the head is parsed again without its Upgrade header
        version = self.parser.get_http_version()
        target = httptools.parse_url(self.url)
        raw_path = target.path or b"/"
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = raw_path.decode("ascii")
        self.scope["raw_path"] = raw_path
        self.scope["query_string"] = target.query or b""
        try:
            self._read_head(version)
            self.scope["path"] = decode_path(raw_path)
        except Malformed as error:
            self._set_error(error)
        if target.schema is not None:  # absolute-form overrides Host: RFC 9112, 3.2.2
            self._replace_host(target)
        self.headers = []  # uvicorn adds trailers to this list, and not to the request's headers
        self._overhead_bytes = 0
        is_valid = PROTOCOL_ERROR not in self.scope["state"]
        keep_alive = is_valid and version != "1.0" and self.parser.should_keep_alive()
        self._begin(self._new_cycle(keep_alive))

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body to the application."""
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
        if self.is_buffer_full:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of one request, and buffer the input after it."""
        start = 0
        while start < len(data) and not self._is_answering:
            end = self._end_of_part(data, start)
            self._overhead_bytes += end - start
            if self._overhead_bytes > _MAX_OVERHEAD_BYTES and not self._body_bytes_left:
                self._refuse(
                    HeadTooLarge(
                        "the request line and headers, or the trailers, exceed "
                        f"{_MAX_OVERHEAD_BYTES} bytes"
                    )
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
        """Return the end index of the next part to parse.

        A part ends where a request can end, so that the next request stays unparsed.
        """
        limit = min(start + _PART_BYTES, len(data))
        if self._body_bytes_left:
            return min(start + self._body_bytes_left, limit)
        # Heads and chunked bodies both end with an empty line.
        least = _CHUNKED_PART_BYTES if self._body_bytes_left is None else 0
        end = data.find(_END_OF_HEAD, start + least, limit)
        return limit if end < 0 else end + len(_END_OF_HEAD)

    def _parse_without_upgrade(self) -> bool:
        """Parse the head again without its Upgrade header, and return whether the head is valid."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self._refuse(Malformed("the method CONNECT is not supported"))
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

    def _read_head(self, version: str) -> None:
        """Read the length of the body; raise `Malformed` if the head but its path is invalid."""
        hosts, is_chunked = 0, True
        self._body_bytes_left = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._body_bytes_left = int(value)
            elif name == _CODING:
                self._body_bytes_left = None
                is_chunked = is_chunked and value.lower() == b"chunked"
        if version not in ("1.0", "1.1"):
            raise Malformed(_NOT_HTTP)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise Malformed(f"the request has {hosts} Host headers; 1 is required")
        if not is_chunked:
            raise Malformed("the transfer coding must be chunked")
        if b"#" in self.url:  # a gateway may count it to the path: RFC 9112, 3.2
            raise Malformed("the request target has a fragment, which begins with #")

    def _replace_host(self, target: Any) -> None:  # noqa: ANN401 - untyped in httptools
        port = b"" if target.port is None else b":%d" % target.port
        # httptools removes the brackets of an IPv6 address.
        host = b"[%b]" % target.host if b":" in target.host else target.host
        self.headers[:] = [header for header in self.headers if header[0] != b"host"]
        self.headers.append((b"host", host + port))

    # Requests and refusals.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        assert isinstance(cycle, Cycle)  # noqa: S101 - as made by `_new_cycle`
        self._started = cycle
        super()._start_asgi_task(cycle, app)

    def _new_cycle(self, keep_alive: bool) -> Cycle:
        return Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            # HTTP/1.0 has no interim responses: RFC 9110, 10.1.1.
            expect_100_continue=self.expect_100_continue and self.scope["http_version"] != "1.0",
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _begin(self, cycle: Cycle) -> None:
        in_flight, self.cycle = self.cycle, cycle
        if in_flight is None or in_flight.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))

    def _set_error(self, error: VitrineError) -> None:
        self.scope["state"][PROTOCOL_ERROR] = error

    def _refuse(self, error: VitrineError) -> None:
        """Respond to a malformed request after all earlier responses, and discard further input."""
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
    """Serves one connection, with reads of at most 16 KiB from the socket.

    By default uvloop reads up to 256 KiB of each connection before the application can refuse the
    body. With a thousand large bodies, peak memory would be 60 MB higher.

    Args:
        arguments: Keyword arguments of `HttpProtocol`.
    """

    # One buffer for all connections: its content is copied before the event loop reads again.
    _buffer = memoryview(bytearray(16_384))

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 - uvicorn's own
        self._protocol = HttpProtocol(**arguments)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return the shared read buffer."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Copy the received bytes and pass them to the protocol."""
        self._protocol.data_received(bytes(self._buffer[:nbytes]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve a connection."""
        self._protocol.connection_made(cast(asyncio.Transport, transport))

    def eof_received(self) -> None:
        """Let asyncio close the connection after the client's EOF."""
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that the client has disconnected."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pause writes of the application until the client has read more."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Resume writes of the application."""
        self._protocol.resume_writing()
