"""Which tokens of two texts made their similarity, token by token.

The cosine is a product of two vectors, and each is a sum over tokens of what integrated gradients
give them: P `(L, W)`, the Jacobian along the line from the baseline, contracted with the tokens'
differences from it. So A = P_a P_b^T / (|e_a| |e_b|) is a matrix of token pairs. Contracted first,
it takes L x W numbers; (L D)^2 would be needed for a product of Jacobians. What the baselines r_a
and r_b have a part in is not attributed, but told apart, so that all adds up to the cosine:

    e_a . e_b = (e_a - r_a) . (e_b - r_b) + e_a . r_b + r_a . e_b - r_a . r_b

Source: Moeller et al. 2023, arXiv:2310.05703.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.gradients.attribution import TOKENS_AT_ONCE
from models.gradients.integration import Integral, integrate
from models.gradients.twin import Row, Twin

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One of the two texts.

    Attributes:
        row: Its ids.
        baseline: Ids that stand for "nothing there", as many as the row has; None: zeros.
    """

    row: Row
    baseline: Sequence[int] | None = None


@dataclass(frozen=True)
class Pair:
    """A similarity, taken apart.

    Attributes:
        matrix: What each pair of tokens adds to the cosine, `(L_a, L_b)`.
        cosine: Of the two vectors.
        a_baseline: e_a . r_b, over the product of the vectors' lengths, as all these terms.
        baseline_b: r_a . e_b.
        baselines: r_a . r_b.
        delta: Sum of the matrix and the terms of the baselines, less the cosine.
        integrals: Of the two sides: how exact they are.
    """

    matrix: Array
    cosine: float
    a_baseline: float
    baseline_b: float
    baselines: float
    delta: float
    integrals: tuple[Integral, Integral]


def explain_pair(
    twin: Twin,
    a: Side,
    b: Side,
    *,
    point: str = "output",
    tolerance: float = 0.01,
    max_evaluations: int = 64,
) -> Pair:
    """Return the cosine of two texts as a sum over pairs of their tokens.

    Args:
        twin: Of the served graph.
        a: The text of the matrix's rows.
        b: The text of its columns.
        point: One of `twin.points`. At "output" tokens know their context, and with mean pooling
            and a baseline of zeros the matrix is exact: products of token vectors.
        tolerance: Of each side, see `integration.integrate`.
        max_evaluations: Of each side, see `integration.integrate`; one costs as much as a Jacobian
            times a vector for each token.
    """
    sides = tuple(_integral(twin, side, point, tolerance, max_evaluations) for side in (a, b))
    (P_a, e_a, r_a), (P_b, e_b, r_b) = (
        (side.scores, side.value_input, side.value_baseline) for side in sides
    )
    scale = 1 / (np.linalg.norm(e_a) * np.linalg.norm(e_b))
    matrix: Array = scale * P_a @ P_b.T  # (L_a, L_b)
    cosine, a_baseline, baseline_b, baselines = (
        float(scale * u @ v) for u, v in ((e_a, e_b), (e_a, r_b), (r_a, e_b), (r_a, r_b))
    )
    delta = float(matrix.sum()) + a_baseline + baseline_b - baselines - cosine
    return Pair(matrix, cosine, a_baseline, baseline_b, baselines, delta, (sides[0], sides[1]))


def _integral(
    twin: Twin, side: Side, point: str, tolerance: float, max_evaluations: int
) -> Integral:
    """Return P `(L, W)` of one side."""
    x = twin.tokens(point, side.row)  # (L, D)
    L = len(x)
    baseline = (
        torch.zeros_like(x)
        if side.baseline is None
        else twin.tokens(point, side.row, side.baseline)
    )
    change = x - baseline

    def along(places: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors `(P, W)` at P places, and how each changes as one token moves on."""
        tokens = baseline + places[:, None, None] * change  # (P, L, D)
        directions = torch.zeros_like(tokens)
        directions[torch.arange(len(moved)), moved] = change[moved]
        # torch types the result as if it could have a third part.
        vectors, changes = torch.func.jvp(  # type: ignore[misc]
            lambda versions: twin.onwards(point, versions, side.row), (tokens,), (directions,)
        )
        return vectors, changes

    def evaluate(places: Array) -> tuple[Array, Array]:
        S = len(places)
        # Every token moves at every place, in a version of the text of its own.
        where = torch.from_numpy(places).to(x).repeat_interleave(L)  # (S * L,)
        moved = torch.arange(L, device=x.device).repeat(S)
        at_once = max(1, TOKENS_AT_ONCE // L)
        found = [
            along(*part) for part in zip(where.split(at_once), moved.split(at_once), strict=True)
        ]
        vectors, changes = (
            torch.cat(part).view(S, L, -1).double().cpu() for part in zip(*found, strict=True)
        )
        return vectors[:, 0].numpy(), changes.numpy()

    # Fused attention has no forward derivative.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return integrate(evaluate, tolerance, max_evaluations, torch.finfo(x.dtype).eps)
