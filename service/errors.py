"""Every error that a client can see, as one tree, and what it looks like on the wire.

    ServiceError
    ├── Malformed             400  the body is not JSON, or a header is not what it should be
    ├── Unauthorized          401  no key, or an unknown one
    ├── Forbidden             403  a key without the scope, or a page of another host
    ├── NotFound              404  a model that is not served, or a part that is switched off
    ├── BodyTooSlow           408  the body was not there in time
    ├── TooLarge              413  a body, or one text in it
    ├── UnsupportedMedia      415  not application/json, or compressed
    ├── InvalidInput          422  a field or an input is not what it should be
    ├── Overloaded            429  the queue is full
    ├── FrameworkError        ...  no such route, no such method
    ├── InferenceFailed       500  the engine failed on this input
    ├── NotReady              503  starting, stopping, or the engine is gone
    └── DeadlineExceeded      504  it took longer than it may

The wire format is RFC 9457: `application/problem+json`. Nothing of the request is ever echoed.
"""

import math
import random
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import orjson
from starlette.responses import Response

PROBLEM = "application/problem+json"

# What the API's documentation says of each status.
DESCRIPTIONS = {
    400: "The body is not JSON, or a header is not what it should be",
    401: "No API key, or an unknown one",
    403: "The API key does not have the scope",
    404: "Switched off, or not served",
    408: "The body was not there in time",
    413: "The body, or one text in it, is too large",
    415: "The body is not plain application/json",
    422: "A field or an input is not what it should be; `index` and `pointer` say which",
    424: "The engine fails on this input",
    429: "The queue is full; `Retry-After` says when to come back",
    500: "The engine fails on this input, or the service has a defect",
    503: "The model is being loaded, the engine is gone, or the service is stopping",
    504: "It took longer than it may",
}


_LONGEST_RETRY_S = 60


class ServiceError(Exception):
    """An error with a status, a stable code and a sentence for the client.

    Args:
        detail: What is wrong and what would help.
        code: Takes the place of the class's own.
        index: Which of the inputs is meant.
        pointer: JSON pointer to the field that is meant.
    """

    # Written down: the interpreter's own phrases change from version to version.
    status: int = 500
    title: str = "Internal Server Error"
    code: str = "internal"
    index: int | None = None
    pointer: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        index: int | None = None,
        pointer: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.code
        if index is not None:
            self.at(index)
        if pointer is not None:
            self.pointer = pointer

    def at(self, index: int) -> None:
        """Say which of the inputs is meant."""
        self.index = index
        self.pointer = f"/inputs/{index}"


class Malformed(ServiceError):
    """The body is not JSON, or a header is not what it should be."""

    status = 400
    title = "Bad Request"
    code = "malformed"


class Unauthorized(ServiceError):
    """No key was given, or one that is not known."""

    status = 401
    title = "Unauthorized"
    code = "unauthorized"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class Forbidden(ServiceError):
    """The key does not have the scope that the route needs."""

    status = 403
    title = "Forbidden"
    code = "forbidden"


class NotFound(ServiceError):
    """A model that is not served, or a part of the service that is switched off."""

    status = 404
    title = "Not Found"
    code = "disabled"


class BodyTooSlow(ServiceError):
    """The body was not there in time."""

    status = 408
    title = "Request Timeout"
    code = "body_timeout"
    # Or the client would keep it, and go on being slow.
    headers = MappingProxyType({"Connection": "close"})


class TooLarge(ServiceError):
    """The body, or one text in it, is larger than the service takes."""

    status = 413
    title = "Content Too Large"
    code = "too_large"


class UnsupportedMedia(ServiceError):
    """The body is not plain application/json."""

    status = 415
    title = "Unsupported Media Type"
    code = "unsupported_media_type"


class InvalidInput(ServiceError):
    """A field or an input is not what it should be."""

    status = 422
    title = "Unprocessable Content"
    code = "invalid"


class Overloaded(ServiceError):
    """The queue is full.

    Args:
        detail: See `ServiceError`.
        retry_after_s: When it will have room again, as far as one can tell.
        code: See `ServiceError`.
    """

    status = 429
    title = "Too Many Requests"
    code = "overloaded"

    def __init__(self, detail: str, retry_after_s: float = 0.0, *, code: str | None = None) -> None:
        super().__init__(detail, code=code)
        # Not all at once: those who are told the same second would be refused together again.
        later = retry_after_s * random.uniform(1.0, 1.5)  # noqa: S311
        seconds = min(max(1, math.ceil(later)), _LONGEST_RETRY_S)
        self.headers = MappingProxyType({"Retry-After": str(seconds)})


class FrameworkError(ServiceError):
    """What the framework refuses by itself: no such route, no such method."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None) -> None:
        phrase = HTTPStatus(status).phrase
        super().__init__(detail, code=phrase.lower().replace(" ", "_"))
        self.status = status
        self.title = phrase
        self.headers = headers or self.headers


class InferenceFailed(ServiceError):
    """The engine failed on one input of the request."""

    code = "inference_failed"


class NotReady(ServiceError):
    """The service is starting or stopping, or its engine is gone."""

    status = 503
    title = "Service Unavailable"
    code = "not_ready"
    headers = MappingProxyType({"Retry-After": "1"})


class DeadlineExceeded(ServiceError):
    """The work took longer than it may."""

    status = 504
    title = "Gateway Timeout"
    code = "deadline"


def problem(error: ServiceError, request_id: str) -> Response:
    """Return the error as an `application/problem+json` response."""
    where = {"index": error.index, "pointer": error.pointer}
    members = {
        # "about:blank": the title says what the status says, and `code` says more.
        "type": "about:blank",
        "title": error.title,
        "status": error.status,
        "code": error.code,
        "detail": error.detail,
        **{name: value for name, value in where.items() if value is not None},
        "request_id": request_id,
    }
    return Response(orjson.dumps(members), error.status, error.headers, PROBLEM)
