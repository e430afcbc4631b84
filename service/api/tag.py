"""`POST /tag`: named entities and parts of speech, with the model's labels or the request's."""

from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from service.api.body import pointing_at, read_inputs
from service.api.deadline import cancel_on_disconnect
from service.api.lease import lease_with_options
from service.api.openapi import inference_route
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.state import State
from service.api.tag_schemas import TagRequest, TagResponse
from service.inference.results.tags import Entity, Tags

router = APIRouter(route_class=RawRoute)


@router.post(
    "/tag",
    **inference_route("Find entities in texts, or label their tokens", TagResponse, TagRequest),
)
async def tag(request: Request, state: State) -> Response:
    """Return the labelled spans of each text; start and end count Unicode code points."""
    body = await read_inputs(request, state, TagRequest)
    model, options = await lease_with_options(request, state, body.model)
    with pointing_at(body.inputs):
        work = model.tag(
            body.inputs,
            labels=body.labels,
            threshold=body.threshold,
            nested=body.nested,
            multi_label=body.multi_label,
            aggregation=body.aggregation,
            on_overflow=body.on_overflow,
            **options,
        )
        result = await cancel_on_disconnect(request, work)
    return await respond(request, state, model, result, partial(_json, model.name, result))


def _json(model: str, result: Tags) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "entities": [list(map(_fields, entities)) for entities in result.entities],
            "tokens": [len(row.ids) for row in result.rows],
            "truncated": [row.truncated for row in result.rows],
        }
    )


def _fields(entity: Entity) -> dict[str, str | int | float]:
    index = {} if entity.index is None else {"index": entity.index}
    return {
        "label": entity.label,
        "score": entity.score,
        "start": entity.start,
        "end": entity.end,
        "text": entity.text,
        **index,
    }
