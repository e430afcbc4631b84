"""Path integrals from a baseline to an input, with adaptive refinement.

F(input) - F(baseline) is the integral of the gradient of F along the line from baseline to input.
The same holds for every panel, an interval of the line. So the values of F at the endpoints of a
panel give the error of its quadrature. The panel with the largest error is halved until the total
error is small. A fixed number of steps has no such check: LayerNorm is invariant to the scale of
its input, so with a baseline of zeros the whole change of F may lie within the first 1e-6 of the
line, between two steps.

Sources: integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365. Quadrature:
Gauss-Legendre with 8 points, exact for polynomials of degree 15.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.gradients.results import Completeness

Array = NDArray[np.float64]
# Evaluates K functions at S positions on the line, from 0 (baseline) to 1 (input). Maps positions
# `(S,)` to function values `(S, K)` and slopes per token `(S, N, K)`. A slope is the dot product of
# the gradient with respect to a token and the token's difference from its baseline.
Evaluate = Callable[[Array], tuple[Array, Array]]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True)
class Integral:
    """Result of an integration.

    Attributes:
        scores: Contribution of each of N tokens to each of K functions, `(N, K)`.
        value_input: Function values at the input, `(K,)`.
        value_baseline: Function values at the baseline, `(K,)`.
        error: Sum of the quadrature errors of all panels. With several functions, the error of a
            panel is the Euclidean norm of the errors of all functions.
        allowed: Largest `error` that counts as converged.
        evaluations: Number of positions on the line at which the functions were evaluated.
        path: Positions of the panel endpoints, `(P,)`, and function values at them, `(P, K)`.
    """

    scores: Array
    value_input: Array
    value_baseline: Array
    error: float
    allowed: float
    evaluations: int
    path: tuple[Array, Array]

    @property
    def delta(self) -> Array:
        """Sum of the scores minus the change of each function from baseline to input, `(K,)`."""
        delta: Array = self.scores.sum(0) - (self.value_input - self.value_baseline)
        return delta

    @property
    def completeness(self) -> Completeness:
        """Accuracy of the integral. With several functions, its `delta` is the norm of `delta`."""
        delta = self.delta
        return Completeness(
            delta.item() if len(delta) == 1 else float(np.linalg.norm(delta)),
            self.error,
            self.allowed,
            self.evaluations,
        )


@dataclass(frozen=True)
class _Panel:
    """Interval of the line, with function values at its endpoints and its part of the scores."""

    start: float
    end: float
    value_start: Array  # (K,)
    value_end: Array  #   (K,)
    scores: Array  #      (N, K)

    @property
    def error(self) -> float:
        errors = self.scores.sum(0) - (self.value_end - self.value_start)  # (K,)
        return float(np.linalg.norm(errors))


def integrate(
    evaluate: Evaluate, tolerance: float, max_evaluations: int, rounding: float
) -> Integral:
    """Integrate along the line until the error is tolerated or the evaluation limit is reached.

    Args:
        evaluate: Computes function values and slopes; see `Evaluate`.
        tolerance: Maximum total error, relative to the change of the function from baseline to
            input. With several functions, the Euclidean norm of their changes counts.
        max_evaluations: Maximum number of evaluated positions; at least 10 are always evaluated.
        rounding: Relative rounding error of a function value. A total error of up to 8 times
            `rounding`, relative to the larger value at baseline and input, is always accepted:
            refinement cannot remove it.
    """
    end_values, panels = _first(evaluate)
    change = float(np.linalg.norm(end_values[1] - end_values[0]))
    size = max(float(np.linalg.norm(value)) for value in end_values)
    allowed = max(tolerance * change, 8 * rounding * size)
    evaluations = 2 + len(_NODES)
    while (
        sum(panel.error for panel in panels) > allowed
        and evaluations + 1 + 2 * len(_NODES) <= max_evaluations
    ):
        worst = max(range(len(panels)), key=lambda index: panels[index].error)
        panels[worst : worst + 1] = _halves(evaluate, panels[worst])
        evaluations += 1 + 2 * len(_NODES)
    return Integral(
        scores=np.sum([panel.scores for panel in panels], axis=0),
        value_input=end_values[1],
        value_baseline=end_values[0],
        error=sum(panel.error for panel in panels),
        allowed=allowed,
        evaluations=evaluations,
        path=(
            np.array([panel.start for panel in panels] + [1.0]),
            np.stack([panel.value_start for panel in panels] + [end_values[1]]),
        ),
    )


def _points(start: float, end: float) -> Array:
    points: Array = start + (end - start) * (_NODES + 1) / 2
    return points


def _scores(start: float, end: float, slopes: Array) -> Array:
    """Return the integral `(N, K)` over a panel, given the slopes `(8, N, K)` at its nodes."""
    scores: Array = np.tensordot(_WEIGHTS * (end - start) / 2, slopes, axes=1)
    return scores


def _first(evaluate: Evaluate) -> tuple[Sequence[Array], list[_Panel]]:
    values, slopes = evaluate(np.concatenate([[0.0, 1.0], _points(0.0, 1.0)]))
    end_values = values[0], values[1]
    return end_values, [_Panel(0.0, 1.0, *end_values, _scores(0.0, 1.0, slopes[2:]))]


def _halves(evaluate: Evaluate, panel: _Panel) -> list[_Panel]:
    middle = (panel.start + panel.end) / 2
    left, right = (panel.start, middle), (middle, panel.end)
    values, slopes = evaluate(np.concatenate([[middle], _points(*left), _points(*right)]))
    count = len(_NODES)
    return [
        _Panel(*left, panel.value_start, values[0], _scores(*left, slopes[1 : 1 + count])),
        _Panel(*right, values[0], panel.value_end, _scores(*right, slopes[1 + count :])),
    ]
