"""Clusters of vectors, against sentence-transformers."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from models.artifact import Artifact
from models.engines import EngineError
from models.manifest import TokenRules
from service.inference.errors import InvalidInput
from service.inference.results import token_pooling
from service.inference.results.token_pooling import check_poolable, pool_vectors


def near_topics(count: int, topics: int = 9) -> NDArray[np.float32]:
    """Return vectors `(count, 24)` of unit length near a few directions."""
    rng = np.random.default_rng(count)
    centres = rng.standard_normal((topics, 24))
    vectors = centres[rng.integers(0, topics, count)] + 0.7 * rng.standard_normal((count, 24))
    unit: NDArray[np.float32] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(
        np.float32
    )
    return unit


@pytest.mark.parametrize("protected", [0, 1, 5])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 100.0])
def test_means_equal_those_of_sentence_transformers(factor: float, protected: int) -> None:
    oracle = HierarchicalTokenPooling(
        factor, num_protected_tokens=protected, normalize_embeddings=False
    )
    for count in (0, 1, 2, 3, 6, 20, 63, 300):
        vectors = near_topics(count)
        expected = oracle.pool([torch.from_numpy(vectors)])[0].numpy()
        actual, clusters = pool_vectors(vectors, factor, protected)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
        assert len(clusters) == count
        assert actual.dtype == np.float32
        for index in range(len(actual)):
            np.testing.assert_allclose(actual[index], vectors[clusters == index].mean(0), atol=1e-6)


def test_equal_vectors_give_fewer_clusters() -> None:
    vectors = np.repeat(near_topics(3), 8, axis=0)
    expected = HierarchicalTokenPooling(2.0, normalize_embeddings=False).pool(
        [torch.from_numpy(vectors)]
    )
    actual, _ = pool_vectors(vectors, 2.0, 1)
    np.testing.assert_allclose(actual, expected[0].numpy(), rtol=0, atol=1e-6)


def test_text_with_too_many_vectors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_pooling, "MAX_POOLED", 20)
    pool_vectors(near_topics(20), 2.0, 1)
    with pytest.raises(InvalidInput, match="21 vectors; at most 20 can be pooled"):
        pool_vectors(near_topics(21), 2.0, 1)


def test_missing_scipy_is_an_error_that_names_the_extra(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {"document": TokenRules(max_tokens=9, pool_factor=2.0)}
    manifest = replace(small_artifact.manifest, token_rules=rules)
    check_poolable(manifest)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_poolable(small_artifact.manifest)
    with pytest.raises(EngineError, match=r"scipy is not installed; .* extra 'pooling'"):
        check_poolable(manifest)
