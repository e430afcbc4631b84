"""Request models of the gradient routes."""

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
    """Base model that rejects unknown fields and does not convert types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PromptedText(StrictModel):
    """A text, and the name of the prompt to prepend to it, and of the adapter to use."""

    text: str
    prompt_name: str | None = None


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptedText, Tag("prompted")],
    Discriminator(
        lambda value: {str: "text", dict: "prompted"}.get(type(value)),
        custom_error_type="text",
        custom_error_message="Input should be a string, or an object with text and prompt_name",
    ),
]


Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]


class Cosine(StrictModel):
    """Cosine similarity of the text's vector and another text's vector."""

    type: Literal["cosine"]
    text: Text


class Margin(StrictModel):
    """Cosine similarity to the text `positive` minus cosine similarity to the text `negative`."""

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
    """Euclidean norm of the vector before normalisation."""

    type: Literal["norm"]


Target = Annotated[Cosine | Margin | Dot | Dim | Norm, Field(discriminator="type")]


class AttributeRequest(StrictModel):
    """Attribution of a scalar to the tokens of a text."""

    text: Text
    target: Target = Field(description="Scalar to attribute")
    method: Method = "integrated_gradients"
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer whose tokens are scored; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "pad",
        description="Baseline of integrated gradients and occlusion: padding tokens, mask tokens "
        "or zero vectors",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Maximum error of the sum of the scores, relative to the scalar's change from "
        "baseline to text, and of each score, relative to the largest score, for integrated "
        "gradients",
    )
    max_evaluations: int = Field(
        256,
        ge=17,
        le=4096,
        description="Maximum number of evaluations of the model for integrated gradients",
    )
    samples: int = Field(25, ge=1, le=1024, description="Number of noisy copies for SmoothGrad")
    sigma: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Standard deviation of SmoothGrad's noise, relative to the root mean square of "
        "the token vectors",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of SmoothGrad")
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class PairRequest(StrictModel):
    """Attribution of the cosine similarity of texts `a` and `b` to pairs of their tokens."""

    a: Text
    b: Text
    layer: str = Field(
        "output",
        max_length=64,
        description="Layer of the paired token vectors; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "zero",
        description="Baseline of the tokens: padding tokens, mask tokens or zero vectors",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Maximum error of each text's path integral, relative to the change of the "
        "vector from baseline to text, and of each token's part, relative to the largest part",
    )
    max_evaluations: int = Field(
        128, ge=17, le=4096, description="Maximum number of evaluations of the model per text"
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class Cosines(StrictModel):
    """Sum of the cosine similarities of all pairs of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class Ranking(StrictModel):
    """Multiple negatives ranking loss of the pairs of texts 2i and 2i + 1, with scale 20."""

    type: Literal["mnrl"]


class Product(StrictModel):
    """Sum of the dot products of every text's served vector with one given vector."""

    type: Literal["dot"]
    vector: Vector


class SquaredError(StrictModel):
    """Mean squared error between served vectors and given vectors, one per text."""

    type: Literal["mse"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class Cotangent(StrictModel):
    """Sum of the dot products of served vectors and given vectors, one per text."""

    type: Literal["cotangent"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class FlowRequest(StrictModel):
    """Flow of the gradient of a training objective through the layers."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        Cosines | Ranking | Product | SquaredError | Cotangent, Field(discriminator="type")
    ]
    emulate: EmulatedPrecision | None = Field(
        None,
        description="Precision to which each step's output and its gradient are rounded; null: no "
        "rounding",
    )
    loss_scale: float = Field(
        1.0,
        ge=2.0**-24,
        le=2.0**32,
        description="Factor on the objective in the backward pass; norms and magnitudes in the "
        "response are divided by it",
    )


class ParityRequest(StrictModel):
    """Comparison of the served graph with the reference model."""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [],
        description="Texts that run through graph and reference model; empty: the artifact's check "
        "inputs",
    )


class NormOfText(StrictModel):
    """Rows that are the inputs of a norm of the model, for a text."""

    type: Literal["text"]
    text: Text
    norm: str = Field(
        max_length=64, description="Name of the norm; /debug/capabilities lists all norms"
    )


Rows = Annotated[list[Vector], Field(min_length=1, max_length=256)]
# Results may be NaN or infinite, for which JSON has null.
ResultVector = Annotated[
    list[FiniteFloat | None], Field(min_length=1, max_length=16_384, fail_fast=True)
]
ResultRows = Annotated[list[ResultVector], Field(min_length=1, max_length=256)]


class Candidate(StrictModel):
    """Results of an implementation of the caller, any subset; null in a list is NaN or infinite."""

    out: ResultRows | None = None
    sum: ResultRows | None = Field(None, description="`x + residual`, the second output")
    dx: ResultRows | None = None
    dresidual: ResultRows | None = None
    dgamma: ResultVector | None = None
    dbeta: ResultVector | None = None


NormKind = Annotated[
    Literal["layer_norm", "rms_norm"],
    Field(description="Norm of the rows; RMS norm subtracts no mean and has no `beta`"),
]


class GivenRows(StrictModel):
    """Rows given in the request."""

    type: Literal["rows"]
    kind: NormKind = "layer_norm"
    x: Rows
    residual: Rows | None = Field(None, description="Rows added to `x`; null: none")
    gamma: Vector | None = Field(None, description="Scale; null: ones")
    beta: Vector | None = Field(None, description="Shift; null: zeros")
    eps: float = Field(1e-12, ge=0, le=1, description="Constant added to the variance")
    dout: Rows | None = Field(
        None, description="Gradient with respect to `out`; null: the `dout` of the request"
    )
    dsum: Rows | None = Field(
        None,
        description="Gradient with respect to `x + residual`, only with `dout`; null: zeros",
    )
    candidate: Candidate | None = Field(
        None,
        description="Results to judge in place of the implementations of the service, computed in "
        "`dtype` from these rows",
    )


class RandomRows(StrictModel):
    """Rows drawn from a distribution."""

    type: Literal["random"]
    kind: NormKind = "layer_norm"
    distribution: Distribution = "normal"
    shape: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]],
        Field(min_length=2, max_length=2, description="Number of rows, then width of a row"),
    ]


class LayerNormRequest(StrictModel):
    """Check of add + norm, step by step."""

    source: Annotated[NormOfText | GivenRows | RandomRows, Field(discriminator="type")]
    dtype: Literal["float32", "float64"] = Field(
        "float32",
        description="Precision of the judged implementations; `steps` are always in float32",
    )
    dout: Literal["random", "ones"] = Field(
        "random",
        description="Gradient with respect to `out`. With `random`, that with respect to "
        "`x + residual` is random too; with `ones`, it is zero",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of random rows and `dout`")
    row: int | None = Field(
        None, ge=0, description="Index of the row whose values are returned; null: no values"
    )


class VjpRequest(StrictModel):
    """Backpropagation of a gradient from the vector to the tokens."""

    text: Text
    cotangent: Vector = Field(description="Gradient with respect to the served vector")
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer of the token vectors; /debug/capabilities lists all layers",
    )
    reduce: Reduction = Field(
        "norm",
        description="Reduction of each token's gradient: its Euclidean norm, its dot product with "
        "the token, or none (`full`)",
    )


BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
)
