"""Pydantic models of `POST /score`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from service.api.classify_schemas import OnOverflow, RawScores


def _tag(value: object) -> str | None:
    return "text" if isinstance(value, str) else "texts" if isinstance(value, list) else None


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")],
    Discriminator(
        _tag,
        custom_error_type="texts",
        custom_error_message="Input should be a text or a list of texts",
    ),
]


class ScoreRequest(BaseModel):
    """Queries, and the documents to score them with."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    queries: Texts = Field(description="One query for all documents, or one query per document")
    documents: Texts = Field(description="A text, or a list of texts")
    raw_scores: RawScores = False
    on_overflow: OnOverflow = "truncate"


class ScoreResponse(BaseModel):
    """The score of each pair of query and document, in the order of the documents."""

    model: str
    kind: Literal["cross_encoder", "cosine", "dot", "maxsim"] = Field(
        description='"cross_encoder": score of a reranker; "cosine": cosine similarity of the '
        'vectors of an embedding model; "dot": dot product of sparse vectors; "maxsim": MaxSim of '
        "multi-vectors"
    )
    scores: list[float]
    tokens: list[int] = Field(description="Number of tokens of each query with its document")
    truncated: list[bool] = Field(
        description="Whether the query or the document was truncated, for each pair"
    )


# Bodies that the handlers parse themselves.
BODIES: tuple[type[BaseModel], ...] = (ScoreRequest,)
