"""Every error that a client can see, as one tree, and what it looks like on the wire.

    ServiceError
    ├── Malformed             400  the body is not JSON
    ├── Unauthorized          401  no key, or an unknown one
    ├── Forbidden             403  a key without the scope
    ├── TooLarge              413  a body, or one text in it
    ├── UnsupportedMedia      415  not application/json, or compressed
    ├── InvalidInput          422  a field or an input is not what it should be
    ├── Overloaded            429  the queue is full
    ├── InferenceFailed       500  the engine failed on this input
    └── NotReady              503  starting, stopping, or the engine is gone

The wire format is RFC 9457: `application/problem+json`. Nothing of the request is ever echoed.
"""

from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

PROBLEM = "application/problem+json"


class ServiceError(Exception):
    """An error with a status, a stable code and a sentence for the client.

    Args:
        detail: What is wrong and what would help.
        code: Takes the place of the class's own.
        index: Which of the inputs is meant.
        pointer: JSON pointer to the field that is meant.
    """

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str = "internal"
    headers: ClassVar[dict[str, str]] = {}

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
        self.index = index
        self.pointer = pointer if pointer or index is None else f"/inputs/{index}"


class Malformed(ServiceError):
    """The body is not JSON."""

    status = HTTPStatus.BAD_REQUEST
    code = "malformed"


class Unauthorized(ServiceError):
    """No key was given, or one that is not known."""

    status = HTTPStatus.UNAUTHORIZED
    code = "unauthorized"
    headers: ClassVar = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServiceError):
    """The key does not have the scope that the route needs."""

    status = HTTPStatus.FORBIDDEN
    code = "forbidden"


class TooLarge(ServiceError):
    """The body, or one text in it, is larger than the service takes."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "too_large"


class UnsupportedMedia(ServiceError):
    """The body is not plain application/json."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_media_type"


class InvalidInput(ServiceError):
    """A field or an input is not what it should be."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    code = "invalid"


class Overloaded(ServiceError):
    """The queue is full."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "overloaded"
    headers: ClassVar = {"Retry-After": "1"}


class InferenceFailed(ServiceError):
    """The engine failed on one input of the request."""

    code = "inference_failed"


class NotReady(ServiceError):
    """The service is starting or stopping, or its engine is gone."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "not_ready"
    headers: ClassVar = {"Retry-After": "1"}


def problem(error: ServiceError, request_id: str) -> Response:
    """Return the error as an `application/problem+json` response."""
    return problem_response(
        error.status,
        error.code,
        error.detail,
        request_id,
        index=error.index,
        pointer=error.pointer,
        headers=error.headers,
    )


def problem_response(
    status: int,
    code: str,
    detail: str,
    request_id: str,
    *,
    index: int | None = None,
    pointer: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a problem of any status; members that are None are left out."""
    members: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "code": code,
        "detail": detail,
        "index": index,
        "pointer": pointer,
        "request_id": request_id,
    }
    body = orjson.dumps({name: value for name, value in members.items() if value is not None})
    return Response(body, status, headers, PROBLEM)
