"""Results of the gradient methods. Torch-free.

The methods return these dataclasses, the gradient process sends them, and the service derives its
response models from them: a field or property added here appears in the API and in its
documentation. In JSON, numbers that are not finite are null.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

# The annotation is the number of dimensions.
Vector = Annotated[NDArray[Any], 1]
Matrix = Annotated[NDArray[Any], 2]

Phase = Literal["forward", "backward"]
Role = Literal["producer", "propagator"]


def properties(result: type) -> dict[str, property]:
    """Return the properties of a result type, which belong to its JSON form as its fields do."""
    return {name: value for name, value in vars(result).items() if isinstance(value, property)}


def as_dict(result: object) -> Any:  # noqa: ANN401 - JSON, except for arrays
    """Return a result with dictionaries in place of dataclasses, properties included."""
    if is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in fields(result)] + list(properties(type(result)))
        return {name: as_dict(getattr(result, name)) for name in names}
    if isinstance(result, list | tuple):
        return [as_dict(value) for value in result]
    # orjson serialises C-contiguous arrays only.
    return np.ascontiguousarray(result) if isinstance(result, np.ndarray) else result


# Attribution.


@dataclass(frozen=True)
class Completeness:
    """Accuracy of a path integral.

    Attributes:
        delta: Sum of the scores less the change of the function; for pairs the length of that.
        error: Sum of the errors of the panels.
        allowed: Error that the tolerance allows.
        evaluations: Number of points at which the function was evaluated.
    """

    delta: float
    error: float
    allowed: float
    evaluations: int

    @property
    def converged(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Attribution:
    """Attribution of a number to the tokens of a text.

    Attributes:
        scores: Score of each token, raw and signed, `(L,)`.
        value: Number at the text.
        baseline_value: Number at the baseline; null for methods without a baseline.
        completeness: Accuracy of integrated gradients; null for other methods.
        path: Number along the line from the baseline, at 0, to the text, at 1.
    """

    scores: Vector
    value: float
    baseline_value: float | None = None
    completeness: Completeness | None = None
    path: tuple[tuple[float, float], ...] | None = None

    @property
    def sum(self) -> float:
        """Sum of the scores."""
        return float(self.scores.sum())


@dataclass(frozen=True)
class ReferenceTerms:
    """Terms of a cosine that involve a baseline.

    All are divided by the product of the vectors' lengths. With them the matrix adds up to the
    cosine: `cosine = sum(matrix) + a_baseline + baseline_b - baselines`.

    Attributes:
        a_baseline: Product of vector a and the baseline of b.
        baseline_b: Product of the baseline of a and vector b.
        baselines: Product of both baselines.
    """

    a_baseline: float
    baseline_b: float
    baselines: float


@dataclass(frozen=True)
class PairAttribution:
    """Attribution of a cosine to pairs of tokens.

    Attributes:
        matrix: Contribution of each pair of tokens to the cosine, `(L_a, L_b)`.
        cosine: Cosine of the two vectors.
        reference_terms: Terms that involve a baseline.
        delta: Sum of the matrix and the reference terms, less the cosine.
        completeness: Accuracy of the integrals of both texts.
    """

    matrix: Matrix
    cosine: float
    reference_terms: ReferenceTerms
    delta: float
    completeness: tuple[Completeness, Completeness]

    @property
    def sum(self) -> float:
        """Sum of the matrix."""
        return float(self.matrix.sum())


@dataclass(frozen=True)
class TokenGradient:
    """Gradient by each token.

    Attributes:
        gradient: One number per token, `(L,)`, or the full gradient, `(L, D)`.
    """

    gradient: Vector | Matrix


# Gradient flow.


@dataclass(frozen=True)
class ForwardSizes:
    """Size of a step's output over all rows; sizes count finite values only.

    Attributes:
        rms: Root mean square; null without a finite value.
        absmax: Largest magnitude; null without a finite value.
        nan: Number of NaN.
        inf: Number of infinities.
        zero_fraction: Fraction of zeros.
    """

    rms: float
    absmax: float
    nan: int
    inf: int
    zero_fraction: float


@dataclass(frozen=True)
class GradientSizes:
    """Size of the gradient by a step's output over all rows; sizes count finite values only.

    Attributes:
        l2: Euclidean norm.
        absmax: Largest magnitude; null without a finite value.
        nan: Number of NaN.
        inf: Number of infinities.
        underflow_fraction: Fraction of values that are nonzero before rounding, and zero or
            subnormal after it; without rounding, the fraction of subnormal values.
    """

    l2: float
    absmax: float
    nan: int
    inf: int
    underflow_fraction: float


@dataclass(frozen=True)
class ParameterGradient:
    """Size of the gradient by all parameters of a step; null if a value of it is not finite.

    Attributes:
        l2: Euclidean norm.
        ratio_to_weights: Euclidean norm relative to that of the parameters.
    """

    l2: float
    ratio_to_weights: float


@dataclass(frozen=True)
class FlowStep:
    """A step of the forward pass, such as "layers.0.attention".

    Attributes:
        name: Name of the step.
        forward: Size of the output.
        gradient: Size of the gradient by the output; null if no gradient reached it.
        parameters: Size of the gradient by the parameters; null for a step without parameters, or
            if no gradient reached one of them.
    """

    name: str
    forward: ForwardSizes
    gradient: GradientSizes | None
    parameters: ParameterGradient | None


@dataclass(frozen=True)
class NonFiniteStep:
    """A step with NaN or infinity in a pass.

    Attributes:
        phase: Pass with the number.
        step: Name of the step.
        role: A producer made it in some row from finite numbers; a propagator passed it on.
        row: Index of the first row that it was made in, or else is in; null if rows are not
            distinguishable.
        token: Index of the first such token of that row; null if tokens are not distinguishable.
    """

    phase: Phase
    step: str
    role: Role
    row: int | None
    token: int | None


@dataclass(frozen=True)
class FlowVerdict:
    """A defect of a step's gradient.

    Attributes:
        step: Name of the step: for "vanishing" and "exploding" the last step of a layer.
        kind: Kind of defect. "missing_gradient": no gradient reached the output or a parameter.
        ratio: Norm of the gradient relative to that at the end of the last layer.
        threshold: Bound that the ratio exceeds.
    """

    step: str
    kind: Literal["vanishing", "exploding", "missing_gradient"]
    ratio: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Flow:
    """Gradient flow through the steps of the forward pass.

    Attributes:
        objective: Value of the objective, not scaled.
        steps: Steps in the order of the forward pass.
        nonfinite_steps: Steps with NaN or infinity, in the order of their pass: the forward pass,
            or the backward pass if the forward pass is finite.
        verdicts: Defects; empty for a healthy gradient.
    """

    objective: float
    steps: tuple[FlowStep, ...]
    nonfinite_steps: tuple[NonFiniteStep, ...]
    verdicts: tuple[FlowVerdict, ...]

    @property
    def first_nonfinite(self) -> NonFiniteStep | None:
        """Step that made the first NaN or infinity."""
        return self.nonfinite_steps[0] if self.nonfinite_steps else None


# The fused operator.


@dataclass(frozen=True)
class NormStep:
    """A step of add + LayerNorm on given rows, in float32.

    Attributes:
        name: Name in `models.add_layer_norm.reference`; "x" is the sum with the residual.
        phase: Pass of the step.
        shape: `(N, D)`, `(N, 1)` or `(D,)`.
        minimum: Minimum of the finite values; null without any.
        maximum: Maximum of the finite values; null without any.
        mean: Mean of the finite values; null without any.
        rms: Root mean square of the finite values; null without any.
        nan: Number of NaN.
        inf: Number of infinities.
        first_nonfinite: Index of the first NaN or infinity.
        values: Values of the chosen row; dgamma and dbeta are of all rows.
        error_float64: Worst error against the step in float64, relative to the largest magnitude
            there; for dx, relative to that of dxmu1. Infinite if float32 alone is not finite.
        error_autograd: The same error of the step in float64 against PyTorch's autograd; null for
            steps that are no gradient.
        error_finite_difference: The same error of slopes in float64 along random directions against
            central differences, for dx, dgamma and dbeta.
    """

    name: str
    phase: Phase
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    rms: float
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    values: Vector | None
    error_float64: float
    error_autograd: float | None
    error_finite_difference: float | None


@dataclass(frozen=True)
class Invariant:
    """An identity of LayerNorm that holds on every finite row.

    Attributes:
        name: Name of the identity.
        phase: Pass of the identity.
        residual: Violation on the worst row.
        bound: Violation that rounding explains on that row.
        row: Index of the worst row.
        passes: Whether the violation is within the bound.
    """

    name: str
    phase: Phase
    residual: float
    bound: float
    row: int
    passes: bool


@dataclass(frozen=True)
class Comparison:
    """Comparison of one value of an implementation with its reference.

    Attributes:
        value: "out", "dx", "dresidual", "dgamma" or "dbeta".
        against: "float64", or "finite differences" for slopes.
        max_abs: Worst error.
        ulp: Worst error in units in the last place of the largest value.
        share_of_bound: Worst error relative to its bound.
        worst_index: Index of the worst error; for slopes, the number of the direction.
        passes: Whether the share is at most 1.
    """

    value: str
    against: str
    max_abs: float
    ulp: float
    share_of_bound: float
    worst_index: tuple[int, ...]
    passes: bool


@dataclass(frozen=True)
class ImplementationVerdict:
    """Verdict on one pass of an implementation.

    Attributes:
        implementation: Name of the implementation.
        phase: Judged pass.
        passes: Whether all comparisons and invariants pass; null if it was not run.
        not_run: Reason why it was not run.
        comparisons: Comparisons with the reference.
        invariants: Invariants of the pass.
    """

    implementation: str
    phase: Phase
    passes: bool | None
    not_run: str | None
    comparisons: tuple[Comparison, ...]
    invariants: tuple[Invariant, ...]


@dataclass(frozen=True)
class LayerNormCheck:
    """Steps of add + LayerNorm and verdicts on its implementations.

    Attributes:
        steps: Steps of the reference, forward and backward.
        invariants: Invariants of the operator as PyTorch runs it on CPU.
        verdicts: Verdicts on every implementation, a forward and a backward one each.
    """

    steps: tuple[NormStep, ...]
    invariants: tuple[Invariant, ...]
    verdicts: tuple[ImplementationVerdict, ...]

    @property
    def passes(self) -> bool:
        """Whether no implementation fails."""
        return all(verdict.passes is not False for verdict in self.verdicts)


# Parity.

# Float32 on both sides; good graphs show 1 - 1e-12 and 1.4e-6.
MIN_COSINE = 0.99999
MAX_ABS = 1e-4


@dataclass(frozen=True)
class FileHash:
    """SHA-256 of a file of the artifact.

    Attributes:
        name: Name of the file.
        expected: Hash in the manifest.
        actual: Hash of the file; null if there is no file.
    """

    name: str
    expected: str
    actual: str | None


@dataclass(frozen=True)
class VectorDifference:
    """Difference between a served vector and the reference model's.

    Attributes:
        cosine: Cosine of both.
        max_abs: Largest difference.
        relative: Largest difference relative to the reference's largest magnitude.
    """

    cosine: float
    max_abs: float
    relative: float


@dataclass(frozen=True)
class WeightDifference:
    """Difference between a weight in the graph and the reference model's.

    Attributes:
        name: Name of the parameter, and in brackets the part that the graph stores separately.
        max_abs: Largest difference; null if the graph has no weight of its shape there.
    """

    name: str
    max_abs: float | None

    @property
    def status(self) -> Literal["equal", "differs", "absent"]:
        """Result of the comparison."""
        if self.max_abs is None:
            return "absent"
        return "equal" if self.max_abs == 0 else "differs"


@dataclass(frozen=True)
class LayerDifference:
    """Difference between tokens in the graph and the reference model's, after a layer.

    Attributes:
        layer: Name of the layer.
        max_abs: Largest difference; null if the graph has no such layer.
        relative: Largest difference relative to the reference's largest magnitude.
    """

    layer: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class StressRow:
    """Error of the served norm on a hard row.

    Attributes:
        row: Name of the row.
        finite: Whether the output is finite.
        error: Largest error against float64.
        bound: Largest error of a good implementation.
    """

    row: str
    finite: bool
    error: float
    bound: float


@dataclass(frozen=True)
class Parity:
    """Comparison of the served graph with the reference model.

    Attributes:
        files: Hashes of the graph and of the reference model's weights.
        vectors: Vector of each row.
        weights: Every weight of the reference model.
        curve: Tokens after each layer, from "embeddings" on.
        first_divergence: Name of the first layer beyond the tolerance.
        layer_norm: Served norm on each hard row.
    """

    files: tuple[FileHash, ...]
    vectors: tuple[VectorDifference, ...]
    weights: tuple[WeightDifference, ...]
    curve: tuple[LayerDifference, ...]
    first_divergence: str | None
    layer_norm: tuple[StressRow, ...]

    @property
    def passes(self) -> bool:
        """Whether there is no failure."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """Differences beyond their bounds, as sentences."""
        return (
            *(f"{f.name} is not the exported file" for f in self.files if f.actual != f.expected),
            *(
                f"{w.name} is absent from the graph"
                if w.max_abs is None
                else f"{w.name} differs by {w.max_abs:.1e}"
                for w in self.weights
                if w.status != "equal"
            ),
            *(
                f"the vector of row {row} differs by {v.max_abs:.1e}, its cosine is {v.cosine:.7f}"
                for row, v in enumerate(self.vectors)
                if not (v.cosine >= MIN_COSINE and v.max_abs <= MAX_ABS)
            ),
            *(
                f"tokens diverge from {d.layer} on, there by {d.max_abs:.1e}"
                for d in self.curve
                if d.layer == self.first_divergence
            ),
            *(
                f"LayerNormalization is off by {s.error:.1e} on the row {s.row!r}"
                for s in self.layer_norm
                if not s.error <= s.bound
            ),
        )
