"""Exact explanations of similarities: the terms of the sum that a score is. numpy only.

The dot product of two pooled vectors is a sum over the pairs of their tokens, if pooling is a
weighted sum of token vectors: with u = sum_i w_i x_i and v = sum_j w_j y_j,

    u . v = sum_ij w_i w_j x_i . y_j

and the cosine is the same sum, divided by |u| |v|. The dot product and the cosine of two sparse
vectors are sums over the vocabulary entries that both have. MaxSim of multi-vectors is a sum over
the query's tokens, each with the document's most similar token. Distances are no such sums.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.manifest import Manifest, SimilarityName
from service.inference.errors import InvalidInput
from service.inference.results.vectors import SparseVector, Vectors
from service.inference.tokenizing.rows import Row, Span

# Similarities that are not sums of products.
DISTANCES: frozenset[SimilarityName] = frozenset({"euclidean", "manhattan"})
# Number of terms in an explanation.
TERMS = 10
# Number of terms in a repr.
_IN_REPR = 3
# Number of a query's tokens whose terms exist at the same time: two texts of 8,192 tokens have 67
# million pairs.
_BLOCK = 256

# Weight of each token in the pooled vector, up to a common factor, by name of the pooling. The
# argument is the number of tokens.
_WEIGHTS: Mapping[str, Callable[[int], Vectors]] = {
    "mean": lambda length: np.ones(length, np.float32),
    "mean_sqrt_len": lambda length: np.ones(length, np.float32),
    "weighted_mean": lambda length: np.arange(1, length + 1, dtype=np.float32),
}
# Heads that only scale or truncate the pooled vector, so that it stays a weighted sum.
_LINEAR_HEADS = {"NormalizeHead", "TruncateHead"}


@dataclass(frozen=True, slots=True)
class TextToken:
    """A token of a text.

    Attributes:
        id: Token id.
        span: Span of the token in the text, in characters; None for a token of the prompt and for
            a special token.
    """

    id: int
    span: Span | None


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a score.

    Attributes:
        value: Value of the term.
        query: The token of the query.
        document: The token of the document. For sparse vectors, query and document have the same
            token, a vocabulary entry without a span.
    """

    value: float
    query: TextToken
    document: TextToken


@dataclass(frozen=True)
class Explanation:
    """The largest terms of a score.

    Attributes:
        terms: Up to `TERMS` terms, the largest absolute values first.
        other: Sum of all other terms: the score is this number plus the sum of `terms`.
    """

    terms: Sequence[Term]
    other: float

    def __repr__(self) -> str:
        largest = ", ".join(f"{term.value:+.4g}" for term in self.terms[:_IN_REPR])
        return f"Explanation({len(self.terms)} terms: {largest}; other {self.other:+.4g})"


def check_explainable(manifest: Manifest, name: str) -> None:
    """Check that a model's scores are sums over tokens.

    Args:
        manifest: Manifest of the model.
        name: Name of the model, for the error.

    Raises:
        InvalidInput: The scores are not sums over tokens.
    """
    reason = ""
    if manifest.similarity in DISTANCES:
        reason = f"{manifest.similarity} is a distance"
    elif manifest.pools_tokens:
        reason = "vectors of several tokens are pooled"
    elif "logits" in manifest.outputs:
        reason = "it reads query and document at once"
    elif "pooled" in manifest.outputs:  # similarities of sparse vectors and MaxSim are sums
        if len(manifest.pooling) != 1 or manifest.pooling[0] not in _WEIGHTS:
            reason = f"its pooling is {' and '.join(manifest.pooling)}"
        elif others := [head for head in manifest.heads if head not in _LINEAR_HEADS]:
            reason = f"its vectors pass through {others[0]}"
    if reason:
        raise InvalidInput(
            f"a score of the model {name} is not a sum over tokens, because {reason}; deletion "
            "explains it",
            code="wrong_model",
            pointer="/explain",
        )


@dataclass(frozen=True)
class WeightedTokens:
    """The tokens of a text as the terms of its pooled vector.

    Attributes:
        row: Row of the text, with offsets.
        vectors: Token vectors times their weights in the pooled vector up to a common factor,
            `(L, W)`.
        scale: This factor, by which the sum of `vectors` is the compared vector.
    """

    row: Row
    vectors: Vectors
    scale: float


