"""What the answers of the gradient routes look like."""

from typing import Any, Literal

from pydantic import BaseModel, Field


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
