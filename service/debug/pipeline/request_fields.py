"""Base models and fields of request bodies."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

from service.api.schemas import ModelName


class StrictModel(BaseModel):
    """Base model that rejects unknown fields and does not convert types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class ModelRequest(StrictModel):
    """Base model of request bodies, which name a model."""

    model: ModelName = None


class PromptedText(StrictModel):
    """A text and the name of its prompt, which also selects the adapter if the model has any."""

    text: str
    prompt_name: str | None = None


class TextOrPair(PromptedText):
    """A text or a pair of texts, and the name of the prompt of the first."""

    text_pair: str | None = Field(
        None, description="Second text, for models that read two texts at once"
    )


def by_type(tags: Mapping[type, str], allowed: str) -> Discriminator:
    """Return the discriminator of a union whose members have different JSON types.

    Without it, the error of a value would be that of the first member.

    Args:
        tags: Tag of the member with each Python type of JSON values, and of its own type.
        allowed: Allowed values, for the error of a value with another type.
    """
    return Discriminator(
        lambda value: tags.get(type(value)),
        custom_error_type="type",
        custom_error_message=f"Input should be {allowed}",
    )


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptedText, Tag("fields")],
    by_type(
        {str: "text", dict: "fields", PromptedText: "fields"},
        "a string, or an object with text and prompt_name",
    ),
]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextOrPair, Tag("fields")],
    by_type(
        {str: "text", dict: "fields", TextOrPair: "fields"},
        "a string, or an object with text, text_pair and prompt_name",
    ),
]
Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]
