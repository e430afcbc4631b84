"""The op under the lens: its trace tells the truth."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array, BackwardSteps, Cache, ForwardSteps
from models.encoder import EncoderLayer
from models.gradients.layer_norm_check import DISTRIBUTIONS
from models.gradients.layer_norm_implementations import Operands
from models.gradients.layer_norm_trace import Step, norm_names, rows_of_layer, trace
from models.gradients.twin import Row, Twin
from tests.models.gradients.toys import D, N, by_torch, random_case, toy_twin

BACKWARD = BackwardSteps._fields


def steps_of(operands: Operands, dout: Array, row: int | None = None) -> dict[str, Step]:
    return {step.name: step for step in trace(operands, dout, row=row).steps}


@pytest.mark.parametrize("residual", [True, False])
def test_a_trace_has_every_step_with_the_values_that_torch_finds(residual: bool) -> None:
    operands, dout = random_case(residual)
    steps = steps_of(operands, dout, row=2)
    assert tuple(steps) == (*ForwardSteps._fields, *BACKWARD)
    for name, wanted in by_torch(operands, dout).items():
        step = steps[name]
        assert step.phase == ("forward" if name == "out" else "backward")
        assert step.shape == wanted.shape
        assert step.minimum == pytest.approx(wanted.min(), rel=1e-4, abs=1e-6)
        assert step.maximum == pytest.approx(wanted.max(), rel=1e-4, abs=1e-6)
        assert step.mean == pytest.approx(wanted.mean(), rel=1e-4, abs=1e-6)
        assert step.rms == pytest.approx(np.sqrt((wanted**2).mean()), rel=1e-4)
        assert (step.nan, step.inf, step.first_nonfinite) == (0, 0, None)
        assert step.values is not None
        assert step.values.dtype == np.float32
        row = wanted[2] if wanted.ndim == 2 else wanted
        np.testing.assert_allclose(step.values, row, rtol=1e-4, atol=1e-5)
    assert steps["var"].shape == (N, 1)
    assert all(step.values is None for step in trace(operands, dout).steps)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_gradient_of_a_trace_agrees_with_autograd_and_slopes(distribution: str) -> None:
    operands, dout = random_case()
    rng = np.random.default_rng(1)
    x, residual = (DISTRIBUTIONS[distribution](rng, (N, D)) for _ in range(2))
    for step in trace(operands._replace(x=x, residual=residual), dout).steps:
        if step.phase == "forward":
            assert step.error_autograd is None
        else:
            assert step.error_autograd is not None, step.name
            assert step.error_autograd < 1e-8, step.name
        if step.name in ("dx", "dgamma", "dbeta"):
            assert step.error_finite_difference is not None
            assert step.error_finite_difference < 1e-4, step.name
        else:
            assert step.error_finite_difference is None


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_step_is_seen_by_autograd(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = reference.backward_steps

    def wrong(dout: Array, cache: Cache) -> BackwardSteps:
        steps = right(dout, cache)
        return steps._replace(**{name: getattr(steps, name) * 1.001})

    monkeypatch.setattr(reference, "backward_steps", wrong)
    steps = steps_of(*random_case())
    for step in steps.values():
        if step.phase == "backward":
            assert step.error_autograd is not None
            assert (step.error_autograd > 1e-4) == (step.name == name), step.name
    slopes = {n: steps[n].error_finite_difference or 0 for n in ("dx", "dgamma", "dbeta")}
    assert {n for n, error in slopes.items() if error > 1e-5} == {name} & set(slopes)


def test_the_error_of_a_step_is_that_of_float32_against_float64_on_the_same_numbers() -> None:
    operands, dout = random_case()
    wanted = by_torch(*random_case(dtype=np.float32))
    steps = [steps_of(operands, dout, row=i) for i in range(N)]
    operands, dout = random_case(dtype=np.float32)
    assert operands.residual is not None
    total = operands.x + operands.residual
    ivar = 1 / np.sqrt(total.var(-1, keepdims=True) + operands.eps)
    scales = {"out": wanted["out"], "dx": dout * operands.gamma * ivar}
    for name, scale in scales.items():
        found = np.array([step[name].values for step in steps], np.float64)
        error = np.abs(found - wanted[name]).max() / np.abs(scale).max()
        assert 0 < error < 1e-5
        assert steps[0][name].error_float64 == pytest.approx(error, rel=1e-3)


def test_nan_and_infinity_are_counted_and_located() -> None:
    operands, dout = random_case()
    operands.x[2, 5] = np.nan
    dout[3, 7] = np.inf
    steps = steps_of(operands, dout)
    assert (steps["x"].nan, steps["x"].first_nonfinite) == (1, (2, 5))
    assert (steps["mean"].nan, steps["mean"].first_nonfinite) == (1, (2, 0))
    assert (steps["out"].nan, steps["out"].first_nonfinite) == (D, (2, 0))
    assert (steps["dbeta"].inf, steps["dbeta"].nan) == (1, 0)
    assert steps["dbeta"].first_nonfinite == (7,)
    assert steps["dx"].nan == 2 * D
    assert np.isfinite([steps["out"].rms, steps["out"].error_float64]).all()
    # What is left of the rows is right.
    assert all(i.passes and i.row not in (2, 3) for i in trace(operands, dout).invariants[2:])


def test_what_is_too_large_for_float32_alone_has_an_infinite_error() -> None:
    operands, dout = random_case()
    steps = steps_of(operands._replace(x=operands.x * 1e25), dout)
    assert (steps["sq"].inf, steps["sq"].error_float64) == (N * D, np.inf)
    assert steps["x"].error_float64 < 1e-6
    all_gone = steps_of(operands._replace(x=operands.x * 1e60), dout)["x"]
    assert all_gone.inf == N * D
    assert np.isnan(all_gone.rms)


def test_a_gradient_that_vanishes_is_no_large_error() -> None:
    operands, dout = random_case()
    plain = operands._replace(gamma=np.ones(D))
    dx = steps_of(plain, np.ones_like(dout))["dx"]
    assert dx.maximum < 1e-6
    assert dx.error_float64 < 1e-6
    assert dx.error_autograd is not None
    assert dx.error_autograd < 1e-12
    assert dx.error_finite_difference is not None
    assert dx.error_finite_difference < 1e-6


def test_a_gradient_or_a_row_that_does_not_fit_is_refused() -> None:
    operands, dout = random_case()
    with pytest.raises(ValueError, match=r"dout is \(3, 16\) where x is \(4, 16\)"):
        trace(operands, dout[1:])
    for row in (-1, N):
        with pytest.raises(ValueError, match=rf"there is no row {row}; there are 4"):
            trace(operands, dout, row=row)


# The norms of a model.


def float32_twin(norm_first: bool) -> Twin:
    twin = toy_twin(norm_first=norm_first, layer_norm_eps=1e-3)
    twin.model.float()
    return twin


def applied(twin: Twin, name: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows of a norm, their residual, and what the norm makes of them."""
    operands = rows_of_layer(twin, ROW, name)
    x, gamma, beta = map(torch.tensor, (operands.x, operands.gamma, operands.beta))
    residual = None if operands.residual is None else torch.tensor(operands.residual)
    total = x if residual is None else x + residual
    return x, residual, F.layer_norm(total, gamma.shape, gamma, beta, operands.eps)


