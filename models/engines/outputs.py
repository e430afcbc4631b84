"""Outputs of a graph and their comparison with a reference.

A comparison measures direction and length, so scaled, shifted and flipped vectors fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Precision = Literal["float32", "float16", "bfloat16"]
# Names of a graph's outputs.
Output = Literal["pooled", "tokens"]


@dataclass(frozen=True)
class Agreement:
    """Worst differences between vectors and their references.

    Attributes:
        cosine: Lowest cosine.
        norm: Largest difference in length, relative to the reference.
    """

    cosine: float
    norm: float

    def is_within(self, bounds: "Agreement") -> bool:
        """Return whether both differences are within the bounds; NaN is outside."""
        return self.cosine >= bounds.cosine and self.norm <= bounds.norm


@dataclass(frozen=True)
class OutputSpec:
    """A kind of output.

    Attributes:
        shape: Shape per input, for documentation.
        bounds: Worst acceptable agreement, by precision of the engine.
    """

    shape: str
    bounds: Mapping[Precision, Agreement]


# float32 reaches 1 - 1e-12 and 3e-7, bfloat16 0.99997 and 3e-3 (all-MiniLM-L6-v2). Pooling
# averages rounding errors out, so token vectors have wider bounds.
OUTPUTS: dict[Output, OutputSpec] = {
    "pooled": OutputSpec(
        "(W,)",
        {
            "float32": Agreement(1 - 1e-6, 1e-4),
            "float16": Agreement(0.9995, 0.02),
            "bfloat16": Agreement(0.9995, 0.02),
        },
    ),
    "tokens": OutputSpec(
        "(L, D)",
        {
            "float32": Agreement(1 - 1e-6, 1e-4),
            "float16": Agreement(0.999, 0.05),
            "bfloat16": Agreement(0.999, 0.05),
        },
    ),
}


def compare(actual: NDArray[np.floating], expected: NDArray[np.floating]) -> Agreement:
    """Return the agreement of vectors `(N, W)` with their references `(N, W)`, N > 0.

    A NaN among the vectors makes both differences NaN.
    """
    lengths = np.linalg.norm(actual.astype(np.float64), axis=1)  # (N,)
    references = np.linalg.norm(expected.astype(np.float64), axis=1)  # (N,)
    # numpy's minimum and maximum propagate NaN.
    return Agreement(
        cosine=float(np.min(cosines(actual, expected))),
        norm=float(np.max(np.abs(lengths / references - 1))),
    )


def cosines(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosines `(N,)` of the rows of `a` and `b`, both `(N, W)`, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosine: NDArray[np.float64] = (a * b).sum(1) / (
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    )
    return cosine
