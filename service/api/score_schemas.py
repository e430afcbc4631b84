"""Pydantic models of `POST /score` and `POST /rerank`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, Tag

from service.api.chunk_schemas import ChunkInfo, DocumentChunking
from service.api.classify_schemas import OnOverflow, RawScores
from service.api.explanations import (
    DeletionInfo,
    Explain,
    ExplanationTokens,
    Highlight,
    ShapleyInfo,
    TermsInfo,
    UnitInfo,
)
from service.api.schemas import ModelName, PromptName, Texts, by_type
from service.api.strict_model import StrictModel

Instruction = Annotated[
    str | None,
    Field(
        min_length=1,
        description="Criterion of relevance, for rerankers that are language models with "
        "a template of pairs; null: the prompt, or else the template's own",
    ),
]
QueryPromptName = Annotated[
    PromptName,
    Field(
        description="Name of a reranker's prompt to prepend to each query, or that is the "
        "instruction if the model has a template of pairs; null: the default prompt; other models "
        "have the prompts `query` and `document`"
    ),
]


class Document(StrictModel):
    """A document, as an object with its text."""

    text: str


Documents = Annotated[
    list[
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Document, Tag("object")],
            by_type({str: "text", dict: "object"}, "a text, or an object with the field text"),
        ]
    ],
    Field(min_length=1, fail_fast=True),
]


ScoreKind = Annotated[
    Literal["cross_encoder", "cosine", "dot", "euclidean", "manhattan", "maxsim"],
    Field(
        description='"cross_encoder": score of a reranker; otherwise the similarity of vectors '
        'that the model declares: "cosine"; "dot", their dot product; "euclidean" or "manhattan", '
        'their negative distance; "maxsim", MaxSim of multi-vectors'
    ),
]


class ScoreRequest(StrictModel):
    """Queries, and the documents to score them with."""

    queries: Texts = Field(description="One query for all documents, or one query per document")
    documents: Texts = Field(description="A text, or a list of texts")
    prompt_name: QueryPromptName = None
    instruction: Instruction = None
    raw_scores: RawScores = False
    explain: Explain = False
    highlight: Highlight = None
    chunking: DocumentChunking = None
    on_overflow: OnOverflow = "truncate"
    model: ModelName = None


class ScoreResponse(BaseModel):
    """The score of each pair of query and document, in the order of the documents."""

    model: str
    kind: ScoreKind
    scores: list[float]
    tokens: list[int] = Field(
        description="Number of tokens of each query with its document, or with its document's "
        "chunks; a reranker reads the query with each chunk"
    )
    truncated: list[bool] = Field(
        description="Whether the query or the document was truncated, for each pair"
    )
    explanations: list[TermsInfo | DeletionInfo | ShapleyInfo | None] | None = Field(
        None,
        description="Explanation of each score, if requested; null for those beyond `top_n`, and "
        "for those for which `max_tokens` does not suffice",
    )
    highlights: list[list[UnitInfo] | None] | None = Field(
        None,
        description="Best sentences of each document, best first, with `highlight`; null for "
        "documents for which the tokens do not suffice",
    )
    explanation_tokens: ExplanationTokens = None
    best_chunks: list[ChunkInfo] | None = Field(
        None, description="Chunk of each document with the highest score, with `chunking`"
    )


class RerankRequest(StrictModel):
    """A query, and documents to sort by their relevance to the query."""

    query: str
    documents: Documents = Field(description="Texts, or objects with the field `text`")
    top_n: int | None = Field(None, ge=1, description="Number of results, best first; null: all")
    return_documents: bool = Field(False, description="Whether results contain the documents")
    max_tokens_per_query: int | None = Field(
        None,
        ge=1,
        description="Number of tokens to which the query is truncated, special tokens not counted; "
        "null: it is truncated only if query and document together exceed the model's limit",
    )
    max_tokens_per_doc: int | None = Field(None, ge=1, description="The same for each document")
    prompt_name: QueryPromptName = None
    instruction: Instruction = None
    raw_scores: RawScores = False
    explain: Explain = False
    highlight: Highlight = None
    chunking: DocumentChunking = None
    on_overflow: OnOverflow = "truncate"
    model: ModelName = None

    def texts(self) -> list[str]:
        """Return the text of each document."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


class Ranked(BaseModel):
    """A document and its score."""

    index: int = Field(description="Index of the document in the request")
    score: float
    document: Document | None = Field(None, description="The document, if requested")
    explanation: TermsInfo | DeletionInfo | ShapleyInfo | None = Field(
        None,
        description="Explanation of the score, if requested; null for those beyond `top_n`, and "
        "for those for which `max_tokens` does not suffice",
    )
    highlights: list[UnitInfo] | None = Field(
        None,
        description="Best sentences of the document, best first, with `highlight`; null: the "
        "tokens do not suffice for it",
    )
    best_chunk: ChunkInfo | None = Field(
        None, description="Chunk of the document with the highest score, with `chunking`"
    )


class RerankResponse(BaseModel):
    """The documents, best first."""

    model: str
    kind: ScoreKind
    results: list[Ranked]
    tokens: list[int] = Field(
        description="Number of tokens of each pair of query and document, in the request's order"
    )
    truncated: list[bool] = Field(
        description="Whether each pair of query and document was truncated, in the request's order"
    )
    explanation_tokens: ExplanationTokens = None
