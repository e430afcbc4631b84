"""What a training gradient is taken of: a number that is made of texts' vectors.

Source: multiple negatives ranking, Henderson et al. 2017, arXiv:1705.00652.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """What is differentiated.

    Attributes:
        kind: A name in `OBJECTIVES`.
        vectors: As wide as the twin's: one for "dot", one for each row for "mse" and "cotangent".
    """

    kind: str
    vectors: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Kind:
    """How rows' vectors `(B, W)` and given ones `(G, W)` become a number.

    Pairs are rows 2i and 2i + 1, compared by their cosine, whatever is served.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    given: Callable[[int], int] = lambda _rows: 0  # of B rows, G
    least_pairs: int = 0  # 0: rows are single


def _mnrl(vectors: Tensor, _given: Tensor) -> Tensor:
    scores = 20.0 * vectors[::2] @ vectors[1::2].T  # (B / 2, B / 2)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


# Sums over rows or pairs, but "mse" is a mean over rows and width, and "mnrl" over pairs: how well
# each pair's first row picks its second one among all second ones, by 20 times their cosine.
OBJECTIVES = {
    "cosine": Kind(lambda vectors, _given: (vectors[::2] * vectors[1::2]).sum(), least_pairs=1),
    "dot": Kind(lambda vectors, given: (vectors * given).sum(), lambda _rows: 1),
    "mnrl": Kind(_mnrl, least_pairs=2),  # with one pair there is no negative and no gradient
    "mse": Kind(F.mse_loss, lambda rows: rows),
    "cotangent": Kind(lambda vectors, given: (vectors * given).sum(), lambda rows: rows),
}


def check_objective(objective: Objective, rows: int, width: int) -> None:
    """Refuse an objective that does not go with the number of rows, or the width of their vectors.

    Raises:
        ValueError: It is not known, the rows are no pairs, or its vectors are not as they must be.
    """
    if objective.kind not in OBJECTIVES:
        raise ValueError(f"objective {objective.kind!r} is not one of {sorted(OBJECTIVES)}")
    kind = OBJECTIVES[objective.kind]
    if rows < max(1, 2 * kind.least_pairs) or (kind.least_pairs and rows % 2):
        wanted = f"{kind.least_pairs} or more pairs of rows" if kind.least_pairs else "a row"
        raise ValueError(f"{objective.kind} needs {wanted}; {rows} rows came")
    if len(objective.vectors) != kind.given(rows):
        raise ValueError(
            f"{objective.kind} of {rows} rows needs {kind.given(rows)} vectors; "
            f"{len(objective.vectors)} came"
        )
    for index, vector in enumerate(objective.vectors):
        if len(vector) != width or not all(map(math.isfinite, vector)):
            raise ValueError(f"vector {index} of the objective is not {width} finite numbers")
