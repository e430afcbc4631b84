"""Pydantic models of requests and responses of text-embeddings-inference (TEI)."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from service.api.classify_schemas import MAX_CANDIDATES, CandidateLabel, HypothesisTemplate
from service.api.schemas import Ids, PromptName, as_list, by_type
from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput
from service.inference.model.zero_shot import CandidateLabels

# Tag of a list, by the type of its first item; booleans are refused as ids.
_IDS = {int: "ids", bool: "ids"}
# One input: a text, or a list of token ids.
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Ids, Tag("ids")],
    by_type({str: "text", list: "ids"}, "a text or a list of token ids"),
]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Input], Field(fail_fast=True), Tag("many")],
    by_type(
        {str: "text", list: "many"},
        "a text, a list of token ids, or a list of texts and lists of token ids",
        _IDS,
    ),
]


class _TeiBody(BaseModel):
    # Unknown fields are ignored, as in TEI.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Truncation(_TeiBody):
    """Truncation of the inputs."""

    truncate: bool | None = Field(
        None,
        description="Whether to truncate inputs that exceed the model's maximum length (null: "
        "true), or to respond with an error",
    )
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = Field(
        None,
        description="Side from which tokens are dropped if an input exceeds the model's maximum "
        "length; null: the truncation side of the model's tokenizer, usually the right",
    )

    def on_overflow(self) -> OnOverflow:
        """Return the value to pass as `on_overflow` to `Model.encode`."""
        if self.truncate is False:
            return "error"
        match (self.truncation_direction or "").lower():
            case "left":
                return "truncate_left"
            case "right":
                return "truncate_right"
        return "truncate"


class TruncationOptions(Truncation):
    """Prompt and truncation of the inputs."""

    prompt_name: PromptName = None
    space: None = Field(None, description="Not supported here, but by the route /encode")


class EmbedAllRequest(TruncationOptions):
    """Inputs to encode into token vectors."""

    inputs: Inputs

    def input_list(self) -> Sequence[str | list[int]]:
        """Return the inputs as a list."""
        return as_list(self.inputs)


class EmbedRequest(EmbedAllRequest):
    """Inputs to encode into vectors."""

    normalize: bool = True
    dimensions: int | None = Field(None, ge=0)  # the model refuses 0, with an error as in TEI


class SimilarityInputs(_TeiBody):
    """A source sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: Annotated[list[str], Field(fail_fast=True)]


class SimilarityRequest(_TeiBody):
    """A request for cosine similarities."""

    inputs: SimilarityInputs
    parameters: TruncationOptions | None = None


class TokenizeRequest(_TeiBody):
    """Texts to tokenise."""

    inputs: str | Annotated[list[str], Field(fail_fast=True)]
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class DecodeRequest(_TeiBody):
    """Token ids to decode."""

    ids: Annotated[
        Annotated[Ids, Tag("ids")] | Annotated[list[Ids], Field(fail_fast=True), Tag("many")],
        by_type({list: "many"}, "a list of token ids, or a list of lists of token ids", _IDS),
    ]
    skip_special_tokens: bool = True

    def id_lists(self) -> Sequence[list[int]]:
        """Return the token ids as a list of lists."""
        return as_list(self.ids)


class SimpleToken(BaseModel):
    """A token."""

    id: int
    text: str
    special: bool
    start: int | None = Field(
        description="Start of the token in the text with its prompt prepended, in UTF-8 bytes; "
        "null for special tokens"
    )
    stop: int | None


class SparseValue(BaseModel):
    """A weight of a sparse vector that is not zero."""

    index: int = Field(description="Token id")
    value: float


class TEIRerankRequest(Truncation):
    """A query, and texts to order by their relevance to it."""

    query: str
    texts: Annotated[list[str], Field(fail_fast=True)]
    raw_scores: bool = Field(False, description="Whether scores are logits, without the sigmoid")
    return_text: bool = Field(False, description="Whether results contain the texts")
    instruction: None = Field(None, description="Not supported here, but by the route /rerank")


class TEIRank(BaseModel):
    """A text and its score."""

    index: int = Field(description="Index of the text in the request")
    text: str | None = Field(None, description="The text, if requested")
    score: float


# A text or a pair of texts.
TextOrPair = Annotated[list[str], Field(min_length=1, max_length=2)]


class PredictParameters(_TeiBody):
    """Parameters of Hugging Face's inference API for classification, which TEI lacks."""

    candidate_labels: list[CandidateLabel] | None = Field(
        None,
        min_length=1,
        max_length=MAX_CANDIDATES,
        description="Labels to score texts with, in place of the model's",
    )
    hypothesis_template: HypothesisTemplate | None = None
    multi_label: bool | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = Field(
        None, description="Activation of the logits of the model's labels; null: see `raw_scores`"
    )
    top_k: int | None = Field(None, ge=1, description="Number of labels, best first; null: all")

    def candidates(self) -> CandidateLabels | None:
        """Return the candidate labels as an argument of `Model.classify`; None: the model's labels.

        Raises:
            InvalidInput: The labels or the template are invalid, or a parameter does not apply to
                these labels.
        """
        if self.candidate_labels is None:
            for name in ("hypothesis_template", "multi_label"):
                if getattr(self, name) is not None:
                    raise InvalidInput(f"{name} needs candidate_labels", pointer=f"/{name}")
            return None
        if self.function_to_apply is not None:
            raise InvalidInput(
                "function_to_apply does not apply to candidate_labels",
                pointer="/function_to_apply",
            )
        template = self.hypothesis_template
        return CandidateLabels(
            labels=self.candidate_labels,
            multi_label=bool(self.multi_label),
            **({} if template is None else {"hypothesis_template": template}),
        )


class PredictRequest(Truncation):
    """Texts, or pairs of texts, to classify."""

    inputs: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TextOrPair, Tag("sequence")]
        | Annotated[list[TextOrPair], Field(fail_fast=True), Tag("sequences")],
        by_type(
            {str: "text", list: "sequences"},
            "a text, a list of one or two texts, or a list of such lists",
            {str: "sequence"},
        ),
    ] = Field(description="A text, a pair `[a, b]` of texts, or a list of `[a]` and `[a, b]`")
    raw_scores: bool = Field(
        False, description="Whether scores are logits, without softmax or sigmoid"
    )
    parameters: PredictParameters | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the inputs are a list of inputs, which the response mirrors."""
        inputs = self.inputs
        return isinstance(inputs, list) and (not inputs or isinstance(inputs[0], list))

    def input_list(self) -> list[str | tuple[str, str]]:
        """Return the inputs as a list of texts and pairs."""
        if isinstance(self.inputs, str):
            return [self.inputs]
        rows = [row for row in self.inputs if isinstance(row, list)]
        if not self.is_batch:
            rows = [[text for text in self.inputs if isinstance(text, str)]]
        return [(row[0], row[1]) if len(row) > 1 else row[0] for row in rows]


class Prediction(BaseModel):
    """A label and its score."""

    score: float
    label: str


# The labels of one input, or of each input, best first.
Predictions = list[Prediction] | list[list[Prediction]]


class TEIInfo(BaseModel):
    """The served model."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class TEIError(BaseModel):
    """An error response of TEI."""

    error: str
    error_type: Literal["Empty", "Validation", "Backend", "Overloaded", "Unhealthy"]
