"""Requests as bytes, for what no client of HTTP sends."""

BODY = b'{"inputs": "a"}'
HOST = b"Host: x\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


def get(target: bytes = b"/healthz", headers: bytes = HOST, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET " + target + b" " + version + b"\r\n" + headers + b"\r\n"


def head(headers: bytes = b"", length: int | None = len(BODY), target: bytes = b"/encode") -> bytes:
    """Return the head of a POST; None: without Content-Length."""
    declared = b"" if length is None else b"Content-Length: %d\r\n" % length
    return b"POST " + target + b" HTTP/1.1\r\n" + HOST + JSON + declared + headers + b"\r\n"


def post(headers: bytes = b"", body: bytes = BODY) -> bytes:
    return head(headers, len(body)) + body


def chunks(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


def chunked(*parts: bytes, headers: bytes = b"", end: bytes = b"0\r\n\r\n") -> bytes:
    return head(CHUNKED + headers, None) + chunks(*parts, end=end)
