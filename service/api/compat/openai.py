"""OpenAI's embeddings API, under /v1.

Contract: https://platform.openai.com/docs/api-reference/embeddings
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, StringConstraints, Tag

from models.quantization import OutputDtype
from service.api.auth import require_scope
from service.api.body import read_inputs, renamed
from service.api.deadline import cancel_on_disconnect
from service.api.errors import headers_of, status_of
from service.api.lease import lease_with_options
from service.api.openapi import error_responses, inference_route
from service.api.raw_route import RawRoute
from service.api.responses import JSON, respond, serialize_rows
from service.api.schemas import Ids, PromptName, as_list, by_type
from service.api.state import State
from service.api.strict_model import StrictModel
from service.inference.errors import InvalidInput, VitrineError
from service.inference.model.similarity import keeps_similarity_at_unit_length
from service.inference.registry.served_models import ModelStatus
from service.inference.results.quantization import Quantizer
from service.inference.results.vectors import Embeddings

PREFIX = "/v1"
# Other values than OpenAI's "float" and "base64" are those of Mixedbread's and Jina's APIs.
Format = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
# OpenAI's error codes, by HTTP status. They replace the codes of this service.
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

router = APIRouter(prefix=PREFIX, route_class=RawRoute)


class EmbeddingsRequest(StrictModel):
    """Texts or token ids to embed."""

    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
        | Annotated[Ids, Tag("row")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("rows")],
        by_type(
            {str: "text", list: "texts"},
            "a text, a list of texts, a list of token ids, or a list of lists of token ids",
            {list: "rows", int: "row", float: "row"},
        ),
    ] = Field(
        description="A text, a list of texts, a list of token ids, or a list of lists of token "
        "ids; token ids are from the served model's vocabulary and include special tokens"
    )
    model: str = Field(max_length=256, description="Name of the model, as in /v1/models")
    dimensions: int | None = Field(
        None, ge=1, description="Number of leading dimensions to keep; null: all"
    )
    encoding_format: Format | None = Field(
        None,
        description='"float" or "base64"; null: "float". Other values are those of Mixedbread\'s '
        "API, and select a dtype as `output_dtype` does",
    )
    embedding_type: Format | None = Field(
        None, description="The same as `encoding_format`, as in Jina's API"
    )
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None,
        description="Dtype of the vectors, as in Voyage's API; see `output_dtype` of /encode; with "
        "base64, of their bytes",
    )
    prompt_name: PromptName = Field(
        None,
        description="Extension of OpenAI's API: name of the model's prompt to prepend to each "
        "text; an adapter of the same name is applied too; null: the default prompt",
    )
    on_overflow: Literal["truncate", "error"] = Field(
        "truncate",
        description="Extension of OpenAI's API: whether to truncate inputs that exceed the model's "
        "maximum length, or to respond with an error",
    )
    user: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        None, description="Ignored"
    )

    def input_list(self) -> Sequence[str | list[int]]:
        """Return the inputs as a list."""
        return as_list(self.input)

    @property
    def in_base64(self) -> bool:
        """Whether vectors are encoded as base64."""
        return "base64" in (self.encoding_format, self.embedding_type)

    def dtype(self) -> tuple[OutputDtype, str]:
        """Return the dtype that the three fields select, and the first field that selects it.

        Raises:
            InvalidInput: They select different dtypes.
        """
        dtypes: dict[OutputDtype, str] = {}
        for field in ("output_dtype", "encoding_format", "embedding_type"):
            if (dtype := getattr(self, field)) not in (None, "float", "base64"):
                dtypes.setdefault(dtype, field)
        if len(dtypes) > 1:
            raise InvalidInput(
                "output_dtype, encoding_format and embedding_type select different dtypes",
                pointer=f"/{next(iter(dtypes.values()))}",
            )
        return next(iter(dtypes.items()), ("float32", "output_dtype"))


class Embedding(BaseModel):
    """The vector of one input: of unit length, integers of another dtype, or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Total number of encoded tokens of the inputs; both fields have the same value."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """One vector per input, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelEntry(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vitrine"


class Models(BaseModel):
    """All served models."""

    object: Literal["list"] = "list"
    data: list[ModelEntry]


class OpenAIError(BaseModel):
    """The error object of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorResponse(BaseModel):
    """An error response of OpenAI's API."""

    error: OpenAIError


_error_responses = partial(error_responses, schema=OpenAIErrorResponse, media_type=JSON)
ERRORS = _error_responses(400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)

_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


@router.post(
    "/embeddings",
    **inference_route("Embeddings", EmbeddingsResponse, EmbeddingsRequest, responses=ERRORS),
)
async def embeddings(request: Request, state: State) -> Response:
    """Encode inputs into one vector each, of unit length as by OpenAI's API.

    Vectors of a model that neither normalises them nor compares them by cosine keep their length,
    on which its similarity depends. By default, inputs that exceed the model's maximum length are
    truncated. The header `X-Truncated-Inputs` has the number of truncated inputs.
    """
    body = await read_inputs(request, state, EmbeddingsRequest, "input")
    dtype, field = body.dtype()
    model, options = await lease_with_options(request, state, body.model)
    normalize = keeps_similarity_at_unit_length(model.artifact.manifest)
    with renamed({"output_dtype": field}):
        quantizer = model.quantizer(dtype, dimensions=body.dimensions, normalize=normalize)

    work = model.encode(
        body.input_list(),
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        normalize=normalize,
        on_overflow=body.on_overflow,
        **options,
    )
    result = await cancel_on_disconnect(request, work)

    serialize = partial(_embeddings_json, body.model, result, body.in_base64, quantizer)
    truncated = sum(row.truncated for row in result.rows)
    headers = {"X-Truncated-Inputs": str(truncated)}
    return await respond(request, state, model, result, serialize, headers=headers)


@router.get(
    "/models",
    summary="Served models",
    dependencies=[require_scope("encode")],
    response_model=Models,
    responses=_error_responses(401, 403, 503),
)
async def models(_request: Request, state: State) -> Response:
    """List the served models."""
    state.registry.check_alive()
    return _json(Models(data=list(map(_model_info, state.registry.statuses()))))


@router.get(
    "/models/{model:path}",
    summary="A served model",
    dependencies=[require_scope("encode")],
    openapi_extra={"parameters": [_MODEL]},
    response_model=ModelEntry,
    responses=_error_responses(400, 401, 403, 404, 503),
)
async def model(request: Request, state: State) -> Response:
    """Return the served model, or 404 if the path names another model."""
    name = state.registry.resolve(request.path_params["model"])
    statuses = {status.name: status for status in state.registry.statuses()}
    return _json(_model_info(statuses[name]))


def render_error(error: VitrineError, _request_id: str) -> Response:
    """Return the error in the format of OpenAI's API, which uses status 400 instead of 422."""
    status = status_of(error)
    status = 400 if status == 422 else status
    code = CODES.get(status, error.code)
    kind = {403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    pointer = (error.pointer or "").lstrip("/")
    message = error.detail
    param = pointer.split("/")[0] or None
    if error.index is not None:
        message = f"input {error.index}: {message}"
    # A query, a value within an input, or a field: OpenAI's client shows the message alone.
    elif "/" in pointer or (param and error.code == "invalid"):
        message = f"{pointer}: {message}"
    body = {
        "message": message,
        "type": kind,
        "param": "input" if param == "inputs" else param,
        "code": code,
    }
    return Response(orjson.dumps({"error": body}), status, headers_of(error), JSON)


def _model_info(status: ModelStatus) -> ModelEntry:
    return ModelEntry(id=status.name, created=status.created)


def _embeddings_json(
    model: str, result: Embeddings, in_base64: bool, quantizer: Quantizer
) -> bytes:
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in enumerate(serialize_rows(quantizer(result.vectors), in_base64))
    ]
    tokens = sum(len(row.ids) for row in result.rows)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type=JSON)
