"""Attributes of embedding requests, by OpenTelemetry's semantic conventions for GenAI.

Conventions: https://github.com/open-telemetry/semantic-conventions-genai, embeddings. They describe
spans of clients. Here the server span has their attributes, beside those of HTTP, and `error.type`
stays that of HTTP. Scores, labels and tags have no conventions.
"""

import itertools
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from service.api.compat.cohere import CohereEmbedRequest
from service.api.compat.openai import EmbeddingsRequest
from service.api.compat.tei_schemas import EmbedAllRequest, EmbedRequest
from service.api.responses import SeveralResults
from service.api.schemas import EncodeRequest
from service.inference.model.chunk_embeddings import ChunkEmbeddings
from service.inference.results.vectors import (
    Embeddings,
    MultiEmbeddings,
    SparseEmbeddings,
    TokenEmbeddings,
)
from service.request_trace import RequestTrace

# Bodies of embedding requests, and their fields that name formats of vectors.
_FORMATS: Mapping[type[BaseModel], Sequence[str]] = {
    EncodeRequest: ("encoding", "output_dtype"),
    EmbeddingsRequest: ("encoding_format", "embedding_type", "output_dtype"),
    CohereEmbedRequest: ("embedding_types",),
    EmbedRequest: (),
    EmbedAllRequest: (),
}

Attributes = dict[str, str | int | Sequence[str]]


def embedding_attributes(trace: RequestTrace) -> Attributes:
    """Return the attributes of a request by name; none: it is no embedding request.

    A trace without content has none either. A request whose body is invalid is none. Names of
    models are those of served models, because clients choose the others.
    """
    body = trace.body
    if not isinstance(body, BaseModel) or type(body) not in _FORMATS:
        return {}
    attributes: Attributes = {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "vitrine",
    }
    values = [getattr(body, name) for name in _FORMATS[type(body)] if name in body.model_fields_set]
    lists = [[value] if isinstance(value, str) else value or [] for value in values]
    if formats := list(dict.fromkeys(itertools.chain(*lists))):
        attributes["gen_ai.request.encoding_formats"] = formats
    if trace.model is None:
        return attributes
    requested, served = trace.model
    if requested is not None:
        attributes["gen_ai.request.model"] = requested
    if trace.result is not None:
        attributes["gen_ai.response.model"] = served
        attributes |= _of_result(trace.result)
    return attributes


def _of_result(result: object) -> Attributes:
    """Return the attributes of a result; of outputs with different widths, it has no width."""
    results = result.results if isinstance(result, SeveralResults) else [result]
    widths = set(map(_width, results))
    tokens = _tokens(results[0])
    attributes: Attributes = {}
    if tokens is not None:
        attributes["gen_ai.usage.input_tokens"] = tokens
    if len(widths) == 1 and (width := widths.pop()) is not None:
        attributes["gen_ai.embeddings.dimension.count"] = width
    return attributes


def _width(result: object) -> int | None:
    match result:
        case SparseEmbeddings():
            return result.width
        case Embeddings() | TokenEmbeddings() | MultiEmbeddings() | ChunkEmbeddings():
            return int(result.vectors[0].shape[-1])
    return None


def _tokens(result: object) -> int | None:
    match result:
        case ChunkEmbeddings():
            return sum(result.tokens)
        case Embeddings() | SparseEmbeddings() | TokenEmbeddings() | MultiEmbeddings():
            return sum(len(row.ids) for row in result.rows)
    return None
