"""The API of text-embeddings-inference (TEI), under /tei.

Contract: https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from models.artifact import Manifest
from service.api.auth import require_scope
from service.api.body import Model, check_count, read_inputs
from service.api.compat.tei_schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    SimilarityRequest,
    SimpleToken,
    TEIError,
    TEIInfo,
    TokenizeRequest,
    TruncationOptions,
)
from service.api.deadline import cancel_on_disconnect, deadline_s, within
from service.api.errors import Unauthorized, headers_of, status_of
from service.api.openapi import error_responses, request_body
from service.api.raw_route import RawRoute
from service.api.responses import JSON, respond, serialize_rows
from service.api.schemas import VERSION
from service.api.state import AppState, State
from service.inference.errors import (
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
    VitrineError,
)
from service.inference.model import Model as ServedModel
from service.inference.results import Embeddings, TokenEmbeddings, Vectors

PREFIX = "/tei"

_Item = TypeVar("_Item")
_TOO_MANY = "batch size {} > maximum allowed batch size {}"

router = APIRouter(prefix=PREFIX, route_class=RawRoute)
_KEY = require_scope("encode")

_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def _error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses, by status.

    As in TEI, 401 has no body, and responses of some statuses can be plain text.
    """
    responses = error_responses(*statuses, schema=TEIError, media_type=JSON)
    for status in responses.keys() - {401, 424, 429, 500, 503}:
        responses[status]["content"] = responses[status]["content"] | _TEXT["content"]
    if 401 in responses:
        del responses[401]["content"]
    return responses


def _route(body: type[BaseModel], response: object, summary: str) -> dict[str, Any]:
    """Return the decorator arguments of a route whose handler parses the body itself."""
    statuses = (400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504)
    return {
        "summary": summary,
        "dependencies": [_KEY],
        "response_model": response,
        "openapi_extra": request_body(body),
        "responses": _error_responses(*statuses),
    }


_HEALTH: dict[str, Any] = {
    "summary": "Readiness",
    "response_class": Response,
    "responses": _error_responses(503),
}


@router.post("", name="tei", **_route(EmbedRequest, list[list[float]], "Same as /tei/embed"))
@router.post("/embed", **_route(EmbedRequest, list[list[float]], "Embeddings"))
async def tei_embed(request: Request, state: State) -> Response:
    """Encode inputs into one vector each; token ids are used unchanged."""
    body = await _read(request, state, EmbedRequest)
    inputs = _non_empty(body.input_list())
    model = state.ready_model()
    work = model.encode(
        inputs,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        normalize=body.normalize,
        on_overflow=body.on_overflow(),
        timeout_s=_timeout_s(request, state),
    )
    result = await cancel_on_disconnect(request, work)
    return await _respond(request, state, model, result, inputs, partial(_as_lists, result.vectors))


@router.post("/embed_all", **_route(EmbedAllRequest, list[list[list[float]]], "Token embeddings"))
async def embed_all(request: Request, state: State) -> Response:
    """Return the token vectors of each input, special tokens included, not normalised."""
    body = await _read(request, state, EmbedAllRequest)
    inputs = _non_empty(body.input_list())
    model = state.ready_model()
    work = model.encode_tokens(
        inputs,
        prompt_name=body.prompt_name,
        on_overflow=body.on_overflow(),
        with_offsets=False,
        timeout_s=_timeout_s(request, state),
    )
    result = await cancel_on_disconnect(request, work)
    return await _respond(request, state, model, result, inputs, partial(_as_lists, result.vectors))


