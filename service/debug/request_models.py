"""Models of the requests of the gradient routes."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

from models.gradients.inputs import (
    BaselineName,
    Distribution,
    EmulatedPrecision,
    Method,
    Reduction,
)


class StrictModel(BaseModel):
    """A model that rejects unknown fields and converts nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PromptedText(StrictModel):
    """A text and the prompt of the model to put before it."""

    text: str
    prompt_name: str | None = None


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptedText, Tag("prompted")],
    Discriminator(
        lambda value: {str: "text", dict: "prompted"}.get(type(value)),
        custom_error_type="text",
        custom_error_message="Input should be a text, or an object of text and prompt_name",
    ),
]


Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]


class Cosine(StrictModel):
    """Cosine similarity to another text."""

    type: Literal["cosine"]
    text: Text


class Margin(StrictModel):
    """Cosine similarity to one text less that to another."""

    type: Literal["margin"]
    positive: Text
    negative: Text


class Dot(StrictModel):
    """Dot product of the served vector with another vector."""

    type: Literal["dot"]
    vector: Vector


class Dim(StrictModel):
    """One dimension of the served vector."""

    type: Literal["dim"]
    index: int = Field(ge=0)


class Norm(StrictModel):
    """Length of the vector before normalisation."""

    type: Literal["norm"]


Target = Annotated[Cosine | Margin | Dot | Dim | Norm, Field(discriminator="type")]


class AttributeRequest(StrictModel):
    """Attribution of a number to the tokens of a text."""

    text: Text
    target: Target
    method: Method = "integrated_gradients"
    layer: str = Field(
        "words", max_length=64, description="Layer of the tokens; /debug/capabilities lists all"
    )
    baseline: BaselineName = Field("pad", description="Baseline that tokens are compared with")
    tolerance: float = Field(
        0.01, gt=0, le=1, description="Tolerated error of the sum, relative to the number's change"
    )
    max_evaluations: int = Field(
        256, ge=10, le=4096, description="Limit of evaluations, for integrated gradients"
    )
    samples: int = Field(25, ge=1, le=1024, description="Number of noisy copies for SmoothGrad")
    sigma: float = Field(
        0.1, ge=0, le=10, description="Noise of SmoothGrad, relative to the size of the tokens"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of SmoothGrad")
    dry_run: bool = Field(False, description="Return the cost without running anything")


class PairRequest(StrictModel):
    """Attribution of a similarity to pairs of tokens."""

    a: Text
    b: Text
    layer: str = Field("output", max_length=64, description="See /debug/attribute")
    baseline: BaselineName = Field("zero", description="Baseline that tokens are compared with")
    tolerance: float = Field(
        0.01, gt=0, le=1, description="Tolerance per text; see /debug/attribute"
    )
    max_evaluations: int = Field(64, ge=10, le=4096, description="Limit of evaluations per text")
    dry_run: bool = Field(False, description="Return the cost without running anything")


class Cosines(StrictModel):
    """Sum of the cosine similarities of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class Ranking(StrictModel):
    """Multiple negatives ranking loss of texts 2i and 2i + 1, at a scale of 20."""

    type: Literal["mnrl"]


class Product(StrictModel):
    """Sum of the served vectors' dot products with a vector."""

    type: Literal["dot"]
    vector: Vector


class SquaredError(StrictModel):
    """Mean squared error of the served vectors from others."""

    type: Literal["mse"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class Cotangent(StrictModel):
    """Sum of the served vectors' dot products with a vector each."""

    type: Literal["cotangent"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class FlowRequest(StrictModel):
    """Flow of a training gradient through the layers."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        Cosines | Ranking | Product | SquaredError | Cotangent, Field(discriminator="type")
    ]
    emulate: EmulatedPrecision | None = Field(
        None, description="Precision to round every step to, forward and backward"
    )
    loss_scale: float = Field(
        1.0, ge=2.0**-24, le=2.0**32, description="Loss scale of the backward pass"
    )


class ParityRequest(StrictModel):
    """Comparison of the served graph with the reference model."""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [], description="Inputs of both; none: the artifact's check inputs"
    )


class NormOfText(StrictModel):
    """Inputs of one norm of the model, for a text."""

    type: Literal["text"]
    text: Text
    norm: str = Field(max_length=64, description="Name of the norm; /debug/capabilities lists all")


Rows = Annotated[list[Vector], Field(min_length=1, max_length=256)]


class GivenRows(StrictModel):
    """Rows in the request."""

    type: Literal["rows"]
    x: Rows
    residual: Rows | None = None
    gamma: Vector | None = None
    beta: Vector | None = None
    eps: float = Field(1e-12, ge=0, le=1)


class RandomRows(StrictModel):
    """Random rows of a distribution."""

    type: Literal["random"]
    distribution: Distribution = "normal"
    shape: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=2, max_length=2)]


class LayerNormRequest(StrictModel):
    """Check of the fused operator, step by step."""

    source: Annotated[NormOfText | GivenRows | RandomRows, Field(discriminator="type")]
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="Precision of the judged implementations; the trace is in float32"
    )
    dout: Literal["random", "ones"] = Field("random", description="Gradient by the output")
    seed: int = Field(0, ge=0, lt=2**63)
    row: int | None = Field(None, ge=0, description="Index of the row whose values are returned")


class VjpRequest(StrictModel):
    """Backpropagation of a gradient from the vector to the tokens."""

    text: Text
    cotangent: Vector = Field(description="Gradient by the served vector")
    layer: str = Field("words", max_length=64, description="See /debug/attribute")
    reduce: Reduction = Field(
        "norm", description="Reduction per token: length, dot product with the token, or none"
    )


BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
)
