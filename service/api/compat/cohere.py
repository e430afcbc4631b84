"""Cohere's embeddings API: POST /v2/embed and /v1/embed.

Contract: https://docs.cohere.com/reference/embed
"""

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from models.quantization import OutputDtype
from service.api.body import read_inputs
from service.api.compat import rerank
from service.api.compat.rerank import Name
from service.api.deadline import cancel_on_disconnect
from service.api.lease import lease_with_options
from service.api.openapi import inference_route
from service.api.raw_route import RawRoute
from service.api.responses import SeveralResults, respond, serialize_rows
from service.api.state import State
from service.inference.call_options import OnOverflow
from service.inference.errors import VitrineError
from service.inference.model.model import Model
from service.inference.model.similarity import keeps_similarity_at_unit_length
from service.inference.results.quantization import Quantizer
from service.inference.results.vectors import Embeddings

# Paths whose errors have the format of Cohere.
PATHS = ("/v1/embed", "/v2/embed")
# Fields of this API by the names of the arguments of `Model`.
_FIELDS = {
    "dimensions": "output_dimension",
    "output_dtype": "embedding_types",
}

router = APIRouter(route_class=RawRoute)

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_DTYPES: Mapping[EmbeddingType, OutputDtype] = {
    "float": "float32",
    "base64": "float32",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "binary",
    "ubinary": "ubinary",
}
InputType = Literal["search_query", "search_document", "classification", "clustering"]
# Names of sentence-transformers' prompts; other input types are names of prompts themselves.
_PROMPTS = {"search_query": "query", "search_document": "document"}
_ON_OVERFLOW: Mapping[str, OnOverflow] = {
    "NONE": "error",
    "START": "truncate_left",
    "END": "truncate_right",
}


class CohereEmbedRequest(BaseModel):
    """Texts to embed."""

    # Cohere ignores unknown fields too. Fields that would change vectors are declared.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    # First, so that a request without texts is refused because of these.
    images: None = Field(None, description="Not supported")
    inputs: None = Field(None, description="Not supported")
    texts: list[str] = Field(min_length=1, fail_fast=True)
    model: Name | None = Field(
        None, description="Name of the model, as in /v1/models; null: the served model"
    )
    input_type: InputType | None = Field(
        None,
        description="Purpose of the vectors: selects the model's prompt `query`, `document`, "
        "`classification` or `clustering`, if it has that prompt, and else its default prompt",
    )
    embedding_types: list[EmbeddingType] | None = Field(
        None,
        min_length=1,
        max_length=len(_DTYPES),
        description="Types of the vectors in the response; `int8` and `uint8` need a calibrated "
        'model; null: `["float"]`',
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None,
        description="Side on which inputs that exceed the model's maximum length are truncated; "
        "`NONE`: they are an error; null: `END`",
    )
    output_dimension: int | None = Field(
        None, ge=1, description="Number of leading dimensions to keep; null: all"
    )
    max_tokens: None = Field(None, description="Not supported")
    space: None = Field(None, description="Not supported here, but by the route /encode")


class CohereEmbeddings(BaseModel):
    """The vectors of the texts, by type."""

    float_: list[list[float]] | None = Field(None, alias="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = Field(None, description="Vectors as base64 of their float32 bytes")


class CohereEmbedResponse(BaseModel):
    """One vector of each type per text, in the order of the texts."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: CohereEmbeddings | list[list[float]] = Field(
        description="Vectors by type; a list without `embedding_types` on /v1"
    )
    texts: list[str]
    meta: dict[str, dict[str, int | str]] = Field(
        description="Version of Cohere's API, and number of tokens"
    )


_ROUTE = inference_route(
    "Embed texts", CohereEmbedResponse, CohereEmbedRequest, responses=rerank.ERRORS
)


@router.post("/v1/embed", name="v1_embed", **_ROUTE)
@router.post("/v2/embed", name="v2_embed", **_ROUTE)
async def embed(request: Request, state: State) -> Response:
    """Encode texts into vectors, and quantise them to the requested types.

    Their length is that of `/v1/embeddings`.
    """
    body = await read_inputs(
        request, state, CohereEmbedRequest, "texts", "{} texts; the limit is {}"
    )
    model, options = await lease_with_options(request, state, body.model)
    types = body.embedding_types or ["float"]
    normalize = keeps_similarity_at_unit_length(model.artifact.manifest)
    quantizers = {
        name: model.quantizer(_DTYPES[name], dimensions=body.output_dimension, normalize=normalize)
        for name in types
    }
    work = model.encode(
        body.texts,
        prompt_name=_prompt_name(model, body.input_type),
        dimensions=body.output_dimension,
        normalize=normalize,
        on_overflow=_ON_OVERFLOW[body.truncate or "END"],
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    is_v1 = request.url.path == "/v1/embed"
    # Version 1 has a list in place of the vectors by type, if the request names no type.
    is_plain = is_v1 and body.embedding_types is None
    serialize = partial(
        _embed_json, body.texts, result, quantizers, "1" if is_v1 else "2", is_plain
    )
    serialized = SeveralResults([result] * len(quantizers))
    return await respond(request, state, model, serialized, serialize)


def render_error(error: VitrineError, request_id: str) -> Response:
    """Return the error in the format of Cohere's API, with the names of its fields."""
    if error.pointer:  # "/inputs" alone is a field of this API
        error.pointer = error.pointer.replace("/inputs/", "/texts/")
    error.rename(_FIELDS)
    return rerank.render_error(error, request_id)


def _prompt_name(model: Model, input_type: str | None) -> str | None:
    if input_type is None:
        return None
    name = _PROMPTS.get(input_type, input_type)
    return name if name in model.artifact.manifest.prompts else None


def _embed_json(
    texts: Sequence[str],
    result: Embeddings,
    quantizers: Mapping[EmbeddingType, Quantizer],
    version: str,
    is_plain: bool,
) -> bytes:
    embeddings = {
        name: serialize_rows(quantizer(result.vectors), name == "base64")
        for name, quantizer in quantizers.items()
    }
    tokens = sum(len(row.ids) for row in result.rows)
    return orjson.dumps(
        {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "embeddings": embeddings["float"] if is_plain else embeddings,
            "texts": texts,
            "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": tokens}},
        }
    )