ROW = Row([3, 7, 11, 4, 9], unpooled=1)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_rows_of_every_norm_are_those_of_the_model(norm_first: bool) -> None:
    twin = float32_twin(norm_first)
    last = ("final_norm",) if norm_first else ()
    layers = ("layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2")
    assert norm_names(twin) == ("embeddings", *layers, *last)
    torch.testing.assert_close(applied(twin, "embeddings")[2], twin.tokens("embeddings", ROW))
    for index, (before, after) in enumerate((("embeddings", "layers.0"), ("layers.0", "output"))):
        layer = twin.model.encoder.layers[index]
        assert isinstance(layer, EncoderLayer)
        into, out = twin.tokens(before, ROW), twin.tokens(after, ROW)
        x1, residual1, normed1 = applied(twin, f"layers.{index}.norm1")
        x2, residual2, normed2 = applied(twin, f"layers.{index}.norm2")
        fed = layer.feed_forward(normed2 if norm_first else normed1)
        if norm_first:
            assert residual1 is None
            torch.testing.assert_close(x1, into)
            torch.testing.assert_close(residual2, into)
            total = x2 + into + fed
            norm = twin.model.encoder.final_norm
            assert norm is not None
            torch.testing.assert_close(norm(total) if after == "output" else total, out)
        else:
            torch.testing.assert_close(residual1, into)
            torch.testing.assert_close(residual2, normed1)
            torch.testing.assert_close(x2, fed)
            torch.testing.assert_close(normed2, out)
    if norm_first:
        torch.testing.assert_close(applied(twin, "final_norm")[2], twin.tokens("output", ROW))


def test_the_rows_of_a_norm_can_be_traced() -> None:
    twin = float32_twin(norm_first=False)
    operands = rows_of_layer(twin, ROW, "layers.1.norm2")
    assert operands.eps == 1e-3
    operands.gamma[:] = 1.0  # which leaves the model as it was
    assert rows_of_layer(twin, ROW, "layers.1.norm2").gamma[0] != 1.0
    found = trace(operands, np.ones((5, 16)), row=4)
    assert all(invariant.passes for invariant in found.invariants)
    assert all(step.nan == step.inf == 0 for step in found.steps)


def test_a_norm_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no norm 'layers\.2\.norm1'; there are embed"):
        rows_of_layer(float32_twin(norm_first=False), ROW, "layers.2.norm1")
