"""Path integrals from a baseline to an input, refined until they add up.

F(input) - F(baseline) is the integral of the gradient along the line between them, and on each part
of the line the same holds. So the values of F at the ends of a panel tell how wrong its quadrature
is, and the worst panel is cut in two until all are right. A fixed number of steps cannot know: a
LayerNorm does not see the length of its input, so near a baseline of zeros all change may happen
within 1e-6 of the line, between two steps.

Sources: integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365. Quadrature: 8 points of
Gauss and Legendre, exact for polynomials of degree 15.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# Places on the line `(S,)`, from 0, the baseline, to 1, the input -> the functions there `(S, K)`,
# and how fast they change through each token `(S, N, K)`: the gradient by the token times its
# difference from the baseline.
Evaluate = Callable[[Array], tuple[Array, Array]]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@dataclass(frozen=True)
class Integral:
    """What came of an integration.

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
    def converged(self) -> bool:
        """Whether the error is within what is allowed."""
        return self.error <= self.allowed

    @property
    def delta(self) -> Array:
        """Sum of the scores less the difference of the values, `(K,)`."""
        delta: Array = self.scores.sum(0) - (self.value_input - self.value_baseline)
        return delta


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
    """Return the integral along the line, as exact as asked for or as the budget allows.

    Args:
        evaluate: See `Evaluate`.
        tolerance: Of the sum of the panels' errors, as a part of the functions' difference between
            the ends (the length of it, where there are several functions).
        max_evaluations: At most so many places are evaluated, and 10 at least.
        rounding: Relative error of a value; an error of a few of these can not be refined away.
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


def _places(start: float, end: float) -> Array:
    places: Array = start + (end - start) * (_NODES + 1) / 2
    return places


def _scores(start: float, end: float, slopes: Array) -> Array:
    """Return the integral of slopes `(8, N, K)` over a panel, `(N, K)`."""
    scores: Array = np.tensordot(_WEIGHTS * (end - start) / 2, slopes, axes=1)
    return scores


def _first(evaluate: Evaluate) -> tuple[Sequence[Array], list[_Panel]]:
    values, slopes = evaluate(np.concatenate([[0.0, 1.0], _places(0.0, 1.0)]))
    ends = values[0], values[1]
    return ends, [_Panel(0.0, 1.0, *ends, _scores(0.0, 1.0, slopes[2:]))]


def _halves(evaluate: Evaluate, panel: _Panel) -> list[_Panel]:
    middle = (panel.start + panel.end) / 2
    left, right = (panel.start, middle), (middle, panel.end)
    values, slopes = evaluate(np.concatenate([[middle], _places(*left), _places(*right)]))
    count = len(_NODES)
    return [
        _Panel(*left, panel.value_start, values[0], _scores(*left, slopes[1 : 1 + count])),
        _Panel(*right, values[0], panel.value_end, _scores(*right, slopes[1 + count :])),
    ]
