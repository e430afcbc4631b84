"""Pydantic models of `POST /tag`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from service.api.schemas import ModelName, Texts
from service.api.strict_model import StrictModel
from service.inference.model.arguments import MAX_ENTITY_LABELS
from service.inference.results.spans import EntityLabels
from service.inference.results.tags import Aggregation

EntityLabel = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class TagRequest(StrictModel):
    """Texts to find entities in, or whose tokens are classified."""

    inputs: Texts = Field(description="A text, or a list of texts")
    labels: list[EntityLabel] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ENTITY_LABELS,
        description="Labels of the entities to find. GLiNER models require them; other models have "
        "labels of their own, and require null",
    )
    threshold: float = Field(
        EntityLabels.threshold,
        ge=0,
        le=1,
        description="Score that entities exceed; with `labels`",
    )
    nested: bool = Field(
        EntityLabels.nested, description="Whether an entity can contain others; with `labels`"
    )
    multi_label: bool = Field(
        EntityLabels.multi_label,
        description="Whether the same span can have several labels; with `labels`",
    )
    aggregation: Aggregation = Field(
        "simple",
        description="Rule that merges tokens into entities, without `labels`, as in transformers' "
        "pipeline. `none`: each token is an entity. `simple`: adjacent tokens are joined by the "
        "prefixes `B-` and `I-` of their labels. `first`, `average` and `max` first give all "
        "tokens of a word one label: that of its first token, of its mean scores, or of its most "
        "certain token",
    )
    on_overflow: Literal["truncate", "error"] = Field(
        "truncate",
        description="Whether to truncate texts that exceed the model's maximum length, or to "
        "respond with an error",
    )
    model: ModelName = None


class TaggedSpan(BaseModel):
    """A span of a text with a label."""

    label: str = Field(description="Label without the prefix `B-` or `I-`, unless `none`")
    score: float = Field(
        description="Mean of the probabilities of the label, over the tokens or words of the span; "
        "with labels of the request, the probability of the label for the span"
    )
    start: int = Field(
        description="Start of the span in the text, in characters (Unicode code points)"
    )
    end: int = Field(description="End of the span, exclusive")
    text: str = Field(description="The span")
    index: int | None = Field(
        None, description="Index of the token, special tokens counted; with `none` only"
    )


class TagResponse(BaseModel):
    """The entities of each input, in the order of the inputs."""

    model: str
    entities: list[list[TaggedSpan]] = Field(
        description="Entities of each input, in the order of the text; without the label `O`"
    )
    tokens: list[int] = Field(description="Number of tokens of each input, after truncation")
    truncated: list[bool] = Field(description="Whether each input was truncated")
