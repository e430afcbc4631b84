"""The trace of add + LayerNorm against torch, autograd and finite differences."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array, BackwardSteps, Cache, ForwardSteps
from models.gradients.inputs import Distribution, InputRow
from models.gradients.layer_norm_operands import DISTRIBUTIONS, Operands
from models.gradients.layer_norm_trace import norm_names, norm_operands, trace
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.layer_norm import NormStep
from models.network.layer import EncoderLayer
from tests.models.gradients.toys import LLAMA, D, N, by_torch, random_case, toy_model

BACKWARD = BackwardSteps._fields


def steps_of(operands: Operands, row: int | None = None) -> dict[str, NormStep]:
    return {step.name: step for step in trace(operands, row=row).steps}


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_trace_statistics_of_every_step_equal_torch(residual: bool, centred: bool) -> None:
    operands = random_case(residual, centred=centred)
    steps = steps_of(operands, row=2)
    assert tuple(steps) == (*ForwardSteps._fields, *BACKWARD)
    for name, expected in by_torch(operands).items():
        step = steps[name]
        assert step.phase == ("forward" if name == "out" else "backward")
        assert step.shape == expected.shape
        assert step.minimum == pytest.approx(expected.min(), rel=1e-4, abs=1e-6)
        assert step.maximum == pytest.approx(expected.max(), rel=1e-4, abs=1e-6)
        assert step.mean == pytest.approx(expected.mean(), rel=1e-4, abs=1e-6)
        assert step.rms == pytest.approx(np.sqrt((expected**2).mean()), rel=1e-4)
        assert (step.nan, step.inf, step.first_nonfinite) == (0, 0, None)
        assert step.values is not None
        assert step.values.dtype == np.float32
        row = expected[2] if expected.ndim == 2 else expected
        np.testing.assert_allclose(step.values, row, rtol=1e-4, atol=1e-5)
    assert steps["var"].shape == (N, 1)
    assert all(step.values is None for step in trace(operands).steps)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_trace_gradients_agree_with_autograd_and_finite_differences(
    distribution: Distribution, centred: bool
) -> None:
    operands = random_case(centred=centred)
    rng = np.random.default_rng(1)
    x, residual = (DISTRIBUTIONS[distribution](rng, (N, D)) for _ in range(2))
    for step in trace(operands._replace(x=x, residual=residual)).steps:
        if step.phase == "forward":
            assert step.error_autograd is None
        else:
            assert step.error_autograd is not None, step.name
            assert step.error_autograd < 1e-8, step.name
        if step.name in ("dx", "dgamma") or (step.name == "dbeta" and centred):
            assert step.error_finite_difference is not None
            assert step.error_finite_difference < 1e-4, step.name
        else:
            assert step.error_finite_difference is None


@pytest.mark.parametrize("name", BACKWARD)
def test_wrong_backward_step_is_detected_by_autograd(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    correct = reference.backward_steps

    def wrong(dout: Array, cache: Cache) -> BackwardSteps:
        steps = correct(dout, cache)
        return steps._replace(**{name: getattr(steps, name) * 1.001})

    monkeypatch.setattr(reference, "backward_steps", wrong)
    steps = steps_of(random_case())
    for step in steps.values():
        if step.phase == "backward":
            assert step.error_autograd is not None
            assert (step.error_autograd > 1e-4) == (step.name == name), step.name
    differences = {n: steps[n].error_finite_difference or 0 for n in ("dx", "dgamma", "dbeta")}
    assert {n for n, error in differences.items() if error > 1e-5} == {name} & set(differences)


def test_step_error_is_the_float32_deviation_from_float64() -> None:
    operands = random_case()
    expected = by_torch(random_case(dtype=np.float32))
    steps = [steps_of(operands, row=i) for i in range(N)]
    operands = random_case(dtype=np.float32)
    assert operands.residual is not None
    total = operands.x + operands.residual
    ivar = 1 / np.sqrt(total.var(-1, keepdims=True) + operands.eps)
    scales = {"out": expected["out"], "dx": operands.dout * operands.gamma * ivar}
    for name, scale in scales.items():
        actual = np.array([step[name].values for step in steps], np.float64)
        error = np.abs(actual - expected[name]).max() / np.abs(scale).max()
        assert 0 < error < 1e-5
        assert steps[0][name].error_float64 == pytest.approx(error, rel=1e-3)


def test_nan_and_infinity_are_counted_and_located() -> None:
    operands = random_case()
    operands.x[2, 5] = np.nan
    operands.dout[3, 7] = np.inf
    steps = steps_of(operands)
    assert (steps["x"].nan, steps["x"].first_nonfinite) == (1, (2, 5))
    assert (steps["mean"].nan, steps["mean"].first_nonfinite) == (1, (2, 0))
    assert (steps["out"].nan, steps["out"].first_nonfinite) == (D, (2, 0))
    assert (steps["dbeta"].inf, steps["dbeta"].nan) == (1, 0)
    assert steps["dbeta"].first_nonfinite == (7,)
    assert steps["dx"].nan == 2 * D
    assert np.isfinite([steps["out"].rms, steps["out"].error_float64]).all()
    # The finite rows still pass.
    assert all(i.passes and i.row not in (2, 3) for i in trace(operands).invariants[2:])


def test_float32_overflow_is_reported_as_infinite_error() -> None:
    operands = random_case()
    steps = steps_of(operands._replace(x=operands.x * 1e25))
    assert (steps["sq"].inf, steps["sq"].error_float64) == (N * D, np.inf)
    assert steps["x"].error_float64 < 1e-6
    overflowed = steps_of(operands._replace(x=operands.x * 1e60))["x"]
    assert overflowed.inf == N * D
    assert np.isnan(overflowed.rms)


def test_zero_gradient_has_a_small_error() -> None:
    operands = random_case()
    unit_gamma = operands._replace(gamma=np.ones(D), dout=np.ones((N, D)))
    dx = steps_of(unit_gamma)["dx"]
    assert dx.maximum < 1e-6
    assert dx.error_float64 < 1e-6
    assert dx.error_autograd is not None
    assert dx.error_autograd < 1e-12
    assert dx.error_finite_difference is not None
    assert dx.error_finite_difference < 1e-6


def test_mismatched_gradient_or_row_raises_value_error() -> None:
    operands = random_case()
    with pytest.raises(ValueError, match=r"dout is \(3, 16\); for x of shape \(4, 16\)"):
        trace(operands._replace(dout=operands.dout[1:]))
    for row in (-1, N):
        with pytest.raises(ValueError, match=rf"row is {row}; it must be 0 to 3"):
            trace(operands, row=row)


# The norms of a model.


def float32_model(norm_first: bool) -> ReferenceModel:
    model = toy_model(norm_first=norm_first, norm_eps=1e-3)
    model.network.float()
    return model


def applied(model: ReferenceModel, name: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the rows of a norm, their residual and the normalised rows."""
    operands = norm_operands(model, ROW, name)
    x, gamma, beta = map(torch.tensor, (operands.x, operands.gamma, operands.beta))
    residual = None if operands.residual is None else torch.tensor(operands.residual)
    total = x if residual is None else x + residual
    return x, residual, F.layer_norm(total, gamma.shape, gamma, beta, operands.eps)


