"""The op under the lens: its trace tells the truth, and the judge catches what is wrong."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array, BackwardSteps, Cache, ForwardSteps
from models.encoder import Encoder, EncoderConfig, EncoderLayer
from models.gradients import layer_norm_check
from models.gradients.layer_norm_check import (
    DISTRIBUTIONS,
    EPS,
    IMPLEMENTATIONS,
    MAX_ELEMENTS,
    Operands,
    Outcome,
    Verdict,
    gradcheck,
    judge,
)
from models.gradients.layer_norm_trace import Step, norm_names, rows_of_layer, trace
from models.gradients.twin import Row, Twin
from models.sentence_encoder import SentenceEncoder

N, D = 4, 16
BACKWARD = BackwardSteps._fields


def random_case(residual: bool = True, dtype: type = np.float64) -> tuple[Operands, Array]:
    rng = np.random.default_rng(0)
    x, other, dout = rng.normal(size=(3, N, D)).astype(dtype)
    gamma, beta = rng.normal(size=(2, D)).astype(dtype)
    return Operands(x, other if residual else None, gamma, beta, EPS), dout


def by_torch(operands: Operands, dout: Array) -> dict[str, Array]:
    """The output and its gradients by torch, in float64."""
    x, residual, gamma, beta, eps = operands
    rows = x.astype(np.float64) + (0 if residual is None else residual.astype(np.float64))
    leaves = [torch.tensor(a, dtype=torch.float64).requires_grad_() for a in (rows, gamma, beta)]
    out = F.layer_norm(leaves[0], (x.shape[-1],), leaves[1], leaves[2], eps)
    found = torch.autograd.grad(out, leaves, torch.tensor(dout, dtype=torch.float64))
    gradients = dict(zip(("dx", "dgamma", "dbeta"), (g.numpy() for g in found), strict=True))
    return {"out": out.detach().numpy(), **gradients}


def steps_of(operands: Operands, dout: Array, row: int | None = None) -> dict[str, Step]:
    return {step.name: step for step in trace(operands, dout, row=row).steps}


def verdict(verdicts: tuple[Verdict, ...], implementation: str, phase: str) -> Verdict:
    [found] = [v for v in verdicts if (v.implementation, v.phase) == (implementation, phase)]
    return found


# The trace.


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
    ivar = 1 / np.sqrt(norm(operands)[2] + EPS)
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


# Invariants.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (N, D), (2, 384), (1, MAX_ELEMENTS)])
def test_what_is_right_passes_on_every_distribution(
    distribution: str, dtype: str, shape: tuple[int, int]
) -> None:
    found = gradcheck(shape, distribution, dtype, seed=3)
    assert found.passes
    ran = [v for v in found.verdicts if v.passes is not None]
    assert {v.implementation for v in ran} >= {"reference", "aten"}
    for v in ran:
        assert v.passes
        assert len(v.invariants) == (2 if v.phase == "forward" else 3)
        values = [c.value for c in v.comparisons if c.against == "float64"]
        backward = ["dbeta", "dgamma", "dresidual", "dx"]
        assert sorted(values) == (["out"] if v.phase == "forward" else backward)


def test_only_float64_is_held_against_finite_differences() -> None:
    for dtype, wanted in (("float32", []), ("float64", ["dx", "dgamma", "dbeta"])):
        backward = verdict(gradcheck((N, D), dtype=dtype).verdicts, "aten", "backward")
        slopes = [c.value for c in backward.comparisons if c.against == "finite differences"]
        assert slopes == wanted


# Mutations: each is an implementation that is wrong in one way.


def norm(operands: Operands) -> tuple[Array, Array, Array]:
    """The sum, its centred rows, and their biased variance."""
    total = operands.x if operands.residual is None else operands.x + operands.residual
    centred = total - total.mean(-1, keepdims=True)
    return total, centred, (centred**2).mean(-1, keepdims=True)


def forward_of(operands: Operands, ivar: Array) -> Array:
    out: Array = operands.gamma * norm(operands)[1] * ivar + operands.beta
    return out


def biased(operands: Operands) -> Array:
    return forward_of(operands, 1 / np.sqrt(norm(operands)[2] + operands.eps))


def unbiased(operands: Operands) -> Array:
    var = norm(operands)[2] * D / (D - 1)
    return forward_of(operands, 1 / np.sqrt(var + operands.eps))


def eps_outside(operands: Operands) -> Array:
    return forward_of(operands, 1 / (np.sqrt(norm(operands)[2]) + operands.eps))


def swapped(operands: Operands) -> Array:
    return biased(operands._replace(gamma=operands.beta, beta=operands.gamma))


def of_squares(operands: Operands) -> Array:
    total, _, _ = norm(operands)
    var = (total**2).mean(-1, keepdims=True) - total.mean(-1, keepdims=True) ** 2
    return forward_of(operands, 1 / np.sqrt(var + operands.eps))


def backward_of(
    operands: Operands, dout: Array, ivar: Array, mean: float = 1.0, along: float = 1.0
) -> dict[str, Array]:
    xhat = norm(operands)[1] * ivar
    dxhat = dout * operands.gamma
    terms = mean * dxhat.mean(-1, keepdims=True)
    terms = terms + along * xhat * (dxhat * xhat).mean(-1, keepdims=True)
    dx = ivar * (dxhat - terms)
    return {"dx": dx, "dresidual": dx, "dgamma": (dout * xhat).sum(0), "dbeta": dout.sum(0)}


def ivar_of(operands: Operands) -> Array:
    ivar: Array = 1 / np.sqrt(norm(operands)[2] + operands.eps)
    return ivar


def swapped_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands._replace(gamma=operands.beta), dout, ivar_of(operands))


def swapped_gradients(operands: Operands, dout: Array) -> dict[str, Array]:
    right = backward_of(operands, dout, ivar_of(operands))
    return {**right, "dgamma": right["dbeta"], "dbeta": right["dgamma"]}


def unbiased_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    var = norm(operands)[2] * D / (D - 1)
    return backward_of(operands, dout, 1 / np.sqrt(var + operands.eps))


def eps_outside_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, 1 / (np.sqrt(norm(operands)[2]) + operands.eps))


def right_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands))


def without_dmean(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands), mean=0.0)


def detached_ivar(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands), along=0.0)


def half_of_the_residual(operands: Operands, dout: Array) -> dict[str, Array]:
    right = right_backward(operands, dout)
    return {**right, "dresidual": right["dx"] / 2}


def judged(
    monkeypatch: pytest.MonkeyPatch,
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    distribution: str,
    dtype: str,
) -> dict[str, Verdict]:
    def mutant(operands: Operands, dout: Array) -> Outcome:
        return Outcome(forward(operands), backward(operands, dout))

    monkeypatch.setitem(IMPLEMENTATIONS, "mutant", mutant)
    found = gradcheck((N, D), distribution, dtype, implementations=["mutant"])
    assert found.passes == all(v.passes for v in found.verdicts)
    return {v.phase: v for v in found.verdicts}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_plain_two_pass_implementation_passes(
    monkeypatch: pytest.MonkeyPatch, distribution: str, dtype: str
) -> None:
    halves = judged(monkeypatch, biased, right_backward, distribution, dtype)
    assert halves["forward"].passes
    assert halves["backward"].passes


@pytest.mark.parametrize(
    ("wrong", "distribution", "dtype"),
    [
        (unbiased, "normal", "float32"),
        (unbiased, "normal", "float64"),
        (unbiased, "large_mean", "float64"),
        (unbiased, "huge", "float32"),
        (eps_outside, "normal", "float64"),
        (eps_outside, "tiny_var", "float32"),
        (swapped, "normal", "float32"),
        (swapped, "constant_row", "float32"),
        (swapped, "large_mean", "float64"),
        (of_squares, "large_mean", "float32"),
        (of_squares, "large_mean", "float64"),
    ],
)
def test_a_wrong_forward_pass_is_blamed_alone(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[Operands], Array],
    distribution: str,
    dtype: str,
) -> None:
    halves = judged(monkeypatch, wrong, right_backward, distribution, dtype)
    assert halves["forward"].passes is False
    [out] = halves["forward"].comparisons
    assert out.share_of_bound > 1
    assert halves["backward"].passes


@pytest.mark.parametrize(
    ("wrong", "distribution", "dtype", "guilty"),
    [
        (without_dmean, "normal", "float32", {"dx", "dresidual"}),
        (without_dmean, "normal", "float64", {"dx", "dresidual"}),
        (without_dmean, "constant_row", "float32", {"dx", "dresidual"}),
        (without_dmean, "large_mean", "float32", {"dx", "dresidual"}),
        (detached_ivar, "normal", "float32", {"dx", "dresidual"}),
        (detached_ivar, "normal", "float64", {"dx", "dresidual"}),
        (detached_ivar, "large_mean", "float32", {"dx", "dresidual"}),
        (detached_ivar, "huge", "float32", {"dx", "dresidual"}),
        (unbiased_backward, "normal", "float32", {"dx", "dresidual", "dgamma"}),
        (eps_outside_backward, "constant_row", "float32", {"dx", "dresidual"}),
        (eps_outside_backward, "normal", "float64", {"dx", "dresidual", "dgamma"}),
        (swapped_backward, "normal", "float32", {"dx", "dresidual"}),
        (swapped_gradients, "normal", "float32", {"dgamma", "dbeta"}),
        (half_of_the_residual, "normal", "float32", {"dresidual"}),
    ],
)
def test_a_wrong_backward_pass_is_blamed_alone(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[Operands, Array], dict[str, Array]],
    distribution: str,
    dtype: str,
    guilty: set[str],
) -> None:
    halves = judged(monkeypatch, biased, wrong, distribution, dtype)
    assert halves["forward"].passes
    assert halves["backward"].passes is False
    failed = [c for c in halves["backward"].comparisons if not c.passes]
    assert {c.value for c in failed if c.against == "float64"} == guilty
    if dtype == "float64":
        slopes = {c.value for c in failed if c.against == "finite differences"}
        assert slopes == guilty - {"dresidual"}


@pytest.mark.parametrize(
    ("forward", "backward", "broken"),
    [
        (biased, right_backward, set()),
        (lambda o: biased(o) + 1e-3, right_backward, {"mean(xhat) = 0"}),
        (unbiased, right_backward, {"mean(xhat^2) = var / (var + eps)"}),
        (biased, without_dmean, {"sum(dx) = 0"}),
        (biased, detached_ivar, {"sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"}),
        (biased, half_of_the_residual, {"dx = dresidual"}),
    ],
)
def test_each_invariant_is_broken_by_the_fault_that_it_is_there_for(
    monkeypatch: pytest.MonkeyPatch,
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    broken: set[str],
) -> None:
    halves = judged(monkeypatch, forward, backward, "normal", "float32")
    found = {i.name for v in halves.values() for i in v.invariants if not i.passes}
    assert broken <= found
    assert bool(broken) == bool(found)


def test_a_broken_invariant_fails_its_half_even_where_values_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_gamma_wrong(operands: Operands, dout: Array) -> dict[str, Array]:
        plain = bool((operands.gamma == 1).all())
        return (half_of_the_residual if plain else right_backward)(operands, dout)

    halves = judged(monkeypatch, biased, without_gamma_wrong, "normal", "float32")
    assert halves["forward"].passes
    assert all(c.passes for c in halves["backward"].comparisons)
    assert halves["backward"].passes is False


def test_slopes_see_an_error_of_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(operands: Operands, dout: Array) -> dict[str, Array]:
        return {n: g * (1 + 1e-6) for n, g in right_backward(operands, dout).items()}

    backward = judged(monkeypatch, biased, off, "normal", "float64")["backward"]
    slopes = [c for c in backward.comparisons if c.against == "finite differences"]
    assert [c.value for c in slopes if not c.passes] == ["dx", "dgamma", "dbeta"]


def test_distributions_are_what_they_are_named() -> None:
    rows = {n: draw(np.random.default_rng(0), (8, 64)) for n, draw in DISTRIBUTIONS.items()}
    spread = {name: x.std(-1) for name, x in rows.items()}
    assert (np.ptp(rows["constant_row"], axis=-1) == 0).all()
    assert (np.abs(rows["large_mean"]).mean(-1) > 1e4 * spread["large_mean"]).all()
    assert (spread["tiny_var"] ** 2 < EPS / 100).all()
    assert (spread["huge"] > 1e14).all()
    assert np.isfinite(rows["huge"].astype(np.float32) ** 2).all()
    assert len(np.unique(rows["constant_row"])) == 8


# Particular rows and implementations.


def large_row() -> tuple[Operands, Array]:
    row = np.array([[40000, 40001, 40002, 40003]], np.float32)
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    return Operands(row, np.zeros_like(row), gamma, beta, EPS), np.eye(1, 4, dtype=np.float32)


def test_a_row_of_large_neighbours_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for implementation in ("reference", "aten", "onnxruntime"):
        found = verdict(judge(*large_row()), implementation, "forward")
        [out] = found.comparisons
        assert found.passes, implementation
        assert out.max_abs < 1e-2

    def squares(operands: Operands, dout: Array) -> Outcome:
        return Outcome(of_squares(operands), right_backward(operands, dout))

    monkeypatch.setitem(IMPLEMENTATIONS, "squares", squares)
    assert verdict(judge(*large_row()), "squares", "forward").passes is False


def test_onnxruntime_runs_the_served_nodes_and_has_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for residual in (True, False):
        operands, dout = random_case(residual, np.float32)
        out, gradients = IMPLEMENTATIONS["onnxruntime"](operands, dout)
        assert not isinstance(out, str)
        np.testing.assert_allclose(out, by_torch(operands, dout)["out"], rtol=1e-4, atol=1e-5)
        assert gradients == "a served graph has no backward pass"
    verdicts = judge(operands, dout, ["onnxruntime"])
    assert [v.passes for v in verdicts] == [True, None]
    assert verdicts[1].not_run == gradients
    wide = gradcheck((N, D), dtype="float64", implementations=["onnxruntime"])
    assert [v.not_run for v in wide.verdicts] == ["a served graph computes in float32", gradients]
    assert wide.passes

    class Nans:
        def run(self, _names: list[str], feeds: dict[str, Array]) -> list[Array]:
            return [np.full_like(feeds["x"], np.nan)]

    monkeypatch.setattr(layer_norm_check, "onnxruntime_session", lambda *_, **__: Nans())
    [forward, _] = judge(*large_row(), ["onnxruntime"])
    assert forward.passes is False
    assert forward.comparisons[0].share_of_bound == np.inf


def test_triton_is_not_run_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = gradcheck((N, D), dtype="float32")
    assert found.passes
    for phase in ("forward", "backward"):
        half = verdict(found.verdicts, "triton", phase)
        assert half.passes is None
        assert half.not_run == "no CUDA device is here"
        assert not half.comparisons


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_triton_is_judged_on_its_device(distribution: str) -> None:
    for half in gradcheck((4, 384), distribution, "float32", implementations=["triton"]).verdicts:
        assert half.passes, half
    wide = gradcheck((4, 384), distribution, implementations=["triton"])
    assert {v.not_run for v in wide.verdicts} == {"ATen takes rows of this dtype and width"}


def test_a_nan_row_of_the_input_is_nobodys_fault_and_one_of_the_output_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operands, dout = random_case(dtype=np.float32)
    operands.x[1, 3] = np.nan
    found = judge(operands, dout, ["reference", "aten"])
    assert all(v.passes for v in found)

    def nans(operands: Operands, dout: Array) -> Outcome:
        out, gradients = IMPLEMENTATIONS["reference"](operands, dout)
        assert not isinstance(out, str)
        out[2, 0] = np.nan
        return Outcome(out, gradients)

    def zeros(operands: Operands, dout: Array) -> Outcome:
        out, gradients = IMPLEMENTATIONS["reference"](operands, dout)
        assert not isinstance(out, str)
        return Outcome(np.nan_to_num(out), gradients)

    for wrong, place in ((nans, (2, 0)), (zeros, (1, 0))):
        monkeypatch.setitem(IMPLEMENTATIONS, "wrong", wrong)
        [forward, backward] = judge(operands, dout, ["wrong"])
        assert (forward.passes, backward.passes) == (False, True)
        assert forward.comparisons[0].worst_index == place
        assert forward.comparisons[0].max_abs == np.inf
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", nans)
    [mean, _] = judge(operands, dout, ["wrong"])[0].invariants
    assert (mean.passes, mean.row) == (False, 2)


def test_an_error_is_located_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(operands: Operands, dout: Array) -> Outcome:
        out = by_torch(operands, dout)["out"].astype(np.float32)
        out[2, 9] += 0.5
        return Outcome(out, "nothing to say")

    monkeypatch.setitem(IMPLEMENTATIONS, "off", off)
    operands, dout = random_case(dtype=np.float32)
    [out] = verdict(judge(operands, dout, ["off"]), "off", "forward").comparisons
    assert out.worst_index == (2, 9)
    assert out.max_abs == pytest.approx(0.5, rel=1e-5)
    largest = np.float32(np.abs(by_torch(operands, dout)["out"]).max())
    assert out.ulp == pytest.approx(0.5 / np.spacing(largest), rel=1e-5)


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (64, 65)}, r"64 x 65 numbers; 1 to 4096 are taken"),
        ({"shape": (0, 4)}, r"0 x 4 numbers"),
        ({"shape": (-4, -4)}, r"-4 x -4 numbers"),
        ({"distribution": "cauchy"}, r"distribution 'cauchy' is not one of normal, "),
        ({"dtype": "float16"}, r"dtype 'float16' is not one of float32, float64"),
        ({"implementations": ["apex"]}, r"implementation 'apex' is not one of reference, "),
    ],
)
def test_gradcheck_refuses_what_it_does_not_know(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gradcheck(**{"shape": (N, D), **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros(D)}, r"x is \(16,\); \(N, D\) is needed"),
        ({"x": np.zeros((0, D))}, r"x is \(0, 16\)"),
        ({"residual": np.zeros((N, 1))}, r"residual is \(4, 1\) where x is \(4, 16\)"),
        ({"gamma": np.zeros(N)}, r"gamma is \(4,\) where x is \(4, 16\); \(16,\) is needed"),
        ({"beta": np.zeros((1, D))}, r"beta is \(1, 16\)"),
        ({"eps": -1e-5}, r"eps is -1e-05; a finite number, 0 or above, is needed"),
        ({"eps": float("nan")}, r"eps is nan"),
        ({"eps": float("inf")}, r"eps is inf"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    operands, dout = random_case()
    for call in (trace, judge):
        with pytest.raises(ValueError, match=message):
            call(operands._replace(**changes), dout)  # type: ignore[arg-type]


def test_a_gradient_or_a_row_that_does_not_fit_is_refused() -> None:
    operands, dout = random_case()
    with pytest.raises(ValueError, match=r"dout is \(3, 16\) where x is \(4, 16\)"):
        trace(operands, dout[1:])
    for row in (-1, N):
        with pytest.raises(ValueError, match=rf"there is no row {row}; there are 4"):
            trace(operands, dout, row=row)


# The norms of a model.


def random_twin(norm_first: bool) -> Twin:
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=30,
        d_model=8,
        num_layers=2,
        num_heads=2,
        dim_feedforward=12,
        max_positions=20,
        type_vocab_size=2,
        norm_first=norm_first,
        layer_norm_eps=1e-3,
    )
    model = SentenceEncoder(Encoder(config), ["mean"]).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return Twin(model, normalize=True)


def applied(twin: Twin, name: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows of a norm, their residual, and what the norm makes of them."""
    operands = rows_of_layer(twin, ROW, name)
    x, gamma, beta = map(torch.tensor, (operands.x, operands.gamma, operands.beta))
    residual = None if operands.residual is None else torch.tensor(operands.residual)
    total = x if residual is None else x + residual
    return x, residual, F.layer_norm(total, (8,), gamma, beta, operands.eps)


ROW = Row([3, 7, 11, 4, 9], unpooled=1)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_rows_of_every_norm_are_those_of_the_model(norm_first: bool) -> None:
    twin = random_twin(norm_first)
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
    twin = random_twin(norm_first=False)
    operands = rows_of_layer(twin, ROW, "layers.1.norm2")
    assert operands.eps == 1e-3
    operands.gamma[:] = 1.0  # which leaves the model as it was
    assert rows_of_layer(twin, ROW, "layers.1.norm2").gamma[0] != 1.0
    found = trace(operands, np.ones((5, 8)), row=4)
    assert all(invariant.passes for invariant in found.invariants)
    assert all(step.nan == step.inf == 0 for step in found.steps)


def test_a_norm_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no norm 'layers\.2\.norm1'; there are embed"):
        rows_of_layer(random_twin(norm_first=False), ROW, "layers.2.norm1")
