"""Vectors are normalised."""

import numpy as np
import torch

from service.inference.results.vectors import unit_vectors


def test_vectors_have_unit_length_together_and_alone_and_zero_vectors_stay_zero() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    vectors[2] = 0
    expected = torch.nn.functional.normalize(torch.from_numpy(vectors)).numpy()
    np.testing.assert_allclose(unit_vectors(vectors), expected, atol=1e-6)
    alone = [unit_vectors(vectors[index : index + 1]) for index in range(4)]
    np.testing.assert_allclose(np.concatenate(alone), expected, atol=1e-6)
