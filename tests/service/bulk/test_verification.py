"""Differences of two results of one record."""

from math import inf, nan
from typing import Any

import pytest

from service.bulk.verification import _difference


@pytest.mark.parametrize(
    ("stored", "again", "expected"),
    [(0.5, 0.5 + 1e-4, 1e-4), (0.0, -1e-4, 1e-4), (500.0, 500.01, 2e-5), (-200.0, -200.2, 1e-3)],
)
def test_large_scores_differ_relative_to_their_size(
    stored: float, again: float, expected: float
) -> None:
    """Dot products and distances can be hundreds, of which float32 rounds the last digits."""
    row = {"score": stored, "tokens": 4, "truncated": False}
    actual = _difference(row, {**row, "score": again}, "float32")
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("stored", "again", "expected"),
    [
        ({"score": nan}, {"score": 0.5}, inf),
        ({"embedding": [nan] * 4}, {"embedding": [0.5] * 4}, inf),
        ({"embedding": [inf, 0.0]}, {"embedding": [1.0, 0.0]}, inf),
        ({"embedding": [nan, nan]}, {"embedding": [nan, nan]}, 0.0),
        ({"embedding": [0.0, 0.0]}, {"embedding": [0.0, 0.0]}, 0.0),
        ({"embedding": [0.0, 0.0]}, {"embedding": [0.0, 1.0]}, inf),
        ({"embedding": [0.5, 1.0]}, {"embedding": [5.0, 10.0]}, 0.9),
        ({"embedding": [[0.5, 1.0], [1.0, 0.0]]}, {"embedding": [[0.5, 1.0], [1.0, 0.0]]}, 0.0),
        ({"scores": [0.01, 0.02]}, {"scores": [0.33, 0.66]}, 0.64),
        ({"ids": [3, 7], "weights": [1.0, 2.0]}, {"ids": [3, 7], "weights": [9.0, 18.0]}, 8 / 9),
    ],
)
def test_results_that_are_scaled_or_not_finite_differ(
    stored: dict[str, Any], again: dict[str, Any], expected: float
) -> None:
    assert _difference(stored, again, "float32") == pytest.approx(expected)
