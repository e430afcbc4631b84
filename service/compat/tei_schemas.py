"""What the requests and answers of text-embeddings-inference look like."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from service.schemas import Ids, one_by_one
from service.tokenizer import OnOverflow

_IDS_OR_TEXT = {str: "text", list: "ids"}


def _kind_of_inputs(given: object) -> str | None:
    if isinstance(given, list):
        return "ids" if given and isinstance(given[0], int) else "many"
    return "text" if isinstance(given, str) else None


# A text, or token ids.
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Ids, Tag("ids")],
    Discriminator(
        lambda given: _IDS_OR_TEXT.get(type(given)),
        custom_error_type="input",
        custom_error_message="Input should be a text or a list of token ids",
    ),
]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Input], Field(fail_fast=True), Tag("many")],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, token ids, or a list of these",
    ),
]
PromptName = Annotated[str, StringConstraints(max_length=256)] | None


class _Asked(BaseModel):
    # What is not known is ignored, as there.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Cut(_Asked):
    """How inputs are made ready."""

    truncate: bool | None = Field(None, description="false: an input that is too long is an error")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field(
        "Right", description="Which end of an input that is too long is cut off"
    )
    prompt_name: PromptName = None

    def on_overflow(self) -> OnOverflow:
        """Return what to do with an input that is too long."""
        if self.truncate is False:
            return "error"
        return "truncate_left" if self.truncation_direction.lower() == "left" else "truncate"


class EmbedAllRequest(Cut):
    """Inputs whose tokens' vectors are wanted."""

    inputs: Inputs

    def rows(self) -> Sequence[str | list[int]]:
        """Return the inputs, one by one."""
        return one_by_one(self.inputs)


class EmbedRequest(EmbedAllRequest):
    """Inputs whose vectors are wanted."""

    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)


class SimilarityInputs(_Asked):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Field(fail_fast=True)]


class SimilarityRequest(_Asked):
    """A sentence, and those that it is compared with."""

    inputs: SimilarityInputs
    parameters: Cut | None = None


class TokenizeRequest(_Asked):
    """Texts whose tokens are wanted."""

    inputs: str | Annotated[list[str], Field(fail_fast=True)]
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class DecodeRequest(_Asked):
    """Token ids whose text is wanted."""

    ids: Annotated[
        Annotated[Ids, Tag("ids")] | Annotated[list[Ids], Field(fail_fast=True), Tag("many")],
        Discriminator(
            _kind_of_inputs,
            custom_error_type="ids",
            custom_error_message="Input should be a list of token ids, or a list of these",
        ),
    ]
    skip_special_tokens: bool = True

    def rows(self) -> Sequence[list[int]]:
        """Return the lists of ids, one by one."""
        return one_by_one(self.ids)


class SimpleToken(BaseModel):
    """A token."""

    id: int
    text: str
    special: bool
    start: int | None = Field(description="In the text, in bytes; null for special tokens")
    stop: int | None


class TEIInfo(BaseModel):
    """What is served."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, dict[str, str]]
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
    """What went wrong."""

    error: str
    error_type: Literal["Empty", "Validation", "Backend", "Overloaded", "Unhealthy"]


BODIES = (
    EmbedRequest,
    EmbedAllRequest,
    SimilarityRequest,
    TokenizeRequest,
    DecodeRequest,
    TEIError,
)