@router.post("/similarity", **_route(SimilarityRequest, list[float], "Cosine similarities"))
async def similarity(request: Request, state: State) -> Response:
    """Return the cosine similarity of one sentence with each of the others."""
    body = await _read(request, state, SimilarityRequest)
    options = body.parameters or TruncationOptions()
    inputs = [body.inputs.source_sentence, *_non_empty(body.inputs.sentences)]
    check_count(inputs, state.settings.limits.max_inputs, "inputs", _TOO_MANY)
    model = state.ready_model()
    work = model.encode(
        inputs,
        prompt_name=options.prompt_name,
        normalize=True,
        on_overflow=options.on_overflow(),
        timeout_s=_timeout_s(request, state),
    )
    try:
        result = await cancel_on_disconnect(request, work)
    except VitrineError as error:
        if error.index is not None:  # the source sentence comes first and has no index
            error.index = error.index - 1 if error.index else None
        raise
    cosines = (result.vectors[1:] @ result.vectors[0]).tolist()
    serialize = partial(orjson.dumps, cosines)
    return await _respond(request, state, model, result, inputs, serialize)


@router.post("/tokenize", **_route(TokenizeRequest, list[list[SimpleToken]], "Tokens"))
async def tokenize(request: Request, state: State) -> Response:
    """Return the tokens of each text and their byte spans; texts are not truncated."""
    body = await _read(request, state, TokenizeRequest)
    texts = _non_empty([body.inputs] if isinstance(body.inputs, str) else body.inputs)
    work = state.ready_model().tokenize(
        texts, prompt_name=body.prompt_name, add_special_tokens=body.add_special_tokens
    )
    tokens = await within(_timeout_s(request, state), work)
    return _json(
        [
            [
                {"id": id_, "text": text, "special": span is None}
                | {"start": span and span[0], "stop": span and span[1]}
                for id_, text, span in tokens_of_text
            ]
            for tokens_of_text in tokens
        ]
    )


@router.post("/decode", **_route(DecodeRequest, list[str], "Token ids to texts"))
async def decode(request: Request, state: State) -> Response:
    """Return the text of each list of token ids."""
    body = await _read(request, state, DecodeRequest, "ids")
    rows = _non_empty(body.id_lists(), "ids")
    work = state.ready_model().decode(rows, skip_special_tokens=body.skip_special_tokens)
    return _json(await within(_timeout_s(request, state), work))


def _model_type(manifest: Manifest) -> dict[str, dict[str, Any]]:
    if not manifest.labels:
        return {"embedding": {"pooling": "+".join(manifest.pooling)}}
    names = {str(index): label for index, label in enumerate(manifest.labels)}
    numbers = {label: index for index, label in enumerate(manifest.labels)}
    kind = "reranker" if len(names) == 1 else "classifier"
    return {kind: {"id2label": names, "label2id": numbers}}


@router.get(
    "/info",
    summary="Served model",
    dependencies=[_KEY],
    response_model=TEIInfo,
    responses=_error_responses(401, 403, 503),
)
async def tei_info(_request: Request, state: State) -> Response:
    """Return the served model in the format of text-embeddings-inference."""
    model, settings = state.ready_model(), state.settings
    manifest = model.artifact.manifest
    return _json(
        TEIInfo(
            model_id=manifest.source,
            model_sha=manifest.revision,
            model_dtype=model.engine.precision,
            served_model_name=model.name,
            model_type=_model_type(manifest),
            max_concurrent_requests=settings.batch.max_queue_tokens // manifest.max_tokens,
            max_input_length=manifest.max_tokens,
            max_batch_tokens=model.max_cost,
            max_batch_requests=None,
            max_client_batch_size=settings.limits.max_inputs,
            auto_truncate=True,
            tokenization_workers=model.engine.threads,
            version=VERSION,
            sha=None,
            docker_label=None,
        ).model_dump()
    )


@router.get("", name="tei_root", **_HEALTH)
@router.get("/ping", name="tei_ping", **_HEALTH)
@router.get("/health", **_HEALTH)
async def tei_health(_request: Request, state: State) -> Response:
    """Return 200 with an empty body while the model is ready, otherwise 503."""
    state.check_ready()
    return Response()


# Paths of the routes in `root_router`. GET / and GET /info remain routes of the native API.
ROOT_PATHS = frozenset(
    route.path.removeprefix(PREFIX) or "/"
    for route in router.routes
    if isinstance(route, APIRoute) and route.path != f"{PREFIX}/info"
)


