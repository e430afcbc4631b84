"""Routes of sequence classification models: /classify and /rerank."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.auth import require_scope
from service.api.body import pointing_at, read_inputs
from service.api.classify_schemas import (
    ClassifyRequest,
    ClassifyResponse,
    RerankRequest,
    RerankResponse,
)
from service.api.deadline import cancel_on_disconnect, deadline_s
from service.api.openapi import error_responses, request_body
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.state import State
from service.inference.scores import Classification

router = APIRouter(route_class=RawRoute)
_ERRORS = error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504)


@router.post(
    "/classify",
    summary="Classify texts or pairs of texts",
    dependencies=[require_scope("encode")],
    response_model=ClassifyResponse,
    openapi_extra=request_body(ClassifyRequest),
    responses=_ERRORS,
)
async def classify(request: Request, state: State) -> Response:
    """Return the labels of each text or pair of texts with their scores, best first."""
    body = await read_inputs(request, state, ClassifyRequest)
    model = state.ready_model()
    with pointing_at(body.inputs):
        work = model.classify(
            body.input_list(),
            on_overflow=body.on_overflow,
            timeout_s=deadline_s(request, state.settings.limits.request_s),
        )
        result = await cancel_on_disconnect(request, work)
    serialize = partial(_labels_json, model.name, result, body)
    return await respond(request, state, model, result, serialize)


@router.post(
    "/rerank",
    summary="Order documents by their relevance to a query",
    dependencies=[require_scope("encode")],
    response_model=RerankResponse,
    openapi_extra=request_body(RerankRequest),
    responses=_ERRORS,
)
async def rerank(request: Request, state: State) -> Response:
    """Score each document by its relevance to the query, and return the documents, best first."""
    body = await read_inputs(
        request, state, RerankRequest, "documents", "{} documents; the limit is {}"
    )
    model = state.ready_model()
    work = model.rerank(
        body.query,
        body.texts(),
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
        on_overflow=body.on_overflow,
        timeout_s=deadline_s(request, state.settings.limits.request_s),
    )
    result = await cancel_on_disconnect(request, work)
    serialize = partial(_ranking_json, model.name, result, body)
    return await respond(request, state, model, result, serialize)


def _labels_json(model: str, result: Classification, body: ClassifyRequest) -> bytes:
    scores = result.logits if body.raw_scores else result.scores
    labels = [
        [{"label": result.labels[index], "score": row[index]} for index in best]
        for row, best in zip(scores.tolist(), result.best_labels(body.top_k), strict=True)
    ]
    return _json(model, result, labels=labels)


def _ranking_json(model: str, result: Classification, body: RerankRequest) -> bytes:
    scores = (result.logits if body.raw_scores else result.scores)[:, 0].tolist()
    texts = body.texts()
    results = [
        {
            "index": index,
            "score": scores[index],
            **({"document": {"text": texts[index]}} if body.return_documents else {}),
        }
        for index in result.ranking(body.top_n)
    ]
    return _json(model, result, results=results)


def _json(model: str, result: Classification, **fields: object) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            **fields,
            "tokens": [len(row.ids) for row in result.rows],
            "truncated": [row.truncated for row in result.rows],
        }
    )
