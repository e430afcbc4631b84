"""Results of encoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.inference.tokenizer import Row

Vectors = NDArray[np.float32]

_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Embeddings:
    """One vector per input.

    Attributes:
        vectors: Vectors `(B, W)`, in the order of the inputs.
        rows: Each input as the model saw it.
        seconds: Duration of each stage.
    """

    vectors: Vectors
    rows: Sequence[Row]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class TokenEmbeddings:
    """One vector per token.

    Attributes:
        vectors: Token vectors `(L, D)` of each input.
        rows: Each input as the model saw it.
        seconds: Duration of each stage.
    """

    vectors: Sequence[Vectors]
    rows: Sequence[Row]
    seconds: Mapping[str, float]


def truncate_and_normalize(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """Return the leading `dimensions` of vectors `(N, W)`, then normalised to unit length.

    Zero vectors stay zero.

    Args:
        vectors: Vectors `(N, W)`.
        dimensions: Number of dimensions to keep; None keeps all.
        normalize: Whether to normalise.
    """
    kept = vectors[:, :dimensions]
    if normalize:
        lengths = np.sqrt(np.einsum("nd,nd->n", kept, kept))[:, None]  # faster than linalg.norm
        kept = kept / np.maximum(lengths, _TINY)
    return np.ascontiguousarray(kept, np.float32)
