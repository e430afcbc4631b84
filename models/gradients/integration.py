"""Path integrals from a baseline to an input, with adaptive refinement.

F(input) - F(baseline) is the integral of the gradient of F along the line from baseline to input.
The line is divided into intervals, called panels, and the same identity holds for each panel. So
the values of F at the endpoints of a panel give the error of the panel's scores, summed over all
tokens. Errors of single tokens can cancel in this sum. Therefore a second, coarser quadrature on
half of the nodes estimates the error of each token. The panel with the largest error is halved
until both errors are within the tolerance.

A fixed number of steps has no such checks. LayerNorm is invariant to the scale of its input, so
with a baseline of zeros the whole change of F may lie within the first 1e-6 of the line, between
two steps.

The quadrature is Clenshaw-Curtis with 17 points, exact for polynomials of degree 17. Its nested 9
points are the coarser quadrature. A panel and its two halves share the panel's endpoints and
middle.

Source: integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.gradients.results.attribution import Completeness

Array = NDArray[np.float64]
# Evaluates K functions at S positions on the line, from 0 (baseline) to 1 (input). Maps positions
# `(S,)` to function values `(S, K)` and slopes per token `(S, N, K)`. A slope is the dot product of
# the gradient with respect to a token and the token's difference from its baseline.
Evaluate = Callable[[Array], tuple[Array, Array]]


def _clenshaw_curtis(intervals: int) -> tuple[Array, Array]:
    """Return the nodes and weights of a Clenshaw-Curtis quadrature on [-1, 1].

    The nodes are the extrema of the Chebyshev polynomial of degree `intervals`.
    """
    degrees = np.arange(intervals + 1, dtype=np.float64)
    nodes = -np.cos(np.pi * degrees / intervals)
    polynomials = np.polynomial.chebyshev.chebvander(nodes, intervals).T  # T_j at node k
    with np.errstate(divide="ignore"):
        integrals = np.where(degrees % 2, 0.0, 2 / (1 - degrees**2))
    return nodes, np.linalg.solve(polynomials, integrals).astype(np.float64)


_NODES, _WEIGHTS = _clenshaw_curtis(16)
_COARSE_WEIGHTS = _clenshaw_curtis(8)[1]
_POINTS = len(_NODES)
# Halving a panel evaluates the nodes of both halves, except their endpoints, which the panel has.
_POINTS_PER_HALVING = 2 * (_POINTS - 2)


@dataclass(frozen=True)
class Integral:
    """Result of an integration along the line from baseline to input, in intervals called panels.

    Attributes:
        scores: Contribution of each of N tokens to each of K functions, `(N, K)`.
        value_input: Function values at the input, `(K,)`.
        value_baseline: Function values at the baseline, `(K,)`.
        error: Sum of the panels' errors. The error of a panel is the absolute difference between
            its scores, summed over tokens, and the change of the function over the panel. With
            several functions, it is the Euclidean norm of the differences.
        allowed: Largest `error` that counts as converged.
        score_error: Largest estimated error of a token's score. The estimate is the sum, over all
            panels, of the absolute difference between two quadratures. With several functions, it
            is the sum of the Euclidean norms of the differences.
        score_allowed: Largest `score_error` that counts as converged.
        evaluations: Number of positions on the line at which the functions were evaluated.
        path: Positions of the final quadrature, `(P,)`, and function values at them, `(P, K)`.
    """

    scores: Array
    value_input: Array
    value_baseline: Array
    error: float
    allowed: float
    score_error: float
    score_allowed: float
    evaluations: int
    path: tuple[Array, Array]

    @property
    def delta(self) -> Array:
        """Sum of the scores minus the change of each function from baseline to input, `(K,)`."""
        return self.scores.sum(0) - (self.value_input - self.value_baseline)

    @property
    def completeness(self) -> Completeness:
        """Accuracy of the integral; `delta` of several functions is reduced to its norm."""
        delta = self.delta
        return Completeness(
            delta.item() if len(delta) == 1 else float(np.linalg.norm(delta)),
            self.error,
            self.allowed,
            self.score_error,
            self.score_allowed,
            self.evaluations,
        )


@dataclass(frozen=True)
class _Panel:
    """Interval of the path from baseline to input, with its contribution to the scores.

    `points` are the quadrature nodes. `values` and `slopes` are the function and its derivatives
    along the path at these nodes.
    """

    points: Array  #        (17,)
    values: Array  #        (17, K)
    slopes: Array  #        (17, N, K)
    scores: Array  #        (N, K)
    score_errors: Array  #  (N,)

    @property
    def error(self) -> float:
        return float(np.linalg.norm(self.scores.sum(0) - (self.values[-1] - self.values[0])))


def integrate(
    evaluate: Evaluate, tolerance: float, max_evaluations: int, rounding: float
) -> Integral:
    """Integrate along the line; refine until the tolerance or the evaluation limit is reached.

    Args:
        evaluate: Computes function values and slopes; see `Evaluate`.
        tolerance: Maximum error of the sum of the scores, relative to the change of the function
            from baseline to input, and maximum error of each score, relative to the largest score.
            Errors, changes and scores of several functions are measured by their Euclidean norms.
        max_evaluations: Maximum number of evaluated positions; at least 17 are always evaluated.
        rounding: Relative rounding error of a function value. Errors of up to 8 times `rounding`
            per panel, relative to the larger of the values at baseline and input, are always
            accepted, because refinement cannot remove them.
    """
    points = _points(0.0, 1.0)
    panels = [_panel(points, *evaluate(points))]
    evaluations = _POINTS
    baseline, value = panels[0].values[0], panels[0].values[-1]  # (K,)
    rounding_error = 8 * rounding * max(np.linalg.norm(baseline), np.linalg.norm(value))
    while True:
        floor = len(panels) * rounding_error
        allowed = max(tolerance * np.linalg.norm(value - baseline), floor)
        scores: Array = np.sum([panel.scores for panel in panels], axis=0)
        score_allowed = max(tolerance * np.linalg.norm(scores, axis=-1).max(), floor)
        error = sum(panel.error for panel in panels)
        score_error = np.sum([panel.score_errors for panel in panels], axis=0).max()
        is_refinable = evaluations + _POINTS_PER_HALVING <= max_evaluations
        if not ((error > allowed or score_error > score_allowed) and is_refinable):
            break
        # The larger of both errors relative to their tolerances. Both are multiplied by the product
        # of the tolerances, because a tolerance can be zero.
        sizes = [max(p.error * score_allowed, p.score_errors.max() * allowed) for p in panels]
        worst = int(np.argmax(sizes))
        panels[worst : worst + 1] = _halves(evaluate, panels[worst])
        evaluations += _POINTS_PER_HALVING
    return Integral(
        scores=scores,
        value_input=value,
        value_baseline=baseline,
        error=error,
        allowed=float(allowed),
        score_error=float(score_error),
        score_allowed=float(score_allowed),
        evaluations=evaluations,
        path=(
            np.concatenate([[0.0], *(panel.points[1:] for panel in panels)]),
            np.concatenate([[baseline], *(panel.values[1:] for panel in panels)]),
        ),
    )


def _points(start: float, end: float) -> Array:
    return start + (end - start) * (_NODES + 1) / 2


def _panel(points: Array, values: Array, slopes: Array) -> _Panel:
    half_width = (points[-1] - points[0]) / 2
    scores: Array = np.tensordot(half_width * _WEIGHTS, slopes, axes=1)
    coarse: Array = np.tensordot(half_width * _COARSE_WEIGHTS, slopes[::2], axes=1)
    return _Panel(points, values, slopes, scores, np.linalg.norm(scores - coarse, axis=-1))


def _halves(evaluate: Evaluate, panel: _Panel) -> list[_Panel]:
    middle = _POINTS // 2
    ends = [(0, middle), (middle, _POINTS - 1)]  # node indices of the endpoints of each half
    grids = [_points(panel.points[start], panel.points[end]) for start, end in ends]
    values, slopes = evaluate(np.concatenate([grid[1:-1] for grid in grids]))
    halves = []
    for grid, (start, end), inner_values, inner_slopes in zip(
        grids, ends, np.split(values, 2), np.split(slopes, 2), strict=True
    ):
        halves.append(
            _panel(
                grid,
                np.stack([panel.values[start], *inner_values, panel.values[end]]),
                np.stack([panel.slopes[start], *inner_slopes, panel.slopes[end]]),
            )
        )
    return halves
