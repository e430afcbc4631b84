"""Training objectives of `flow`: functions of the texts' vectors.

Source: multiple negatives ranking, Henderson et al. 2017, arXiv:1705.00652.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.gradients.inputs import Objective, ObjectiveName


@dataclass(frozen=True)
class ObjectiveKind:
    """Kind of objective: a scalar function of the texts' embeddings `(B, W)`.

    Some kinds also take constant vectors `(G, W)` from the request, which have no gradient. A
    pairwise objective compares the embeddings 2i and 2i + 1 by cosine similarity. It normalises the
    embeddings, even if the model does not.

    Attributes:
        value: Function from row vectors and constant vectors to the scalar.
        constants: Function from the number of rows, B, to the number of constant vectors, G.
        min_pairs: Minimum number of pairs; 0 for an objective that is not pairwise.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    constants: Callable[[int], int] = lambda _rows: 0
    min_pairs: int = 0


def _weighted_sum(vectors: Tensor, weights: Tensor) -> Tensor:
    return (vectors * weights).sum()


def _mnrl(vectors: Tensor, _constants: Tensor) -> Tensor:
    scores = 20.0 * vectors[::2] @ vectors[1::2].T  # (B / 2, B / 2)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


# "cosine" is a sum over pairs, "dot" and "cotangent" are sums over rows, and "mse" is a mean over
# rows and vector elements. "mnrl" is a mean over pairs of a cross-entropy: the first row of a pair
# selects its second row among the second rows of all pairs. Logits are 20 times the cosine
# similarity.
OBJECTIVES: dict[ObjectiveName, ObjectiveKind] = {
    "cosine": ObjectiveKind(lambda vectors, _: (vectors[::2] * vectors[1::2]).sum(), min_pairs=1),
    "dot": ObjectiveKind(_weighted_sum, lambda _rows: 1),
    # With one pair, there is no negative and the gradient is 0.
    "mnrl": ObjectiveKind(_mnrl, min_pairs=2),
    "mse": ObjectiveKind(F.mse_loss, lambda rows: rows),
    "cotangent": ObjectiveKind(_weighted_sum, lambda rows: rows),
}


def check_objective(objective: Objective, rows: int, width: int) -> None:
    """Check that an objective matches the number of rows and the width of their vectors.

    Raises:
        ValueError: The name is unknown, the objective needs more rows or an even number of rows,
            the number of constant vectors is wrong, or one of them has another width or a
            non-finite element.
    """
    if objective.name not in OBJECTIVES:
        raise ValueError(
            f"unknown objective {objective.name!r}; allowed: {', '.join(sorted(OBJECTIVES))}"
        )
    kind = OBJECTIVES[objective.name]
    if rows < max(1, 2 * kind.min_pairs) or (kind.min_pairs and rows % 2):
        needed = (
            f"an even number of texts, at least {2 * kind.min_pairs}"
            if kind.min_pairs
            else "at least 1 text"
        )
        raise ValueError(f"objective {objective.name} needs {needed}; the request has {rows}")
    if len(objective.vectors) != kind.constants(rows):
        raise ValueError(
            f"objective {objective.name} with {rows} texts needs {kind.constants(rows)} vectors; "
            f"the request has {len(objective.vectors)}"
        )
    for index, vector in enumerate(objective.vectors):
        if len(vector) != width or not all(map(math.isfinite, vector)):
            raise ValueError(
                f"vector {index} of the objective must consist of {width} finite numbers"
            )
