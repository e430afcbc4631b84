"""OpenAI's embeddings API, under /v1.

Contract: https://platform.openai.com/docs/api-reference/embeddings
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from service.body import read_inputs
from service.encoding import check_dimensions, encode, respond
from service.errors import NotFound, ServiceError
from service.routing import DirectRoute, body_of, problems, runtime_of, scope
from service.schemas import Ids, one_by_one
from service.vectors import JSON, finish, written

PREFIX = "/v1"
# By status, where OpenAI has a code of its own.
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

router = APIRouter(prefix=PREFIX, route_class=DirectRoute, dependencies=[scope("encode")])


def _kind_of_input(given: object) -> str | None:
    """The first element decides; trying every member of a union costs seconds on large bodies."""
    if isinstance(given, list):
        first = {list: "rows", int: "row"}
        return first.get(type(given[0]), "texts") if given else "texts"
    return "text" if isinstance(given, str) else None


class EmbeddingsRequest(BaseModel):
    """Texts, or token ids, to embed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
        | Annotated[Ids, Tag("row")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("rows")],
        Discriminator(
            _kind_of_input,
            custom_error_type="input",
            custom_error_message="Input should be a text, texts, token ids or lists of token ids",
        ),
    ] = Field(description="Token ids are the served model's, special ones included")
    model: str = Field(max_length=256, description="As /v1/models names it")
    dimensions: int | None = Field(None, ge=1, description="Keep the first so many numbers")
    encoding_format: Literal["float", "base64"] = "float"
    user: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        None, description="Not looked at"
    )

    def inputs(self) -> Sequence[str | list[int]]:
        """Return the inputs, one by one."""
        return one_by_one(self.input)


class Embedding(BaseModel):
    """One vector, of unit length."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were encoded."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """A vector for each input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vitrine"


class Models(BaseModel):
    """The one model that is served."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIError(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorResponse(BaseModel):
    """An error, as OpenAI writes it."""

    error: OpenAIError


_problems = partial(problems, shape=OpenAIErrorResponse, media_type=JSON)

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}

BODIES = (EmbeddingsRequest, OpenAIErrorResponse)


@router.post(
    "/embeddings",
    summary="Embeddings, as OpenAI",
    response_model=EmbeddingsResponse,
    openapi_extra=body_of(EmbeddingsRequest),
    responses=_problems(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504),
)
async def embeddings(request: Request) -> Response:
    """Encode as OpenAI's API does: vectors of unit length, with the model's default prompt.

    Texts that are longer than the model takes are cut; `X-Truncated-Inputs` says how many.
    """
    asked = await read_inputs(request, EmbeddingsRequest, "input")
    _check_model(request, asked.model)
    check_dimensions(request, asked.dimensions)

    encoded = await encode(request, asked.inputs(), None, "truncate")

    vectors = finish(encoded.vectors, asked.dimensions, normalize=True)  # (B, dimensions)
    tokens = sum(len(row.ids) for row in encoded.rows)
    write = partial(_as_json, asked.model, vectors, tokens, asked.encoding_format == "base64")
    cut = sum(row.truncated for row in encoded.rows)
    return await respond(request, encoded, write, headers={"X-Truncated-Inputs": str(cut)})


@router.get(
    "/models",
    summary="What is served",
    response_model=Models,
    responses=_problems(401, 403, 503),
)
async def models(request: Request) -> Response:
    """List the one model that is served."""
    return _json(Models(data=[_model(request)]))


@router.get(
    "/models/{model:path}",
    summary="Whether a model is served",
    openapi_extra={"parameters": [_MODEL]},
    response_model=Model,
    responses=_problems(401, 403, 404, 503),
)
async def model(request: Request) -> Response:
    """Return a model, if it is the served one."""
    _check_model(request, request.path_params["model"])
    return _json(_model(request))


def error(error: ServiceError, _request_id: str) -> Response:
    """Return an error as OpenAI writes it. What others answer with 422 is a 400 there."""
    status = 400 if error.status == 422 else error.status
    code = CODES.get(status, error.code)
    kind = {403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    param = None if error.pointer is None else error.pointer.split("/")[1]
    told = {
        "message": error.detail if error.index is None else f"input {error.index}: {error.detail}",
        "type": kind,
        "param": "input" if param == "inputs" else param,
        "code": code,
    }
    return Response(orjson.dumps({"error": told}), status, error.headers, JSON)


def _check_model(request: Request, name: str) -> None:
    served = runtime_of(request).artifact.manifest.name
    if name != served:
        raise NotFound(
            f"this model is not served here; {served} is", code="model_not_found", pointer="/model"
        )


def _model(request: Request) -> Model:
    artifact = runtime_of(request).artifact
    return Model(id=artifact.manifest.name, created=int(artifact.path.stat().st_mtime))


def _as_json(model: str, vectors: NDArray[np.float32], tokens: int, in_base64: bool) -> bytes:
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(written(vectors, in_base64))
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type=JSON)
