"""Base models and fields of request bodies."""

from typing import Annotated

from pydantic import Field, FiniteFloat, Tag

from service.api.schemas import ModelName, by_type
from service.api.strict_model import StrictModel


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