def weigh(manifest: Manifest, row: Row, tokens: Vectors, length: float) -> WeightedTokens:
    """Return the tokens of a text as the terms of its pooled vector.

    Args:
        manifest: Manifest of the model, which passes `check_explainable`.
        row: Row of the text, with offsets.
        tokens: Token vectors, `(L, D)`.
        length: L2 norm of the pooled vector that is compared; 1 for the cosine.
    """
    weights = _WEIGHTS[manifest.pooling[0]](len(tokens))
    weights[: row.prompt_tokens] = 0
    # A truncated vector is the same sum of truncated token vectors.
    weighted: Vectors = tokens[:, : manifest.width] * weights[:, None]
    norm = float(np.linalg.norm(weighted.sum(0, np.float64)))
    # The similarity with a zero vector is 0.
    return WeightedTokens(row, weighted, length / norm if norm else 0.0)


def explain_pooled(query: WeightedTokens, document: WeightedTokens) -> Explanation:
    """Return the largest terms of the cosine or dot product of two pooled vectors."""
    x, y = query.vectors, document.vectors  # (L, W), (L', W)
    scale = query.scale * document.scale
    best: list[Term] = []
    total = 0.0
    for start in range(0, len(x), _BLOCK):
        values = x[start : start + _BLOCK] @ y.T * scale  # (block, L')
        total += float(values.sum(dtype=np.float64))
        for index in _largest(values.ravel()).tolist():
            i, j = divmod(index, len(y))
            tokens = _token(query.row, start + i), _token(document.row, j)
            best.append(Term(float(values[i, j]), *tokens))
    best = sorted(best, key=lambda term: -abs(term.value))[:TERMS]
    return _explanation(best, total)


def explain_sparse(
    query: SparseVector, document: SparseVector, *, unit_length: bool
) -> Explanation:
    """Return the largest terms of the dot product of two sparse vectors.

    Args:
        query: Sparse vector of the query.
        document: Sparse vector of the document.
        unit_length: Whether the vectors are scaled to unit length, whose dot product is the cosine.
    """
    ids, a, b = np.intersect1d(query.ids, document.ids, assume_unique=True, return_indices=True)
    values = query.weights[a].astype(np.float64) * document.weights[b]
    if unit_length and values.any():
        values /= float(np.linalg.norm(query.weights)) * float(np.linalg.norm(document.weights))
    best = [(float(values[index]), int(ids[index])) for index in _largest(values).tolist()]
    terms = [Term(value, TextToken(token, None), TextToken(token, None)) for value, token in best]
    return _explanation(terms, float(values.sum()))


def explain_maxsim(
    query: tuple[Row, NDArray[np.intp]],
    document: tuple[Row, NDArray[np.intp]],
    values: Vectors,
    nearest: NDArray[np.intp],
) -> Explanation:
    """Return the largest terms of MaxSim of two multi-vectors.

    Args:
        query: Row of the query, with offsets, and the position in the row of each vector's token.
        document: The same of the document; it has at least one vector.
        values: Largest dot product of each query vector with a document vector, `(L',)`.
        nearest: Index of that document vector, `(L',)`.
    """
    (a, rows), (b, columns) = query, document
    terms = [
        Term(float(values[i]), _token(a, int(rows[i])), _token(b, int(columns[nearest[i]])))
        for i in _largest(values).tolist()
    ]
    return _explanation(terms, float(values.sum(dtype=np.float64)))


def _explanation(terms: Sequence[Term], total: float) -> Explanation:
    return Explanation(terms, total - sum(term.value for term in terms))


def _largest(values: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the indices of the `TERMS` largest absolute values, in descending order."""
    sizes = np.abs(values)
    kept = np.arange(len(sizes))
    if len(sizes) > TERMS:  # sorting all would take longer than the products
        kept = np.argpartition(sizes, -TERMS)[-TERMS:]
    order: NDArray[np.intp] = kept[np.argsort(-sizes[kept], kind="stable")]
    return order


def _token(row: Row, index: int) -> TextToken:
    return TextToken(row.ids[index], row.offsets[index] if row.offsets else None)
