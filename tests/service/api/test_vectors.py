"""Vectors are truncated, then normalised."""

import numpy as np
import pytest
import torch

from service.inference.results.vectors import VectorOptions, pooled_vectors, unit_vectors


def test_vectors_have_unit_length_together_and_alone_and_zero_vectors_stay_zero() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    vectors[2] = 0
    expected = torch.nn.functional.normalize(torch.from_numpy(vectors)).numpy()
    np.testing.assert_allclose(unit_vectors(vectors), expected, atol=1e-6)
    alone = [unit_vectors(vectors[index : index + 1]) for index in range(4)]
    np.testing.assert_allclose(np.concatenate(alone), expected, atol=1e-6)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_pooled_vectors_are_truncated_before_they_are_normalized(dimensions: int | None) -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    expected = torch.nn.functional.normalize(torch.from_numpy(vectors[:, :dimensions]))
    actual = pooled_vectors(vectors, VectorOptions(dimensions=dimensions), is_normalized=True)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-6)
