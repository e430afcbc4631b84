"""Pydantic models of the requests and responses of /classify and /rerank."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


def _input_tag(value: object) -> str | None:
    return "text" if isinstance(value, str) else "pair" if isinstance(value, list) else None


def _inputs_tag(value: object) -> str | None:
    return "text" if isinstance(value, str) else "inputs" if isinstance(value, list) else None


def document_tag(value: object) -> str | None:
    """Return the union tag of a document."""
    return "text" if isinstance(value, str) else "object" if isinstance(value, dict) else None


Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Pair, Tag("pair")],
    Discriminator(
        _input_tag,
        custom_error_type="inputs",
        custom_error_message="Input should be a text or a pair of texts",
    ),
]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[Input], Field(min_length=1, fail_fast=True), Tag("inputs")],
    Discriminator(
        _inputs_tag,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, or a list whose items are texts or pairs of "
        "texts",
    ),
]


class Document(BaseModel):
    """A document, as an object with its text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    text: str


Documents = Annotated[
    list[
        Annotated[
            Annotated[str, Tag("text")] | Annotated[Document, Tag("object")],
            Discriminator(
                document_tag,
                custom_error_type="documents",
                custom_error_message="Input should be a text, or an object with the field text",
            ),
        ]
    ],
    Field(min_length=1, fail_fast=True),
]
OnOverflow = Annotated[
    Literal["truncate", "error"],
    Field(
        description="Whether to truncate inputs that exceed the model's maximum length, or to "
        "respond with an error; in a pair, the longer text is truncated first"
    ),
]
RawScores = Annotated[
    bool, Field(description="Whether scores are logits, before the model's activation function")
]


class ClassifyRequest(BaseModel):
    """Texts, or pairs of texts, to classify."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    inputs: Inputs = Field(
        description="A text, or a list whose items are texts or pairs `[a, b]` of texts; a single "
        "pair is `[[a, b]]`"
    )
    top_k: int | None = Field(
        None, ge=1, description="Number of labels per input, best first; null: all"
    )
    raw_scores: RawScores = False
    on_overflow: OnOverflow = "truncate"

    def input_list(self) -> list[str | tuple[str, str]]:
        """Return the inputs as a list of texts and pairs."""
        inputs = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [item if isinstance(item, str) else (item[0], item[1]) for item in inputs]


class LabelScore(BaseModel):
    """A label and its score."""

    label: str
    score: float


class ClassifyResponse(BaseModel):
    """The labels of each input, in the order of the inputs."""

    model: str
    labels: list[list[LabelScore]] = Field(description="Labels of each input, best first")
    tokens: list[int] = Field(description="Number of tokens of each input, after truncation")
    truncated: list[bool] = Field(description="Whether each input was truncated")


class RerankRequest(BaseModel):
    """A query, and documents to sort by their relevance to the query."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

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
    raw_scores: RawScores = False
    on_overflow: OnOverflow = "truncate"

    def texts(self) -> list[str]:
        """Return the text of each document."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


class Ranked(BaseModel):
    """A document and its score."""

    index: int = Field(description="Index of the document in the request")
    score: float
    document: Document | None = Field(None, description="The document, if requested")


class RerankResponse(BaseModel):
    """The documents, best first."""

    model: str
    results: list[Ranked]
    tokens: list[int] = Field(
        description="Number of tokens of each pair of query and document, in the request's order"
    )
    truncated: list[bool] = Field(
        description="Whether each pair of query and document was truncated, in the request's order"
    )


# Models of the request bodies that the handlers parse themselves.
BODIES: tuple[type[BaseModel], ...] = (ClassifyRequest, RerankRequest)
