"""The judge of add + LayerNorm catches what is wrong, and nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from models.add_layer_norm.reference import Array
from models.gradients import layer_norm_implementations
from models.gradients.layer_norm_check import (
    DISTRIBUTIONS,
    EPS,
    MAX_ELEMENTS,
    Verdict,
    draw,
    judge,
    rounded_to,
)
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, Operands, Outcome
from models.gradients.layer_norm_trace import trace
from tests.models.gradients.toys import D, N, by_torch, random_case


def drawn(
    distribution: str = "normal",
    dtype: str = "float64",
    shape: tuple[int, int] = (N, D),
    seed: int = 0,
) -> tuple[Operands, Array]:
    return rounded_to(*draw(shape, distribution, seed), np.dtype(dtype).type)


def verdict(verdicts: tuple[Verdict, ...], implementation: str, phase: str) -> Verdict:
    [found] = [v for v in verdicts if (v.implementation, v.phase) == (implementation, phase)]
    return found


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (N, D), (2, 384), (1, MAX_ELEMENTS)])
def test_what_is_right_passes_on_every_distribution(
    distribution: str, dtype: str, shape: tuple[int, int]
) -> None:
    ran = [v for v in judge(*drawn(distribution, dtype, shape, seed=3)) if v.passes is not None]
    assert {v.implementation for v in ran} >= {"reference", "aten"}
    for v in ran:
        assert v.passes
        assert len(v.invariants) == (2 if v.phase == "forward" else 3)
        values = [c.value for c in v.comparisons if c.against == "float64"]
        backward = ["dbeta", "dgamma", "dresidual", "dx"]
        assert sorted(values) == (["out"] if v.phase == "forward" else backward)


def test_only_float64_is_held_against_finite_differences() -> None:
    for dtype, wanted in (("float32", []), ("float64", ["dx", "dgamma", "dbeta"])):
        backward = verdict(judge(*drawn(dtype=dtype)), "aten", "backward")
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
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    distribution: str,
    dtype: str,
) -> dict[str, Verdict]:
    def mutant(operands: Operands, dout: Array) -> Outcome:
        return Outcome(forward(operands), backward(operands, dout))

    found = judge(*drawn(distribution, dtype), {"mutant": mutant})
    return {v.phase: v for v in found}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_plain_two_pass_implementation_passes(distribution: str, dtype: str) -> None:
    halves = judged(biased, right_backward, distribution, dtype)
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
    wrong: Callable[[Operands], Array],
    distribution: str,
    dtype: str,
) -> None:
    halves = judged(wrong, right_backward, distribution, dtype)
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
    wrong: Callable[[Operands, Array], dict[str, Array]],
    distribution: str,
    dtype: str,
    guilty: set[str],
) -> None:
    halves = judged(biased, wrong, distribution, dtype)
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
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    broken: set[str],
) -> None:
    halves = judged(forward, backward, "normal", "float32")
    found = {i.name for v in halves.values() for i in v.invariants if not i.passes}
    assert broken <= found
    assert bool(broken) == bool(found)


def test_a_broken_invariant_fails_its_half_even_where_values_are_right() -> None:
    def without_gamma_wrong(operands: Operands, dout: Array) -> dict[str, Array]:
        plain = bool((operands.gamma == 1).all())
        return (half_of_the_residual if plain else right_backward)(operands, dout)

    halves = judged(biased, without_gamma_wrong, "normal", "float32")
    assert halves["forward"].passes
    assert all(c.passes for c in halves["backward"].comparisons)
    assert halves["backward"].passes is False


def test_slopes_see_an_error_of_a_millionth() -> None:
    def off(operands: Operands, dout: Array) -> dict[str, Array]:
        return {n: g * (1 + 1e-6) for n, g in right_backward(operands, dout).items()}

    backward = judged(biased, off, "normal", "float64")["backward"]
    slopes = [c for c in backward.comparisons if c.against == "finite differences"]
    assert [c.value for c in slopes if not c.passes] == ["dx", "dgamma", "dbeta"]


def test_distributions_are_what_they_are_named() -> None:
    rows = {n: sample(np.random.default_rng(0), (8, 64)) for n, sample in DISTRIBUTIONS.items()}
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


def test_a_row_of_large_neighbours_is_judged() -> None:
    for implementation in ("reference", "aten", "onnxruntime"):
        found = verdict(judge(*large_row()), implementation, "forward")
        [out] = found.comparisons
        assert found.passes, implementation
        assert out.max_abs < 1e-2

    def squares(operands: Operands, dout: Array) -> Outcome:
        return Outcome(of_squares(operands), right_backward(operands, dout))

    assert verdict(judge(*large_row(), {"squares": squares}), "squares", "forward").passes is False


def test_onnxruntime_runs_the_served_nodes_and_has_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = IMPLEMENTATIONS["onnxruntime"]
    for residual in (True, False):
        operands, dout = random_case(residual, np.float32)
        out, gradients = served(operands, dout)
        assert not isinstance(out, str)
        np.testing.assert_allclose(out, by_torch(operands, dout)["out"], rtol=1e-4, atol=1e-5)
        assert gradients == "a served graph has no backward pass"
    verdicts = judge(operands, dout, {"served": served})
    assert [v.passes for v in verdicts] == [True, None]
    assert verdicts[1].not_run == gradients
    wide = judge(*drawn(dtype="float64"), {"served": served})
    assert [v.not_run for v in wide] == ["a served graph computes in float32", gradients]
    assert [v.passes for v in wide] == [None, None]

    class Nans:
        def run(self, _names: list[str], feeds: dict[str, Array]) -> list[Array]:
            return [np.full_like(feeds["x"], np.nan)]

    monkeypatch.setattr(layer_norm_implementations, "onnxruntime_session", lambda *_, **__: Nans())
    [forward, _] = judge(*large_row(), {"served": served})
    assert forward.passes is False
    assert forward.comparisons[0].share_of_bound == np.inf


def test_triton_is_not_run_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = judge(*drawn(dtype="float32"))
    for phase in ("forward", "backward"):
        half = verdict(found, "triton", phase)
        assert half.passes is None
        assert half.not_run == "no CUDA device is here"
        assert not half.comparisons


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_triton_is_judged_on_its_device(distribution: str) -> None:
    triton = {"triton": IMPLEMENTATIONS["triton"]}
    for half in judge(*drawn(distribution, "float32", (4, 384)), triton):
        assert half.passes, half
    wide = judge(*drawn(distribution, "float64", (4, 384)), triton)
    assert {v.not_run for v in wide} == {"ATen takes rows of this dtype and width"}


def test_a_nan_row_of_the_input_is_nobodys_fault_and_one_of_the_output_is() -> None:
    operands, dout = random_case(dtype=np.float32)
    operands.x[1, 3] = np.nan
    found = judge(operands, dout, {name: IMPLEMENTATIONS[name] for name in ("reference", "aten")})
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
        [forward, backward] = judge(operands, dout, {"wrong": wrong})
        assert (forward.passes, backward.passes) == (False, True)
        assert forward.comparisons[0].worst_index == place
        assert forward.comparisons[0].max_abs == np.inf
    [mean, _] = judge(operands, dout, {"wrong": nans})[0].invariants
    assert (mean.passes, mean.row) == (False, 2)


def test_an_error_is_located_and_measured() -> None:
    def off(operands: Operands, dout: Array) -> Outcome:
        out = by_torch(operands, dout)["out"].astype(np.float32)
        out[2, 9] += 0.5
        return Outcome(out, "nothing to say")

    operands, dout = random_case(dtype=np.float32)
    [out] = verdict(judge(operands, dout, {"off": off}), "off", "forward").comparisons
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
        ({"dtype": "float16"}, r"x is in float16; float32 or float64 is needed"),
    ],
)
def test_rows_that_cannot_be_drawn_or_judged_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        judge(*drawn(**arguments))


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
