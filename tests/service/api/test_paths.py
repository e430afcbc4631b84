"""Paths of requests: what cannot be decoded, or has a control character, reaches no route."""

import asyncio
import string
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from service.api.errors import Malformed
from service.api.http_protocol import PROTOCOL_ERROR, decode_path
from tests.service.api.test_server import Wire, protocol_of

PIECES = (
    *("/", "models", "metrics", "x", "%", "%2", "%2f", "%2F", "%6d", "%25", "%zz", "%00", "%0a"),
    *("%0d%0a", "%1b", "%7f", "%ff", "%c3%a9", "%c2%85", "%c0%af", "%ed%a0%80", "%f4%90%80%80"),
    *("%e7%8c%ab", ".", "..", ";", "+", "\\", "|", "~", "%%", "%u0041", "%2500", "%3f", "%23"),
)
paths = st.lists(st.sampled_from(PIECES), max_size=8).map(lambda pieces: "/" + "".join(pieces))


async def scope_of(target: str) -> Scope | None:
    """Return the scope that the application gets; None: the request is refused."""
    scopes: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    protocol = protocol_of(Wire(), app)
    protocol.data_received(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))
    while not scopes:
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    (scope,) = scopes
    return None if PROTOCOL_ERROR in scope["state"] else scope


def decoded(path: str) -> str | None:
    """Return the path decoded by the standard library; None: it is not valid."""
    after = [part[:2] for part in path.split("%")[1:]]
    if not all(len(two) == 2 and set(two) <= set(string.hexdigits) for two in after):
        return None
    try:
        value = unquote(path, errors="strict")
    except UnicodeDecodeError:
        return None
    controls = {*map(chr, range(32)), *map(chr, range(127, 160))}
    return None if controls & set(value) else value


@given(paths)
@example("/metrics%0a")
@example("/models/x%")
@example("/models/%zz")
def test_routes_get_the_decoded_path_or_nothing(path: str) -> None:
    scope = asyncio.run(scope_of(path))
    assert (None if scope is None else scope["path"]) == decoded(path)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_every_quoted_name_is_a_path(name: str) -> None:
    assert decode_path(f"/models/{quote(name, safe='')}/info".encode()) == f"/models/{name}/info"


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        (b"/models/x%", "% that is not followed by two hexadecimal digits"),
        (b"/models/%4", "% that is not followed by two hexadecimal digits"),
        (b"/models/%c3x", "not UTF-8"),
        (b"/metrics%0A", "control character"),
        (b"/models/a%C2%9B", "control character"),
    ],
)
def test_errors_of_paths_name_the_reason(path: bytes, detail: str) -> None:
    with pytest.raises(Malformed, match=detail):
        decode_path(path)


@pytest.mark.parametrize("target", ["/metrics#", "/metrics#x", "/#/metrics", "http://x/metrics#x"])
def test_fragments_are_refused(target: str) -> None:
    assert asyncio.run(scope_of(target)) is None
