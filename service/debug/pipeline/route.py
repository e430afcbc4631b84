"""Routes of questions: their router, their OpenAPI options, and their requests."""

from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel

from service.api.auth import require_scope
from service.api.body import read_body
from service.api.openapi import error_responses, request_body
from service.api.raw_route import RawRoute
from service.debug.pipeline.access import ACCESS
from service.debug.pipeline.call import Call
from service.debug.pipeline.model_kinds import kind_for
from service.debug.pipeline.request_fields import ModelRequest
from service.debug.pipeline.state import DebugState

Body = TypeVar("Body", bound=ModelRequest)

_MAX_BODY_BYTES = 2**20


def gradient_router() -> APIRouter:
    """Return the router of a question: for keys with the scope `debug`, and allowed hosts."""
    return APIRouter(
        prefix="/debug", route_class=RawRoute, dependencies=[require_scope("debug"), *ACCESS]
    )


def route_options(
    body: type[BaseModel],
    response: Any,  # noqa: ANN401 - a type expression
    summary: str,
    **success: Any,  # noqa: ANN401 - JSON
) -> dict[str, Any]:
    """Return the options of a route whose handler parses the request body itself.

    Args:
        body: Model of the request body.
        response: Model of a successful response in JSON.
        summary: Title of the route.
        success: Further OpenAPI fields of the successful response.
    """
    errors = error_responses(400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
    return {
        "summary": summary,
        "response_model": response,
        "openapi_extra": request_body(body),
        "responses": {**({200: success} if success else {}), **errors},
    }


async def read_request(
    request: Request, state: DebugState, route: str, body: type[Body]
) -> tuple[Body, Call]:
    """Return the validated body of a request, and the call with the served model that it names.

    Args:
        request: The request.
        state: State of the application.
        route: Key of `ROUTES`.
        body: Model of the body.

    Raises:
        InvalidInput: The body does not match its model, or the route is for other kinds of models.
        VitrineError: Any other error of `read_body` and `AppState.lease`.
    """
    read = await read_body(request, state, body, _MAX_BODY_BYTES)
    model = await state.lease(request, read.model)
    kind_for(route, model.artifact.manifest)
    return read, Call(request, state, model)
