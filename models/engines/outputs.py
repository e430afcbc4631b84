"""Outputs of a graph, and the comparison of their vectors with reference vectors.

The comparison measures both cosine similarity and norm, so it detects vectors that are scaled,
shifted or negated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.manifest import Output

Precision = Literal["float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class Agreement:
    """Worst agreement between vectors and their reference vectors, or bounds for it.

    Attributes:
        cosine: Lowest cosine similarity between a vector and its reference.
        norm: Largest difference between the L2 norms of a vector and its reference, relative to the
            norm of the reference.
    """

    cosine: float
    norm: float

    def is_within(self, bounds: "Agreement") -> bool:
        """Return whether cosine and norm are both within the bounds; NaN never is."""
        return self.cosine >= bounds.cosine and self.norm <= bounds.norm


Bounds = Mapping[Precision, Agreement]


@dataclass(frozen=True)
class OutputSpec:
    """Shape of a graph's output, and bounds for its agreement with PyTorch.

    Attributes:
        shape: Shape of the output for one input, for documentation.
        bounds: Worst acceptable agreement with PyTorch, by precision of the engine. For int8 they
            hold at export; those of a start are narrower, see `int8_bounds`.
        per_token: Whether a batch has one vector per token, `(T, W)`, in place of one per row.
        per_pair: Whether a batch has one vector per pair of a word and a label, `(P, W)`.
        per_element: Whether each element is compared on its own, as `compare` describes.
    """

    shape: str
    bounds: Bounds
    per_token: bool = False
    per_pair: bool = False
    per_element: bool = False


_EXACT = Agreement(1 - 1e-6, 1e-4)
# Worst cosine and norm difference measured with all-MiniLM-L6-v2: 1 - 1e-12 and 3e-7 in float32,
# 0.99997 and 3e-3 in bfloat16, and in int8 0.997 and 0.03, depending on the texts that calibrate.
_OF_ROWS: Bounds = {
    "float32": _EXACT,
    "float16": Agreement(0.9995, 0.02),
    "bfloat16": Agreement(0.9995, 0.02),
    "int8": Agreement(0.99, 0.1),
}
# Pooling averages rounding errors out, so vectors of tokens have wider bounds.
_OF_TOKENS: Bounds = {
    "float32": _EXACT,
    "float16": Agreement(0.999, 0.05),
    "bfloat16": Agreement(0.999, 0.05),
    "int8": Agreement(0.95, 0.1),
}
# A logit near 0 has an error in int8 that turns its vector (z, 1) further than those of rows.
_OF_LOGITS: Bounds = {**_OF_ROWS, "int8": Agreement(0.95, 0.1)}
# Errors of logits grow with the head's weights: with a random head on the same model, and logits up
# to 9, the worst of 6,000 are 0.99993 and 9e-3 in float16, and 0.997 and 6e-2 in bfloat16.
_OF_TAGS: Bounds = {**_OF_TOKENS, "bfloat16": Agreement(0.99, 0.1)}

OUTPUTS: dict[Output, OutputSpec] = {
    "pooled": OutputSpec("(W,)", _OF_ROWS),
    "tokens": OutputSpec("(L, D)", _OF_TOKENS, per_token=True),
    "logits": OutputSpec("(C,)", _OF_LOGITS, per_element=True),
    "sparse": OutputSpec("(V,)", _OF_ROWS, per_element=True),
    "weights": OutputSpec("(L, 1)", _OF_TAGS, per_token=True, per_element=True),
    "tags": OutputSpec("(L, C)", _OF_TAGS, per_token=True, per_element=True),
    "multi": OutputSpec("(L, W)", _OF_TOKENS, per_token=True),
    "spans": OutputSpec("(words * labels, W)", _OF_TAGS, per_pair=True, per_element=True),
}


def int8_bounds(output: Output, measured: Mapping[str, float]) -> Agreement:
    """Return bounds for an output of an int8 graph: twice the deviations measured at its export.

    They are never wider than those in `OUTPUTS`: a check with wider bounds would detect no fault.

    Args:
        output: Name of the output.
        measured: Worst `cosine` and `norm` in the self-check at export.
    """
    widest = OUTPUTS[output].bounds["int8"]
    return Agreement(
        cosine=max(widest.cosine, 1 - 2 * (1 - measured["cosine"])),
        norm=min(widest.norm, 2 * measured["norm"]),
    )


def compare(
    output: Output, actual: NDArray[np.floating], expected: NDArray[np.floating]
) -> Agreement:
    """Return the agreement of the vectors `actual` with their references `expected`.

    Each logit and each weight z of a sparse vector is compared as the vector (z, 1). Its norm
    bounds the relative difference of large values, and its direction the absolute difference of
    small ones. Equal zero vectors, as of unknown tokens in a static model, have no direction and
    are left out, unless all are zero.

    Args:
        output: Name of the output.
        actual: Vectors `(N, W)` with N > 0. A NaN makes cosine and norm NaN.
        expected: Reference vectors, `(N, W)`.
    """
    if OUTPUTS[output].per_element:
        actual, expected = (np.stack([z.ravel(), np.ones(z.size)], 1) for z in (actual, expected))
    if (has_direction := actual.any(1) | expected.any(1)).any():
        actual, expected = actual[has_direction], expected[has_direction]
    lengths = np.linalg.norm(actual.astype(np.float64), axis=1)  # (N,)
    references = np.linalg.norm(expected.astype(np.float64), axis=1)  # (N,)
    # np.min and np.max propagate NaN; Python's min and max may not.
    return Agreement(
        cosine=float(np.min(cosines(actual, expected))),
        norm=float(np.max(np.abs(lengths / references - 1))),
    )


def cosines(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosine similarity of each row of `a` and `b`, both `(N, W)`, as `(N,)` float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosine: NDArray[np.float64] = (a * b).sum(1) / (
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    )
    return cosine
