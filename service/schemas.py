"""What requests and answers look like; the OpenAPI document is made from these."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag


def _kind_of_inputs(inputs: object) -> str | None:
    """The first element decides; trying every member of a union costs seconds on large bodies."""
    if isinstance(inputs, str):
        return "text"
    if isinstance(inputs, list):
        return "ids" if inputs and isinstance(inputs[0], list) else "texts"
    return None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]

Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True)]],
        Field(min_length=1, fail_fast=True),
        Tag("ids"),
    ],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, a list of texts or a list of lists of ids",
    ),
]

EXAMPLE_INPUTS = ("The cat sat on the mat.", "A feline rested on the rug.")


class EncodeRequest(BaseModel):
    """Texts, or token ids, to encode."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [{"inputs": [*EXAMPLE_INPUTS]}]},
    )

    inputs: Inputs = Field(
        description="A text, texts, or rows of token ids, which are taken as they are"
    )
    prompt_name: Annotated[str, StringConstraints(max_length=256)] | None = Field(
        None, description="A prompt of the model, put before each text; null: its default one"
    )
    normalize: bool | None = Field(
        None, description="Whether vectors have unit length; null: as the model does"
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep the first so many numbers, then normalise"
    )
    on_overflow: Literal["truncate", "error"] = Field(
        "truncate", description="What to do with an input that is longer than the model takes"
    )
    encoding: Literal["float", "base64"] = Field(
        "float", description="Numbers, or base64 of their little-endian float32 bytes"
    )


class EncodeResponse(BaseModel):
    """One vector for each input, in order."""

    model: str
    dimensions: int
    embeddings: list[list[float]] | list[str]
    tokens: list[int] = Field(description="Tokens of each input that were encoded")
    truncated: list[bool] = Field(description="Whether each input had more tokens than that")


class Problem(BaseModel):
    """An error, RFC 9457."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Entity",
                    "status": 422,
                    "code": "empty",
                    "detail": "the text is empty or only white space",
                    "index": 1,
                    "pointer": "/inputs/1",
                    "request_id": "0c9e8b7a6f5d4c3b2a190807060504ff",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    code: str = Field(description="Stable, for programs")
    detail: str = Field(description="A sentence, for people")
    index: int | None = Field(None, description="Which input is meant")
    pointer: str | None = Field(None, description="JSON pointer to the field that is meant")
    request_id: str


class Health(BaseModel):
    """The process or the engine answers."""

    status: Literal["ok"] = "ok"


class Limits(BaseModel):
    """What a request may ask for."""

    max_inputs: int
    max_chars: int
    max_body_bytes: int
    max_tokens: int


class ServiceInfo(BaseModel):
    """What is served, and by what."""

    model: str
    source: str
    revision: str | None
    family: str
    dimensions: int
    pooling: list[str]
    normalize: bool
    prompts: list[str]
    default_prompt: str | None
    weights_sha256: dict[str, str]
    graph_sha256: str
    tokenizer_sha256: str
    engine: str
    precision: str
    threads: int
    self_check_cosine: float
    limits: Limits
    version: str


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return an OpenAPI request body; the handler parses the bytes itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
