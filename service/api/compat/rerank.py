"""The rerank API of Jina, Cohere and vLLM: POST /v1/rerank and /v2/rerank; and /vllm/rerank.

Their requests differ in optional fields, and their responses in members that clients of the others
ignore. So one handler accepts all fields and returns all members.

Contracts: https://jina.ai/reranker, https://docs.cohere.com/reference/rerank,
https://docs.vllm.ai/en/latest/models/pooling_models.html
"""

import uuid
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, Tag

from service.api.body import read_inputs
from service.api.compat.openai import Usage
from service.api.deadline import cancel_on_disconnect
from service.api.errors import headers_of, status_of
from service.api.lease import lease_with_options
from service.api.openapi import INFERENCE_STATUSES, error_responses, inference_route
from service.api.raw_route import RawRoute
from service.api.responses import JSON, respond
from service.api.schemas import by_type
from service.api.state import State
from service.inference.errors import VitrineError
from service.inference.model.pair_scores import PairScores

# Paths whose errors have the format of Jina and Cohere.
PATHS = ("/v1/rerank", "/v2/rerank")

router = APIRouter(route_class=RawRoute)

Name = Annotated[str, StringConstraints(max_length=256)]


class CompatDocument(BaseModel):
    """A document with its text; other fields are returned, integers beyond 64 bits as floats."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    text: str


class CompatRerankRequest(BaseModel):
    """A query, and documents to order by their relevance to it."""

    # The services ignore unknown fields too. Fields that would change scores are declared.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: Name | None = Field(
        None, description="Name of the model, as in /v1/models; null: the served model"
    )
    query: str
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("text")] | Annotated[CompatDocument, Tag("object")],
                by_type({str: "text", dict: "object"}, "a text, or an object with a text"),
            ]
        ],
        Field(min_length=1, fail_fast=True),
    ] = Field(description="Texts, or objects with the field `text`")
    top_n: int | None = Field(
        None, ge=0, description="Number of results, best first; null or 0: all"
    )
    return_documents: bool | None = Field(
        None,
        description="Whether results contain the documents; null: yes, as by Jina and vLLM, but "
        "not on /v2, as by Cohere",
    )
    max_tokens_per_query: int | None = Field(
        None, ge=0, description="Maximum number of tokens of the query; null or 0: no limit"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=0, description="Maximum number of tokens of each document; null or 0: no limit"
    )
    truncation: bool | None = Field(
        None,
        description="Whether pairs with too many tokens for the model are truncated; null: yes; "
        "false: they are an error",
    )
    use_activation: bool | None = Field(
        None, description="Whether the model's activation is applied to the logits; null: yes"
    )
    rank_fields: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = Field(
        None, description="Fields of the documents that are scored; only `text` is supported"
    )
    truncate_prompt_tokens: None = Field(None, description="Not supported")
    instruction: None = Field(None, description="Not supported here, but by the route /rerank")

    def texts(self) -> list[str]:
        """Return the text of each document."""
        return [item if isinstance(item, str) else item.text for item in self.documents]

    def document(self, index: int) -> dict[str, Any]:
        """Return a document as an object."""
        item = self.documents[index]
        return {"text": item} if isinstance(item, str) else item.model_dump()


class CompatRanked(BaseModel):
    """A document and its score."""

    index: int = Field(description="Index of the document in the request")
    relevance_score: float
    document: CompatDocument | None = None


class CompatRerankResponse(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    usage: Usage
    results: list[CompatRanked]
    meta: dict[str, dict[str, int | str]] = Field(
        description="Version of Cohere's API, and number of tokens"
    )


class RerankError(BaseModel):
    """An error of Jina's and of Cohere's API, which call its text `detail` and `message`."""

    id: str
    message: str
    detail: str


ERRORS = error_responses(*INFERENCE_STATUSES, schema=RerankError, media_type=JSON)
_ROUTE = inference_route(
    "Order documents by their relevance to a query",
    CompatRerankResponse,
    CompatRerankRequest,
    responses=ERRORS,
)


@router.post("/v1/rerank", name="v1_rerank", **_ROUTE)
@router.post("/v2/rerank", name="v2_rerank", **_ROUTE)
async def rerank(request: Request, state: State) -> Response:
    """Score each document with the query, and return the best ones."""
    body = await read_inputs(
        request, state, CompatRerankRequest, "documents", "{} documents; the limit is {}"
    )
    model, options = await lease_with_options(request, state, body.model)
    work = model.rerank(
        body.query,
        body.texts(),
        max_tokens_per_query=body.max_tokens_per_query or None,
        max_tokens_per_doc=body.max_tokens_per_doc or None,
        on_overflow="error" if body.truncation is False else "truncate",
        **options,
    )
    result = await cancel_on_disconnect(request, work)
    version = "2" if request.url.path == "/v2/rerank" else "1"
    serialize = partial(_rerank_json, model.name, result, body, version)
    return await respond(request, state, model, result, serialize)


def _rerank_json(model: str, result: PairScores, body: CompatRerankRequest, version: str) -> bytes:
    scores = (result.raw_scores if body.use_activation is False else result.scores).tolist()
    with_documents = version != "2" if body.return_documents is None else body.return_documents
    tokens = sum(result.tokens)
    return orjson.dumps(
        {
            "id": str(uuid.uuid4()),
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": body.document(index)} if with_documents else {}),
                }
                for index in result.ranking(body.top_n or None)
            ],
            "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": tokens}},
        }
    )


def render_error(error: VitrineError, request_id: str) -> Response:
    """Return the error in the format of Jina's and Cohere's APIs."""
    place = f"{error.pointer}: " if error.pointer else ""
    message = place + error.detail
    body = {"id": request_id, "message": message, "detail": message}
    return Response(orjson.dumps(body), status_of(error), headers_of(error), JSON)
