"""Faithfulness of an attribution: effect of removing the parts of a text with the largest scores.

Comprehensiveness is the decrease of the value when these parts are removed, and sufficiency the
decrease when all other parts are. Tokens are deleted from the inputs, so the model sees shorter
texts, and no token that stands for a removed one.

Source: DeYoung et al. 2020, arXiv:1911.03429.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from models.gradients.attribution import TargetFunction
from models.gradients.budget import RANDOM_ORDERS, removal_counts
from models.gradients.inputs import InputRow, Units, starts_of, without
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import Faithfulness, FaithfulnessPoint, RemovalEffect


def faithfulness(
    model: ReferenceModel,
    rows: Sequence[InputRow],
    target: TargetFunction,
    units: Units,
    scores: NDArray[np.float64],
    *,
    seed: int = 0,
    entries: Sequence[int] | None = None,
) -> Faithfulness | None:
    """Measure the faithfulness of scores; None if there are no units.

    The score of a unit is the sum of the scores of its tokens.

    Args:
        model: Reference model of the served graph.
        rows: Inputs of the model.
        target: Attributed scalar, as a function of the vectors of each row.
        units: Parts of the texts that are removed.
        scores: Score of each token of all rows, `(L,)`.
        seed: Random seed of the random orders.
        entries: Vocabulary entries of the sparse vectors that `target` receives; None: all.
    """
    if not units.tokens:
        return None
    value = _value(model, rows, target, (), entries)
    everything = {token for unit in units.tokens for token in unit}

    def points(order: Sequence[int]) -> tuple[FaithfulnessPoint, ...]:
        measured = []
        for count, share in removal_counts(len(order)).items():
            first = {token for unit in order[:count] for token in units.tokens[unit]}
            removed, alone = (
                value - _value(model, rows, target, tokens, entries)
                for tokens in (first, everything - first)
            )
            measured.append(FaithfulnessPoint(share, count, removed, alone))
        return tuple(measured)

    unit_scores = np.array([scores[list(tokens)].sum() for tokens in units.tokens])
    # A stable sort, so that equal scores keep the order of the text.
    ordered = points(np.argsort(-unit_scores, kind="stable").tolist())
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(units.tokens)).tolist() for _ in range(RANDOM_ORDERS)]
    mean = _mean(ordered)
    return Faithfulness(
        units.kind,
        ordered,
        mean.comprehensiveness,
        mean.sufficiency,
        # Every order has as many points, so the mean over all of them is the mean over the orders.
        random=_mean([point for order in orders for point in points(order)]),
    )


def _mean(points: Sequence[FaithfulnessPoint]) -> RemovalEffect:
    return RemovalEffect(
        sum(point.comprehensiveness for point in points) / len(points),
        sum(point.sufficiency for point in points) / len(points),
    )


def _value(
    model: ReferenceModel,
    rows: Sequence[InputRow],
    target: TargetFunction,
    removed: Collection[int],
    entries: Sequence[int] | None,
) -> float:
    """Return the scalar of rows without some tokens; NaN if a row has no tokens left."""
    shorter = [
        without(row, {token - start for token in removed})
        for row, start in zip(rows, starts_of(rows), strict=True)
    ]
    if not all(row.ids for row in shorter):
        return math.nan
    return target(*(model.vectors(row, entries=entries) for row in shorter)).item()
