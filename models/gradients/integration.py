"""Path integrals from a baseline to an input, with adaptive refinement.

F(input) - F(baseline) is the integral of the gradient along the line between them, and the same
holds for every panel of the line. So the values of F at the ends of a panel give the error of its
quadrature, and the worst panel is halved until the total error is small. A fixed number of steps
has no such check: LayerNorm ignores the length of its input, so with a baseline of zeros all change
may happen within the first 1e-6 of the line, between two steps.

Sources: integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365. Quadrature:
Gauss-Legendre with 8 points, exact for polynomials of degree 15.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.gradients.results import Completeness

Array = NDArray[np.float64]
# Positions on the line `(S,)`, from 0, the baseline, to 1, the input -> values of the functions
# `(S, K)`, and their slopes through each token `(S, N, K)`: the gradient by the token times its
# difference from the baseline.
Evaluate = Callable[[Array], tuple[Array, Array]]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True)
class Integral:
    """Result of an integration.

    Attributes:
        scores: What each token adds to each of K functions, `(N, K)`.
        value_input: The functions at the input, `(K,)`.
        value_baseline: The functions at the baseline, `(K,)`.
        error: Sum over the panels of the length of what is missing in each.
        allowed: What the error should stay below.
        evaluations: Places at which the functions were evaluated.
        path: The ends of the panels, and the functions there: `(P,)` and `(P, K)`.
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
        """Sum of the scores less the difference of the values, `(K,)`."""
        delta: Array = self.scores.sum(0) - (self.value_input - self.value_baseline)
        return delta

    @property
    def completeness(self) -> Completeness:
        """Accuracy of the integral; of several functions, the length of their delta."""
        delta = self.delta
        return Completeness(
            delta.item() if len(delta) == 1 else float(np.linalg.norm(delta)),
            self.error,
            self.allowed,
            self.evaluations,
        )


@dataclass(frozen=True)
class _Panel:
    """A part of the line: its ends, the functions there, and its share of the scores."""

    start: float
    end: float
    value_start: Array  # (K,)
    value_end: Array  #   (K,)
    scores: Array  #      (N, K)

    @property
    def error(self) -> float:
        missing = self.scores.sum(0) - (self.value_end - self.value_start)
        return float(np.linalg.norm(missing))


def integrate(
    evaluate: Evaluate, tolerance: float, max_evaluations: int, rounding: float
) -> Integral:
    """Return the integral along the line, within the tolerance or the evaluation limit.

    Args:
        evaluate: Functions and slopes; see `Evaluate`.
        tolerance: Bound of the summed errors of the panels, relative to the change of the functions
            (for several functions, to the length of the change).
        max_evaluations: Maximum number of evaluations; 10 are always made.
        rounding: Relative rounding error of a value. Errors of 8 times that are accepted, because
            refinement cannot remove them.
    """
    ends, panels = _first(evaluate)
    change = float(np.linalg.norm(ends[1] - ends[0]))
    size = max(float(np.linalg.norm(value)) for value in ends)
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
        value_input=ends[1],
        value_baseline=ends[0],
        error=sum(panel.error for panel in panels),
        allowed=allowed,
        evaluations=evaluations,
        path=(
            np.array([panel.start for panel in panels] + [1.0]),
            np.stack([panel.value_start for panel in panels] + [ends[1]]),
        ),
    )


def _points(start: float, end: float) -> Array:
    points: Array = start + (end - start) * (_NODES + 1) / 2
    return points


def _scores(start: float, end: float, slopes: Array) -> Array:
    """Return the integral of slopes `(8, N, K)` over a panel, `(N, K)`."""
    scores: Array = np.tensordot(_WEIGHTS * (end - start) / 2, slopes, axes=1)
    return scores


def _first(evaluate: Evaluate) -> tuple[Sequence[Array], list[_Panel]]:
    values, slopes = evaluate(np.concatenate([[0.0, 1.0], _points(0.0, 1.0)]))
    ends = values[0], values[1]
    return ends, [_Panel(0.0, 1.0, *ends, _scores(0.0, 1.0, slopes[2:]))]


def _halves(evaluate: Evaluate, panel: _Panel) -> list[_Panel]:
    middle = (panel.start + panel.end) / 2
    left, right = (panel.start, middle), (middle, panel.end)
    values, slopes = evaluate(np.concatenate([[middle], _points(*left), _points(*right)]))
    count = len(_NODES)
    return [
        _Panel(*left, panel.value_start, values[0], _scores(*left, slopes[1 : 1 + count])),
        _Panel(*right, values[0], panel.value_end, _scores(*right, slopes[1 + count :])),
    ]
