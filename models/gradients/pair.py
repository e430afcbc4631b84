"""Attribution of a similarity to pairs of tokens.

The cosine is a product of two vectors, each the sum of its baseline and of the contributions of its
tokens by integrated gradients: P `(L, W)`, the integrated Jacobian, contracted with the tokens'
differences from the baseline. So A = P_a P_b^T / (|e_a| |e_b|) is a matrix of token pairs. Each P
takes L W numbers; a product of Jacobians would take (L D)^2. Terms with the baselines r_a and r_b
are not attributed to tokens, but reported separately, so that everything adds up to the cosine:

    e_a . e_b = (e_a - r_a) . (e_b - r_b) + e_a . r_b + r_a . e_b - r_a . r_b

Source: Moeller et al. 2023, arXiv:2310.05703.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.gradients.attribution import TOKENS_AT_ONCE
from models.gradients.inputs import Side
from models.gradients.integration import Integral, integrate
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import PairAttribution, ReferenceTerms

Array = NDArray[np.float64]


def explain_pair(
    model: ReferenceModel,
    a: Side,
    b: Side,
    *,
    layer_name: str = "output",
    tolerance: float = 0.01,
    max_evaluations: int = 64,
) -> PairAttribution:
    """Return the attribution of the cosine of two texts to pairs of their tokens.

    Args:
        model: Reference model of the served graph.
        a: Text of the matrix's rows.
        b: Text of the matrix's columns.
        layer_name: Layer of the tokens, one of `model.layer_names`. Tokens at "output" include
            their context; with mean pooling and a baseline of zeros, the matrix is then exact:
            products of token vectors.
        tolerance: Tolerance of each side; see `integration.integrate`.
        max_evaluations: Evaluation limit of each side; see `integration.integrate`. An evaluation
            costs one Jacobian-vector product per token.
    """
    sides = tuple(_integral(model, side, layer_name, tolerance, max_evaluations) for side in (a, b))
    (P_a, e_a, r_a), (P_b, e_b, r_b) = (
        (side.scores, side.value_input, side.value_baseline) for side in sides
    )
    scale = 1 / (np.linalg.norm(e_a) * np.linalg.norm(e_b))
    matrix: Array = scale * P_a @ P_b.T  # (L_a, L_b)
    cosine, a_baseline, baseline_b, baselines = (
        float(scale * u @ v) for u, v in ((e_a, e_b), (e_a, r_b), (r_a, e_b), (r_a, r_b))
    )
    delta = float(matrix.sum()) + a_baseline + baseline_b - baselines - cosine
    return PairAttribution(
        matrix,
        cosine,
        ReferenceTerms(a_baseline, baseline_b, baselines),
        delta,
        (sides[0].completeness, sides[1].completeness),
    )


def _integral(
    model: ReferenceModel, side: Side, layer_name: str, tolerance: float, max_evaluations: int
) -> Integral:
    """Return the integral of one side; its scores are P `(L, W)`."""
    x = model.tokens(layer_name, side.row)  # (L, D)
    L = len(x)
    baseline = (
        torch.zeros_like(x)
        if side.baseline is None
        else model.tokens(layer_name, side.row, side.baseline)
    )
    change = x - baseline

    def along(points: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors `(P, W)` at P positions, and their slopes `(P, W)` through one token."""
        tokens = baseline + points[:, None, None] * change  # (P, L, D)
        directions = torch.zeros_like(tokens)
        directions[torch.arange(len(moved)), moved] = change[moved]
        # torch types the result as a tuple of two or three.
        vectors, changes = torch.func.jvp(  # type: ignore[misc]
            lambda versions: model.continue_from(layer_name, versions, side.row),
            (tokens,),
            (directions,),
        )
        return vectors, changes

    def evaluate(points: Array) -> tuple[Array, Array]:
        S = len(points)
        # One version of the text for each token at each position.
        positions = torch.from_numpy(points).to(x).repeat_interleave(L)  # (S * L,)
        moved = torch.arange(L, device=x.device).repeat(S)
        at_once = max(1, TOKENS_AT_ONCE // L)
        parts = [
            along(*part)
            for part in zip(positions.split(at_once), moved.split(at_once), strict=True)
        ]
        vectors, changes = (
            torch.cat(part).view(S, L, -1).double().cpu() for part in zip(*parts, strict=True)
        )
        return vectors[:, 0].numpy(), changes.numpy()

    # Fused attention has no forward-mode derivative.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return integrate(evaluate, tolerance, max_evaluations, torch.finfo(x.dtype).eps)
