"""Similarities of vectors, against the functions of sentence-transformers in float64."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sentence_transformers.util import SimilarityFunction

from models.manifest import SimilarityName
from service.inference.results.scores import similarities, similarity_matrix, sparse_similarities
from service.inference.results.vectors import SparseVector, Vectors

KINDS = [name for name in get_args(SimilarityName) if name != "maxsim"]

# Lengths of the vectors, and what else they have: equal pairs, zeros and nearly equal pairs are
# where distances and cosines lose their digits.
SCALES = [1e-3, 1.0, 30.0, 1e4]


def draw(seed: int, rows: int, width: int, scale: float, *, sparse: bool) -> Vectors:
    """Return random vectors, of which some are zero."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(0, scale, (rows, width))
    if sparse:
        vectors = np.abs(vectors) * (rng.random((rows, width)) < rng.random())
    vectors[rng.random(rows) < 0.1] = 0
    return vectors.astype(np.float32)


def pairs_of(seed: int, count: int, width: int, scale: float, *, sparse: bool) -> list[Vectors]:
    """Return queries and documents, `(N, W)` each, of which some are equal or nearly equal."""
    rng = np.random.default_rng(seed + 1)
    queries = draw(seed, count, width, scale, sparse=sparse)
    documents = draw(seed + 2, count, width, scale, sparse=sparse)
    equal = rng.random(count) < 0.2
    documents[equal] = queries[equal]
    near = rng.random(count) < 0.2
    documents[near] = queries[near] * np.float32(1 + 1e-4)
    return [queries, documents]


def reference(compare: Callable[..., Any], queries: Vectors, documents: Vectors) -> Any:  # noqa: ANN401
    """Return similarities by a function of sentence-transformers, in float64."""
    return compare(*(torch.from_numpy(own.astype(np.float64)) for own in (queries, documents)))


def pairwise(kind: str, queries: Vectors, documents: Vectors) -> NDArray[np.float64]:
    compare = SimilarityFunction.to_similarity_pairwise_fn(kind)
    return np.asarray(reference(compare, queries, documents))


def matrix(kind: str, queries: Vectors, documents: Vectors) -> NDArray[np.float64]:
    return np.asarray(reference(SimilarityFunction.to_similarity_fn(kind), queries, documents))


def sparse_rows(vectors: Vectors) -> list[SparseVector]:
    return [SparseVector(np.flatnonzero(row), row[row != 0]) for row in vectors]


def close(actual: NDArray[np.float64], expected: NDArray[np.float64], scale: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6 * scale)


CASES = {
    "seed": st.integers(0, 2**20),
    "count": st.integers(1, 12),
    "width": st.sampled_from([1, 2, 7, 32, 384]),
    "scale": st.sampled_from(SCALES),
}


@pytest.mark.parametrize("kind", KINDS)
@given(**CASES)
def test_dense_similarities_equal_sentence_transformers(
    kind: SimilarityName, seed: int, count: int, width: int, scale: float
) -> None:
    queries, documents = pairs_of(seed, count, width, scale, sparse=False)
    size = {"cosine": 1.0, "dot": scale**2 * width}.get(kind, 0.0)  # distances keep their digits
    close(similarities(kind, queries, documents), pairwise(kind, queries, documents), size)
    one = similarities(kind, queries[:1], documents)
    close(one, pairwise(kind, queries[:1].repeat(count, 0), documents), size)
    if kind != "euclidean":  # `torch.cdist` of many rows multiplies matrices and loses digits
        close(one, matrix(kind, queries[:1], documents)[0], size)


@pytest.mark.parametrize("kind", KINDS)
@given(**CASES)
def test_matrix_of_similarities_equals_sentence_transformers(
    kind: SimilarityName, seed: int, count: int, width: int, scale: float
) -> None:
    queries, documents = pairs_of(seed, count, width, scale, sparse=False)
    queries = queries[: count // 2 + 1]
    size = {"cosine": 1.0, "dot": scale**2 * width}.get(kind, 0.0)  # distances keep their digits
    pairs = queries.repeat(count, 0), np.tile(documents, (len(queries), 1))
    expected = pairwise(kind, *pairs).reshape(len(queries), count)
    close(similarity_matrix(kind, queries, documents), expected, size)


@pytest.mark.parametrize("kind", KINDS)
@given(**CASES)
def test_sparse_similarities_equal_sentence_transformers(
    kind: SimilarityName, seed: int, count: int, width: int, scale: float
) -> None:
    queries, documents = pairs_of(seed, count, width, scale, sparse=True)
    own, others = sparse_rows(queries), sparse_rows(documents)
    expected = pairwise(kind, queries, documents)
    close(sparse_similarities(kind, own, others, width), expected, 0.0)
    # One query for many documents is the same object.
    one = sparse_similarities(kind, own[:1] * count, others, width)
    close(one, pairwise(kind, queries[:1].repeat(count, 0), documents), 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_vectors_are_the_most_similar(kind: SimilarityName) -> None:
    vectors = draw(3, 5, 16, 1.0, sparse=True)
    vectors[:, 0] = 1  # none is zero
    rows = sparse_rows(vectors)
    expected = np.square(vectors).sum(1) if kind == "dot" else {"cosine": 1.0}.get(kind, 0.0)
    for scores in (similarities(kind, vectors, vectors), sparse_similarities(kind, rows, rows, 16)):
        np.testing.assert_allclose(scores, np.broadcast_to(expected, 5), rtol=1e-6, atol=0)
