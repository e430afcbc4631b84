"""Reading of requests and rendering of responses of the API of text-embeddings-inference."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response

from service.api.auth import require_scope
from service.api.body import Model, read_inputs
from service.api.compat.tei_schemas import TEIError
from service.api.lease import lease_with_options
from service.api.openapi import error_responses, inference_route
from service.api.responses import JSON, respond
from service.api.state import AppState
from service.inference.call_options import QueueArguments
from service.inference.errors import InvalidInput
from service.inference.model.classification import Classification
from service.inference.model.model import Model as ServedModel
from service.inference.model.pair_scores import PairScores
from service.inference.results.vectors import Embeddings, SparseEmbeddings, TokenEmbeddings

PREFIX = "/tei"
TOO_MANY = "batch size {} > maximum allowed batch size {}"
KEY = require_scope("encode")

_Item = TypeVar("_Item")
_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def openapi_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses, by status.

    As in TEI, a 401 response has no body. Responses other than 401, 424, 429, 500 and 503 can be
    plain text instead of JSON.
    """
    responses = error_responses(*statuses, schema=TEIError, media_type=JSON)
    for status in responses.keys() - {401, 424, 429, 500, 503}:
        responses[status]["content"] = responses[status]["content"] | _TEXT["content"]
    if 401 in responses:
        del responses[401]["content"]
    return responses


route_options = partial(
    inference_route,
    responses=openapi_errors(400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504),
)


async def read_request(
    request: Request,
    state: AppState,
    model: type[Model],
    field: str = "inputs",
    members: type = int,
) -> Model:
    """Return the validated body of a request; see `read_inputs`."""
    return await read_inputs(request, state, model, field, TOO_MANY, members)


async def named_model(request: Request, state: AppState) -> ServedModel:
    """Return the model in the path, or else the default model; see `AppState.lease`."""
    return (await named_model_with_options(request, state))[0]


async def named_model_with_options(
    request: Request, state: AppState
) -> tuple[ServedModel, QueueArguments]:
    """Return the model in the path, or else the default model; see `lease_with_options`."""
    return await lease_with_options(request, state, request.path_params.get("model"))


def non_empty(inputs: Sequence[_Item], field: str = "inputs") -> Sequence[_Item]:
    """Return the inputs; raise `InvalidInput` if there are none."""
    if not inputs:
        raise InvalidInput(f"`{field}` cannot be empty", code="empty", pointer=f"/{field}")
    return inputs


async def respond_with_durations(
    request: Request,
    state: AppState,
    model: ServedModel,
    result: Embeddings | TokenEmbeddings | SparseEmbeddings | Classification | PairScores,
    inputs: Sequence[str | list[int]],
    serialize: Callable[[], bytes],
) -> Response:
    """Return a response with the serialised result, and the duration of each stage in ms.

    The headers also count the characters and token ids in `inputs`, and all tokens.
    """
    seconds = result.seconds
    if isinstance(result, PairScores):
        tokens = sum(result.tokens)
    else:
        tokens = sum(len(row.ids) for row in result.rows)
    durations = {
        "x-total-time": sum(seconds.values()),
        "x-compute-time": sum(seconds.values()),
        "x-tokenization-time": seconds["tokenize"],
        "x-queue-time": seconds["queue"],
        "x-inference-time": seconds["infer"],
    }
    headers = {
        "x-compute-type": "cpu",
        "x-compute-characters": str(sum(map(len, inputs))),
        "x-compute-tokens": str(tokens),
        **{name: str(round(1e3 * duration)) for name, duration in durations.items()},
    }
    return await respond(request, state, model, result, serialize, headers=headers)


def json_response(body: object) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(body), media_type=JSON)
