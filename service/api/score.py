"""`POST /score`: relevance of documents to queries, by rerankers and by embedding models."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.auth import require_scope
from service.api.body import read_inputs
from service.api.deadline import cancel_on_disconnect, deadline_s
from service.api.openapi import error_responses, request_body
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.score_schemas import ScoreRequest, ScoreResponse
from service.api.state import State
from service.inference.scores import PairScores

router = APIRouter(route_class=RawRoute)


@router.post(
    "/score",
    summary="Score pairs of queries and documents",
    dependencies=[require_scope("encode")],
    response_model=ScoreResponse,
    openapi_extra=request_body(ScoreRequest),
    responses=error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
)
async def score(request: Request, state: State) -> Response:
    """Return the relevance of each document to the query, or to the query of the same index.

    A reranker scores query and document together. An embedding model gives the cosine similarity of
    their vectors, a model of sparse vectors their dot product, and a multi-vector model MaxSim;
    these prepend their prompts `query` and `document`.
    """
    body = await read_inputs(
        request, state, ScoreRequest, "documents", "{} documents; the limit is {}"
    )
    model = state.ready_model()
    work = model.score(
        body.queries,
        body.documents,
        on_overflow=body.on_overflow,
        timeout_s=deadline_s(request, state.settings.limits.request_s),
    )
    result = await cancel_on_disconnect(request, work)
    return await respond(request, state, model, result, partial(_json, model.name, result, body))


def _json(model: str, result: PairScores, body: ScoreRequest) -> bytes:
    scores = result.raw_scores if body.raw_scores else result.scores
    return orjson.dumps(
        {
            "model": model,
            "kind": result.kind,
            "scores": scores.tolist(),
            "tokens": result.tokens,
            "truncated": result.truncated,
        }
    )
