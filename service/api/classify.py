"""`POST /classify`: labels of texts and of pairs of texts."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.body import pointing_at, read_inputs
from service.api.classify_schemas import ClassifyRequest, ClassifyResponse
from service.api.deadline import cancel_on_disconnect
from service.api.explanations import label_fields
from service.api.lease import lease_with_options
from service.api.openapi import inference_route
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.state import State
from service.inference.model.classification import Classification

router = APIRouter(route_class=RawRoute)


@router.post(
    "/classify",
    **inference_route("Classify texts or pairs of texts", ClassifyResponse, ClassifyRequest),
)
async def classify(request: Request, state: State) -> Response:
    """Return the labels of each text or pair of texts with their scores, best first."""
    body = await read_inputs(request, state, ClassifyRequest)
    model, options = await lease_with_options(request, state, body.model)
    with pointing_at(body.inputs):
        work = model.classify(
            body.input_list(),
            candidates=body.candidates(),
            prompt_name=body.prompt_name,
            explain=body.explain if isinstance(body.explain, bool) else body.explain.option(),
            on_overflow=body.on_overflow,
            **options,
        )
        result = await cancel_on_disconnect(request, work)
    serialize = partial(_labels_json, model.name, result, body)
    return await respond(request, state, model, result, serialize)


def _labels_json(model: str, result: Classification, body: ClassifyRequest) -> bytes:
    scores = result.logits if body.raw_scores else result.scores
    labels = [
        [{"label": result.labels[index], "score": row[index]} for index in best]
        for row, best in zip(scores.tolist(), result.best_labels(body.top_k), strict=True)
    ]
    return orjson.dumps(
        {
            "model": model,
            "labels": labels,
            "tokens": [len(row.ids) for row in result.rows],
            "truncated": [row.truncated for row in result.rows],
            **_explanation_fields(result, body),
        }
    )


def _explanation_fields(result: Classification, body: ClassifyRequest) -> dict[str, object]:
    if not body.explain:
        return {}
    indices = range(len(result.rows))
    return {
        "explanations": [label_fields(result, index, raw=body.raw_scores) for index in indices],
        "explanation_tokens": result.explanation_tokens,
    }
