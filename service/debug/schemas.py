"""What the requests and answers of the gradient routes look like."""

from typing import Annotated, Any, Literal

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


class Token(BaseModel):
    """A token of a text."""

    token: str = Field(description="As the vocabulary spells it")
    start: int | None = Field(description="In the text, in characters; null if it is not of it")
    end: int | None


class Hashes(BaseModel):
    """What the answer speaks of."""

    name: str
    weights_sha256: dict[str, str]
    graph_sha256: str
    tokenizer_sha256: str


class Parity(BaseModel):
    """How far the twin's vectors of these texts are from the served graph's."""

    cosine: float = Field(description="The worst")
    max_abs: float
    engine: str


class Cost(BaseModel):
    """What it takes, at most."""

    token_steps: int = Field(description="Tokens that run through the twin")
    limit: int = Field(description="What one request may take")


class NonFinite(BaseModel):
    """A number that JSON has not, and null stands for."""

    pointer: str = Field(description="JSON pointer into this answer")
    kind: Literal["nan", "inf", "-inf"]


class Completeness(BaseModel):
    """How exact an integral is."""

    delta: float | None = Field(
        description="Sum of the scores less the change; its length for pairs"
    )
    error: float | None = Field(description="Sum of the errors of the panels")
    allowed: float | None = Field(description="What the tolerance allows")
    converged: bool
    evaluations: int


class Answer(BaseModel):
    """What every answer tells."""

    model: Hashes
    parity: Parity | None = None
    cost: Cost
    wall_ms: float | None = None
    warnings: list[str] = []
    nonfinite: list[NonFinite] = []


class AttributeAnswer(Answer):
    """The tokens, scored; of a dry run, the cost alone."""

    tokens: list[Token] = []
    scores: list[float | None] = Field([], description="One for each token, raw and signed")
    value: float | None = None
    baseline_value: float | None = None
    sum: float | None = None
    completeness: Completeness | None = None
    path: list[tuple[float, float | None]] | None = Field(
        None, description="The number along the line from the baseline, 0, to the text, 1"
    )


class ReferenceTerms(BaseModel):
    """What the baselines have a part in, so that all adds up to the cosine."""

    a_baseline: float | None
    baseline_b: float | None
    baselines: float | None


class PairAnswer(Answer):
    """The matrix of token pairs; of a dry run, the cost alone."""

    tokens_a: list[Token] = []
    tokens_b: list[Token] = []
    matrix: list[list[float | None]] = []
    sum: float | None = None
    cosine: float | None = None
    reference_terms: ReferenceTerms | None = None
    delta: float | None = None
    completeness: list[Completeness] = []


class ForwardSizes(BaseModel):
    """What comes out of a step."""

    rms: float | None
    absmax: float | None
    nan: int
    inf: int
    zero_fraction: float


class GradientSizes(BaseModel):
    """The gradient by what comes out of a step."""

    l2: float | None
    absmax: float | None
    nan: int
    inf: int
    underflow_fraction: float


class ParameterGradient(BaseModel):
    """The gradient by the weights of a step."""

    l2: float | None
    ratio_to_weights: float | None


class Place(BaseModel):
    """A step of the forward pass."""

    name: str
    forward: ForwardSizes
    gradient: GradientSizes | None
    parameters: ParameterGradient | None


class BrokenPlace(BaseModel):
    """A step with NaN or infinity."""

    phase: Literal["forward", "backward"]
    place: str
    role: Literal["producer", "propagator"]
    row: int | None = Field(description="Index of the text")
    token: int | None


class Verdict(BaseModel):
    """What is wrong with a gradient."""

    place: str
    kind: Literal["vanishing", "exploding", "missing_gradient"]
    ratio: float | None
    threshold: float | None


class FlowAnswer(Answer):
    """The gradient's sizes, step by step."""

    objective: float | None
    places: list[Place]
    first_nonfinite: BrokenPlace | None
    nonfinite_places: list[BrokenPlace]
    verdicts: list[Verdict]


class Step(BaseModel):
    """One step of the op, as `models.add_layer_norm.reference` names it."""

    name: str
    phase: Literal["forward", "backward"]
    shape: list[int]
    minimum: float | None
    maximum: float | None
    mean: float | None
    rms: float | None
    nan: int
    inf: int
    first_nonfinite: list[int] | None
    values: list[float | None] | None
    error_float64: float | None
    error_autograd: float | None
    error_finite_difference: float | None


class Invariant(BaseModel):
    """What holds on every finite row, whatever the numbers."""

    name: str
    phase: Literal["forward", "backward"]
    residual: float | None
    bound: float | None
    row: int
    passes: bool


class Comparison(BaseModel):
    """One value of an implementation against what it should be."""

    value: str
    against: str
    max_abs: float | None
    ulp: float | None
    share_of_bound: float | None
    worst_index: list[int]
    passes: bool


class Judgement(BaseModel):
    """One half of an implementation; `passes` is null where `not_run` says why."""

    implementation: str
    phase: Literal["forward", "backward"]
    passes: bool | None
    not_run: str | None
    comparisons: list[Comparison]
    invariants: list[Invariant]


class LayerNormAnswer(Answer):
    """The op's steps, its invariants, and a verdict on every implementation."""

    passes: bool
    steps: list[Step]
    invariants: list[Invariant]
    verdicts: list[Judgement]


class VjpAnswer(Answer):
    """The gradient by each token."""

    tokens: list[Token]
    gradient: list[float | None] | list[list[float | None]]


class FileHash(BaseModel):
    """A file of the artifact."""

    name: str
    expected: str
    found: str | None


class VectorDifference(BaseModel):
    """A served vector against the twin's."""

    cosine: float | None
    max_abs: float | None
    relative: float | None


class WeightDifference(BaseModel):
    """A weight in the graph against the twin's; null: the graph has none in its place."""

    name: str
    max_abs: float | None


class PointDifference(BaseModel):
    """Tokens in the graph against the twin's."""

    point: str
    max_abs: float | None
    relative: float | None


class StressRow(BaseModel):
    """The served norm on a row that is hard for it."""

    row: str
    finite: bool
    error: float | None
    bound: float


class ParityAnswer(Answer):
    """What was compared."""

    passes: bool
    failures: list[str] = Field(description="What is wrong, in sentences")
    files: list[FileHash]
    vectors: list[VectorDifference]
    weights: list[WeightDifference]
    curve: list[PointDifference]
    first_divergence: str | None
    layer_norm: list[StressRow]


class Capabilities(BaseModel):
    """What can be asked for here."""

    model: Hashes
    points: list[str]
    norms: list[str]
    methods: list[str]
    targets: list[str]
    baselines: list[str]
    device: str
    torch: str
    op: dict[str, str] = Field(description="What runs the fused op, forward and backward")
    limits: dict[str, Any]


BODIES = (
    AttributeRequest,
    PairRequest,
    FlowRequest,
    LayerNormRequest,
    ParityRequest,
    VjpRequest,
)
