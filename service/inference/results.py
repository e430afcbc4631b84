"""Results of encoding, and the truncation and normalisation of vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.inference.tokenizer import Row

Vectors = NDArray[np.float32]


class SparseVector(NamedTuple):
    """The positive weights of a vector.

    Attributes:
        ids: Token ids with a positive weight, in ascending order.
        weights: Their weights.
    """

    ids: NDArray[np.intp]
    weights: Vectors


# Result of one row: a vector, the vectors of its tokens, or a sparse vector.
RowResult = Vectors | SparseVector
# Results of one row, one per requested output.
RowResults = tuple[RowResult, ...]

_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Embeddings:
    """One vector per input.

    Attributes:
        vectors: Pooled vectors `(B, W)` of B inputs, in the order of the inputs.
        rows: Token ids of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Vectors
    rows: Sequence[Row]
    seconds: Mapping[str, float]

    @property
    def size(self) -> int:
        """Total number of vector elements."""
        return self.vectors.size


@dataclass(frozen=True)
class TokenEmbeddings:
    """One vector per token.

    Attributes:
        vectors: Token vectors `(L, D)` of each input of L tokens, in the order of the inputs.
        rows: Token ids and offsets of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[Vectors]
    rows: Sequence[Row]
    seconds: Mapping[str, float]

    @property
    def size(self) -> int:
        """Total number of vector elements."""
        return sum(part.size for part in self.vectors)


@dataclass(frozen=True)
class SparseEmbeddings:
    """One sparse vector per input.

    Attributes:
        vectors: Sparse vectors, in the order of the inputs.
        width: Number of entries of the vocabulary, V.
        rows: Token ids and truncation of each input.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    vectors: Sequence[SparseVector]
    width: int
    rows: Sequence[Row]
    seconds: Mapping[str, float]

    @property
    def size(self) -> int:
        """Size in JSON, in numbers: an id and its weight take as long to serialise as five."""
        return 5 * sum(len(vector.ids) for vector in self.vectors)


def truncate_and_normalize(vectors: Vectors, dimensions: int | None, normalize: bool) -> Vectors:
    """Return the leading `dimensions` of each vector, scaled to unit length if `normalize`.

    Zero vectors remain zero.

    Args:
        vectors: Vectors `(N, W)`.
        dimensions: Number of dimensions to keep; None: all.
        normalize: Whether to scale the truncated vectors to unit length.
    """
    kept = vectors[:, :dimensions]
    if normalize:
        lengths = np.sqrt(np.einsum("nd,nd->n", kept, kept))[:, None]  # faster than linalg.norm
        kept = kept / np.maximum(lengths, _TINY)
    return np.ascontiguousarray(kept, np.float32)
