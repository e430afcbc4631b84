"""Attribution of a cosine or a dot product to pairs of tokens.

Integrated gradients split the vector e of a text into the vector r of its baseline and one
contribution per token: e = r + sum over tokens of P `(L, W)`. P is the integrated Jacobian,
contracted with each token's difference from the baseline. So A = P_a P_b^T is a matrix over the
token pairs of texts a and b. Each P takes L W numbers; the product of the two Jacobians would take
(L D)^2. Terms with r_a or r_b are not attributed to tokens. They are reported separately, so that
all terms add up to the dot product; divided by |e_a| |e_b|, they add up to the cosine:

    e_a . e_b = (e_a - r_a) . (e_b - r_b) + e_a . r_b + r_a . e_b - r_a . r_b

Source: Moeller et al. 2023, arXiv:2310.05703.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.gradients.attribution import TOKENS_AT_ONCE, baseline_tokens
from models.gradients.inputs import Side
from models.gradients.integration import Integral, integrate
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import PairAttribution, ReferenceTerms
from models.network.heads import NormalizeHead, TruncateHead
from models.network.taps import NO_TAP, Tap

Array = NDArray[np.float64]

# Heads after which the cosine is the same without normalisation between them.
_WITHOUT_SCALE = (NormalizeHead, TruncateHead)


def explain_pair(
    model: ReferenceModel,
    a: Side,
    b: Side,
    *,
    layer_name: str = "output",
    tolerance: float = 0.01,
    max_evaluations: int = 128,
) -> PairAttribution:
    """Attribute the similarity of two texts to pairs of their tokens.

    Args:
        model: Reference model of the served graph, whose similarity is the cosine or the dot
            product.
        a: Text whose tokens are the rows of the matrix.
        b: Text whose tokens are the columns of the matrix.
        layer_name: Layer of the tokens, one of `model.layer_names`. Token vectors at "output"
            depend on their context. With mean pooling, a baseline of zeros, and no heads but
            truncation and, for a cosine, normalisation, the matrix at "output" is exact: it
            consists of scaled dot products of token vectors.
        tolerance: Tolerance of each text's integral; see `integration.integrate`.
        max_evaluations: Evaluation limit of each text's integral; see `integration.integrate`. An
            evaluation costs one Jacobian-vector product per token.
    """
    # The dot product of vectors of unit length is their cosine.
    is_cosine = model.normalize or model.similarity == "cosine"
    heads = model.network.heads
    # Normalisation has no derivative at a vector of zeros, which can be that of a baseline.
    keeps_cosine = is_cosine and all(isinstance(head, _WITHOUT_SCALE) for head in heads)
    tap = _WithoutNormalization() if keeps_cosine else NO_TAP
    rest = layer_name, tolerance, max_evaluations, tap
    sides = tuple(_integral(model, side, *rest) for side in (a, b))
    (P_a, e_a, r_a), (P_b, e_b, r_b) = (
        (side.scores, side.value_input, side.value_baseline) for side in sides
    )
    scale = 1 / (np.linalg.norm(e_a) * np.linalg.norm(e_b)) if is_cosine else 1.0
    matrix: Array = scale * P_a @ P_b.T  # (L_a, L_b)
    similarity, a_baseline, baseline_b, baselines = (
        float(scale * u @ v) for u, v in ((e_a, e_b), (e_a, r_b), (r_a, e_b), (r_a, r_b))
    )
    delta = float(matrix.sum()) + a_baseline + baseline_b - baselines - similarity
    return PairAttribution(
        matrix,
        similarity,
        ReferenceTerms(a_baseline, baseline_b, baselines),
        delta,
        (sides[0].completeness, sides[1].completeness),
    )


class _WithoutNormalization(Tap):
    """Leaves out the normalisation of vectors."""

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return the output of a step; see `Tap.step`."""
        is_left_out = isinstance(module, NormalizeHead)
        return inputs[0] if is_left_out else super().step(name, module, function, *inputs)


def _integral(
    model: ReferenceModel,
    side: Side,
    layer_name: str,
    tolerance: float,
    max_evaluations: int,
    tap: Tap,
) -> Integral:
    """Return the path integral of a text's vector.

    Its scores are the contributions of the tokens to the vector, P `(L, W)` in the docstring of
    this module.
    """
    x = model.tokens(layer_name, side.row)  # (L, D)
    L = len(x)
    baseline = baseline_tokens(model, layer_name, side, x)
    change = x - baseline

    def vectors_and_slopes(points: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors `(S, W)` at S positions, and their slopes `(S, W)`.

        Args:
            points: Position on the line for each slope, `(S,)`.
            moved: Index of the token along whose change each slope is taken, `(S,)`.
        """
        tokens = baseline + points[:, None, None] * change  # (S, L, D)
        directions = torch.zeros_like(tokens)
        directions[torch.arange(len(moved)), moved] = change[moved]
        # torch annotates the result as a tuple of two or three tensors.
        vectors, slopes = torch.func.jvp(  # type: ignore[misc]
            lambda versions: model.continue_from(layer_name, versions, side.row, tap=tap),
            (tokens,),
            (directions,),
        )
        return vectors, slopes

    def evaluate(points: Array) -> tuple[Array, Array]:
        S = len(points)
        # One version of the text for each token at each position.
        positions = torch.from_numpy(points).to(x).repeat_interleave(L)  # (S * L,)
        moved = torch.arange(L, device=x.device).repeat(S)
        at_once = max(1, TOKENS_AT_ONCE // L)
        parts = [
            vectors_and_slopes(*part)
            for part in zip(positions.split(at_once), moved.split(at_once), strict=True)
        ]
        vectors, slopes = (
            torch.cat(part).view(S, L, -1).double().cpu() for part in zip(*parts, strict=True)
        )
        return vectors[:, 0].numpy(), slopes.numpy()

    # PyTorch's fused attention does not support forward-mode differentiation.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return integrate(evaluate, tolerance, max_evaluations, torch.finfo(x.dtype).eps)
