"""Vectors are truncated, then normalised."""

import numpy as np
import pytest
import torch

from service.inference.results.vectors import truncate_and_normalize


@pytest.mark.parametrize("dimensions", [None, 3])
def test_vectors_are_normalized_and_zero_vectors_stay_zero(dimensions: int | None) -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    vectors[2] = 0
    expected = torch.nn.functional.normalize(torch.from_numpy(vectors[:, :dimensions]))
    actual = truncate_and_normalize(vectors, dimensions, normalize=True)
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-6)
