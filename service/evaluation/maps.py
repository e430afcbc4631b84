"""Maps between the vectors of two models, fitted to the vectors of the same documents by both.

Source: arXiv:2509.23471, which maps by an orthogonal matrix, by an affine map, or by a network.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
# Strengths of the ridge penalty, relative to the mean variance of a dimension.
_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Of `_rank`: the temperature of the softmax over cosines, the number of batches, the maximum
# number of documents of a batch, and the step size of Adam.
_TEMPERATURE, _BATCHES, _BATCH, _STEP = 0.05, 100, 2000, 3e-4
# Adam's decay rates of the means of gradients and of their squares, and its epsilon.
_DECAYS, _EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Map:
    """A fitted map.

    Attributes:
        matrix: Matrix `(W', W)`.
        constant: Constant term, `(W',)`.
    """

    matrix: Matrix
    constant: Matrix

    def __call__(self, vectors: NDArray[Any]) -> Matrix:
        """Return vectors `(N, W)` in the other space, `(N, W')`."""
        mapped: Matrix = vectors @ self.matrix.T + self.constant
        return mapped


def fit_maps(x: Matrix, y: Matrix) -> dict[str, Map]:
    """Return a map of each form from vectors `x` `(N, W)` to `y` `(N, W')` of the same texts."""
    left, _, right = np.linalg.svd(y.T @ x, full_matrices=False)
    rotation = left @ right  # (W', W), Schoenemann 1966: the orthogonal Procrustes problem
    none = np.zeros(y.shape[1])
    return {
        "orthogonal": Map(rotation, none),
        "ranked": Map(_rank(x, y, rotation), none),
        "affine": _ridge(x, y),
    }


def _ridge(x: Matrix, y: Matrix) -> Map:
    """Return the affine map with the least squares and the penalty that fits other pairs best."""
    held = np.arange(len(x)) % 10 == 0

    def solve(some: NDArray[np.bool_], penalty: float) -> Map:
        means_ = x[some].mean(0), y[some].mean(0)
        a, b = x[some] - means_[0], y[some] - means_[1]
        gram = a.T @ a
        gram[np.diag_indices_from(gram)] += penalty * np.trace(gram) / len(gram)
        matrix = np.linalg.solve(gram, a.T @ b).T
        return Map(matrix, means_[1] - matrix @ means_[0])

    def error(penalty: float) -> float:
        return float(((solve(~held, penalty)(x[held]) - y[held]) ** 2).mean())

    return solve(np.ones(len(x), bool), min(_PENALTIES, key=error))


def _rank(x: Matrix, y: Matrix, matrix: Matrix) -> Matrix:
    """Return a matrix that leaves documents near to those that they are near to in `x`.

    Each document of a batch is a query: the softmax over the cosines of its mapped vector with the
    vectors `y` of the batch approaches that over its cosines with the vectors `x`. It minimises the
    cross entropy (ListNet, Cao et al. 2007) with Adam (Kingma and Ba 2015).

    Args:
        x: Vectors `(N, W)`.
        y: Vectors `(N, W')`.
        matrix: First matrix, `(W', W)`.
    """
    mean, square = np.zeros_like(matrix), np.zeros_like(matrix)
    random = np.random.default_rng(0)
    for step in range(1, _BATCHES + 1):
        batch = random.permutation(len(x))[:_BATCH]
        gradient = _gradient(matrix, _unit(x[batch]), _unit(y[batch]))
        mean += (1 - _DECAYS[0]) * (gradient - mean)
        square += (1 - _DECAYS[1]) * (gradient**2 - square)
        first, second = mean / (1 - _DECAYS[0] ** step), square / (1 - _DECAYS[1] ** step)
        matrix = matrix - _STEP * first / (np.sqrt(second) + _EPSILON)
    return matrix


def _gradient(matrix: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return the gradient of the mean cross entropy of unit vectors `(B, W)` and `(B, W')`."""
    mapped = x @ matrix.T  # (B, W')
    lengths = _lengths(mapped)  # (B, 1)
    unit = mapped / lengths
    difference = _softmax(unit @ y.T) - _softmax(x @ x.T)  # (B, B)
    by_unit = difference @ y / (_TEMPERATURE * len(x))  # (B, W')
    by_mapped = (by_unit - unit * (unit * by_unit).sum(1, keepdims=True)) / lengths
    gradient: Matrix = by_mapped.T @ x
    return gradient


def _softmax(cosines: Matrix) -> Matrix:
    """Return the softmax of each row; numbers of at most `1 / _TEMPERATURE` cannot overflow."""
    powers = np.exp(cosines / _TEMPERATURE)
    shares: Matrix = powers / powers.sum(1, keepdims=True)
    return shares


def _unit(vectors: Matrix) -> Matrix:
    return vectors / _lengths(vectors)


def _lengths(vectors: Matrix) -> Matrix:
    """Return the lengths of vectors, `(N, 1)`; those of zeros are replaced by a small number."""
    lengths: Matrix = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.maximum(lengths, 1e-12)
