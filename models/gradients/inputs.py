"""Inputs of the gradient methods and names of their options. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from models.packing import NO_ADAPTER

Method = Literal["integrated_gradients", "saliency", "grad_x_input", "smoothgrad", "occlusion"]
TargetName = Literal["cosine", "margin", "dot", "dim", "norm", "score", "label", "sparse", "maxsim"]
BaselineName = Literal["pad", "mask", "zero"]
ObjectiveName = Literal["cosine", "mnrl", "dot", "mse", "cotangent"]
EmulatedPrecision = Literal["float16", "bfloat16"]
Distribution = Literal["normal", "constant_row", "large_mean", "tiny_var", "huge"]
Reduction = Literal["norm", "dot", "full"]


@dataclass(frozen=True)
class Row:
    """One input of the model.

    Attributes:
        ids: Token ids, special tokens included.
        prompt_tokens: Number of leading prompt tokens that are excluded from pooling.
        adapter: Index of the adapter, or `NO_ADAPTER`.
        token_types: Type of each token of a pair of texts; empty: all tokens have type 0.
        unattended: Number of last tokens that no token attends to.
        vector_positions: Positions of the tokens whose vectors are the row's multi-vector; empty:
            all tokens. Only for multi-vector models.
    """

    ids: Sequence[int]
    prompt_tokens: int = 0
    adapter: int = NO_ADAPTER
    token_types: Sequence[int] = ()
    unattended: int = 0
    vector_positions: Sequence[int] = ()


@dataclass(frozen=True)
class Side:
    """One of the model inputs whose tokens a scalar is attributed to.

    Attributes:
        row: Input of the model.
        baseline: Token ids of the baseline, as many as `row.ids`. None: the baseline at the layer
            is zero vectors.
    """

    row: Row
    baseline: Sequence[int] | None = None


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
        seed: Random seed of SmoothGrad.
    """

    tolerance: float = 0.01
    max_evaluations: int = 256
    samples: int = 25
    sigma: float = 0.1
    seed: int = 0


DEFAULT_OPTIONS = MethodOptions()
