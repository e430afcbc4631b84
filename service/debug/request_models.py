"""Request models of the gradient routes."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

from models.gradients.inputs import (
    BaselineName,
    Distribution,
    EmulatedPrecision,
    Method,
    Reduction,
    TokenReduction,
    UnitKind,
)
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


class Cosine(StrictModel):
    """Cosine similarity of the text's vector and the vector of another text."""

    type: Literal["cosine"]
    text: Text


class Margin(StrictModel):
    """Cosine similarity to the text `positive` minus cosine similarity to the text `negative`."""

    type: Literal["margin"]
    positive: Text
    negative: Text


class Dot(StrictModel):
    """Dot product of the text's served vector and a given vector."""

    type: Literal["dot"]
    vector: Vector


class Dim(StrictModel):
    """One element of the text's served vector."""

    type: Literal["dim"]
    index: int = Field(ge=0)


class Norm(StrictModel):
    """Euclidean norm of the text's vector before normalisation."""

    type: Literal["norm"]


class Score(StrictModel):
    """Logit of a model with one label, such as a reranker, or its margin over that of `versus`."""

    type: Literal["score"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose logit is subtracted"
    )


class Label(StrictModel):
    """Logit of a label, or its margin over the logit of the label `versus`."""

    type: Literal["label"]
    label: str | None = Field(None, description="Null: the label with the largest logit")
    versus: str | None = None


class Sparse(StrictModel):
    """Weight of one vocabulary entry in the text's sparse vector."""

    type: Literal["sparse"]
    token: str = Field(description="Spelling of the entry in the vocabulary")


class MaxSim(StrictModel):
    """MaxSim of the query `text` and the document `text_pair`, or its margin over that of `versus`.

    The texts have the prompts `query` and `document`.
    """

    type: Literal["maxsim"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose MaxSim is subtracted"
    )


Target = Annotated[
    Cosine | Margin | Dot | Dim | Norm | Score | Label | Sparse | MaxSim,
    Field(discriminator="type"),
]


class AttributeRequest(ModelRequest):
    """Attribution of a scalar to the tokens and words of a text, or of a pair of texts."""

    text: Text
    text_pair: str | None = Field(
        None,
        description="Second text: the document of a query, or the text that a reranker or "
        "classifier reads together with `text`; null: `text` alone",
    )
    target: Target = Field(
        description="Scalar to attribute; /debug/capabilities lists those of the model"
    )
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
        description="Tolerance of integrated gradients: the maximum error of the sum of the "
        "scores, relative to the scalar's change from baseline to text, and the maximum error of "
        "each score, relative to the largest score",
    )
    max_evaluations: int = Field(
        256,
        ge=17,
        le=4096,
        description="Maximum number of evaluations of the model for integrated gradients",
    )
    samples: int = Field(25, ge=1, le=1024, description="Number of noisy copies in SmoothGrad")
    sigma: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Standard deviation of SmoothGrad's noise, relative to the root mean square of "
        "the token vectors",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of SmoothGrad, and of the random orders in `faithfulness`",
    )
    faithfulness: UnitKind | None = Field(
        None,
        description="Units whose removal measures the faithfulness of the scores; null: it is not "
        "measured",
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class PairRequest(ModelRequest):
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
        description="Tolerance of each text's path integral: the maximum error of the sum over "
        "tokens, relative to the vector's change from baseline to text, and the maximum error of "
        "each token's contribution, relative to the largest contribution",
    )
    max_evaluations: int = Field(
        128, ge=17, le=4096, description="Maximum number of evaluations of the model per text"
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class Cosines(StrictModel):
    """Sum of the cosine similarities of all pairs of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class Ranking(StrictModel):
    """Multiple negatives ranking loss, with scale 20, of the pairs of texts 2i and 2i + 1."""

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


class FlowRequest(ModelRequest):
    """Gradient flow of a training objective, measured at every step of the model."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        Cosines | Ranking | Product | SquaredError | Cotangent, Field(discriminator="type")
    ]
    emulate: EmulatedPrecision | None = Field(
        None,
        description="Precision to which the output of each step, and the gradient with respect to "
        "it, are rounded; null: no rounding",
    )
    loss_scale: float = Field(
        1.0,
        ge=2.0**-24,
        le=2.0**32,
        description="Factor on the objective in the backward pass; gradient norms and magnitudes "
        "in the response are divided by it",
    )


class ParityRequest(ModelRequest):
    """Comparison of the served graph with the reference model."""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [],
        description="Texts to encode with both the served model and the reference model; empty: "
        "the artifact's check inputs",
    )


class NormOfText(StrictModel):
    """Input rows of one normalisation layer, recorded while the model encodes a text."""

    type: Literal["text"]
    text: Text
    norm: str = Field(
        max_length=64, description="Name of the normalisation layer; /debug/capabilities lists them"
    )


Rows = Annotated[list[Vector], Field(min_length=1, max_length=256)]
# Results may be NaN or infinite, which JSON represents as null.
ResultVector = Annotated[
    list[FiniteFloat | None], Field(min_length=1, max_length=16_384, fail_fast=True)
]
ResultRows = Annotated[list[ResultVector], Field(min_length=1, max_length=256)]


