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
    """Return the evaluation of a function of rows `(S, D)` on a line; each element is a token."""

    def evaluate(alphas: Array) -> tuple[Array, Array]:
        alpha = torch.from_numpy(alphas)[:, None]
        values, gradients = value_and_gradient(function, baseline + alpha * (x - baseline))  # type: ignore[arg-type]
        return values.numpy()[:, None], (gradients * (x - baseline)).numpy()[:, :, None]

    return evaluate


def integral(function: object, *, dimensions: int = 6, tolerance: float = 1e-6) -> Integral:
    x = torch.randn(dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return integrate(line(function, x, torch.zeros_like(x)), tolerance, 1000, EPS)


def test_cubic_polynomial_is_exact_on_the_first_panel() -> None:
    result = integral(lambda x: (x**3).sum(-1))
    assert result.evaluations == 17
    x = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(result.scores[:, 0], (x**3).numpy(), rtol=1e-12)


def layer_norm_case(width: int) -> tuple[Evaluate, torch.Tensor, torch.Tensor]:
    """Return a scale-invariant case: a LayerNorm with BERT's epsilon on the line from zeros."""
    D = width
    draw = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, D, dtype=torch.float64, generator=draw)
    evaluate = line(
        lambda rows: F.layer_norm(rows, (D,), eps=1e-12) @ w, x, torch.zeros(D).double()
    )
    return evaluate, x, w


def test_layer_norm_from_zero_baseline_converges_unlike_fixed_quadrature() -> None:
    D = 384
    evaluate, x, w = layer_norm_case(D)
    truth = F.layer_norm(x, (D,), eps=1e-12) @ w
    nodes, weights = leggauss(50)
    fixed = np.tensordot(weights / 2, evaluate((nodes + 1) / 2)[1], axes=1).sum()
    assert abs(fixed - truth) > 0.9 * abs(truth)

    result = integrate(evaluate, tolerance=1e-4, max_evaluations=1000, rounding=EPS)
    assert result.completeness.converged
    assert result.evaluations < 600
    assert abs(result.scores.sum() - truth) <= 1e-4 * abs(truth)
    assert abs(result.delta.item()) <= result.error


def test_exhausted_budget_returns_an_unconverged_result() -> None:
    evaluate, _, _ = layer_norm_case(384)
    result = integrate(evaluate, tolerance=1e-4, max_evaluations=50, rounding=EPS)
    assert not result.completeness.converged
    assert result.evaluations == 47  # 17, and 30 for each halved panel


def test_evaluation_count_equals_the_points_evaluated() -> None:
    evaluate, _, _ = layer_norm_case(16)
    calls = []

    def counted(alphas: Array) -> tuple[Array, Array]:
        calls.append(len(alphas))
        return evaluate(alphas)

    result = integrate(counted, tolerance=1e-6, max_evaluations=200, rounding=EPS)
    assert result.evaluations == sum(calls)
    assert len(calls) > 3


def test_panel_errors_do_not_cancel_in_the_total_error() -> None:
    # The errors of the two halves have opposite signs, so a sum over the line would be zero.
    result = integral(lambda x: torch.cos(40 * x.sum(-1)), dimensions=1, tolerance=1e-3)
    assert result.error <= result.allowed
    assert abs(result.delta.item()) <= result.error + 1e-15


def test_path_runs_from_baseline_to_input_over_the_evaluated_points() -> None:
    evaluate, _, _ = layer_norm_case(16)
    result = integrate(evaluate, tolerance=1e-6, max_evaluations=400, rounding=EPS)
    alphas, values = result.path
    assert (alphas[0], alphas[-1]) == (0.0, 1.0)
    assert np.all(np.diff(alphas) > 0)
    np.testing.assert_allclose(values, evaluate(alphas)[0], rtol=1e-12)
    # The points of refined panels are no longer part of the quadrature.
    assert result.evaluations / 2 < len(alphas) <= result.evaluations
    assert result.value_baseline == values[0]
    assert result.value_input == values[-1]


def test_errors_of_tokens_that_cancel_in_their_sum_are_refined() -> None:
    """The slopes of two tokens have opposite peaks, and the function is constant."""

    def evaluate(alphas: Array) -> tuple[Array, Array]:
        peak = 1 / (1e-3 + (alphas - 0.3) ** 2)
        return np.ones((len(alphas), 1)), np.stack([peak, -peak], axis=-1)[:, :, None]

    result = integrate(evaluate, tolerance=0.01, max_evaluations=1000, rounding=EPS)
    scale = np.sqrt(1e-3)
    truth = (np.arctan(0.7 / scale) + np.arctan(0.3 / scale)) / scale
    np.testing.assert_allclose(result.scores[:, 0], [truth, -truth], rtol=0.01)
    assert result.completeness.converged
    assert result.score_allowed == pytest.approx(0.01 * truth, rel=0.01)
    limited = integrate(evaluate, tolerance=0.01, max_evaluations=17, rounding=EPS)
    assert (limited.error, limited.completeness.converged) == (0.0, False)
    assert abs(limited.scores[0, 0] - truth) <= limited.score_error


def test_several_functions_share_panels_and_each_is_complete() -> None:
    x = torch.tensor([0.5, -1.5], dtype=torch.float64)

    def evaluate(alphas: Array) -> tuple[Array, Array]:
        points = alphas[:, None] * x.numpy()  # (S, N)
        slopes = np.stack([np.cos(points), 2 * points], axis=-1) * x.numpy()[:, None]
        return np.stack([np.sin(points).sum(-1), (points**2).sum(-1)], axis=-1), slopes

    result = integrate(evaluate, 1e-9, 100, EPS)
    np.testing.assert_allclose(result.scores, np.stack([torch.sin(x), x**2], axis=-1), atol=1e-9)
    np.testing.assert_allclose(result.delta, 0, atol=1e-9)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constant_function_converges_on_the_first_panel(sign: float) -> None:
    result = integral(lambda x: sign + 0 * x.sum(-1))
    assert result.completeness.converged
    assert result.evaluations == 17


def test_tolerance_is_relative_to_the_change_in_value() -> None:
    result = integral(lambda x: 100 + x.sum(-1), tolerance=1e-2)
    change = abs(result.value_input - result.value_baseline).item()
    assert result.allowed == pytest.approx(1e-2 * change)


@pytest.mark.parametrize(
    "function",
    [lambda x: 1e6 + 1e-9 * x.sum(-1), lambda x: 1e6 * torch.sin(x).sum(-1)],
    ids=["large-at-both-ends", "large-at-one-end"],
)
def test_changes_below_rounding_error_are_not_refined(function: Callable[[Tensor], Tensor]) -> None:
    result = integral(function, tolerance=1e-18)
    assert result.completeness.converged
    assert result.evaluations < 1000 - 30
