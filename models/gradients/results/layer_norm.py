"""Results of a check of the fused operator, add + norm."""

from dataclasses import dataclass

from models.gradients.results.json_form import Phase, Vector


@dataclass(frozen=True)
class NormStep:
    """A step of add + norm, computed in float32.

    Attributes:
        name: Name of the step in `models/add_layer_norm/reference.py`. "x" is the sum of input and
            residual. For RMS norm, the steps "mean" and "dx2" are zero.
        phase: "forward" or "backward".
        shape: Shape of the step's value: `(N, D)`, `(N, 1)` or `(D,)`.
        minimum: Minimum of the finite values; null if there are none.
        maximum: Maximum of the finite values; null if there are none.
        mean: Mean of the finite values; null if there are none.
        rms: Root mean square of the finite values; null if there are none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        first_nonfinite: Index of the first NaN or infinite value; null if there is none.
        values: Values of the requested row; null if no row was requested. dgamma and dbeta are sums
            over all rows.
        error_float64: Largest absolute difference from the step in float64, divided by the largest
            magnitude of the step in float64. For dx it is divided by the largest magnitude of
            dxmu1 instead, because the terms of dx can cancel. Infinite (null in JSON) if a value is
            finite in float64 but not in float32.
        error_autograd: Largest absolute difference between the step in float64 and PyTorch's
            autograd in float64, divided by the same magnitude as `error_float64`; null for forward
            steps.
        error_finite_difference: Largest difference between a directional derivative of the float64
            gradient and a central difference, divided by the root of the sum of the squares of the
            derivative's terms. Only for dx, dgamma and dbeta; null for other steps.
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
    """An identity of the norm that holds on every finite row.

    Attributes:
        name: Name of the identity.
        phase: "forward" or "backward".
        residual: Absolute deviation from the identity on row `row`.
        bound: Tolerance for rounding errors on row `row`.
        row: Index of the row whose deviation is largest relative to its bound.
        passes: Whether `residual` is at most `bound`.
    """

    name: str
    phase: Phase
    residual: float
    bound: float
    row: int
    passes: bool


@dataclass(frozen=True)
class Comparison:
    """Comparison of an output or gradient of an implementation with its reference.

    Attributes:
        value: Compared array: "out", "sum", "dx", "dresidual", "dgamma" or "dbeta".
        against: Reference. "float64": the same array in float64. "finite differences": directional
            derivatives by central differences.
        max_abs: Largest absolute error.
        ulp: Largest absolute error in units in the last place of the reference's largest value.
        share_of_bound: Largest ratio of an absolute error to its bound.
        worst_index: Index of the element with the largest ratio; for finite differences, index of
            the direction.
        actual: Value of the implementation at `worst_index`.
        expected: Value of the reference at `worst_index`.
        passes: Whether `share_of_bound` is at most 1.
    """

    value: str
    against: str
    max_abs: float
    ulp: float
    share_of_bound: float
    worst_index: tuple[int, ...]
    actual: float
    expected: float
    passes: bool


@dataclass(frozen=True)
class ImplementationVerdict:
    """Verdict on one pass of an implementation.

    Attributes:
        implementation: Name of the implementation.
        phase: "forward" or "backward".
        passes: Whether no gradient is missing and all comparisons and invariants pass; null if
            there is no verdict.
        no_verdict: Reason why there is no verdict: the pass was not run, or the rows cannot decide
            whether its results are correct. Null if there is a verdict.
        missing: Gradients that the implementation should return but does not.
        comparisons: Comparisons with the reference.
        invariants: Invariants of the pass.
    """

    implementation: str
    phase: Phase
    passes: bool | None
    no_verdict: str | None
    missing: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    invariants: tuple[Invariant, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """One sentence per missing gradient, failed comparison and failed invariant."""
        return (
            *(f"{name} is missing" for name in self.missing),
            *(
                f"{c.value}[{', '.join(map(str, c.worst_index))}] is {c.actual:.9g}; it should be "
                f"{c.expected:.9g}, so its error is {c.share_of_bound:.3g} times the bound"
                if c.against == "float64"
                else f"{c.value} gives a directional derivative of {c.actual:.9g}; finite "
                f"differences give {c.expected:.9g}, so its error is {c.share_of_bound:.3g} times "
                "the bound"
                for c in self.comparisons
                if not c.passes
            ),
            *(
                f"{i.name} is off by {i.residual:.3g} on row {i.row}; the bound is {i.bound:.3g}"
                for i in self.invariants
                if not i.passes
            ),
        )


@dataclass(frozen=True)
class LayerNormCheck:
    """Steps of add + norm and verdicts on its implementations.

    Attributes:
        steps: Steps of the reference implementation, forward and backward.
        invariants: Invariants of the operator, run with PyTorch on CPU.
        verdicts: Two verdicts per implementation: on its forward pass and on its backward pass. If
            the request has a candidate, only the verdicts on the candidate.
    """

    steps: tuple[NormStep, ...]
    invariants: tuple[Invariant, ...]
    verdicts: tuple[ImplementationVerdict, ...]

    @property
    def passes(self) -> bool | None:
        """Whether no verdict fails; null if none fails, but one of the passes has no verdict."""
        if any(verdict.passes is False for verdict in self.verdicts):
            return False
        right = {verdict.phase for verdict in self.verdicts if verdict.passes}
        return True if right == {verdict.phase for verdict in self.verdicts} else None
