from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from models.gradients.attribution import value_and_gradient
from models.gradients.integration import Array, Evaluate, Integral, integrate

EPS = 2.0**-52


def line(function: object, x: torch.Tensor, baseline: torch.Tensor) -> Evaluate:
    """What `integrate` asks of a function of rows `(S, D)`: each number is a token."""

    def evaluate(places: Array) -> tuple[Array, Array]:
        alpha = torch.from_numpy(places)[:, None]
        values, gradients = value_and_gradient(function, baseline + alpha * (x - baseline))  # type: ignore[arg-type]
        return values.numpy()[:, None], (gradients * (x - baseline)).numpy()[:, :, None]

    return evaluate


def of(function: object, *, dimensions: int = 6, tolerance: float = 1e-6) -> Integral:
    x = torch.randn(dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return integrate(line(function, x, torch.zeros_like(x)), tolerance, 1000, EPS)


def test_a_polynomial_is_exact_at_once() -> None:
    found = of(lambda x: (x**3).sum(-1))
    assert found.evaluations == 10
    x = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(found.scores[:, 0], (x**3).numpy(), rtol=1e-12)


def norm_of(width: int) -> tuple[Evaluate, torch.Tensor, torch.Tensor]:
    """A LayerNorm as BERT has it, from a baseline of zeros, where it sees no length."""
    D = width
    draw = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, D, dtype=torch.float64, generator=draw)
    evaluate = line(
        lambda rows: F.layer_norm(rows, (D,), eps=1e-12) @ w, x, torch.zeros(D).double()
    )
    return evaluate, x, w


def test_a_layer_norm_from_a_baseline_of_zeros_converges_where_fifty_fixed_points_do_not() -> None:
    D = 384
    evaluate, x, w = norm_of(D)
    truth = F.layer_norm(x, (D,), eps=1e-12) @ w
    nodes, weights = leggauss(50)
    fixed = np.tensordot(weights / 2, evaluate((nodes + 1) / 2)[1], axes=1).sum()
    assert abs(fixed - truth) > 0.9 * abs(truth)

    found = integrate(evaluate, tolerance=1e-4, max_evaluations=1000, rounding=EPS)
    assert found.converged
    assert found.evaluations < 400
    assert abs(found.scores.sum() - truth) <= 1e-4 * abs(truth)
    assert abs(found.delta.item()) <= found.error


def test_the_budget_ends_what_does_not_converge_and_says_so() -> None:
    evaluate, _, _ = norm_of(384)
    found = integrate(evaluate, tolerance=1e-4, max_evaluations=50, rounding=EPS)
    assert not found.converged
    assert found.evaluations == 44  # 10, and 17 for each panel that was cut


def test_the_evaluations_are_counted_as_they_are_made() -> None:
    evaluate, _, _ = norm_of(16)
    made = []

    def counted(places: Array) -> tuple[Array, Array]:
        made.append(len(places))
        return evaluate(places)

    found = integrate(counted, tolerance=1e-6, max_evaluations=200, rounding=EPS)
    assert found.evaluations == sum(made)
    assert len(made) > 3


def test_errors_of_panels_are_added_before_they_can_cancel() -> None:
    # The change of a half is minus that of the other, so the sums of the whole line agree at once.
    found = of(lambda x: torch.cos(40 * x.sum(-1)), dimensions=1, tolerance=1e-3)
    assert found.error <= found.allowed
    assert abs(found.delta.item()) <= found.error + 1e-15


def test_the_path_leads_from_baseline_to_input_through_the_ends_of_the_panels() -> None:
    evaluate, _, _ = norm_of(16)
    found = integrate(evaluate, tolerance=1e-6, max_evaluations=400, rounding=EPS)
    places, values = found.path
    assert (places[0], places[-1]) == (0.0, 1.0)
    assert np.all(np.diff(places) > 0)
    np.testing.assert_array_equal(values, evaluate(places)[0])
    assert found.value_baseline == values[0]
    assert found.value_input == values[-1]


def test_functions_share_panels_and_each_adds_up() -> None:
    x = torch.tensor([0.5, -1.5], dtype=torch.float64)

    def evaluate(places: Array) -> tuple[Array, Array]:
        at = places[:, None] * x.numpy()  # (S, N)
        slopes = np.stack([np.cos(at), 2 * at], axis=-1) * x.numpy()[:, None]
        return np.stack([np.sin(at).sum(-1), (at**2).sum(-1)], axis=-1), slopes

    found = integrate(evaluate, 1e-9, 100, EPS)
    np.testing.assert_allclose(found.scores, np.stack([torch.sin(x), x**2], axis=-1), atol=1e-9)
    np.testing.assert_allclose(found.delta, 0, atol=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_function_that_does_not_change_is_right_at_once(sign: float) -> None:
    found = of(lambda x: sign + 0 * x.sum(-1))
    assert found.converged
    assert found.evaluations == 10


def test_the_tolerance_is_of_the_change_not_of_the_values() -> None:
    found = of(lambda x: 100 + x.sum(-1), tolerance=1e-2)
    change = abs(found.value_input - found.value_baseline).item()
    assert found.allowed == pytest.approx(1e-2 * change)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 1e6 + 1e-9 * x.sum(-1),  # large at both ends
        lambda x: 1e6 * torch.sin(x).sum(-1),  # at one alone
    ],
)
def test_what_rounding_hides_is_not_searched_for(function: Callable[[Tensor], Tensor]) -> None:
    found = of(function, tolerance=1e-18)
    assert found.converged
    assert found.evaluations < 100
