"""Pydantic models of requests and responses, from which the OpenAPI document is generated."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from models.quantization import OutputDtype
from service.api.chunk_schemas import ChunkingOptions
from service.api.strict_model import StrictModel


def by_type(
    tags: Mapping[type, str], allowed: str, by_item: Mapping[type, str] = MappingProxyType({})
) -> Discriminator:
    """Return the discriminator of a union whose members have different JSON types.

    Without it, the error of a value would be that of the first member. And pydantic would try all
    members, which takes seconds on large bodies.

    Args:
        tags: Tag of the member with each Python type of JSON values, and of its own type.
        allowed: Allowed values, for the error of a value with another type.
        by_item: Tag of a list, by the type of its first item; of other lists see `tags`.
    """

    def tag(value: object) -> str | None:
        own = by_item.get(type(value[0])) if isinstance(value, list) and value else None
        return own or tags.get(type(value))

    return Discriminator(
        tag, custom_error_type="type", custom_error_message=f"Input should be {allowed}"
    )


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Token ids of one input.
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")]
    | Annotated[list[Ids], Field(min_length=1, fail_fast=True), Tag("ids")],
    by_type(
        {str: "text", list: "texts"},
        "a text, a list of texts, or a list of lists of token ids",
        {list: "ids"},
    ),
]


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, fail_fast=True), Tag("texts")],
    by_type({str: "text", list: "texts"}, "a text or a list of texts"),
]


def as_list(inputs: str | Sequence[Any]) -> Sequence[Any]:
    """Return the inputs as a list; a text or a list of integers is a single input."""
    is_single = isinstance(inputs, str) or (inputs and isinstance(inputs[0], int))
    return [inputs] if is_single else inputs


VERSION = version("vitrine")
OutputName = Literal["pooled", "tokens", "sparse", "multi"]
Outputs = Annotated[
    Annotated[OutputName, Tag("output")]
    | Annotated[list[OutputName], Field(min_length=1, max_length=4), Tag("outputs")],
    Discriminator(lambda output: "outputs" if isinstance(output, list) else "output"),
]
PromptName = Annotated[str, StringConstraints(max_length=256)] | None
ModelName = Annotated[
    Annotated[str, StringConstraints(max_length=256)] | None,
    Field(description="Name or alias of a served model; null: the default model"),
]
EXAMPLE_INPUTS = ("The cat sat on the mat.", "A feline rested on the rug.")


class EncodeRequest(StrictModel):
    """Texts or token ids to encode."""

    inputs: Inputs = Field(
        description="A text, a list of texts, or a list of lists of token ids; token ids get no "
        "prompt and no special tokens"
    )
    prompt_name: PromptName = Field(
        None,
        description="Name of the model's prompt to prepend to each text; an adapter of the same "
        "name is applied too; `query` and `document` also select a multi-vector model's rules for "
        "tokens, and `query` the table of an inference-free sparse model; null: the default prompt",
    )
    normalize: bool | None = Field(
        None,
        description="Whether to scale vectors to unit length; null: the model's own setting, or "
        "false for output `tokens`",
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        description="Number of leading dimensions to keep, only with output `pooled`; vectors are "
        "truncated before they are normalised",
    )
    truncate_dim: int | None = Field(
        None,
        ge=1,
        description="Like `dimensions`, but vectors are truncated after the model has normalised "
        "them, and normalised again if `normalize` is true, as in sentence-transformers",
    )
    output: Outputs | None = Field(
        None,
        description="`pooled`: one vector per input; `tokens`: one vector per token; `sparse`: one "
        "sparse vector per input; `multi`: multi-vectors, as of ColBERT; null: the first output of "
        "the model; a list: several outputs, from one pass of the model",
    )
    on_overflow: Literal["truncate", "error"] = Field(
        "truncate",
        description="Whether to truncate inputs that exceed the model's maximum length, or to "
        "respond with an error",
    )
    encoding: Literal["float", "base64"] = Field(
        "float",
        description="`float`: vectors as JSON numbers; `base64`: vectors as base64 of "
        "little-endian float32, or of the bytes of `output_dtype`",
    )
    output_dtype: OutputDtype = Field(
        "float32",
        description="Dtype of the vectors of output `pooled`; `int8` and `uint8` need a calibrated "
        "model; `binary` (int8) and `ubinary` (uint8) have the signs of 8 dimensions per number",
    )
    chunking: ChunkingOptions | None = Field(
        None,
        description="How to divide texts into chunks with a vector each, only with output "
        "`pooled`; null: each input has one vector",
    )
    space: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None,
        description="Space of another model, into which `vitrine migrate` fitted a map: vectors of "
        "queries for an index of that model, only with output `pooled`; their prompt is by default "
        "that with which the map was measured; null: the model's own space",
    )
    model: ModelName = None

    def outputs(self) -> Sequence[OutputName]:
        """Return the requested outputs; none: the default output of the model."""
        if isinstance(self.output, list):
            return self.output
        return [self.output] if self.output else []


class EncodeResponse(BaseModel):
    """One vector per input, in the order of the inputs."""

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
    dimensions: int = Field(
        description="Number of dimensions of a vector; packed bits are an eighth as many numbers"
    )
    embeddings: list[list[float]] | list[str] = Field(
        description="Vectors as numbers, which are integers with another `output_dtype` than "
        "`float32`, or as base64"
    )
    tokens: list[int] = Field(description="Number of encoded tokens of each input")
    truncated: list[bool] = Field(description="Whether each input was truncated")


class TokensResponse(BaseModel):
    """The vectors of each input's tokens, in the order of the inputs.

    The response to `"output": "tokens"` and `"output": "multi"`.
    """

    model: str
    dimensions: int
    embeddings: list[list[list[float]]] | list[str]
    tokens: list[int] = Field(description="Number of encoded tokens of each input")
    truncated: list[bool] = Field(description="Whether each input was truncated")
    ids: list[list[int]] = Field(
        description="Token id of each vector, special tokens included; with `multi`, some tokens "
        "have no vector"
    )
    offsets: list[list[tuple[int, int] | None] | None] = Field(
        description="Start and end of each vector's token in its text, in characters; null for "
        "special, prompt and added tokens; null instead of the list for an input of token ids"
    )
    clusters: list[list[int]] | None = Field(
        None,
        description="Only for texts whose tokens are pooled: index in `embeddings` of the vector "
        "of each token in `ids`",
    )


class SparseWeights(BaseModel):
    """A sparse vector: its weights that are not zero."""

    ids: list[int] = Field(description="Token ids with such a weight, in ascending order")
    weights: list[float] = Field(description="Weight of each of these token ids")


class SparseResponse(BaseModel):
    """One sparse vector per input, in order; the response to `"output": "sparse"`."""

    model: str
    dimensions: int = Field(description="Number of entries of the vocabulary")
    embeddings: list[SparseWeights]
    tokens: list[int] = Field(description="Number of encoded tokens of each input")
    truncated: list[bool] = Field(description="Whether each input was truncated")


class OutputVectors(BaseModel):
    """One of several outputs: the fields of the response to this output alone."""

    dimensions: int
    embeddings: list[list[float]] | list[list[list[float]]] | list[SparseWeights] | list[str]
    ids: list[list[int]] | None = Field(None, description="See `TokensResponse`")
    offsets: list[list[tuple[int, int] | None] | None] | None = Field(
        None, description="See `TokensResponse`"
    )
    clusters: list[list[int]] | None = Field(None, description="See `TokensResponse`")


class OutputsResponse(BaseModel):
    """Several outputs of each input; the response to a list in `output`."""

    model: str
    outputs: dict[OutputName, OutputVectors] = Field(description="Vectors by name of the output")
    tokens: list[int] = Field(description="Number of encoded tokens of each input")
    truncated: list[bool] = Field(description="Whether each input was truncated")


class Problem(BaseModel):
    """An error response in the format of RFC 9457."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "code": "empty",
                    "detail": "the text is empty",
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
    code: str = Field(description="Stable, machine-readable error code")
    detail: str = Field(description="Human-readable explanation of the error")
    index: int | None = Field(None, description="Index of the input that caused the error")
    pointer: str | None = Field(
        None, description="JSON pointer to the field or input that caused the error"
    )
    request_id: str


