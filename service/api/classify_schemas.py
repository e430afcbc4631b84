"""Pydantic models of `POST /classify`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, Tag

from service.api.explanations import DeletionInfo, ExplainLabel, ExplanationTokens, ShapleyInfo
from service.api.schemas import ModelName, PromptName, by_type
from service.api.strict_model import StrictModel
from service.inference.errors import InvalidInput
from service.inference.model.zero_shot import CandidateLabels

Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Pair, Tag("pair")],
    by_type({str: "text", list: "pair"}, "a text or a pair of texts"),
]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[Input], Field(min_length=1, fail_fast=True), Tag("inputs")],
    by_type(
        {str: "text", list: "inputs"}, "a text, or a list whose items are texts or pairs of texts"
    ),
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
# Maximum number of candidate labels of a request.
MAX_CANDIDATES = 1024
CandidateLabel = Annotated[str, StringConstraints(min_length=1, max_length=256)]
HypothesisTemplate = Annotated[str, StringConstraints(max_length=1024)]


class ClassifyRequest(StrictModel):
    """Texts, or pairs of texts, to classify."""

    inputs: Inputs = Field(
        description="A text, or a list whose items are texts or pairs `[a, b]` of texts; a single "
        "pair is `[[a, b]]`"
    )
    top_k: int | None = Field(
        None, ge=1, description="Number of labels per input, best first; null: all"
    )
    prompt_name: PromptName = Field(
        None,
        description="Name of the model's prompt to prepend to each text and to the first text of "
        "each pair; null: the default prompt",
    )
    candidate_labels: list[CandidateLabel] | None = Field(
        None,
        min_length=1,
        max_length=MAX_CANDIDATES,
        description="Labels to score texts with, in place of the model's, by a model of language "
        "inference, one of whose labels begins with `entail`; each pair of a text and a label "
        "counts as an input; null: the model's labels",
    )
    hypothesis_template: HypothesisTemplate = Field(
        CandidateLabels.hypothesis_template,
        description="Template of the statement that a candidate label makes about a text: `{}` "
        "stands for the label, once; braces of the statement itself are doubled",
    )
    multi_label: bool = Field(
        False,
        description="Whether each candidate label has a score of its own, from entailment and "
        "contradiction, as a single label always has; false: the scores add up to 1",
    )
    raw_scores: RawScores = False
    on_overflow: OnOverflow = "truncate"
    explain: ExplainLabel = False
    model: ModelName = None

    def candidates(self) -> CandidateLabels | None:
        """Return the candidate labels as an argument of `Model.classify`; None: the model's labels.

        Raises:
            InvalidInput: The labels or the template are invalid, or the template has no labels.
        """
        if self.candidate_labels is None:
            for name in ("hypothesis_template", "multi_label"):
                if name in self.model_fields_set:
                    raise InvalidInput(f"{name} needs candidate_labels", pointer=f"/{name}")
            return None
        return CandidateLabels(
            labels=self.candidate_labels,
            hypothesis_template=self.hypothesis_template,
            multi_label=self.multi_label,
        )

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
    explanations: list[DeletionInfo | ShapleyInfo | None] | None = Field(
        None,
        description="Explanation of the score of a label, of each input, only with `explain`; "
        "null for inputs for which `max_tokens` does not suffice",
    )
    explanation_tokens: ExplanationTokens = None
