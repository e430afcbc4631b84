"""Scores of logits and of pairs of vectors, in float64."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from models.manifest import SimilarityName
from service.inference.results.vectors import SparseVector, Vectors, unit_vectors

Scores = NDArray[np.float64]

# Number of query vectors whose dot products with all document vectors exist at the same time.
_BLOCK = 256


def best_first(scores: Scores, limit: int | None = None) -> list[int]:
    """Return the indices of the best scores, best first; equal scores keep their order.

    Args:
        scores: Scores `(N,)`.
        limit: Maximum number of indices; None: all.
    """
    order: list[int] = np.argsort(-scores, kind="stable")[:limit].tolist()
    return order


def _cosines(queries: Vectors, documents: Vectors) -> Scores:
    units = map(unit_vectors, (queries, documents))
    scores: Scores = np.einsum("nw,nw->n", *np.broadcast_arrays(*units)).astype(np.float64)
    return scores


def _dot_products(queries: Vectors, documents: Vectors) -> Scores:
    scores: Scores = np.vecdot(queries.astype(np.float64), documents)
    return scores


def _euclidean(queries: Vectors, documents: Vectors) -> Scores:
    scores: Scores = -np.linalg.norm(queries.astype(np.float64) - documents, axis=1)
    return scores


def _manhattan(queries: Vectors, documents: Vectors) -> Scores:
    scores: Scores = -np.abs(queries.astype(np.float64) - documents).sum(axis=1)
    return scores


_DENSE: Mapping[SimilarityName, Callable[[Vectors, Vectors], Scores]] = {
    "cosine": _cosines,
    "dot": _dot_products,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}


def similarities(kind: SimilarityName, queries: Vectors, documents: Vectors) -> Scores:
    """Return the similarity of each document with its query, `(N,)`.

    Args:
        kind: Similarity of two vectors.
        queries: Vectors `(N, W)`, or one vector `(1, W)` for all documents.
        documents: Vectors `(N, W)`.
    """
    return _DENSE[kind](queries, documents)


def similarity_matrix(kind: SimilarityName, queries: Vectors, documents: Vectors) -> Scores:
    """Return the similarity of each query with each document, `(N, M)`.

    Args:
        kind: Similarity of two vectors.
        queries: Vectors `(N, W)`.
        documents: Vectors `(M, W)`.
    """
    if kind == "cosine":
        queries, documents = unit_vectors(queries), unit_vectors(documents)
    if kind in ("cosine", "dot"):
        products: Scores = queries.astype(np.float64) @ documents.astype(np.float64).T
        return products
    return np.array([similarities(kind, query[None], documents) for query in queries])


def _sparse_cosine(query: Scores, document: Scores, own: Scores) -> float:
    # A vector without weights has a cosine of 0 with every other.
    lengths = np.linalg.norm(own) * np.linalg.norm(document)
    return float(query @ document / lengths) if lengths else 0.0


def _sparse_euclidean(query: Scores, document: Scores, own: Scores) -> float:
    # Entries of the query alone: the sum of their squares can be rounded below 0.
    others = np.vecdot(own, own) - np.vecdot(query, query)
    difference = query - document
    return -float(np.sqrt(np.vecdot(difference, difference) + max(others, 0.0)))


def _sparse_manhattan(query: Scores, document: Scores, own: Scores) -> float:
    others = np.abs(own).sum() - np.abs(query).sum()
    return -float(np.abs(query - document).sum() + max(others, 0.0))


# The arguments are the query's weights at the document's entries, the document's weights there, and
# all weights of the query.
_SPARSE: Mapping[SimilarityName, Callable[[Scores, Scores, Scores], float]] = {
    "cosine": _sparse_cosine,
    "dot": lambda query, document, _own: float(query @ document),
    "euclidean": _sparse_euclidean,
    "manhattan": _sparse_manhattan,
}


def sparse_similarities(
    kind: SimilarityName,
    queries: Sequence[SparseVector],
    documents: Sequence[SparseVector],
    width: int,
) -> Scores:
    """Return the similarity of each query with the document of the same index, `(N,)`.

    Args:
        kind: Similarity of two vectors.
        queries: Sparse vector of each query.
        documents: Sparse vector of each document.
        width: Number of entries of the vocabulary.
    """
    compare = _SPARSE[kind]
    scores: list[float] = []
    previous: SparseVector | None = None
    for query, document in zip(queries, documents, strict=True):
        if query is not previous:  # one query can have thousands of documents
            own = query.weights.astype(np.float64)
            dense, previous = np.zeros(width), query
            dense[query.ids] = own
        weights = document.weights.astype(np.float64)
        scores.append(compare(dense[document.ids], weights, own))
    return np.array(scores)


def max_similarities(queries: Sequence[Vectors], documents: Sequence[Vectors]) -> Scores:
    """Return MaxSim of each query with the document of the same index, `(N,)`.

    MaxSim is the sum, over the query's vectors, of the largest dot product with a vector of the
    document; 0 without any.

    Args:
        queries: Vectors of each query, `(L', W)`.
        documents: The same for documents.
    """
    pairs = zip(queries, documents, strict=True)
    return np.array([nearest(*pair)[0].sum(dtype=np.float64) for pair in pairs])


def nearest(query: Vectors, document: Vectors) -> tuple[Vectors, NDArray[np.intp]]:
    """Return the largest dot product of each query vector with a document vector, and its index.

    Both are `(L',)`; zeros if the document has no vectors.

    Args:
        query: Vectors of the query, `(L', W)`.
        document: Vectors of the document, `(L'', W)`.
    """
    values = np.zeros(len(query), np.float32)
    indices = np.zeros(len(query), np.intp)
    for start in range(0, len(query) if len(document) else 0, _BLOCK):
        block = slice(start, start + _BLOCK)
        products = query[block] @ document.T  # (block, L'')
        indices[block] = products.argmax(axis=1)
        values[block] = products.max(axis=1)
    return values, indices


def _sigmoid(logits: Scores) -> Scores:
    # The argument of exp is never positive, so that it cannot overflow.
    decayed = np.exp(-np.abs(logits))
    scores: Scores = np.where(logits >= 0, 1.0, decayed) / (1 + decayed)
    return scores


def _softmax(logits: Scores) -> Scores:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores: Scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    return scores


# Activation functions, by their names in `models.manifest.Manifest.activation`.
ACTIVATIONS: Mapping[str, Callable[[Scores], Scores]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "identity": lambda logits: logits,
}