class Health(BaseModel):
    """Response of a successful probe."""

    status: Literal["ok"] = "ok"


# Models of bodies that handlers parse and of error responses, by name: FastAPI does not know them.
REFERENCED: dict[str, type[BaseModel]] = {}


def reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a JSON reference to a pydantic model's schema, which the OpenAPI document then has."""
    REFERENCED[model.__name__] = model
    return {"$ref": f"#/components/schemas/{model.__name__}"}


# The handler parses the body itself, so FastAPI does not know its schema.
ENCODE_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "application/json": {
            "schema": reference(EncodeRequest),
            "examples": {
                "texts": {"value": {"inputs": [*EXAMPLE_INPUTS], "dimensions": 4}},
                "one text": {"value": {"inputs": EXAMPLE_INPUTS[0]}},
                "token ids": {"value": {"inputs": [[101, 1996, 4937, 2938, 102]]}},
                "chunks": {
                    "value": {
                        "inputs": " ".join(EXAMPLE_INPUTS),
                        "chunking": {"strategy": "sentences", "size": 16},
                    }
                },
                "base64": {"value": {"inputs": EXAMPLE_INPUTS[0], "encoding": "base64"}},
                "bits": {"value": {"inputs": EXAMPLE_INPUTS[0], "output_dtype": "ubinary"}},
            },
        }
    },
}


def _header(description: str, example: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}, "example": example}


ENCODE_HEADERS = {
    "Server-Timing": _header(
        "Duration of each stage in milliseconds; the stage `cache` is described by the numbers of "
        "inputs found in the cache, shared with an equal input in flight, and computed",
        "tokenize;dur=0.661, queue;dur=0.052, infer;dur=8.916, serialize;dur=0.104",
    ),
    "X-Model-Version": _header(
        "Version of the model: start of the SHA-256 of everything that determines its results",
        "a3f09c1d2e4b",
    ),
    "X-Space-Version": _header(
        "With `space`: start of the SHA-256 of the map into it", "5d0c81b7aa42"
    ),
    "X-Engine": _header("Engine that computed the vectors", "onnxruntime; precision=float32"),
    "X-Shape": _header("Number and width of the vectors in an octet-stream response", "2,384"),
    "X-Dtype": _header(
        "Dtype of the numbers in an octet-stream response: float32, int8 or uint8", "float32"
    ),
}
