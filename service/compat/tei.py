"""text-embeddings-inference's API, under /tei.

Contract: https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from service.body import Model, check_count, read_inputs
from service.compat.tei_schemas import (
    Cut,
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    SimilarityRequest,
    SimpleToken,
    TEIError,
    TEIInfo,
    TokenizeRequest,
)
from service.encoding import Encoded, check_dimensions, encode, respond, tokenizing
from service.errors import (
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    ServiceError,
    TooLarge,
    Unauthorized,
)
from service.routing import DirectRoute, body_of, check_ready, problems, runtime_of, scope
from service.schemas import VERSION
from service.settings import Settings
from service.vectors import JSON, finish, written

PREFIX = "/tei"

_Item = TypeVar("_Item")
_TOO_MANY = "batch size {} > maximum allowed batch size {}"

router = APIRouter(prefix=PREFIX, route_class=DirectRoute)
_KEY = scope("encode")

_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """As `routing.problems`; what its framework refuses is text, and 401 has no body."""
    found = problems(*statuses, shape=TEIError, media_type=JSON)
    for status in found.keys() - {401, 424, 429, 500, 503}:
        found[status]["content"] = found[status]["content"] | _TEXT["content"]
    if 401 in found:
        del found[401]["content"]
    return found


def _documented(asked: type[BaseModel], answer: object, summary: str) -> dict[str, Any]:
    statuses = (400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504)
    return {
        "summary": summary,
        "dependencies": [_KEY],
        "response_model": answer,
        "openapi_extra": body_of(asked),
        "responses": _problems(*statuses),
    }


_HEALTH: dict[str, Any] = {
    "summary": "Can it encode?",
    "response_class": Response,
    "responses": _problems(503),
}


@router.post("", name="tei", **_documented(EmbedRequest, list[list[float]], "As /tei/embed"))
@router.post("/embed", **_documented(EmbedRequest, list[list[float]], "Vectors, as TEI"))
async def tei_embed(request: Request) -> Response:
    """Encode as text-embeddings-inference does; token ids are taken as they are."""
    asked = await _read(request, EmbedRequest)
    check_dimensions(request, asked.dimensions)
    inputs = _some(asked.rows())
    encoded = await encode(request, inputs, asked.prompt_name, asked.on_overflow())
    vectors = finish(encoded.vectors, asked.dimensions, asked.normalize)  # (B, dimensions)
    return await _respond(request, encoded, inputs, partial(_as_lists, vectors))


@router.post("/embed_all", **_documented(EmbedAllRequest, list[list[list[float]]], "Of tokens"))
async def embed_all(request: Request) -> Response:
    """Return the vectors of each input's tokens, special ones included, not normalised."""
    asked = await _read(request, EmbedAllRequest)
    inputs = _some(asked.rows())
    encoded = await encode(request, inputs, asked.prompt_name, asked.on_overflow(), "tokens")
    ends = np.cumsum([len(row.ids) for row in encoded.rows])
    by_input = np.split(finish(encoded.vectors, None, normalize=False), ends[:-1])  # (L, D) each
    return await _respond(request, encoded, inputs, partial(_as_lists, by_input))


@router.post("/similarity", **_documented(SimilarityRequest, list[float], "Cosines"))
async def similarity(request: Request) -> Response:
    """Return the cosine of one sentence to each of others."""
    asked = await _read(request, SimilarityRequest)
    how = asked.parameters or Cut()
    inputs = [asked.inputs.source_sentence, *_some(asked.inputs.sentences)]
    check_count(inputs, _settings(request).limits.max_inputs, "inputs", _TOO_MANY)
    try:
        encoded = await encode(request, inputs, how.prompt_name, how.on_overflow())
    except ServiceError as error:
        if error.index is not None:  # the first is the source, and no number of the list's
            error.index = error.index - 1 if error.index else None
        raise
    vectors = finish(encoded.vectors, None, normalize=True)  # (B, W)
    cosines = (vectors[1:] @ vectors[0]).tolist()
    return await _respond(request, encoded, inputs, partial(orjson.dumps, cosines))


@router.post("/tokenize", **_documented(TokenizeRequest, list[list[SimpleToken]], "Tokens"))
async def tokenize(request: Request) -> Response:
    """Return the tokens of texts, not cut, and where they are, in bytes."""
    asked = await _read(request, TokenizeRequest)
    texts = _some([asked.inputs] if isinstance(asked.inputs, str) else asked.inputs)
    tokenizer, most = runtime_of(request).tokenizer, _settings(request).limits.max_token_vectors

    def tokens() -> bytes:
        pieces = tokenizer.pieces(texts, asked.prompt_name, asked.add_special_tokens, most)
        return orjson.dumps(
            [
                [
                    {"id": id_, "text": text, "special": span is None}
                    | {"start": span and span[0], "stop": span and span[1]}
                    for id_, text, span in of_text
                ]
                for of_text in pieces
            ]
        )

    return Response(await tokenizing(request, tokens, texts), media_type=JSON)


