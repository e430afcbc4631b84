"""`POST /score` and `POST /rerank`: relevance of documents to queries, by models of every kind."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.body import read_inputs
from service.api.deadline import cancel_on_disconnect
from service.api.explanations import explanation_fields, highlighted_units, option_of
from service.api.lease import lease_with_options
from service.api.openapi import inference_route
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.score_schemas import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from service.api.state import State
from service.inference.model.model import Model
from service.inference.model.pair_scores import PairScores

router = APIRouter(route_class=RawRoute)


@router.post(
    "/score",
    **inference_route("Score pairs of queries and documents", ScoreResponse, ScoreRequest),
)
async def score(request: Request, state: State) -> Response:
    """Return the relevance of each document to the query, or to the query of the same index.

    A reranker scores query and document together. Other models give the similarity of their vectors
    that they declare, mostly the cosine of embeddings, the dot product of sparse vectors, and
    MaxSim of multi-vectors; these prepend their prompts `query` and `document`.
    """
    body = await read_inputs(
        request, state, ScoreRequest, "documents", "{} documents; the limit is {}"
    )
    model, options = await lease_with_options(request, state, body.model)
    work = model.score(
        body.queries,
        body.documents,
        prompt_name=body.prompt_name,
        instruction=body.instruction,
        explain=option_of(body.explain, body.highlight),
        chunking=body.chunking.chunking() if body.chunking else None,
        on_overflow=body.on_overflow,
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    return await respond(request, state, model, result, partial(_scores_json, model, result, body))


@router.post(
    "/rerank",
    **inference_route(
        "Order documents by their relevance to a query", RerankResponse, RerankRequest
    ),
)
async def rerank(request: Request, state: State) -> Response:
    """Score each document by its relevance to the query, and return the documents, best first.

    The scores are those of `/score`: every kind of model can rerank.
    """
    body = await read_inputs(
        request, state, RerankRequest, "documents", "{} documents; the limit is {}"
    )
    model, options = await lease_with_options(request, state, body.model)
    work = model.rerank(
        body.query,
        body.texts(),
        top_n=body.top_n,
        prompt_name=body.prompt_name,
        instruction=body.instruction,
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
        explain=option_of(body.explain, body.highlight),
        chunking=body.chunking.chunking() if body.chunking else None,
        on_overflow=body.on_overflow,
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    serialize = partial(_ranking_json, model, result, body)
    return await respond(request, state, model, result, serialize)


def _scores_json(model: Model, result: PairScores, body: ScoreRequest) -> bytes:
    scores = result.raw_scores if body.raw_scores else result.scores
    indices, raw = range(len(scores)), body.raw_scores
    explained: dict[str, object] = {}
    if body.explain:
        own = [explanation_fields(model, result, index, raw=raw) for index in indices]
        explained = {"explanations": own}
    elif body.highlight:
        explained = {"highlights": [highlighted_units(result, index, raw=raw) for index in indices]}
    return orjson.dumps(
        {
            "model": model.name,
            "kind": result.kind,
            "scores": scores.tolist(),
            "tokens": result.tokens,
            "truncated": result.truncated,
            **explained,
            **_explanation_tokens(result),
            **({"best_chunks": result.best_chunks} if result.best_chunks else {}),
        }
    )


def _ranking_json(model: Model, result: PairScores, body: RerankRequest) -> bytes:
    scores = (result.raw_scores if body.raw_scores else result.scores).tolist()
    texts = body.texts()
    results: list[dict[str, object]] = []
    for index in result.ranking(body.top_n):
        ranked: dict[str, object] = {"index": index, "score": scores[index]}
        if body.return_documents:
            ranked["document"] = {"text": texts[index]}
        if body.explain:
            ranked["explanation"] = explanation_fields(model, result, index, raw=body.raw_scores)
        if body.highlight:
            ranked["highlights"] = highlighted_units(result, index, raw=body.raw_scores)
        if result.best_chunks:
            ranked["best_chunk"] = result.best_chunks[index]
        results.append(ranked)
    return orjson.dumps(
        {
            "model": model.name,
            "kind": result.kind,
            "results": results,
            "tokens": result.tokens,
            "truncated": result.truncated,
            **_explanation_tokens(result),
        }
    )


def _explanation_tokens(result: PairScores) -> dict[str, int]:
    is_explained = result.deletions or result.shapley_values
    return {"explanation_tokens": result.explanation_tokens} if is_explained else {}
