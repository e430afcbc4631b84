"""`POST /encode` with the field `chunking`."""

from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response

from service.api.body import pointing_at
from service.api.chunk_schemas import ChunkingOptions
from service.api.deadline import cancel_on_disconnect
from service.api.responses import prefers_octets, respond, serialize_rows
from service.api.schemas import EncodeRequest
from service.api.state import AppState
from service.inference.call_options import QueueArguments
from service.inference.errors import InvalidInput
from service.inference.model.chunk_embeddings import ChunkEmbeddings
from service.inference.model.model import Model
from service.inference.results.quantization import Quantizer


async def encode_chunks(
    request: Request,
    state: AppState,
    model: Model,
    body: EncodeRequest,
    chunking: ChunkingOptions,
    quantizer: Quantizer,
    options: QueueArguments,
) -> Response:
    """Respond with one vector per chunk of each input.

    Raises:
        InvalidInput: The inputs are token ids, or the response would not be JSON.
        VitrineError: Any error of `Model.encode_chunks`, under the same conditions.
    """
    if prefers_octets(request):
        raise InvalidInput(
            "chunks need a JSON response; use encoding base64 for compact vectors",
            pointer="/chunking",
        )
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise InvalidInput("chunking applies to texts, not to token ids", pointer="/chunking")
    with pointing_at(body.inputs):
        work = model.encode_chunks(
            texts,
            chunking.chunking(),
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            truncate_dim=body.truncate_dim,
            normalize=body.normalize,
            **options,
        )
        result = await cancel_on_disconnect(request, work)
    serialize = partial(_json, model.name, result, body.encoding == "base64", quantizer)
    return await respond(request, state, model, result, serialize)


def _json(model: str, result: ChunkEmbeddings, in_base64: bool, quantizer: Quantizer) -> bytes:
    """Return the JSON of a `ChunksResponse`."""
    fields: dict[str, Any] = {
        "model": model,
        "dimensions": result.vectors[0].shape[1],
        "embeddings": [serialize_rows(quantizer(own), in_base64) for own in result.vectors],
        "chunks": result.chunks,  # orjson writes dataclasses as objects
        "tokens": result.tokens,
        "truncated": [False] * len(result.chunks),
    }
    return orjson.dumps(fields)
