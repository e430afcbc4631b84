"""Shapley values against their definition, the mean over all orders of the units."""

from itertools import permutations
from math import factorial

import numpy as np
import pytest

from service.inference.explain.shapley import min_samples, shapley_values, subsets_of

SEEDS = 200


def random_function(units: int, seed: int) -> np.ndarray:
    """Return a random result of each subset, by the number whose bits are the kept units."""
    generator = np.random.default_rng(seed)
    kept = np.arange(2**units)[:, None] >> np.arange(units) & 1
    pairs = generator.normal(size=(units, units))
    linear = kept @ generator.normal(size=units)
    noise = generator.normal(size=2**units)
    return np.asarray(linear + np.einsum("si,ij,sj->s", kept, pairs, kept) + noise / 2)


def exact_values(function: np.ndarray, units: int) -> np.ndarray:
    """Return the Shapley values by their definition."""
    values = np.zeros(units)
    for order in permutations(range(units)):
        subset = 0
        for unit in order:
            values[unit] += function[subset | 1 << unit] - function[subset]
            subset |= 1 << unit
    return values / factorial(units)


def estimate(
    function: np.ndarray, units: int, samples: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    subsets = subsets_of(units, samples, seed)
    return shapley_values(
        subsets, function[subsets @ (1 << np.arange(units))], function[-1], function[0]
    )


@pytest.mark.parametrize("units", range(1, 9))
def test_values_of_all_subsets_are_exact(units: int) -> None:
    function = random_function(units, units)
    values, errors = estimate(function, units, 2**units)
    np.testing.assert_allclose(values, exact_values(function, units), rtol=0, atol=1e-9)
    np.testing.assert_array_equal(errors, np.zeros(units))


@pytest.mark.parametrize("units", range(1, 9))
def test_all_subsets_but_the_full_and_the_empty_set_are_returned_once(units: int) -> None:
    subsets = subsets_of(units, 2**units - 2)
    assert subsets.shape == (2**units - 2, units)
    numbers = subsets @ (1 << np.arange(units))
    assert sorted(numbers) == list(range(1, 2**units - 1))


@pytest.mark.parametrize(
    ("units", "samples"), [(5, 20), (7, 40), (8, 32), (8, 64), (8, 128), (8, 200)]
)
def test_deviations_from_the_exact_values_agree_with_the_standard_errors(
    units: int, samples: int
) -> None:
    function = random_function(units, units)
    expected = exact_values(function, units)
    estimates = [estimate(function, units, samples, seed) for seed in range(SEEDS)]
    values, errors = (np.array(part) for part in zip(*estimates, strict=True))
    deviations = values - expected
    ratio = np.sqrt((deviations**2).mean() / (errors**2).mean())
    assert 0.6 < ratio < 1.2
    assert (np.abs(deviations) <= 4 * errors).mean() > 0.97


def test_error_decreases_with_the_number_of_samples() -> None:
    function = random_function(8, 8)
    expected = exact_values(function, 8)
    few, some, many = (
        np.mean([(estimate(function, 8, samples, seed)[0] - expected) ** 2 for seed in range(50)])
        for samples in (32, 64, 200)
    )
    assert few > 1.5 * some > 1.5 * 1.5 * many


@pytest.mark.parametrize(
    ("units", "samples"), [(1, 0), (2, 2), (3, 6), (9, 22), (24, 64), (60, 256)]
)
def test_values_sum_to_the_difference_of_the_full_and_the_empty_set(
    units: int, samples: int
) -> None:
    generator = np.random.default_rng(units)
    subsets = subsets_of(units, samples)
    values, errors = shapley_values(subsets, generator.normal(size=len(subsets)) * 100, 250.0, -3.5)
    assert values.shape == errors.shape == (units,)
    assert values.sum() == pytest.approx(253.5, abs=1e-6)
    assert np.isfinite(errors).all()


@pytest.mark.parametrize(("units", "samples"), [(5, 20), (8, 65), (24, 64), (24, 256), (300, 1000)])
def test_subsets_are_pairs_of_complements(units: int, samples: int) -> None:
    subsets = subsets_of(units, samples, seed=3)
    assert subsets.shape == (samples - samples % 2, units)
    np.testing.assert_array_equal(subsets[::2], ~subsets[1::2])
    assert subsets[::2, 0].all()
    assert subsets.any(1).all()
    # All subsets of one unit, and so all of all but one, are among them.
    alone = subsets[subsets.sum(1) == 1]
    assert set(alone.argmax(1)) == set(range(units))


def test_seed_determines_the_subsets() -> None:
    first, second, other = (subsets_of(24, 64, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


def test_two_units_share_their_interaction() -> None:
    values, errors = shapley_values(subsets_of(2, 2), np.array([1.0, 2.0]), 7.0, 0.0)
    assert values.tolist() == pytest.approx([3.0, 4.0])
    assert errors.tolist() == [0, 0]


def test_sample_of_an_additive_function_is_exact() -> None:
    weights = np.random.default_rng(0).normal(size=24)
    subsets = subsets_of(24, 64)
    values, errors = shapley_values(subsets, subsets @ weights + 5, weights.sum() + 5, 5.0)
    np.testing.assert_allclose(values, weights, atol=1e-9)
    np.testing.assert_allclose(errors, 0, atol=1e-9)


@pytest.mark.parametrize(("units", "samples", "match"), [(0, 8, "units is 0"), (24, 51, "52")])
def test_too_few_units_or_samples_are_refused(units: int, samples: int, match: str) -> None:
    assert min_samples(24) == 52
    with pytest.raises(ValueError, match=match):
        subsets_of(units, samples)
