"""Results of a gradient-flow analysis."""

from dataclasses import dataclass
from typing import Literal

from models.gradients.results.json_form import Phase

Role = Literal["producer", "propagator"]


@dataclass(frozen=True)
class ForwardSizes:
    """Statistics of a step's output, over all rows.

    Attributes:
        rms: Root mean square of the finite values; null if there are none.
        absmax: Largest magnitude of the finite values; null if there are none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        zero_fraction: Fraction of values that are zero.
    """

    rms: float
    absmax: float
    nan: int
    inf: int
    zero_fraction: float


@dataclass(frozen=True)
class GradientSizes:
    """Statistics of the gradient with respect to a step's output, over all rows.

    Attributes:
        l2: Euclidean norm of the finite values, divided by the loss scale; null if there are none.
        absmax: Largest magnitude of the finite values, divided by the loss scale; null if there are
            none.
        nan: Number of NaN values.
        inf: Number of infinite values.
        underflow_fraction: Fraction of values that are nonzero before rounding to the emulated
            precision, and zero or subnormal after rounding. Without emulation, the fraction of
            subnormal values.
    """

    l2: float
    absmax: float
    nan: int
    inf: int
    underflow_fraction: float


@dataclass(frozen=True)
class ParameterGradient:
    """Size of the gradient with respect to all parameters of a step.

    If the model runs a layer several times, the gradient is the sum over all runs.

    Attributes:
        l2: Euclidean norm, divided by the loss scale; null if any value is not finite.
        ratio_to_weights: `l2` divided by the Euclidean norm of the parameters; null if `l2` is
            null.
    """

    l2: float
    ratio_to_weights: float


@dataclass(frozen=True)
class FlowStep:
    """A step of the forward pass, such as "layers.0.attention".

    Attributes:
        name: Name of the step.
        forward: Statistics of the output.
        gradient: Statistics of the gradient with respect to the output; null if the output of any
            row received no gradient.
        parameters: Size of the gradient with respect to the parameters; null if the step has no
            parameters, or if any of them received no gradient.
    """

    name: str
    forward: ForwardSizes
    gradient: GradientSizes | None
    parameters: ParameterGradient | None


@dataclass(frozen=True)
class NonFiniteStep:
    """A step with a NaN or infinite value in the forward or backward pass.

    Attributes:
        phase: Pass with the non-finite value, "forward" or "backward".
        step: Name of the step.
        role: "producer": the first step of the pass with a non-finite value, or the first one in
            some row. "propagator": every row with a non-finite value had one in an earlier step of
            the pass.
        row: Index of a row with a non-finite value; for a producer, of a row without such a value
            in earlier steps of the pass. Null if the value belongs to no single row.
        token: Index of the first non-finite token of `row`; null if the value belongs to no single
            token.
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
        step: Name of the step. For "vanishing" and "exploding", this is the last step of a layer.
        kind: Kind of defect. "missing_gradient": no gradient reached the output or a parameter.
        ratio: Norm of the gradient with respect to the step's output, divided by the norm at the
            output of the last layer; null for "missing_gradient".
        threshold: Threshold that `ratio` is below ("vanishing") or above ("exploding"); null for
            "missing_gradient".
    """

    step: str
    kind: Literal["vanishing", "exploding", "missing_gradient"]
    ratio: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Flow:
    """Gradient flow through the steps of the forward pass.

    Attributes:
        objective: Value of the objective, before multiplication by the loss scale.
        steps: Steps in the order of the forward pass.
        nonfinite_steps: Steps with a NaN or infinite value, in execution order. They are steps of
            the forward pass, or of the backward pass if all outputs are finite.
        verdicts: Vanishing, exploding and missing gradients; empty if there are none.
    """

    objective: float
    steps: tuple[FlowStep, ...]
    nonfinite_steps: tuple[NonFiniteStep, ...]
    verdicts: tuple[FlowVerdict, ...]

    @property
    def first_nonfinite(self) -> NonFiniteStep | None:
        """First step that computed a NaN or infinite value; null if there is none."""
        return self.nonfinite_steps[0] if self.nonfinite_steps else None
