"""Base models and fields that the request models of several gradient routes share."""

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


def _string_or(fields: str) -> Discriminator:
    tags: dict[type, str] = {str: "text", dict: "fields"}
    return Discriminator(
        lambda value: tags.get(type(value)),
        custom_error_type="text",
        custom_error_message=f"Input should be a string, or an object with {fields}",
    )


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptedText, Tag("fields")],
    _string_or("text and prompt_name"),
]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[TextOrPair, Tag("fields")],
    _string_or("text, text_pair and prompt_name"),
]


Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]
