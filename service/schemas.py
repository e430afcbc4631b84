"""What requests and answers look like; the OpenAPI document is made from these."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag


def _kind_of_inputs(inputs: object) -> str | None:
    """The first element decides; trying every member of a union costs seconds on large bodies."""
    if isinstance(inputs, str):
        return "text"
    if isinstance(inputs, list):
        return "ids" if inputs and isinstance(inputs[0], list) else "texts"
    return None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# One row of token ids.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(min_length=1, fail_fast=True), Tag("ids")],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, a list of texts or a list of lists of ids",
    ),
]


def one_by_one(inputs: str | Sequence[Any]) -> Sequence[Any]:
    """Return inputs one by one, of which a text, or a list of numbers, is one."""
    is_one = isinstance(inputs, str) or (inputs and isinstance(inputs[0], int))
    return [inputs] if is_one else inputs


VERSION = version("vitrine")
EXAMPLE_INPUTS = ("The cat sat on the mat.", "A feline rested on the rug.")


class EncodeRequest(BaseModel):
    """Texts, or token ids, to encode."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
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
    output: Literal["pooled", "tokens"] = Field(
        "pooled", description="One vector for each input, or one for each of its tokens"
    )
    on_overflow: Literal["truncate", "error"] = Field(
        "truncate", description="What to do with an input that is longer than the model takes"
    )
    encoding: Literal["float", "base64"] = Field(
        "float", description="Numbers, or base64 of their little-endian float32 bytes"
    )

    def rows(self) -> Sequence[str | list[int]]:
        """Return the inputs, one by one."""
        return one_by_one(self.inputs)


class EncodeResponse(BaseModel):
    """One vector for each input, in order."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "sentence-transformers/all-MiniLM-L6-v2",
                    "dimensions": 4,
                    "embeddings": [
                        [0.8796389, -0.106531836, -0.24798937, 0.3916473],
                        [0.4447052, 0.26278275, 0.30500343, 0.8000971],
                    ],
                    "tokens": [9, 10],
                    "truncated": [False, False],
                }
            ]
        }
    )

    model: str
    dimensions: int
    embeddings: list[list[float]] | list[str]
    tokens: list[int] = Field(description="Tokens of each input that were encoded")
    truncated: list[bool] = Field(description="Whether each input had more tokens than that")


class TokensResponse(BaseModel):
    """The vectors of each input's tokens, in order; of `"output": "tokens"`."""

    model: str
    dimensions: int
    embeddings: list[list[list[float]]] | list[str]
    tokens: list[int] = Field(description="Tokens of each input that were encoded")
    truncated: list[bool] = Field(description="Whether each input had more tokens than that")
    ids: list[list[int]] = Field(description="Of the tokens, special ones included")
    offsets: list[list[tuple[int, int] | None] | None] = Field(
        description="Start and end of each token in its text, in characters; null for tokens that "
        "are not of it, and for rows of ids"
    )


class Problem(BaseModel):
    """An error, RFC 9457."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Content",
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
    max_token_vectors: int
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


def reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a reference to a model's schema in the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


# The handler parses the bytes itself, so FastAPI is told what they are.
ENCODE_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": reference(EncodeRequest),
            "examples": {
                "texts": {"value": {"inputs": [*EXAMPLE_INPUTS], "dimensions": 4}},
                "one text": {"value": {"inputs": EXAMPLE_INPUTS[0]}},
                "token ids": {"value": {"inputs": [[101, 1996, 4937, 2938, 102]]}},
                "base64": {"value": {"inputs": EXAMPLE_INPUTS[0], "encoding": "base64"}},
            },
        }
    },
}


def _header(description: str, example: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}, "example": example}


ENCODE_HEADERS = {
    "Server-Timing": _header(
        "Milliseconds of each stage",
        "tokenize;dur=0.661, queue;dur=0.052, infer;dur=8.916, serialize;dur=0.104",
    ),
    "X-Engine": _header("What computed the vectors", "onnxruntime; precision=float32"),
    "X-Request-Id": _header("Of the request, or made", "0c9e8b7a6f5d4c3b2a190807060504ff"),
    "X-Shape": _header("Rows and width of an answer in octets", "2,384"),
}


def openapi(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document, with the models that only references name.

    Args:
        app: The application.
        bodies: Models of requests that handlers parse themselves.
    """
    if app.openapi_schema is None:
        app.openapi_schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        schemas = app.openapi_schema["components"]["schemas"]
        models: list[type[BaseModel]] = [*bodies, Problem]
        for model in models:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
    return app.openapi_schema
