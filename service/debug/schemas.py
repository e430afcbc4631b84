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
    Discriminator(lambda given: "text" if isinstance(given, str) else "prompted"),
]


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
    vector: Annotated[list[FiniteFloat], Field(min_length=1, max_length=16_384, fail_fast=True)]


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

    delta: float | None = Field(description="Sum of the scores less the change of the number")
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


class Capabilities(BaseModel):
    """What can be asked for here."""

    model: Hashes
    points: list[str]
    methods: list[str]
    targets: list[str]
    baselines: list[str]
    device: str
    torch: str
    op: dict[str, str] = Field(description="What runs the fused op, forward and backward")
    limits: dict[str, Any]