@router.post("/decode", **_documented(DecodeRequest, list[str], "Token ids to texts"))
async def decode(request: Request) -> Response:
    """Return the texts of token ids."""
    asked = await _read(request, DecodeRequest, "ids")
    rows = _some(asked.rows(), "ids")
    texts = partial(runtime_of(request).tokenizer.decode, rows, asked.skip_special_tokens)
    return _json(await tokenizing(request, texts, rows))


@router.get(
    "/info",
    summary="What is served, as TEI",
    dependencies=[_KEY],
    response_model=TEIInfo,
    responses=_problems(401, 403, 503),
)
async def tei_info(request: Request) -> Response:
    """Tell what is served, as text-embeddings-inference does."""
    runtime, settings = runtime_of(request), _settings(request)
    manifest = runtime.artifact.manifest
    return _json(
        TEIInfo(
            model_id=manifest.source,
            model_sha=manifest.revision,
            model_dtype=runtime.engine.precision,
            served_model_name=manifest.name,
            model_type={"embedding": {"pooling": "+".join(manifest.pooling)}},
            max_concurrent_requests=settings.batch.max_queue_tokens // manifest.max_tokens,
            max_input_length=manifest.max_tokens,
            max_batch_tokens=runtime.batch_cost,
            max_batch_requests=None,
            max_client_batch_size=settings.limits.max_inputs,
            auto_truncate=True,
            tokenization_workers=runtime.engine.threads,
            version=VERSION,
            sha=None,
            docker_label=None,
        ).model_dump()
    )


@router.get("", name="tei_root", **_HEALTH)
@router.get("/ping", name="tei_ping", **_HEALTH)
@router.get("/health", **_HEALTH)
async def tei_health(request: Request) -> Response:
    """Answer 200 with an empty body while the service can encode, or else 503."""
    check_ready(request)
    return Response()


def error(error: ServiceError, _request_id: str) -> Response:
    """Return an error as text-embeddings-inference writes it."""
    told = {
        "empty": f"Input validation error: `{_field(error)}` cannot be empty",
        "overloaded": "Model is overloaded",
        "not_ready": "unhealthy",
    }.get(error.code, f"Input validation error: {error.detail}")
    match error:
        case Unauthorized():
            return Response(status_code=401, headers=error.headers)
        case InvalidInput(code="empty"):
            status, kind = 400, "Empty"
        case InvalidInput(code="invalid", pointer=str()):  # of another type than it should be
            told = f"{error.pointer}: {error.detail}"
            return Response(told, 422, error.headers, "text/plain")
        case InvalidInput() | TooLarge(code="text_too_large"):
            status, kind = 422, "Validation"
        case Overloaded():
            status, kind = 429, "Overloaded"
        case NotReady():
            status, kind = 503, "Unhealthy"
        case InferenceFailed():
            status, kind, told = 424, "Backend", f"Backend error: {error.detail}"
        case _ if error.status == 500:
            status, kind, told = 500, "Backend", f"Backend error: {error.detail}"
        case _:  # what its framework refuses
            return Response(error.detail, error.status, error.headers, "text/plain")
    if error.index is not None:
        told += f" (at index {error.index})"
    body = orjson.dumps({"error": told, "error_type": kind})
    return Response(body, status, error.headers, JSON)


def _field(error: ServiceError) -> str:
    return "ids" if (error.pointer or "").startswith("/ids") else "inputs"


async def _read(request: Request, model: type[Model], field: str = "inputs") -> Model:
    return await read_inputs(request, model, field, _TOO_MANY)


def _some(inputs: Sequence[_Item], field: str = "inputs") -> Sequence[_Item]:
    """Return the inputs, if there are any."""
    if not inputs:
        raise InvalidInput(f"`{field}` cannot be empty", code="empty", pointer=f"/{field}")
    return inputs


async def _respond(
    request: Request,
    encoded: Encoded,
    inputs: Sequence[str | list[int]],
    write: Callable[[], bytes],
) -> Response:
    seconds = encoded.seconds
    milliseconds = {
        "x-total-time": sum(seconds.values()),
        "x-compute-time": sum(seconds.values()),
        "x-tokenization-time": seconds["tokenize"],
        "x-queue-time": seconds["queue"],
        "x-inference-time": seconds["infer"],
    }
    headers = {
        "x-compute-type": "cpu",
        "x-compute-characters": str(sum(len(text) for text in inputs if isinstance(text, str))),
        "x-compute-tokens": str(sum(len(row.ids) for row in encoded.rows)),
        **{name: str(round(1e3 * taken)) for name, taken in milliseconds.items()},
    }
    return await respond(request, encoded, write, headers=headers)


def _as_lists(parts: Iterable[NDArray[np.float32]]) -> bytes:
    return orjson.dumps(written(parts, in_base64=False))


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _json(answer: object) -> Response:
    return Response(orjson.dumps(answer), media_type=JSON)