def root_router() -> APIRouter:
    """Return the routes without the prefix /tei, for clients that drop the path of a base URL."""
    root = APIRouter(route_class=RawRoute)
    for route in router.routes:
        assert isinstance(route, APIRoute)  # noqa: S101 - all are declared above
        path, methods = route.path.removeprefix(PREFIX) or "/", list(route.methods or ())
        if path in ROOT_PATHS and (path != "/" or "POST" in methods):
            root.add_api_route(
                path,
                route.endpoint,
                methods=methods,
                dependencies=route.dependencies,
                name=f"root_{route.name}",
                include_in_schema=False,
            )
    return root


def render_error(error: VitrineError, _request_id: str) -> Response:
    """Return the error in the format of text-embeddings-inference."""
    status, headers = status_of(error), headers_of(error)
    message = {
        "empty": f"Input validation error: `{_field(error)}` cannot be empty",
        "overloaded": "Model is overloaded",
        "not_ready": "unhealthy",
    }.get(error.code, f"Input validation error: {error.detail}")
    match error:
        case Unauthorized():
            return Response(status_code=401, headers=headers)
        case InvalidInput(code="empty"):
            status, kind = 400, "Empty"
        case InvalidInput(code="invalid", pointer=str()):  # a field of the wrong type
            message = f"{error.pointer}: {error.detail}"
            return Response(message, 422, headers, "text/plain")
        case InvalidInput() | TooLarge(code="text_too_large"):
            status, kind = 422, "Validation"
        case Overloaded():
            status, kind = 429, "Overloaded"
        case NotReady():
            status, kind = 503, "Unhealthy"
        case InferenceFailed():
            status, kind, message = 424, "Backend", f"Backend error: {error.detail}"
        case _ if status == 500:
            status, kind, message = 500, "Backend", f"Backend error: {error.detail}"
        case _:  # errors of TEI's web framework
            return Response(error.detail, status, headers, "text/plain")
    if error.index is not None:
        message += f" (at index {error.index})"
    body = orjson.dumps({"error": message, "error_type": kind})
    return Response(body, status, headers, JSON)


def _field(error: VitrineError) -> str:
    return "ids" if (error.pointer or "").startswith("/ids") else "inputs"


async def _read(
    request: Request, state: AppState, model: type[Model], field: str = "inputs"
) -> Model:
    return await read_inputs(request, state, model, field, _TOO_MANY)


def _timeout_s(request: Request, state: AppState) -> float:
    return deadline_s(request, state.settings.limits.request_s)


def _non_empty(inputs: Sequence[_Item], field: str = "inputs") -> Sequence[_Item]:
    """Return the inputs; raise `InvalidInput` if there are none."""
    if not inputs:
        raise InvalidInput(f"`{field}` cannot be empty", code="empty", pointer=f"/{field}")
    return inputs


async def _respond(
    request: Request,
    state: AppState,
    model: ServedModel,
    result: Embeddings | TokenEmbeddings,
    inputs: Sequence[str | list[int]],
    serialize: Callable[[], bytes],
) -> Response:
    seconds = result.seconds
    durations = {
        "x-total-time": sum(seconds.values()),
        "x-compute-time": sum(seconds.values()),
        "x-tokenization-time": seconds["tokenize"],
        "x-queue-time": seconds["queue"],
        "x-inference-time": seconds["infer"],
    }
    headers = {
        "x-compute-type": "cpu",
        "x-compute-characters": str(sum(len(text) for text in inputs if isinstance(text, str))),
        "x-compute-tokens": str(sum(len(row.ids) for row in result.rows)),
        **{name: str(round(1e3 * duration)) for name, duration in durations.items()},
    }
    return await respond(request, state, model, result, serialize, headers=headers)


def _as_lists(vectors: Sequence[Vectors] | Vectors) -> bytes:
    return orjson.dumps(serialize_rows(vectors, in_base64=False))


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type=JSON)
