"""The headers of a request, read once by the middleware."""

from collections.abc import Iterable, Mapping

from fastapi import Request

TIMEOUT = "X-Request-Timeout-Ms"
PRIORITY = "X-Priority"

# Headers that decide how a request is served, and have one value: of several, a proxy in front may
# believe another one. The protocol refuses a second Host and Content-Length.
_SINGLE = {
    name.lower(): name
    for name in (
        *("Authorization", "X-API-Key", "api-key", "Content-Type", "Origin", "Sec-Fetch-Site"),
        *(TIMEOUT, PRIORITY),
    )
}
# Key in the `state` of an ASGI scope.
HEADERS = "headers"


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> tuple[Mapping[str, str], str | None]:
    """Return the value of each header, by name in lower case, and an ambiguous header.

    Several values of a header are one list: RFC 9110, 5.3.

    Args:
        raw: Headers of an ASGI scope.

    Returns:
        The headers, and the name of a header with one value that has two different ones, if any.
    """
    values: dict[str, str] = {}
    ambiguous: str | None = None
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name not in values:
            values[name] = value
        elif name not in _SINGLE:
            values[name] += f",{value}"
        elif values[name] != value:
            ambiguous = _SINGLE[name]
    return values, ambiguous


def header(request: Request, name: str) -> str | None:
    """Return the value of a header, by its name in lower case; None without the header."""
    headers: Mapping[str, str] = request.scope["state"][HEADERS]
    return headers.get(name)
