"""vLLM's routes for scores and classes, under /vllm: /rerank, /score, /v1/score and /classify.

Contract: https://docs.vllm.ai/en/latest/models/pooling_models.html
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from service.api.body import check_count, read_body, read_inputs, renamed
from service.api.compat.openai import ERRORS, Usage, render_error
from service.api.compat.rerank import CompatRerankRequest, CompatRerankResponse, Name, rerank
from service.api.deadline import cancel_on_disconnect
from service.api.lease import lease_with_options
from service.api.openapi import inference_route
from service.api.raw_route import RawRoute
from service.api.responses import respond
from service.api.schemas import Texts
from service.api.state import State
from service.inference.errors import InvalidInput
from service.inference.model.classification import Classification
from service.inference.model.pair_scores import PairScores

__all__ = ["PREFIX", "render_error", "router"]

PREFIX = "/vllm"

router = APIRouter(prefix=PREFIX, route_class=RawRoute)


class _RequestBody(BaseModel):
    # vLLM ignores unknown fields too.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: Name | None = Field(
        None, description="Name of the model, as in /v1/models; null: the served model"
    )
    use_activation: bool | None = Field(
        None, description="Whether the model's activation is applied to the logits; null: yes"
    )
    truncate_prompt_tokens: None = Field(None, description="Not supported")


# Names that vLLM accepts for each field.
_NAMES = {
    "queries": ("queries", "text_1", "data_1"),
    "documents": ("documents", "items", "text_2", "data_2"),
}


def _declare_names(schema: dict[str, Any]) -> None:
    """Add the other names of the fields to a JSON schema, which requires one name of each."""
    null = {"type": "null"}
    for field, names in _NAMES.items():
        schema["required"].remove(field)
        texts_or_null = {"anyOf": [schema["properties"][field], null]}
        schema["properties"] |= dict.fromkeys(names, texts_or_null)
    choices = [
        [{"required": [name], "properties": {name: {"not": null}}} for name in names]
        for names in _NAMES.values()
    ]
    schema["allOf"] = [{"oneOf": choice} for choice in choices]


class VLLMScoreRequest(_RequestBody):
    """Queries, and the documents to score them with."""

    model_config = ConfigDict(json_schema_extra=_declare_names)

    queries: Texts = Field(validation_alias=AliasChoices(*_NAMES["queries"]))
    documents: Texts = Field(validation_alias=AliasChoices(*_NAMES["documents"]))
    instruction: None = Field(None, description="Not supported here, but by the route /score")
    max_tokens_per_query: int | None = Field(
        None, ge=0, le=0, description="Not supported here, but by the route /rerank"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=0, le=0, description="Not supported here, but by the route /rerank"
    )

    _names: dict[str, str] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _choose_names(cls, body: dict[str, Any], validate: ModelWrapValidatorHandler[Self]) -> Self:
        chosen: dict[str, str] = {}
        for field, names in _NAMES.items():
            own = [name for name in names if body.get(name) is not None]
            if len(own) > 1:
                message = f"{' and '.join(own)} are names of the same field; send one of them"
                raise InvalidInput(message, pointer=f"/{own[1]}")
            if own:
                chosen[field] = own[0]
                body = {name: body[name] for name in body if name in own or name not in names}
        request = validate(body)
        request._names = chosen
        return request

    def names(self) -> dict[str, str]:
        """Return the name of each field in the request."""
        return self._names


class VLLMClassifyRequest(_RequestBody):
    """Texts to classify."""

    input: Texts
    add_special_tokens: Literal[True] = Field(True, description="False is not supported")


class VLLMScore(BaseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class VLLMScoreResponse(BaseModel):
    """One score per pair, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[VLLMScore]
    usage: Usage


class VLLMClass(BaseModel):
    """The class of a text, and the probabilities of all labels in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class VLLMClassifyResponse(BaseModel):
    """One class per text, in order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[VLLMClass]
    usage: Usage


_route = partial(inference_route, responses=ERRORS)
_SCORE = _route("Score pairs of queries and documents", VLLMScoreResponse, VLLMScoreRequest)
_CLASSIFY = _route("Classify texts", VLLMClassifyResponse, VLLMClassifyRequest)
_RERANK = _route("Order documents by relevance", CompatRerankResponse, CompatRerankRequest)

router.add_api_route("/rerank", rerank, methods=["POST"], name="vllm_rerank", **_RERANK)


@router.post("/score", name="vllm_score", **_SCORE)
@router.post("/v1/score", name="vllm_v1_score", **_SCORE)
async def score(request: Request, state: State) -> Response:
    """Score each document with the query, or with the query of the same index.

    The score is that of a reranker, or the similarity of vectors that the model declares.
    """
    body = await read_body(request, state, VLLMScoreRequest)
    with renamed(body.names()):
        if isinstance(body.documents, list):
            message = "{} documents; the limit is {}"
            limit = state.settings.limits.max_inputs
            check_count(body.documents, limit, "documents", message)
        model, options = await lease_with_options(request, state, body.model)
        work = model.score(body.queries, body.documents, **options)
        result = await cancel_on_disconnect(request, work)
    return await respond(
        request, state, model, result, partial(_scores_json, model.name, result, body)
    )


@router.post("/classify", name="vllm_classify", **_CLASSIFY)
async def classify(request: Request, state: State) -> Response:
    """Return the probability of each label of the model for each text."""
    body = await read_inputs(request, state, VLLMClassifyRequest, "input")
    model, options = await lease_with_options(request, state, body.model)
    work = model.classify(body.input, **options)
    result = await cancel_on_disconnect(request, work)
    serialize = partial(_classes_json, model.name, result, body.use_activation is False)
    return await respond(request, state, model, result, serialize)


def _scores_json(model: str, result: PairScores, body: VLLMScoreRequest) -> bytes:
    scores = result.raw_scores if body.use_activation is False else result.scores
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(scores.tolist())
    ]
    return _list_json("score", model, data, sum(result.tokens))


def _classes_json(model: str, result: Classification, logits: bool) -> bytes:
    scores = result.logits if logits else result.scores
    data = [
        {"index": index, "label": result.labels[best], "probs": probs, "num_classes": len(probs)}
        for index, (best, probs) in enumerate(
            zip(np.argmax(result.logits, axis=1), scores.tolist(), strict=True)
        )
    ]
    return _list_json("classify", model, data, sum(len(row.ids) for row in result.rows))


def _list_json(kind: str, model: str, data: Sequence[dict[str, Any]], tokens: int) -> bytes:
    return orjson.dumps(
        {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )
