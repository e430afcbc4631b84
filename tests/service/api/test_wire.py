"""HTTP as bytes on a socket: one response for each request, and none for anything else."""

import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path

import httpx2
import pytest

from tests.eventually import eventually
from tests.service.api.raw_http import (
    BODY,
    CHUNKED,
    HOST,
    WEBSOCKET,
    chunked,
    chunks,
    get,
    head,
    post,
)
from tests.serving import PATIENCE_S, connect

pytestmark = pytest.mark.slow  # starts processes

GET = get()
H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIA\r\n"
)
# The service stops reading a long pipeline while nobody reads its responses.
MAX_AWAITED_BYTES = 65_536


@dataclass(frozen=True)
class Shape:
    """Segments to send, and the expected outcome.

    Attributes:
        statuses: Expected statuses of the responses, in order; 100 is "Continue".
        after: State of the connection afterwards: open for another request, closed, or waiting
            for the rest of a request.
    """

    segments: tuple[bytes, ...]
    statuses: tuple[int, ...]
    after: str = "open"


def opened(*statuses: int, of: tuple[bytes, ...]) -> Shape:
    return Shape(of, statuses)


def closed(*statuses: int, of: tuple[bytes, ...]) -> Shape:
    return Shape(of, statuses, "closed")


def waiting(*statuses: int, of: tuple[bytes, ...]) -> Shape:
    return Shape(of, statuses, "waiting")


