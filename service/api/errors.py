"""Errors of the HTTP API, and the HTTP response of every error.

    VitrineError                 see `service.inference.errors`
    ├── InvalidInput       422   an argument or an input is invalid
    ├── TooLarge           413   the body, or one text in it, is too large
    ├── Overloaded         429   the queue is full, or the request would miss its deadline
    ├── UnknownModel       404   no served model has this name
    ├── InferenceFailed    500   the engine failed on one input
    ├── NotReady           503   the service is starting or stopping, or the engine has stopped
    ├── DeadlineExceeded   504   the request's deadline has passed
    └── HTTPError
        ├── Malformed        400   the request is not HTTP, the body not JSON, or a header invalid
        ├── Unauthorized     401   the API key is missing or unknown
        ├── Forbidden        403   the API key lacks the scope, or a host or origin is not allowed
        ├── NotFound         404   the model or file is unknown, or the feature is disabled
        ├── BodyTimeout      408   the body did not arrive before the timeout
        ├── UnsupportedMedia 415   the body is not application/json, or its encoding is unsupported
        ├── HeadTooLarge     431   the request line and headers, or the trailers, are too large
        └── FrameworkError   ...   the route does not exist, or does not allow the method

The format is RFC 9457, `application/problem+json`, except for the APIs in `service.api.compat`.
Error responses never repeat text of a request, except its X-Request-Id.
"""

import math
import random
from collections.abc import Mapping
from types import MappingProxyType

import orjson
from starlette.responses import Response

from service.inference.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
    UnknownModel,
    VitrineError,
)

PROBLEM = "application/problem+json"

_STATUSES: Mapping[type[VitrineError], int] = {
    InvalidInput: 422,
    TooLarge: 413,
    Overloaded: 429,
    UnknownModel: 404,
    InferenceFailed: 500,
    NotReady: 503,
    DeadlineExceeded: 504,
    VitrineError: 500,
}
# Hard-coded, because the phrases of `http.HTTPStatus` depend on the Python version.
_TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
# Descriptions of error responses in the OpenAPI document.
DESCRIPTIONS = {
    400: "The body is not JSON, or a header is invalid",
    401: "The API key is missing or unknown",
    403: "The API key lacks the scope",
    404: "The model is unknown, or the feature is disabled",
    408: "The body did not arrive before the timeout",
    413: "The body, or one text in it, is too large",
    415: "The body is not application/json, or its encoding is unsupported",
    422: "A field or an input is invalid; `index` and `pointer` locate it",
    424: "The engine failed on this input",
    429: "The service is overloaded; retry after the number of seconds in `Retry-After`",
    500: "The engine failed on this input, or an internal error occurred",
    503: "The model is loading, the engine has stopped, or the service is stopping",
    504: "The request's deadline has passed",
}

_MAX_RETRY_S = 60


class HTTPError(VitrineError):
    """Base class of the errors of the HTTP API."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})


class Malformed(HTTPError):
    """The request is not HTTP, its body is not JSON, or a header is invalid."""

    status = 400
    code = "malformed"


class Unauthorized(HTTPError):
    """The API key is missing or unknown."""

    status = 401
    code = "unauthorized"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(HTTPError):
    """The API key lacks the scope, or a host or origin is not allowed."""

    status = 403
    code = "forbidden"


class NotFound(HTTPError):
    """The model or file is unknown, or the feature is disabled."""

    status = 404
    code = "disabled"


class BodyTimeout(HTTPError):
    """The body did not arrive before the timeout."""

    status = 408
    code = "body_timeout"
    # Otherwise a slow client could keep the connection open.
    headers = MappingProxyType({"Connection": "close"})


class UnsupportedMedia(HTTPError):
    """The body is not application/json, or its encoding is unsupported."""

    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(HTTPError):
    """The request line and headers, the trailers, or the extensions of a chunk are too large."""

    status = 431
    code = "head_too_large"


class FrameworkError(HTTPError):
    """An error of the web framework: the route does not exist or does not allow the method."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None) -> None:
        title = _TITLES.get(status, "Error")
        super().__init__(detail, code=title.lower().replace(" ", "_"))
        self.status = status
        self.headers = headers or self.headers


def status_of(error: VitrineError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, HTTPError):
        return error.status
    return next(_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES)


def headers_of(error: VitrineError) -> Mapping[str, str]:
    """Return the additional response headers of an error, such as Retry-After."""
    match error:
        case HTTPError():
            return error.headers
        case Overloaded():
            # Randomised, so that clients refused at the same time do not retry at the same time.
            delay_s = error.retry_after_s * random.uniform(1.0, 1.5)  # noqa: S311
            return {"Retry-After": str(min(max(1, math.ceil(delay_s)), _MAX_RETRY_S))}
        case NotReady():
            return {"Retry-After": str(math.ceil(error.retry_after_s))}
        case _:
            return {}


def problem(error: VitrineError, request_id: str) -> Response:
    """Return the error as an `application/problem+json` response."""
    status = status_of(error)
    location = {"index": error.index, "pointer": error.pointer}
    members = {
        # RFC 9457: "about:blank" means that `title` is the status phrase. Clients tell errors
        # apart by `code`.
        "type": "about:blank",
        "title": _TITLES.get(status, "Error"),
        "status": status,
        "code": error.code,
        "detail": error.detail,
        **{name: value for name, value in location.items() if value is not None},
        "request_id": request_id,
    }
    return Response(orjson.dumps(members), status, headers_of(error), PROBLEM)
