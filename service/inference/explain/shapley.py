"""Shapley values of the units of a text, from the results of texts that keep a subset of the units.

The Shapley value of a unit is the mean change of the result when the unit is added to the units
before it, over all orders of the units. The values are the solution of a least-squares problem over
all subsets, with a weight that depends on the number of units in the subset (the Shapley kernel),
whose values must sum to the difference of the results of the full and the empty set.

A sample of the subsets estimates the sums of this problem. Subsets come in pairs of complements,
which removes the part of the error that both have with opposite signs. Sizes whose subsets would
all be drawn anyway are complete, starting with one unit and all but one; the others are drawn with
replacement from the Shapley kernel. The standard errors are those of the draws, by linearisation.

The functions know no model: the caller scores all subsets of `subsets_of` in one batch.

Sources: Shapley kernel and constrained least squares, Lundberg and Lee 2017, arXiv:1705.07874;
pairs of complements and the uncertainty of the estimate, Covert and Lee 2021, arXiv:2012.01536.
Complete sizes are an idea of the library shap.
"""

from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
# Subsets of n units, `(M, n)`: whether each unit is kept.
Subsets = NDArray[np.bool_]

# Fewest drawn pairs, from which a standard error can be estimated.
_MIN_DRAWS = 2


def min_samples(units: int) -> int:
    """Return the smallest number of samples of `subsets_of`."""
    return min((1 << units) - 2, 2 * (units + _MIN_DRAWS))


def subsets_of(units: int, samples: int, seed: int = 0) -> Subsets:
    """Return the subsets whose results determine or estimate the Shapley values, `(M, n)`.

    Row 2p + 1 is the complement of row 2p, which has the first unit. The full and the empty set are
    not among them. All 2^n - 2 other subsets are returned once if they are at most `samples`;
    otherwise the number of rows is `samples` rounded down to an even number, and a subset can occur
    several times.

    Args:
        units: Number of units, n.
        samples: Maximum number of subsets, M.
        seed: Random seed.

    Raises:
        ValueError: `units` is below 1, or `samples` below `min_samples`.
    """
    if units < 1:
        raise ValueError(f"units is {units}; it must be at least 1")
    if samples < min_samples(units):
        raise ValueError(
            f"samples is {samples}; {units} units need at least {min_samples(units)} samples"
        )
    masses, counts = _kernel(units)
    is_all = (1 << units) - 2 <= samples
    draws, size = samples // 2, 1
    complete: list[Subsets] = []
    while size <= len(counts) and (is_all or _completes(masses[size - 1 :], counts, size, draws)):
        complete.append(_all_pairs(units, size))
        draws -= counts[size - 1]
        size += 1
    pairs = [np.empty((0, units), bool), *complete]
    if size <= len(counts):
        rest = masses[size - 1 :]
        generator = np.random.default_rng(seed)
        sizes = generator.choice(np.arange(size, len(counts) + 1), draws, p=rest / rest.sum())
        ranks = generator.random((draws, units)).argsort(1).argsort(1)
        pairs.append(_with_first(ranks < sizes[:, None]))
    first = np.concatenate(pairs)
    return np.stack([first, ~first], 1).reshape(-1, units)


def shapley_values(
    subsets: Subsets, results: Values, full: float, empty: float
) -> tuple[Values, Values]:
    """Return the Shapley value of each unit, `(n,)`, and its standard error, `(n,)`.

    The values sum to `full - empty`. With all subsets they are exact, and the errors are 0. The
    errors of fewer than 4 n subsets can be several times too small.

    Args:
        subsets: Subsets as returned by `subsets_of`.
        results: Result of each subset, `(M,)`.
        full: Result of the set of all units.
        empty: Result of the set without units.
    """
    units, change = subsets.shape[1], full - empty
    if units == 1:
        return np.array([change]), np.zeros(1)
    pairs, indices, draws = np.unique(subsets[::2], axis=0, return_index=True, return_counts=True)
    pair_results = np.asarray(results, np.float64).reshape(-1, 2)[indices]
    weights, is_drawn = _weights(pairs, draws)
    # The least squares of both subsets of a pair are those of the mean of the two estimates of the
    # sum of its first subset's values. The last value is eliminated by the sum of all values.
    sums = (pair_results[:, 0] - pair_results[:, 1] + change) / 2
    x = pairs[:, :-1].astype(np.float64) - pairs[:, -1:]
    y = sums - pairs[:, -1] * change
    inverse = np.linalg.inv(x.T @ (weights[:, None] * x))
    values = inverse @ (x.T @ (weights * y))
    # Each drawn pair moves the values by its influence. Its residual is that of a fit without it.
    leverage = weights / draws * np.vecdot(x @ inverse, x)
    residuals = (y - x @ values) / np.where(is_drawn, 1 - leverage, 1)
    influences = (weights / draws * residuals)[:, None] * x @ inverse
    influences = np.repeat(influences[is_drawn], draws[is_drawn], axis=0)
    influences = np.column_stack([influences, -influences.sum(1)])
    number = len(influences)
    if not number:
        return np.append(values, change - values.sum()), np.zeros(units)
    variances = influences.var(0) * number * number / max(number - 1, 1)
    return np.append(values, change - values.sum()), np.sqrt(variances)


def _kernel(units: int) -> tuple[Values, list[int]]:
    """Return the kernel's mass and the number of pairs, by size of the smaller subset, from 1."""
    sizes = np.arange(1, units // 2 + 1)
    halves = 2 * sizes == units
    masses = (units - 1) / (sizes * (units - sizes)) * np.where(halves, 0.5, 1)
    counts = [comb(units, k) // (2 if 2 * k == units else 1) for k in map(int, sizes)]
    return masses, counts


def _completes(masses: Values, counts: list[int], size: int, draws: int) -> bool:
    """Return whether all pairs of a size are used, and not drawn; `masses` are those from it."""
    count = counts[size - 1]
    if draws - count < _MIN_DRAWS:
        return False
    return size == 1 or draws * float(masses[0] / masses.sum()) >= count


def _all_pairs(units: int, size: int) -> Subsets:
    chosen = np.array(list(combinations(range(units), size)))
    subsets = np.zeros((len(chosen), units), bool)
    np.put_along_axis(subsets, chosen, True, axis=1)
    return np.unique(_with_first(subsets), axis=0)


def _with_first(subsets: Subsets) -> Subsets:
    """Return the one of each subset and its complement that has the first unit."""
    return subsets ^ ~subsets[:, :1]


def _weights(pairs: Subsets, draws: NDArray[np.intp]) -> tuple[Values, Subsets]:
    """Return the weight of each distinct pair, and whether it is a sample of its size.

    Args:
        pairs: First subset of each distinct pair.
        draws: Number of times that each occurs.
    """
    units = pairs.shape[1]
    masses, counts = _kernel(units)
    sizes = np.minimum(pairs.sum(1), units - pairs.sum(1)) - 1
    actual = np.bincount(sizes, minlength=len(counts))
    is_complete = np.array([int(a) == b for a, b in zip(actual, counts, strict=True)])
    is_drawn = ~is_complete[sizes]
    weights = masses[sizes] / actual[sizes]
    drawn = np.where(is_drawn, draws, 0)
    rest = masses[~is_complete].sum()
    return np.where(is_drawn, rest * drawn / max(drawn.sum(), 1), weights), is_drawn