class Candidate(StrictModel):
    """Results of the caller's implementation, at least one; a null element is NaN or infinite."""

    out: ResultRows | None = None
    sum: ResultRows | None = Field(None, description="`x + residual`, the second output")
    dx: ResultRows | None = None
    dresidual: ResultRows | None = None
    dgamma: ResultVector | None = None
    dbeta: ResultVector | None = None


NormKind = Annotated[
    Literal["layer_norm", "rms_norm"],
    Field(description="Kind of norm; RMS norm subtracts no mean and has no `beta`"),
]


class GivenRows(StrictModel):
    """Rows given in the request."""

    type: Literal["rows"]
    kind: NormKind = "layer_norm"
    x: Rows
    residual: Rows | None = Field(None, description="Rows to add to `x`; null: no residual")
    gamma: Vector | None = Field(None, description="Scale; null: ones")
    beta: Vector | None = Field(None, description="Shift; null: zeros")
    eps: float = Field(1e-12, ge=0, le=1, description="Constant added to the variance")
    dout: Rows | None = Field(
        None, description="Gradient with respect to `out`; null: as chosen by the request's `dout`"
    )
    dsum: Rows | None = Field(
        None,
        description="Gradient with respect to `x + residual`, allowed only with `dout` and "
        "`residual`; null: zeros if `dout` is set, otherwise as chosen by the request's `dout`",
    )
    candidate: Candidate | None = Field(
        None,
        description="Results to judge instead of the service's implementations. They must be "
        "computed from these rows in the request's `dtype`",
    )


class RandomRows(StrictModel):
    """Rows drawn from a distribution."""

    type: Literal["random"]
    kind: NormKind = "layer_norm"
    distribution: Distribution = "normal"
    shape: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]],
        Field(min_length=2, max_length=2, description="Number of rows, then width of each row"),
    ]


class LayerNormRequest(ModelRequest):
    """Step-by-step check of add + norm: a residual sum, then layer norm or RMS norm."""

    source: Annotated[NormOfText | GivenRows | RandomRows, Field(discriminator="type")]
    dtype: Literal["float32", "float64"] = Field(
        "float32",
        description="Precision of the judged implementations; `steps` are always in float32",
    )
    dout: Literal["random", "ones"] = Field(
        "random",
        description="Gradient with respect to `out`, unless `source` has a `dout`. The gradient "
        "with respect to `x + residual` is random with `random`, and zero with `ones`",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of random rows and gradients")
    row: int | None = Field(
        None,
        ge=0,
        description="Index of the row whose values are returned at each step; null: no values",
    )


class VjpRequest(ModelRequest):
    """Backpropagation of a gradient from the served vector to the token vectors at a layer."""

    text: Text
    cotangent: Vector = Field(description="Gradient with respect to the served vector")
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer of the token vectors; /debug/capabilities lists all layers",
    )
    reduce: Reduction = Field(
        "norm",
        description="Reduction of each token's gradient: its Euclidean norm (`norm`), its dot "
        "product with the token vector (`dot`), or no reduction (`full`)",
    )


TensorFormat = Literal["safetensors", "npz"]
TapNames = Annotated[
    list[Annotated[str, Field(max_length=64)]],
    Field(
        min_length=1,
        max_length=1024,
        description="Names of steps of the forward pass, or of layers, whose output is that of "
        "their last step; /debug/capabilities lists both as `taps` and `layers`",
    ),
]


class ActivationsRequest(ModelRequest):
    """Outputs of steps of the forward pass, as a file of tensors."""

    texts: Annotated[list[Input], Field(min_length=1, max_length=64)]
    taps: TapNames
    reduction: TokenReduction = Field(
        "none",
        description="Reduction over the tokens of a text: their mean, the norm of each, the first "
        "or the last one. Outputs with one vector per text stay as they are, except for `norm`",
    )
    format: TensorFormat = "safetensors"
    dry_run: bool = Field(
        False, description="Return only the cost and the size of the tensors in bytes"
    )


PairOfPositions = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
Positions = (
    Literal["each"] | Annotated[list[PairOfPositions], Field(min_length=1, max_length=4096)] | None
)


class PatchRequest(ModelRequest):
    """Replacement of token vectors of a text by those of another one, the source."""

    text: Text
    text_pair: str | None = Field(None, description="As in /debug/attribute")
    source: Text = Field(description="Text in place of `text`, from which the token vectors are")
    source_pair: str | None = Field(
        None, description="Text in place of `text_pair`; null: `text_pair`"
    )
    target: Target = Field(
        description="Scalar to compute; /debug/capabilities lists those of the model"
    )
    taps: TapNames
    positions: Positions = Field(
        None,
        description="Replaced tokens. Null: all at once, if both texts have as many tokens. "
        "`each`: each one alone, likewise. A list of pairs: all of these at once; a pair is an "
        "index in `tokens`, and one in `source_tokens`",
    )
    dry_run: bool = Field(False, description="Return only the cost")


BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
    ActivationsRequest,
    PatchRequest,
)
