"""Routes of text-embeddings-inference for embeddings and tokens."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from service.api.body import check_count
from service.api.compat.tei_routes import (
    PREFIX,
    TOO_MANY,
    json_response,
    named_model,
    named_model_with_options,
    non_empty,
    read_request,
    respond_with_durations,
    route_options,
)
from service.api.compat.tei_schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    SimilarityRequest,
    SimpleToken,
    SparseValue,
    TokenizeRequest,
    TruncationOptions,
)
from service.api.deadline import cancel_on_disconnect, within
from service.api.raw_route import RawRoute
from service.api.responses import serialize_rows
from service.api.state import State
from service.inference.call_options import QueueArguments, call_options
from service.inference.errors import VitrineError
from service.inference.model.model import Model
from service.inference.results.vectors import (
    Embeddings,
    SparseVector,
    Vectors,
    unit_vectors,
)

router = APIRouter(prefix=PREFIX, route_class=RawRoute)


@router.post(
    "/embed", name="tei_embed", **route_options("Embeddings", list[list[float]], EmbedRequest)
)
async def embed(request: Request, state: State) -> Response:
    """Encode inputs into one vector each; token ids get no prompt and no special tokens."""
    body = await read_request(request, state, EmbedRequest)
    inputs = non_empty(body.input_list())
    model, options = await named_model_with_options(request, state)
    work = model.encode(
        inputs,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        normalize=body.normalize,
        on_overflow=body.on_overflow(),
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    return await respond_with_durations(
        request, state, model, result, inputs, partial(_as_lists, result.vectors)
    )


@router.post(
    "/embed_all", **route_options("Token embeddings", list[list[list[float]]], EmbedAllRequest)
)
async def embed_all(request: Request, state: State) -> Response:
    """Return the token vectors of each input, special tokens included, not normalised."""
    body = await read_request(request, state, EmbedAllRequest)
    inputs = non_empty(body.input_list())
    model, options = await named_model_with_options(request, state)
    work = model.encode_tokens(
        inputs,
        prompt_name=body.prompt_name,
        on_overflow=body.on_overflow(),
        with_offsets=False,
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    return await respond_with_durations(
        request, state, model, result, inputs, partial(_as_lists, result.vectors)
    )


@router.post(
    "/embed_sparse", **route_options("Sparse vectors", list[list[SparseValue]], EmbedAllRequest)
)
async def embed_sparse(request: Request, state: State) -> Response:
    """Encode inputs into the nonzero weights of one sparse vector each."""
    body = await read_request(request, state, EmbedAllRequest)
    inputs = non_empty(body.input_list())
    model, options = await named_model_with_options(request, state)
    work = model.encode_sparse(
        inputs,
        prompt_name=body.prompt_name,
        on_overflow=body.on_overflow(),
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    serialize = partial(_sparse_values, result.vectors)
    return await respond_with_durations(request, state, model, result, inputs, serialize)


@router.post("/similarity", **route_options("Cosine similarities", list[float], SimilarityRequest))
async def similarity(request: Request, state: State) -> Response:
    """Return the cosine similarity between the source sentence and each of the sentences."""
    body = await read_request(request, state, SimilarityRequest)
    parameters = body.parameters or TruncationOptions()
    inputs = [body.inputs.source_sentence, *non_empty(body.inputs.sentences)]
    check_count(inputs, state.settings.limits.max_inputs, "inputs", TOO_MANY)
    model, options = await named_model_with_options(request, state)
    try:
        work = _unit_vectors(model, inputs, parameters, options)
        result = await cancel_on_disconnect(request, work)
    except VitrineError as error:
        if error.index is not None:  # the source sentence comes first and has no index
            error.index = error.index - 1 if error.index else None
        raise
    cosines = (result.vectors[1:] @ result.vectors[0]).tolist()
    serialize = partial(orjson.dumps, cosines)
    return await respond_with_durations(request, state, model, result, inputs, serialize)


async def _unit_vectors(
    model: Model, texts: Sequence[str], parameters: TruncationOptions, options: QueueArguments
) -> Embeddings:
    """Return vectors `(N, W)` of unit length; like a score, they take empty texts."""
    on_overflow = parameters.on_overflow()
    rows, (vectors,), seconds = await model.run(
        texts,
        len(texts),
        partial(model.tokenizer.rows_of_texts, texts, parameters.prompt_name, on_overflow),
        ("pooled",),
        call_options(**options),
    )
    return Embeddings(unit_vectors(np.array(vectors)), rows, seconds)


@router.post("/tokenize", **route_options("Tokens", list[list[SimpleToken]], TokenizeRequest))
async def tokenize(request: Request, state: State) -> Response:
    """Return the tokens of each text and their byte spans; texts are not truncated."""
    body = await read_request(request, state, TokenizeRequest)
    texts = non_empty([body.inputs] if isinstance(body.inputs, str) else body.inputs)
    model = await named_model(request, state)
    work = model.tokenize(
        texts, prompt_name=body.prompt_name, add_special_tokens=body.add_special_tokens
    )
    tokens = await within(state.deadline(request), work)
    return json_response(
        [
            [
                {"id": id_, "text": text, "special": span is None}
                | {"start": span and span[0], "stop": span and span[1]}
                for id_, text, span in tokens_of_text
            ]
            for tokens_of_text in tokens
        ]
    )


@router.post("/decode", **route_options("Token ids to texts", list[str], DecodeRequest))
async def decode(request: Request, state: State) -> Response:
    """Return the text of each list of token ids."""
    body = await read_request(request, state, DecodeRequest, "ids")
    rows = non_empty(body.id_lists(), "ids")
    model = await named_model(request, state)
    work = model.decode(rows, skip_special_tokens=body.skip_special_tokens)
    return json_response(await within(state.deadline(request), work))


def _as_lists(vectors: Sequence[Vectors] | Vectors) -> bytes:
    return orjson.dumps(serialize_rows(vectors, in_base64=False))


def _sparse_values(vectors: Sequence[SparseVector]) -> bytes:
    rows = (
        [{"index": i, "value": v} for i, v in zip(vector.ids, vector.weights, strict=True)]
        for vector in vectors
    )
    return orjson.dumps(
        [orjson.Fragment(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in rows]
    )
