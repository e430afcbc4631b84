"""The step-by-step reference, and evidence against wrong published formulas.

`test_exactness` compares its results in float32 with float64.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.add_layer_norm import add_layer_norm
from models.add_layer_norm.reference import (
    Array,
    BackwardSteps,
    Cache,
    ForwardSteps,
    backward,
    backward_steps,
    closed_form,
    forward,
    forward_steps,
    jacobian_form,
)

EPS = 1e-5
N, D = 5, 7
SHAPES = [(D,), (N, D), (2, 3, D), (4, 1), (3, 2)]


def inputs(*shape: int, dtype: type = np.float64, seed: int = 0) -> tuple[Array, ...]:
    """Return x, residual, gamma, beta and dout."""
    rng = np.random.default_rng(seed)
    sizes = [shape, shape, shape[-1:], shape[-1:], shape]
    return tuple(rng.normal(size=size).astype(dtype) for size in sizes)


def cache_of(*shape: int) -> tuple[Array, Cache]:
    """Return dout and the cache of a random forward pass."""
    x, residual, gamma, beta, dout = inputs(*shape)
    return dout, forward(x, gamma, beta, EPS, residual)[1]


def error(actual: Array, expected: Array) -> float:
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-12))


@pytest.mark.parametrize("shape", SHAPES)
def test_three_forms_of_dx_agree(shape: tuple[int, ...]) -> None:
    dout, cache = cache_of(*shape)
    dx, _, _ = backward(dout, cache)
    scale = max(float(np.abs(dx).max()), 1.0)
    np.testing.assert_allclose(closed_form(dout, cache), dx, rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(jacobian_form(dout, cache), dx, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("which", ["x", "gamma", "beta"])
def test_gradients_equal_finite_differences(which: str) -> None:
    x, residual, gamma, beta, dout = inputs(N, D)
    values = {"x": x, "gamma": gamma, "beta": beta}

    def loss(**changed: Array) -> float:
        arguments = {**values, **changed}
        out, _ = forward(arguments["x"], arguments["gamma"], arguments["beta"], EPS, residual)
        return float((out * dout).sum())

    _, cache = forward(x, gamma, beta, EPS, residual)
    gradient = dict(zip(("x", "gamma", "beta"), backward(dout, cache), strict=True))[which]
    step = 1e-5
    for index in np.ndindex(values[which].shape):
        moved = [values[which].copy(), values[which].copy()]
        moved[0][index] += step
        moved[1][index] -= step
        difference = (loss(**{which: moved[0]}) - loss(**{which: moved[1]})) / (2 * step)
        assert gradient[index] == pytest.approx(difference, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_torch_forward_and_backward(shape: tuple[int, ...]) -> None:
    x, residual, gamma, beta, dout = inputs(*shape)
    leaves = [torch.from_numpy(a.copy()).requires_grad_() for a in (x, residual, gamma, beta)]
    y = F.layer_norm(leaves[0] + leaves[1], shape[-1:], leaves[2], leaves[3], EPS)
    y.backward(torch.from_numpy(dout))
    out, cache = forward(x, gamma, beta, EPS, residual)
    dx, dgamma, dbeta = backward(dout, cache)
    for actual, expected in zip((out, dx, dx, dgamma, dbeta), (y, *leaves), strict=True):
        exact = expected.detach() if expected is y else expected.grad
        assert exact is not None
        np.testing.assert_allclose(actual, exact.numpy(), rtol=1e-9, atol=1e-11)


def test_every_step_has_its_documented_shape() -> None:
    x, residual, gamma, beta, dout = inputs(2, 3, D)
    _, cache = forward(x, gamma, beta, EPS, residual)
    row, wide, narrow = (2, 3, 1), (2, 3, D), (D,)
    by_name = {"mean", "var", "var_eps", "sqrtvar", "ivar", "divar", "dsqrtvar", "dvar", "dmu"}
    steps = forward_steps(x, gamma, beta, EPS, residual)._asdict()
    for name, value in {**steps, **backward_steps(dout, cache)._asdict()}.items():
        expected = narrow if name in ("dgamma", "dbeta") else row if name in by_name else wide
        assert value.shape == expected, name
    assert len(ForwardSteps._fields) == 1 + 10
    assert len(BackwardSteps._fields) == 12 + 1


def test_reference_satisfies_its_analytic_identities() -> None:
    dout, cache = cache_of(N, D)
    steps = backward_steps(dout, cache)
    zero = np.zeros((N, 1))
    np.testing.assert_allclose(cache.xhat.mean(-1, keepdims=True), zero, atol=1e-15)
    biased = cache.var / (cache.var + EPS)
    np.testing.assert_allclose((cache.xhat**2).mean(-1, keepdims=True), biased, rtol=1e-12)
    np.testing.assert_allclose(steps.dx.sum(-1, keepdims=True), zero, atol=1e-13)
    along = (steps.dx * cache.xhat).sum(-1, keepdims=True)
    left = cache.ivar * (steps.dxhat * cache.xhat).sum(-1, keepdims=True) * (1 - biased)
    np.testing.assert_allclose(along, left, rtol=1e-6, atol=1e-13)


def test_mismatched_shapes_raise_value_error() -> None:
    x, residual, gamma, beta, _ = inputs(N, D)
    with pytest.raises(ValueError, match=r"gamma is \(6,\)"):
        forward(x, gamma[1:], beta, EPS)
    with pytest.raises(ValueError, match=r"residual and x differ in shape: \(4, 7\), \(5, 7\)"):
        forward(x, gamma, beta, EPS, residual[1:])


# The tests below fail for the wrong published formulas listed in `reference`.


def test_dgamma_and_dbeta_are_summed_over_rows_not_features() -> None:
    # With as many rows as features the wrong axis gives the right shape.
    dout, cache = cache_of(D, D)
    _, dgamma, dbeta = backward(dout, cache)
    assert error((dout * cache.xhat).sum(-1), dgamma) > 0.5
    assert error(dout.sum(-1), dbeta) > 0.5


def test_dgamma_needs_xhat_rather_than_the_output() -> None:
    x, residual, gamma, beta, dout = inputs(N, D)
    out, cache = forward(x, gamma, beta, EPS, residual)
    _, dgamma, _ = backward(dout, cache)
    assert error((dout * out).sum(0), dgamma) > 0.5
    assert error(out.sum(0), dgamma) > 0.5


def test_dx_differs_from_the_sigmoid_derivative() -> None:
    x, residual, gamma, beta, dout = inputs(N, D)
    out, cache = forward(x, gamma, beta, EPS, residual)
    dx, _, _ = backward(dout, cache)
    sigmoid_form = gamma / cache.sqrtvar * (1 - 1 / D) * out * (1 - out)
    assert error(sigmoid_form, dx) > 0.5
    # The published formula depends on beta; the gradient does not.
    shifted, shifted_cache = forward(x, gamma, beta + 1, EPS, residual)
    np.testing.assert_allclose(backward(dout, shifted_cache)[0], dx, rtol=1e-12, atol=1e-14)
    assert error(gamma / cache.sqrtvar * (1 - 1 / D) * shifted * (1 - shifted), sigmoid_form) > 0.5


def test_jacobian_is_dense_and_its_sigma_includes_eps() -> None:
    dout, cache = cache_of(N, D)
    dx, _, _ = backward(dout, cache)
    diagonal = (dout * cache.gamma) * (D - 1 - cache.xhat**2) / (D * cache.sqrtvar)
    assert error(diagonal, dx) > 0.1
    large = 0.5
    x, residual, gamma, beta, dout = inputs(N, D)
    _, cache = forward(x, gamma, beta, large, residual)
    without = cache._replace(sqrtvar=np.sqrt(cache.var))
    assert error(jacobian_form(dout, without), backward(dout, cache)[0]) > 0.05


def test_gamma_scales_features_not_rows() -> None:
    # Equal rows have equal outputs for any gamma.
    x = np.tile(inputs(1, D)[0], (D, 1))
    gamma = np.arange(1.0, D + 1)
    out, cache = forward(x, gamma, np.zeros(D), EPS)
    np.testing.assert_array_equal(out, np.tile(out[:1], (D, 1)))
    assert error(gamma[:, None] * cache.xhat, out) > 0.5


def test_single_pass_variance_is_lost_in_float32() -> None:
    x = np.array([[40000, 40001, 40002, 40003]], np.float32)
    squares = (x**2).mean(-1) - x.mean(-1) ** 2
    assert squares[0] <= 0 or abs(squares[0] - 1.25) > 0.5
    _, cache = forward(x, np.ones(4, np.float32), np.zeros(4, np.float32), EPS)
    assert cache.var[0, 0] == 1.25
    actual = add_layer_norm(
        torch.from_numpy(x), torch.zeros(1, 4), torch.ones(4), torch.zeros(4), EPS
    )
    np.testing.assert_allclose(actual.numpy(), cache.xhat, rtol=1e-5)


def test_gradient_of_a_summed_output_is_zero() -> None:
    # With gamma of ones the sum of each output row is constant.
    x, residual, _, beta, _ = inputs(N, D)
    _, cache = forward(x, np.ones(D), beta, EPS, residual)
    dx, _, _ = backward(np.ones((N, D)), cache)
    np.testing.assert_allclose(dx, np.zeros((N, D)), atol=1e-14)


def test_norm_of_two_features_is_plus_and_minus_one() -> None:
    x = np.array([[3.0, 5.0], [-7.0, 2.0]])
    out, _ = forward(x, np.ones(2), np.zeros(2), 0.0)
    np.testing.assert_allclose(out, [[-1, 1], [-1, 1]], rtol=1e-14)


def run_module(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "models.add_layer_norm", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_command_prints_every_error_and_exits_zero() -> None:
    completed = run_module("--batch-size", "3", "--sequence-length", "4", "--embedding-dim", "32")
    assert completed.returncode == 0, completed.stderr
    assert f"torch {torch.__version__}, add + layer_norm of (3, 4, 32)" in completed.stdout
    triton = torch.cuda.is_available()
    assert completed.stdout.count("  pass") == (15 if triton else 10)
    assert ("not run: no CUDA device" in completed.stdout) != triton
    assert "FAIL" not in completed.stdout


def test_command_exits_one_on_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.add_layer_norm.__main__ import main

    def no_mean_term(dout: Array, cache: Cache) -> tuple[Array, Array, Array]:
        dx, dgamma, dbeta = backward(dout, cache)
        return dx + 1e-3, dgamma, dbeta

    monkeypatch.setattr("models.add_layer_norm.reference.backward", no_mean_term)
    assert main(["--embedding-dim", "16"]) == 1
    with pytest.raises(SystemExit):
        main(["--embedding-dim", "1"])
