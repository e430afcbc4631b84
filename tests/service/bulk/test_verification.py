"""Differences of two results of one record."""

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
