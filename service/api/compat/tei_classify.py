"""Routes of text-embeddings-inference for models for sequence classification."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.body import renamed
from service.api.compat.tei_routes import (
    PREFIX,
    named_model_with_options,
    non_empty,
    read_request,
    respond_with_durations,
    route_options,
)
from service.api.compat.tei_schemas import (
    Predictions,
    PredictParameters,
    PredictRequest,
    TEIRank,
    TEIRerankRequest,
)
from service.api.deadline import cancel_on_disconnect
from service.api.raw_route import RawRoute
from service.api.state import State
from service.inference.model.classification import Classification
from service.inference.model.pair_scores import PairScores
from service.inference.results.scores import ACTIVATIONS, Scores

router = APIRouter(prefix=PREFIX, route_class=RawRoute)


@router.post(
    "/rerank",
    name="tei_rerank",
    **route_options("Order texts by their relevance to a query", list[TEIRank], TEIRerankRequest),
)
async def rerank(request: Request, state: State) -> Response:
    """Score each text with the query, and return all, best first."""
    body = await read_request(request, state, TEIRerankRequest, "texts")
    texts = non_empty(body.texts, "texts")
    model, options = await named_model_with_options(request, state)
    model.check_outputs(("logits",))  # TEI reranks with rerankers alone
    work = model.rerank(body.query, texts, on_overflow=body.on_overflow(), **options)
    result = await cancel_on_disconnect(request, work)
    serialize = partial(_ranks_json, result, body)
    inputs = [*[body.query] * len(texts), *texts]
    return await respond_with_durations(request, state, model, result, inputs, serialize)


@router.post(
    "/predict", name="tei_predict", **route_options("Labels of texts", Predictions, PredictRequest)
)
async def predict(request: Request, state: State) -> Response:
    """Return the score of each label for each text or pair of texts, best first."""
    body = await read_request(request, state, PredictRequest, members=str)
    inputs = non_empty(body.input_list())
    model, options = await named_model_with_options(request, state)
    with renamed({name: f"parameters/{name}" for name in PredictParameters.model_fields}):
        candidates = None if body.parameters is None else body.parameters.candidates()
        overflow = body.on_overflow()
        work = model.classify(inputs, candidates=candidates, on_overflow=overflow, **options)
        result = await cancel_on_disconnect(request, work)
    serialize = partial(_predictions_json, result, body)
    texts = [text for item in inputs for text in ([item] if isinstance(item, str) else item)]
    return await respond_with_durations(request, state, model, result, texts, serialize)


def _scores(result: Classification, body: PredictRequest) -> Scores:
    """Return the scores `(N, C)`, with TEI's activation, whatever the model's own is.

    Scores of candidate labels and a requested activation are those of transformers' pipelines.
    """
    parameters = body.parameters or PredictParameters()
    name = parameters.function_to_apply
    if name is not None:
        return ACTIVATIONS["identity" if name == "none" else name](result.logits)
    if body.raw_scores:
        return result.logits
    if parameters.candidate_labels:
        return result.scores
    return ACTIVATIONS["sigmoid" if len(result.labels) == 1 else "softmax"](result.logits)


def _ranks_json(result: PairScores, body: TEIRerankRequest) -> bytes:
    scores = result.raw_scores if body.raw_scores else ACTIVATIONS["sigmoid"](result.raw_scores)
    return orjson.dumps(
        [
            {
                "index": index,
                **({"text": body.texts[index]} if body.return_text else {}),
                "score": float(scores[index]),
            }
            for index in result.ranking()
        ]
    )


def _predictions_json(result: Classification, body: PredictRequest) -> bytes:
    top_k = None if body.parameters is None else body.parameters.top_k
    predictions = [
        [{"score": row[column], "label": result.labels[column]} for column in best]
        for row, best in zip(_scores(result, body).tolist(), result.best_labels(top_k), strict=True)
    ]
    return orjson.dumps(predictions if body.is_batch else predictions[0])