ROW = InputRow([3, 7, 11, 4, 9], prompt_tokens=1)


@pytest.mark.parametrize("norm_first", [False, True])
def test_norm_operands_equal_the_activations_of_the_model(norm_first: bool) -> None:
    model = float32_model(norm_first)
    last = ("final_norm",) if norm_first else ()
    layers = ("layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2")
    assert norm_names(model) == ("embeddings.norm", *layers, *last)
    torch.testing.assert_close(
        applied(model, "embeddings.norm")[2], model.tokens("embeddings", ROW)
    )
    for index, (before, after) in enumerate((("embeddings", "layers.0"), ("layers.0", "output"))):
        layer = model.network.encoder.layers[index]
        assert isinstance(layer, EncoderLayer)
        into, out = model.tokens(before, ROW), model.tokens(after, ROW)
        x1, residual1, normed1 = applied(model, f"layers.{index}.norm1")
        x2, residual2, normed2 = applied(model, f"layers.{index}.norm2")
        fed = layer.linear2(layer.activation(layer.linear1(normed2 if norm_first else normed1)))
        if norm_first:
            assert residual1 is None
            torch.testing.assert_close(x1, into)
            torch.testing.assert_close(residual2, into)
            total = x2 + into + fed
            norm = model.network.encoder.final_norm
            assert norm is not None
            torch.testing.assert_close(norm(total) if after == "output" else total, out)
        else:
            torch.testing.assert_close(residual1, into)
            torch.testing.assert_close(residual2, normed1)
            torch.testing.assert_close(x2, fed)
            torch.testing.assert_close(normed2, out)
    if norm_first:
        torch.testing.assert_close(applied(model, "final_norm")[2], model.tokens("output", ROW))


def test_norm_operands_can_be_traced_without_changing_the_model() -> None:
    model = float32_model(norm_first=False)
    operands = norm_operands(model, ROW, "layers.1.norm2")
    assert operands.eps == 1e-3
    operands.gamma[:] = 1.0  # a copy: the model keeps its own
    assert norm_operands(model, ROW, "layers.1.norm2").gamma[0] != 1.0
    result = trace(operands, row=4)
    assert all(invariant.passes for invariant in result.invariants)
    assert all(step.nan == step.inf == 0 for step in result.steps)


def test_rms_norms_of_a_model_equal_its_activations() -> None:
    model = toy_model(**LLAMA)
    model.network.float()
    parts = ("norm1", "branch_norm1", "norm2", "branch_norm2")
    layers = [f"layers.{i}.{part}" for i in range(2) for part in parts]
    assert norm_names(model) == (*layers, "final_norm")
    operands = norm_operands(model, ROW, "final_norm")
    assert not operands.centred
    normed = F.rms_norm(torch.tensor(operands.x), (16,), torch.tensor(operands.gamma), operands.eps)
    torch.testing.assert_close(normed, model.tokens("output", ROW))
    result = trace(norm_operands(model, ROW, "layers.1.norm2"), row=4)
    assert len(result.invariants) == 3
    assert all(invariant.passes for invariant in result.invariants)


def test_unknown_norm_name_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"unknown norm 'layers\.2\.norm1'; norms: embed"):
        norm_operands(float32_model(norm_first=False), ROW, "layers.2.norm1")