SHAPES = {
    # Lengths.
    "POST with Content-Length": opened(200, of=(post(),)),
    "POST, head and body apart": opened(200, of=(head(), BODY)),
    "POST, byte by byte": opened(200, of=tuple(bytes([byte]) for byte in post())),
    "GET": opened(200, of=(GET,)),
    "GET with a body": opened(200, of=(get(headers=HOST + b"Content-Length: 3\r\n") + b"abc",)),
    "GET with a chunked body": opened(200, of=(get(headers=HOST + CHUNKED) + chunks(b"abc"),)),
    "GET, body apart": closed(200, of=(get(headers=HOST + b"Content-Length: 9\r\n"), b"abc")),
    "POST without a length": opened(400, of=(head(length=None),)),
    "POST with length 0": opened(400, of=(head(length=0),)),
    "body shorter than its length": waiting(of=(head(length=99) + BODY,)),
    "body longer than its length": closed(200, 400, of=(post() + b"xx\r\n\r\n",)),
    "Content-Length twice, equal": closed(400, of=(post(b"Content-Length: 15\r\n"),)),
    "Content-Length twice, different": closed(400, of=(post(b"Content-Length: 4\r\n"),)),
    "Content-Length with a sign": closed(400, of=(head(b"Content-Length: +15\r\n", None) + BODY,)),
    "Content-Length below 0": closed(400, of=(head(b"Content-Length: -1\r\n", None) + BODY,)),
    "Content-Length in hexadecimal": closed(
        400, of=(head(b"Content-Length: 0xf\r\n", None) + BODY,)
    ),
    "Content-Length of two values": closed(
        400, of=(head(b"Content-Length: 15, 15\r\n", None) + BODY,)
    ),
    "Content-Length empty": closed(400, of=(head(b"Content-Length: \r\n", None) + BODY,)),
    "Content-Length of 30 digits": closed(
        400, of=(head(b"Content-Length: " + b"9" * 30 + b"\r\n", None),)
    ),
    "Content-Length over the limit": closed(413, of=(head(length=5 * 2**20), b" " * 1000)),
    "Content-Length over the limit, sent in full": closed(
        413, of=(head(length=5 * 2**20) + b" " * 5 * 2**20,)
    ),
    "chunked over the limit": closed(413, of=(chunked(b" " * 5 * 2**20),)),
    # Chunks.
    "chunked": opened(200, of=(chunked(BODY),)),
    "chunked, chunk by chunk": opened(
        200, of=(head(CHUNKED, None), chunks(BODY[:5], end=b""), chunks(BODY[5:]))
    ),
    "chunked, one byte a chunk": opened(200, of=(chunked(*(bytes([byte]) for byte in BODY)),)),
    "chunked, no chunk": opened(400, of=(chunked(),)),
    "chunked, never ended": waiting(of=(chunked(BODY, end=b""),)),
    "chunked with an extension": opened(
        200, of=(head(CHUNKED, None) + b"f;a=b\r\n" + BODY + b"\r\n0\r\n\r\n",)
    ),
    "chunked with trailers": opened(200, of=(chunked(BODY, end=b"0\r\nX-A: b\r\n\r\n"),)),
    "chunked with a trailer that is a header here": opened(
        200, of=(chunked(BODY, end=b"0\r\nX-Request-Timeout-Ms: no\r\n\r\n"),)
    ),
    "chunked with endless trailers": closed(
        431, of=(chunked(BODY, end=b"0\r\nX: " + b"a" * 70_000), b"a" * 70_000)
    ),
    "chunked in capitals": opened(
        200, of=(head(b"TRANSFER-ENCODING: CHUNKED\r\n", None) + chunks(BODY),)
    ),
    "chunk size that is no number": closed(400, of=(head(CHUNKED, None) + b"zz\r\n",)),
    "chunk size that is no number, behind a chunk": closed(
        400, of=(head(CHUNKED, None), chunks(BODY[:5], end=b""), b"zz\r\n")
    ),
    "chunk size below 0": closed(400, of=(head(CHUNKED, None) + b"-1\r\n",)),
    "chunk size of 20 digits": closed(400, of=(head(CHUNKED, None) + b"f" * 20 + b"\r\n",)),
    "chunk size with 0x": closed(400, of=(head(CHUNKED, None) + b"0xf\r\n" + BODY,)),
    "chunk longer than its size": closed(400, of=(head(CHUNKED, None) + b"3\r\n" + BODY,)),
    "chunk ends in LF alone": closed(400, of=(head(CHUNKED, None) + b"f\n" + BODY + b"\n0\n\n",)),
    "chunked behind Content-Length": closed(400, of=(post(CHUNKED),)),
    "chunked twice": closed(400, of=(head(CHUNKED + CHUNKED, None) + chunks(BODY),)),
    "gzip, chunked": closed(
        400, of=(head(b"Transfer-Encoding: gzip, chunked\r\n", None) + chunks(BODY),)
    ),
    "chunked, gzip": closed(
        400, of=(head(b"Transfer-Encoding: chunked, gzip\r\n", None) + chunks(BODY),)
    ),
    "identity": closed(400, of=(head(b"Transfer-Encoding: identity\r\n", None) + BODY,)),
    "Transfer-Encoding behind a space": closed(
        400, of=(head(b"Transfer-Encoding : chunked\r\n", None) + chunks(BODY),)
    ),
    "Transfer-Encoding behind a tab in its value": opened(
        200, of=(head(b"Transfer-Encoding:\tchunked\r\n", None) + chunks(BODY),)
    ),
    "Transfer-Encoding before white space": opened(
        200, of=(head(b"Transfer-Encoding: chunked \r\n", None) + chunks(BODY),)
    ),
    "X-Priority before white space": opened(200, of=(post(b"X-Priority: bulk \t\r\n"),)),
    "Transfer-Encoding misspelt": closed(
        400, of=(head(b"Transfer-Encoding: xchunked\r\n", None) + chunks(BODY),)
    ),
    # Upgrades.
    "h2c": opened(200, of=(post(H2C),)),
    "h2c, body apart": opened(200, of=(head(H2C), BODY)),
    "h2c, chunked": opened(200, of=(chunked(BODY, headers=H2C),)),
    "h2c, chunks apart": opened(200, of=(head(H2C + CHUNKED, None), chunks(BODY))),
    "h2c, GET": opened(200, of=(get(headers=HOST + H2C),)),
    "h2c, then another": opened(200, 200, of=(post(H2C) + GET,)),
    "h2c, twice": opened(200, 200, of=(post(H2C) + post(H2C),)),
    "h2c, a request for a body": opened(400, of=(head(H2C, len(GET)), GET)),
    "h2c, a request for a body, at once": opened(400, of=(head(H2C, len(GET)) + GET,)),
    "h2c, the connection ends with it": closed(
        200, of=(post(b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n") + GET,)
    ),
    "h2c, wrong length": closed(400, of=(post(H2C + b"Content-Length: 4\r\n"),)),
    "h2c without Connection": opened(200, of=(post(b"Upgrade: h2c\r\n"),)),
    "h2c, broken chunk": closed(400, of=(head(H2C + CHUNKED, None) + b"zz\r\n",)),
    "h2c with a folded header": closed(400, of=(post(H2C + b"X-A: b\r\n c\r\n"),)),
    "h2c by prior knowledge": closed(
        400, of=(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),)
    ),
    "websocket": opened(200, of=(get(headers=HOST + WEBSOCKET),)),
    "websocket without a key": opened(404, of=(get(b"/nothing", HOST + WEBSOCKET),)),
    "websocket, frames behind it": closed(
        200, 400, of=(get(headers=HOST + WEBSOCKET), b"\x81\x85\x01\x02\x03\x04abcde")
    ),
    "websocket, POST": opened(200, of=(post(WEBSOCKET),)),
    "upgrade to TLS": opened(200, of=(post(b"Connection: upgrade\r\nUpgrade: TLS/1.3\r\n"),)),
    "CONNECT": closed(400, of=(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",)),
    "CONNECT, a request in the tunnel": closed(
        400, of=(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n" + GET, GET)
    ),
    # Pipelines.
    "pipeline of two": opened(200, 200, of=(post() + GET,)),
    "pipeline of two, cut anywhere": opened(
        200, 200, of=(post()[:-7], post()[-7:] + GET[:9], GET[9:])
    ),
    "pipeline of 50": opened(*[200] * 50, of=(GET * 50,)),
    "pipeline of 3,000": opened(*[200] * 3000, of=(GET * 3000,)),
    "pipeline of 30 POSTs": opened(*[200] * 30, of=(post() * 30,)),
    "pipeline of 1,500 POSTs": opened(*[200] * 1500, of=(post() * 1500,)),
    "pipeline of chunked bodies": opened(*[200] * 5, of=(chunked(BODY) * 5,)),
    "pipeline of all kinds": opened(
        200, 200, 404, 200, 200, of=(chunked(BODY) + post(H2C) + get(b"/no") + post() + GET,)
    ),
    "an error in a pipeline": opened(200, 400, 200, of=(post() + post(body=b"{") + GET,)),
    "garbage in a pipeline": closed(200, 400, of=(post() + b"nonsense\r\n\r\n" + GET,)),
    "garbage behind a slow request": closed(
        200,
        400,
        of=(post(body=b'{"inputs": "' + b"word " * 900 + b'"}'), b"\r\n\x00\r\n\r\n" + GET),
    ),
    "too large a body in a pipeline": closed(200, 413, of=(post() + head(length=2**30) + GET,)),
    "the connection ends in a pipeline": closed(
        200, 200, of=(GET + get(headers=HOST + b"Connection: close\r\n") + GET,)
    ),
    # Partial requests.
    "nothing": waiting(of=(b"",)),
    "half a request line": waiting(of=(b"GET /heal",)),
    "half a head": waiting(of=(GET[:-2],)),
    "a head without its body": waiting(of=(head(),)),
    "a body that lacks a byte": waiting(of=(head() + BODY[:-1],)),
    "empty lines before a request": opened(200, of=(b"\r\n\r\n" + GET,)),
    "a head of 60 KB": opened(200, of=(get(headers=HOST + b"X: " + b"a" * 60_000 + b"\r\n"),)),
    "a head of 70 KB": closed(431, of=(get(headers=HOST + b"X: " + b"a" * 70_000 + b"\r\n"),)),
    "an endless head": closed(431, of=(b"GET / HTTP/1.1\r\nX: " + b"a" * 50_000, b"a" * 50_000)),
    "an endless path": closed(431, of=(b"GET /" + b"a" * 70_000,)),
    "5,000 headers": opened(200, of=(get(headers=HOST + b"A: b\r\n" * 5000),)),
    # Expectations.
    "Expect: 100-continue": opened(100, 200, of=(head(b"Expect: 100-continue\r\n"), BODY)),
    "Expect: 100-continue, refused": closed(413, of=(head(b"Expect: 100-continue\r\n", 2**30),)),
    "Expect: 100-continue, h2c": opened(
        100, 200, of=(head(H2C + b"Expect: 100-continue\r\n"), BODY)
    ),
    "Expect: 100-continue, HTTP/1.0": closed(
        200, of=(head(b"Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"), BODY)
    ),
    # Targets and hosts.
    "absolute-form": opened(200, of=(get(b"http://x/healthz"),)),
    "absolute-form without a path": opened(307, of=(get(b"http://x"),)),
    "absolute-form of another host": opened(403, of=(get(b"http://other:1/metrics"),)),
    "absolute-form of an IPv6 address": opened(200, of=(get(b"http://[::1]:1/metrics"),)),
    "authority-form": closed(400, of=(get(b"x:80"),)),
    "asterisk-form": opened(404, of=(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",)),
    "a path that does not begin with /": closed(400, of=(get(b"healthz"),)),
    "a path with a space": closed(400, of=(get(b"/heal thz"),)),
    "a path with a NUL": closed(400, of=(get(b"/healthz\x00"),)),
    "a path in Latin-1": closed(400, of=(get(b"/h\xe4lthz"),)),
    "an encoded path": opened(200, of=(get(b"/%68ealthz"),)),
    "an encoded slash": opened(404, of=(get(b"/debug%2Fnothing"),)),
    "a path encoded twice": opened(404, of=(get(b"/%2568ealthz"),)),
    "an encoded NUL": closed(400, of=(get(b"/healthz%00"),)),
    "a broken encoding": closed(400, of=(get(b"/healthz%zz"),)),
    "a broken encoding, POST": closed(400, of=(head(target=b"/encode%zz") + BODY,)),
    "a broken encoding in the query": opened(200, of=(get(b"/healthz?a=%zz"),)),
    "a fragment": closed(400, of=(get(b"/healthz#a"),)),
    "a backslash": opened(404, of=(get(b"/\\healthz"),)),
    "two slashes": opened(404, of=(get(b"//healthz"),)),
    "dots": opened(404, of=(get(b"/./healthz"),)),
    "no Host": closed(400, of=(get(headers=b""),)),
    "two Hosts": closed(400, of=(get(headers=HOST + HOST),)),
    "two Hosts, POST": closed(400, of=(post(HOST),)),
    # Versions and methods.
    "HTTP/1.0": closed(200, of=(get(headers=b"", version=b"HTTP/1.0") + GET,)),
    "HTTP/1.0 with keep-alive": closed(
        200, of=(get(headers=b"Connection: keep-alive\r\n", version=b"HTTP/1.0") + GET,)
    ),
    "HTTP/0.9": closed(400, of=(b"GET /healthz\r\n\r\n",)),
    "HTTP/2.0": closed(400, of=(get(version=b"HTTP/2.0"),)),
    "HTTP/9.9": closed(400, of=(get(version=b"HTTP/9.9"),)),
    "HTTP in lower case": closed(400, of=(get(version=b"http/1.1"),)),
    "HEAD": opened(200, of=(b"HEAD" + GET[3:],)),
    "HEAD, then GET": opened(200, 200, of=(b"HEAD" + GET[3:] + GET,)),
    "HEAD of a route for POST": opened(405, of=(b"HEAD /encode HTTP/1.1\r\nHost: x\r\n\r\n",)),
    "an unknown method": closed(400, of=(b"NONSENSE" + GET[3:],)),
    "a method in lower case": closed(400, of=(b"get" + GET[3:],)),
    "TLS": closed(400, of=(bytes.fromhex("1603010200010001fc0303") + bytes(100),)),
    # Headers.
    "LF for CRLF": closed(400, of=(GET.replace(b"\r\n", b"\n"),)),
    "CR for CRLF": closed(400, of=(b"GET / HTTP/1.1\rHost: x\r\r",)),
    "a folded header": closed(400, of=(get(headers=HOST + b"X-A: b\r\n c\r\n"),)),
    "a header without a colon": closed(400, of=(get(headers=HOST + b"nonsense\r\n"),)),
    "a header with a space before its colon": closed(400, of=(get(headers=HOST + b"A : b\r\n"),)),
    "a NUL in a header": closed(400, of=(get(headers=HOST + b"A: \x00\r\n"),)),
    "a header without a name": closed(400, of=(get(headers=HOST + b": b\r\n"),)),
}


class _Replay:
    """Bytes in place of a socket, for http.client to read responses from."""

    def __init__(self, received: bytes) -> None:
        self.file = BytesIO(received)

    def makefile(self, _mode: str) -> BytesIO:
        return self.file


def responses(received: bytes, methods: list[str]) -> list[tuple[int, str | None]]:
    """Return status and request id of every response; fail if other bytes were received."""
    parsed: list[tuple[int, str | None]] = []
    replay = _Replay(received)
    while replay.file.tell() < len(received):
        method = methods.pop(0) if methods else "GET"
        if received[replay.file.tell() :].startswith(b"HTTP/1.1 100 "):
            parsed.append((100, None))
            replay.file.seek(received.index(b"\r\n\r\n", replay.file.tell()) + 4)
            methods.insert(0, method)
            continue
        response = HTTPResponse(replay, method=method)  # type: ignore[arg-type]
        # It closes its file at the end of a response.
        replay.file.close = lambda: None  # type: ignore[method-assign]
        response.begin()
        response.read()
        parsed.append((response.status, response.getheader("X-Request-Id")))
    return parsed


def wait_until_read(connection: socket.socket) -> None:
    """Wait until the service has read all that was sent, or closed the connection."""
    server, client = connection.getpeername()[1], connection.getsockname()[1]
    # Local and remote address, state, and bytes to send and to read, all in hexadecimal.
    socket_of_service = re.compile(
        rf"\w+:{server:04X} \w+:{client:04X} \w+ \w+:(?!00000000)\w+", re.ASCII
    )
    eventually(lambda: not socket_of_service.search(Path("/proc/net/tcp").read_text()))


PROBE = get(headers=HOST + b"X-Request-Id: probe\r\n")
PROBED = b'{"status":"ok"}'


def exchange(url: str, shape: Shape) -> tuple[list[int], bool]:
    """Send a shape; return the statuses of its responses, and whether another request has one."""
    received = b""
    with connect(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # the service may close after a refusal
            for segment in shape.segments:
                connection.sendall(segment)
                if len(segment) < MAX_AWAITED_BYTES:
                    wait_until_read(connection)  # so that the next segment is read separately
            if shape.after == "waiting":
                connection.shutdown(socket.SHUT_WR)
            else:
                connection.sendall(PROBE)
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
                if b"x-request-id: probe" in received.lower() and received.endswith(PROBED):
                    break
    is_head = shape.segments[0].startswith(b"HEAD")
    parsed = responses(received, ["HEAD"] if is_head else [])
    statuses = [status for status, request_id in parsed if request_id != "probe"]
    return statuses, len(statuses) < len(parsed)


@pytest.mark.parametrize("name", SHAPES)
def test_each_request_has_one_response(url: str, name: str) -> None:
    shape = SHAPES[name]
    assert exchange(url, shape) == (list(shape.statuses), shape.after == "open")
    assert httpx2.get(f"{url}/healthz", timeout=PATIENCE_S).status_code == 200
