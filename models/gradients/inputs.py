"""Inputs of the gradient methods and names of their options. This module does not import torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from models.packing import NO_ADAPTER

Method = Literal["integrated_gradients", "saliency", "grad_x_input", "smoothgrad", "occlusion"]
BaselineName = Literal["pad", "mask", "zero"]
ObjectiveName = Literal["cosine", "mnrl", "dot", "mse", "cotangent"]
EmulatedPrecision = Literal["float16", "bfloat16"]
Distribution = Literal["normal", "constant_row", "large_mean", "tiny_var", "huge"]
Reduction = Literal["norm", "dot", "full"]
UnitKind = Literal["words", "tokens"]
# Methods that compare the text with a baseline.
BASELINE_METHODS: tuple[Method, ...] = ("integrated_gradients", "occlusion")
TokenReduction = Literal["none", "mean", "norm", "first", "last"]


@dataclass(frozen=True)
class InputRow:
    """One input of the model.

    Attributes:
        ids: Token ids, special tokens included.
        prompt_tokens: Number of leading prompt tokens that are excluded from pooling.
        adapter: Index of the adapter, or `NO_ADAPTER`.
        token_types: Type of each token of a pair of texts; empty: all tokens have type 0.
        unattended: Number of last tokens that no token attends to.
        vector_positions: Positions of the tokens whose vectors are the row's multi-vector; None:
            all tokens. Only for multi-vector models.
        entries: Elements of the row's sparse vector to compute; None: all. Those of all versions
            of a row would take gigabytes. Only for sparse encoders.
    """

    ids: Sequence[int]
    prompt_tokens: int = 0
    adapter: int = NO_ADAPTER
    token_types: Sequence[int] = ()
    unattended: int = 0
    vector_positions: Sequence[int] | None = None
    entries: Sequence[int] | None = None


def starts_of(rows: Sequence[InputRow]) -> list[int]:
    """Return the index of the first token of each row, among the tokens of all rows."""
    return list(accumulate((len(row.ids) for row in rows[:-1]), initial=0))


def without(row: InputRow, removed: Collection[int]) -> InputRow:
    """Return a row without some of its tokens.

    Args:
        row: Input of the model.
        removed: Positions of the removed tokens.
    """
    kept = [position for position in range(len(row.ids)) if position not in removed]
    places = {old: new for new, old in enumerate(kept)}
    first_unattended = len(row.ids) - row.unattended
    return replace(
        row,
        ids=[row.ids[position] for position in kept],
        prompt_tokens=sum(position < row.prompt_tokens for position in kept),
        token_types=[row.token_types[position] for position in kept] if row.token_types else (),
        unattended=sum(position >= first_unattended for position in kept),
        vector_positions=None
        if row.vector_positions is None
        else [places[position] for position in row.vector_positions if position in places],
    )


@dataclass(frozen=True)
class Units:
    """Parts of the texts that are removed from the model inputs, to measure faithfulness.

    Attributes:
        kind: Kind of the parts.
        tokens: Indices of each part's tokens, among the tokens of all model inputs. A part of a
            text that several inputs contain has tokens in each of them.
    """

    kind: UnitKind
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class TapPoint:
    """A step of the forward pass whose output belongs to one row.

    Attributes:
        name: Name of the step.
        width: Width of the output's vectors.
        per_token: Whether the output has a vector for each token, or a single one.
    """

    name: str
    width: int
    per_token: bool


@dataclass(frozen=True)
class Side:
    """One of the model inputs whose tokens a scalar is attributed to.

    Attributes:
        row: Input of the model.
        baseline: Token ids of the baseline, as many as `row.ids`. None: the baseline at the layer
            is zero vectors.
        kept: Positions of tokens that keep their vectors at the layer in the baseline. Their
            scores are 0.
    """

    row: InputRow
    baseline: Sequence[int] | None = None
    kept: Sequence[int] = ()


@dataclass(frozen=True)
class Objective:
    """Training objective of a batch of rows.

    Attributes:
        name: Key of `OBJECTIVES` in `models.gradients.objectives`.
        vectors: Constant vectors of the objective, `(G, W)`: one for "dot", one per row for "mse"
            and "cotangent", none for other objectives.
    """

    name: ObjectiveName
    vectors: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class MethodOptions:
    """Options of the attribution methods.

    Attributes:
        tolerance: Tolerance of integrated gradients; see `integration.integrate`.
        max_evaluations: Evaluation limit of integrated gradients; see `integration.integrate`.
        samples: Number of noisy copies of the text for SmoothGrad.
        sigma: Standard deviation of SmoothGrad's noise, relative to the RMS of the token vectors.
        seed: Random seed of SmoothGrad, and of the random orders that faithfulness is compared
            with.
    """

    tolerance: float = 0.01
    max_evaluations: int = 256
    samples: int = 25
    sigma: float = 0.1
    seed: int = 0


DEFAULT_OPTIONS = MethodOptions()
