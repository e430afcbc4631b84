"""Faithfulness of an attribution: effect of removing parts of a text, beside their scores.

Comprehensiveness is the decrease of the value when the parts with the largest scores are removed,
and sufficiency the decrease when all other parts are. Scores can order the parts well and still
have wrong signs, so all scores are also compared with the decrease by the removal of each part
alone. Tokens are deleted from the inputs, so the model sees shorter texts, and no token that stands
for a removed one.

Source of comprehensiveness and sufficiency: DeYoung et al. 2020, arXiv:1911.03429.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from models.gradients.attribution import TargetFunction
from models.gradients.budget import RANDOM_ORDERS, removal_counts
from models.gradients.inputs import InputRow, Units, starts_of, without
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import (
    Faithfulness,
    FaithfulnessPoint,
    RemovalEffect,
    UnitRemoval,
)

Array = NDArray[np.float64]

# A unit matters if its effect is at least this share of the largest.
_MATTERS = 0.1


def faithfulness(
    model: ReferenceModel,
    rows: Sequence[InputRow],
    target: TargetFunction,
    units: Units,
    scores: Array,
    *,
    seed: int = 0,
    is_signed: bool = True,
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
        is_signed: Whether scores have a sign; otherwise `opposite_signs` is None.
    """
    if not units.tokens:
        return None

    def value_without(removed: Collection[int]) -> float:
        """Return the scalar without some tokens; NaN if a row has no tokens left."""
        shorter = [
            without(row, {token - start for token in removed})
            for row, start in zip(rows, starts_of(rows), strict=True)
        ]
        if not all(row.ids for row in shorter):
            return math.nan
        return target(*map(model.vectors, shorter)).item()

    value = value_without(())
    everything = {token for unit in units.tokens for token in unit}

    def points(order: Sequence[int]) -> tuple[FaithfulnessPoint, ...]:
        measured = []
        for count, share in removal_counts(len(order)).items():
            first = {token for unit in order[:count] for token in units.tokens[unit]}
            removed, alone = (
                value - value_without(tokens) for tokens in (first, everything - first)
            )
            measured.append(FaithfulnessPoint(share, count, removed, alone))
        return tuple(measured)

    unit_scores = np.array([scores[list(tokens)].sum() for tokens in units.tokens])
    # A stable sort, so that equal scores keep the order of the text.
    ordered = points(np.argsort(-unit_scores, kind="stable").tolist())
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(len(units.tokens)).tolist() for _ in range(RANDOM_ORDERS)]
    mean = _mean(ordered)
    effects = np.array([value - value_without(tokens) for tokens in units.tokens])
    return Faithfulness(
        units.kind,
        ordered,
        mean.comprehensiveness,
        mean.sufficiency,
        # Every order has as many points, so the mean over all of them is the mean over the orders.
        random=_mean([point for order in orders for point in points(order)]),
        effects=tuple(
            UnitRemoval(tuple(tokens), float(score), float(effect))
            for tokens, score, effect in zip(units.tokens, unit_scores, effects, strict=True)
        ),
        rank_correlation=rank_correlation(unit_scores, effects),
        opposite_signs=opposite_signs(unit_scores, effects) if is_signed else None,
    )


def rank_correlation(scores: Array, effects: Array) -> float | None:
    """Return Spearman's correlation of scores and effects; None if it is undefined.

    Args:
        scores: Score of each unit, `(U,)`.
        effects: Effect of each unit, `(U,)`.
    """
    both = np.stack([scores, effects])  # (2, U)
    if not np.isfinite(both).all() or (both == both[:, :1]).all(1).any():
        return None
    return float(np.corrcoef([_ranks(values) for values in both])[0, 1])


def _ranks(values: Array) -> Array:
    """Return the rank of each value, `(U,)`; equal values have the mean of their ranks."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[indices]


def opposite_signs(scores: Array, effects: Array) -> float | None:
    """Return the share of opposite signs among the units that matter; None if it is undefined.

    Args:
        scores: Score of each unit, `(U,)`.
        effects: Effect of each unit, `(U,)`.
    """
    if not np.isfinite([scores, effects]).all() or not effects.any():
        return None
    matters = np.abs(effects) >= _MATTERS * np.abs(effects).max()
    return float((np.sign(scores) * np.sign(effects) < 0)[matters].mean())


def _mean(points: Sequence[FaithfulnessPoint]) -> RemovalEffect:
    return RemovalEffect(
        sum(point.comprehensiveness for point in points) / len(points),
        sum(point.sufficiency for point in points) / len(points),
    )
