"""What the requests of the gradient routes look like."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

Baseline = Literal["pad", "mask", "zero"]


class _Asked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PromptedText(_Asked):
    """A text, and a prompt of the model that is put before it."""

    text: str
    prompt_name: str | None = None


Text = Annotated[
    Annotated[str, Tag("text")] | Annotated[PromptedText, Tag("prompted")],
    Discriminator(
        lambda given: {str: "text", dict: "prompted"}.get(type(given)),
        custom_error_type="text",
        custom_error_message="Input should be a text, or an object of text and prompt_name",
    ),
]


Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]


class Cosine(_Asked):
    """The cosine to another text."""

    type: Literal["cosine"]
    text: Text


class Margin(_Asked):
    """How much nearer, in cosine, to one text than to another."""

    type: Literal["margin"]
    positive: Text
    negative: Text


class Dot(_Asked):
    """The product of the served vector with another one."""

    type: Literal["dot"]
    vector: Vector


class Dim(_Asked):
    """One number of the served vector."""

    type: Literal["dim"]
    index: int = Field(ge=0)


class Norm(_Asked):
    """The length of the vector before it is normalised."""

    type: Literal["norm"]


Target = Annotated[Cosine | Margin | Dot | Dim | Norm, Field(discriminator="type")]


class AttributeRequest(_Asked):
    """Which tokens of a text made a number?"""

    text: Text
    target: Target
    method: Literal[
        "integrated_gradients", "saliency", "grad_x_input", "smoothgrad", "occlusion"
    ] = "integrated_gradients"
    point: str = Field(
        "words", max_length=64, description="Where tokens are taken; /debug/capabilities lists them"
    )
    baseline: Baseline = Field("pad", description="What stands for nothing")
    tolerance: float = Field(
        0.01, gt=0, le=1, description="Of the sum of errors, as a part of the number's change"
    )
    max_evaluations: int = Field(256, ge=10, le=4096, description="Of integrated gradients")
    samples: int = Field(25, ge=1, le=1024, description="Of SmoothGrad")
    sigma: float = Field(
        0.1, ge=0, le=10, description="Of SmoothGrad's noise, as a part of the tokens' own"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of SmoothGrad's noise")
    dry_run: bool = Field(False, description="Tell the cost and run nothing")


class PairRequest(_Asked):
    """Which tokens of two texts made their similarity?"""

    a: Text
    b: Text
    point: str = Field("output", max_length=64, description="As in /debug/attribute")
    baseline: Baseline = Field("zero", description="What stands for nothing")
    tolerance: float = Field(0.01, gt=0, le=1, description="As in /debug/attribute, of each text")
    max_evaluations: int = Field(64, ge=10, le=4096, description="Of each text")
    dry_run: bool = Field(False, description="Tell the cost and run nothing")


class Cosines(_Asked):
    """Sum of the cosines of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class Ranking(_Asked):
    """Multiple negatives ranking of texts 2i and 2i + 1, at a scale of 20."""

    type: Literal["mnrl"]


class Product(_Asked):
    """Sum of the served vectors' products with another one."""

    type: Literal["dot"]
    vector: Vector


class SquaredError(_Asked):
    """Mean squared difference of the served vectors from others."""

    type: Literal["mse"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class Cotangent(_Asked):
    """Sum of the served vectors' products with one of their own each."""

    type: Literal["cotangent"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class FlowRequest(_Asked):
    """Where does a training gradient shrink, grow or break?"""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        Cosines | Ranking | Product | SquaredError | Cotangent, Field(discriminator="type")
    ]
    emulate: Literal["float16", "bfloat16"] | None = Field(
        None, description="Round what goes from step to step, both ways, as training in it does"
    )
    loss_scale: float = Field(1.0, ge=2.0**-24, le=2.0**32, description="Of the backward pass")


class ParityRequest(_Asked):
    """Is the served graph still the model of the twin?"""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [], description="What both are run on; none: the artifact's check inputs"
    )


class NormOfText(_Asked):
    """What one norm of the model reads, for a text."""

    type: Literal["text"]
    text: Text
    norm: str = Field(max_length=64, description="/debug/capabilities lists them")


Rows = Annotated[list[Vector], Field(min_length=1, max_length=256)]


class GivenRows(_Asked):
    """Rows of the caller's own."""

    type: Literal["rows"]
    x: Rows
    residual: Rows | None = None
    gamma: Vector | None = None
    beta: Vector | None = None
    eps: float = Field(1e-12, ge=0, le=1)


class RandomRows(_Asked):
    """Rows of a distribution, gradcheck."""

    type: Literal["random"]
    distribution: Literal["normal", "constant_row", "large_mean", "tiny_var", "huge"] = "normal"
    shape: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=2, max_length=2)]


class LayerNormRequest(_Asked):
    """Is the fused op right on these rows, step by step?"""

    source: Annotated[NormOfText | GivenRows | RandomRows, Field(discriminator="type")]
    dtype: Literal["float32", "float64"] = Field(
        "float32", description="That implementations are judged in; the trace is in float32"
    )
    dout: Literal["random", "ones"] = Field("random", description="The gradient by the output")
    seed: int = Field(0, ge=0, lt=2**63)
    row: int | None = Field(None, ge=0, description="Whose values are wanted, step by step")


class VjpRequest(_Asked):
    """What does a gradient by the vector become on its way back to the tokens?"""

    text: Text
    cotangent: Vector = Field(description="The gradient by the served vector")
    point: str = Field("words", max_length=64, description="As in /debug/attribute")
    reduce: Literal["norm", "dot", "full"] = Field(
        "norm", description="Its length or its product with the token; or all of it, if allowed"
    )


BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
)
