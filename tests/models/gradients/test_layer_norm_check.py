"""The add + LayerNorm check fails wrong implementations and passes correct ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from models.add_layer_norm.reference import Array
from models.gradients import layer_norm_implementations
from models.gradients.inputs import Distribution
from models.gradients.layer_norm_check import (
    DISTRIBUTIONS,
    EPS,
    MAX_ELEMENTS,
    draw,
    judge,
    rounded_to,
)
from models.gradients.layer_norm_implementations import (
    IMPLEMENTATIONS,
    Implementation,
    Operands,
    Outcome,
)
from models.gradients.layer_norm_trace import trace
from models.gradients.results import ImplementationVerdict
from tests.models.gradients.toys import D, N, by_torch, random_case


def random_operands(
    distribution: Distribution = "normal",
    dtype: str = "float64",
    shape: tuple[int, int] = (N, D),
    seed: int = 0,
) -> tuple[Operands, Array]:
    return rounded_to(*draw(shape, distribution, seed), np.dtype(dtype).type)


def verdict(
    verdicts: tuple[ImplementationVerdict, ...], implementation: str, phase: str
) -> ImplementationVerdict:
    [result] = [v for v in verdicts if (v.implementation, v.phase) == (implementation, phase)]
    return result


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (N, D), (2, 384), (1, MAX_ELEMENTS)])
def test_correct_implementations_pass_on_every_distribution(
    distribution: Distribution, dtype: str, shape: tuple[int, int]
) -> None:
    operands = random_operands(distribution, dtype, shape, seed=3)
    ran = [v for v in judge(*operands) if v.passes is not None]
    assert {v.implementation for v in ran} >= {"reference", "aten"}
    for v in ran:
        # onnxruntime subtracts the mean once.
        is_inexact = v.implementation == "onnxruntime" and distribution == "large_mean"
        assert v.passes or (is_inexact and shape[1] > 1), v
        assert len(v.invariants) == (2 if v.phase == "forward" else 3)
        values = [c.value for c in v.comparisons if c.against == "float64"]
        backward = ["dbeta", "dgamma", "dresidual", "dx"]
        assert sorted(values) == (["out"] if v.phase == "forward" else backward)


def test_finite_differences_are_compared_in_float64_only() -> None:
    for dtype, expected in (("float32", []), ("float64", ["dx", "dgamma", "dbeta"])):
        backward = verdict(judge(*random_operands(dtype=dtype)), "aten", "backward")
        differences = [c.value for c in backward.comparisons if c.against == "finite differences"]
        assert differences == expected


# Mutations: correct implementations and variants with one error each.


def norm(operands: Operands) -> tuple[Array, Array, Array]:
    """Return the sum, its centred rows and their biased variance."""
    total = operands.x if operands.residual is None else operands.x + operands.residual
    centred = total - total.mean(-1, keepdims=True)
    centred -= centred.mean(-1, keepdims=True)
    return total, centred, (centred**2).mean(-1, keepdims=True)


def forward_of(operands: Operands, ivar: Array) -> Array:
    out: Array = operands.gamma * norm(operands)[1] * ivar + operands.beta
    return out


def correct_forward(operands: Operands) -> Array:
    return forward_of(operands, 1 / np.sqrt(norm(operands)[2] + operands.eps))


def unbiased(operands: Operands) -> Array:
    var = norm(operands)[2] * D / (D - 1)
    return forward_of(operands, 1 / np.sqrt(var + operands.eps))


def eps_outside(operands: Operands) -> Array:
    return forward_of(operands, 1 / (np.sqrt(norm(operands)[2]) + operands.eps))


def swapped_gamma_and_beta(operands: Operands) -> Array:
    return correct_forward(operands._replace(gamma=operands.beta, beta=operands.gamma))


def single_pass_variance(operands: Operands) -> Array:
    total, _, _ = norm(operands)
    var = (total**2).mean(-1, keepdims=True) - total.mean(-1, keepdims=True) ** 2
    return forward_of(operands, 1 / np.sqrt(var + operands.eps))


def centred_once(operands: Operands) -> Array:
    total, _, var = norm(operands)
    centred = total - total.mean(-1, keepdims=True)
    out: Array = operands.gamma * centred / np.sqrt(var + operands.eps) + operands.beta
    return out


def a_tenth_too_large(operands: Operands) -> Array:
    return correct_forward(operands._replace(gamma=operands.gamma * operands.gamma.dtype.type(1.1)))


def beta_alone(operands: Operands) -> Array:
    return np.broadcast_to(operands.beta, operands.x.shape)


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


def beta_as_gamma_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands._replace(gamma=operands.beta), dout, ivar_of(operands))


def swapped_gradients(operands: Operands, dout: Array) -> dict[str, Array]:
    correct = backward_of(operands, dout, ivar_of(operands))
    return {**correct, "dgamma": correct["dbeta"], "dbeta": correct["dgamma"]}


def unbiased_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    var = norm(operands)[2] * D / (D - 1)
    return backward_of(operands, dout, 1 / np.sqrt(var + operands.eps))


def eps_outside_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, 1 / (np.sqrt(norm(operands)[2]) + operands.eps))


def correct_backward(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands))


def without_dmean(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands), mean=0.0)


def detached_ivar(operands: Operands, dout: Array) -> dict[str, Array]:
    return backward_of(operands, dout, ivar_of(operands), along=0.0)


def halved_dresidual(operands: Operands, dout: Array) -> dict[str, Array]:
    correct = correct_backward(operands, dout)
    return {**correct, "dresidual": correct["dx"] / 2}


def verdicts_by_phase(
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    distribution: Distribution,
    dtype: str,
) -> dict[str, ImplementationVerdict]:
    def mutant(operands: Operands, dout: Array) -> Outcome:
        return Outcome(forward(operands), backward(operands, dout))

    return {v.phase: v for v in judge(*random_operands(distribution, dtype), {"mutant": mutant})}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_pass_implementation_passes(distribution: Distribution, dtype: str) -> None:
    verdicts = verdicts_by_phase(correct_forward, correct_backward, distribution, dtype)
    assert verdicts["forward"].passes == (None if distribution == "constant_row" else True)
    assert verdicts["backward"].passes


@pytest.mark.parametrize(
    ("wrong", "distribution", "dtype"),
    [
        (unbiased, "normal", "float32"),
        (unbiased, "normal", "float64"),
        (unbiased, "large_mean", "float64"),
        (unbiased, "huge", "float32"),
        (eps_outside, "normal", "float64"),
        (eps_outside, "tiny_var", "float32"),
        (swapped_gamma_and_beta, "normal", "float32"),
        (swapped_gamma_and_beta, "constant_row", "float32"),
        (swapped_gamma_and_beta, "large_mean", "float64"),
        (single_pass_variance, "large_mean", "float32"),
        (single_pass_variance, "large_mean", "float64"),
        (centred_once, "large_mean", "float32"),
        (a_tenth_too_large, "large_mean", "float32"),
        (a_tenth_too_large, "tiny_var", "float32"),
        (beta_alone, "large_mean", "float32"),
        (beta_alone, "huge", "float32"),
    ],
)
def test_wrong_forward_pass_fails_the_forward_verdict_only(
    wrong: Callable[[Operands], Array],
    distribution: Distribution,
    dtype: str,
) -> None:
    verdicts = verdicts_by_phase(wrong, correct_backward, distribution, dtype)
    assert verdicts["forward"].passes is False
    [out] = verdicts["forward"].comparisons
    assert out.share_of_bound > 1
    assert verdicts["backward"].passes


@pytest.mark.parametrize(
    ("wrong", "distribution", "dtype", "wrong_values"),
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
        (beta_as_gamma_backward, "normal", "float32", {"dx", "dresidual"}),
        (swapped_gradients, "normal", "float32", {"dgamma", "dbeta"}),
        (halved_dresidual, "normal", "float32", {"dresidual"}),
    ],
)
def test_wrong_backward_pass_fails_the_backward_verdict_only(
    wrong: Callable[[Operands, Array], dict[str, Array]],
    distribution: Distribution,
    dtype: str,
    wrong_values: set[str],
) -> None:
    verdicts = verdicts_by_phase(correct_forward, wrong, distribution, dtype)
    assert verdicts["forward"].passes is not False
    assert verdicts["backward"].passes is False
    failed = [c for c in verdicts["backward"].comparisons if not c.passes]
    assert {c.value for c in failed if c.against == "float64"} == wrong_values
    if dtype == "float64":
        differences = {c.value for c in failed if c.against == "finite differences"}
        assert differences == wrong_values - {"dresidual"}


@pytest.mark.parametrize(
    ("forward", "backward", "broken"),
    [
        (correct_forward, correct_backward, set()),
        (lambda o: correct_forward(o) + 1e-3, correct_backward, {"mean(xhat) = 0"}),
        (unbiased, correct_backward, {"mean(xhat^2) = var / (var + eps)"}),
        (correct_forward, without_dmean, {"sum(dx) = 0"}),
        (correct_forward, detached_ivar, {"sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"}),
        (correct_forward, halved_dresidual, {"dx = dresidual"}),
    ],
)
def test_each_fault_breaks_its_invariant(
    forward: Callable[[Operands], Array],
    backward: Callable[[Operands, Array], dict[str, Array]],
    broken: set[str],
) -> None:
    verdicts = verdicts_by_phase(forward, backward, "normal", "float32")
    failed = {i.name for v in verdicts.values() for i in v.invariants if not i.passes}
    assert broken <= failed
    assert bool(broken) == bool(failed)


def test_broken_invariant_fails_the_verdict_despite_correct_values() -> None:
    def wrong_with_unit_gamma(operands: Operands, dout: Array) -> dict[str, Array]:
        plain = bool((operands.gamma == 1).all())
        return (halved_dresidual if plain else correct_backward)(operands, dout)

    verdicts = verdicts_by_phase(correct_forward, wrong_with_unit_gamma, "normal", "float32")
    assert verdicts["forward"].passes
    assert all(c.passes for c in verdicts["backward"].comparisons)
    assert verdicts["backward"].passes is False


def test_finite_differences_detect_a_relative_error_of_1e_6() -> None:
    def scaled(operands: Operands, dout: Array) -> dict[str, Array]:
        return {n: g * (1 + 1e-6) for n, g in correct_backward(operands, dout).items()}

    backward = verdicts_by_phase(correct_forward, scaled, "normal", "float64")["backward"]
    differences = [c for c in backward.comparisons if c.against == "finite differences"]
    assert [c.value for c in differences if not c.passes] == ["dx", "dgamma", "dbeta"]


def test_distributions_match_their_names() -> None:
    rows = {n: sample(np.random.default_rng(0), (8, 64)) for n, sample in DISTRIBUTIONS.items()}
    spread = {name: x.std(-1) for name, x in rows.items()}
    assert (np.ptp(rows["constant_row"], axis=-1) == 0).all()
    assert (np.abs(rows["large_mean"]).mean(-1) > 1e4 * spread["large_mean"]).all()
    assert (spread["tiny_var"] ** 2 < EPS / 100).all()
    assert (spread["huge"] > 1e14).all()
    assert np.isfinite(rows["huge"].astype(np.float32) ** 2).all()
    assert len(np.unique(rows["constant_row"])) == 8


# Specific rows and implementations.


def large_mean_row() -> tuple[Operands, Array]:
    row = np.array([[40000, 40001, 40002, 40003]], np.float32)
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    return Operands(row, np.zeros_like(row), gamma, beta, EPS), np.eye(1, 4, dtype=np.float32)


def test_row_with_large_mean_passes_and_fails_the_squares_formula() -> None:
    for implementation in ("reference", "cpp", "aten"):
        forward = verdict(judge(*large_mean_row()), implementation, "forward")
        [out] = forward.comparisons
        assert forward.passes, implementation
        assert out.max_abs < 1e-6

    def squares(operands: Operands, dout: Array) -> Outcome:
        return Outcome(single_pass_variance(operands), correct_backward(operands, dout))

    assert (
        verdict(judge(*large_mean_row(), {"squares": squares}), "squares", "forward").passes
        is False
    )


def constant_rows(eps: float) -> tuple[Operands, Array]:
    operands, dout = random_operands("constant_row", "float32")
    return operands._replace(residual=None, eps=eps), dout


def overflowing_rows() -> tuple[Operands, Array]:
    operands, dout = random_operands("normal", "float32")
    return operands._replace(x=operands.x * np.float32(1e30)), dout


@pytest.mark.parametrize(
    ("rows", "phases", "reason"),
    [
        (constant_rows(EPS), {"forward"}, "the norm of a constant row is beta"),
        (constant_rows(0.0), {"forward", "backward"}, "each row is constant without eps"),
        (overflowing_rows(), {"forward", "backward"}, "or its variance overflows"),
    ],
)
def test_rows_that_cannot_decide_have_no_verdict(
    rows: tuple[Operands, Array], phases: set[str], reason: str
) -> None:
    verdicts = [v for v in judge(*rows) if v.implementation in ("reference", "cpp", "aten")]
    for v in verdicts:
        assert v.passes == (None if v.phase in phases else True), v
        assert (reason in (v.no_verdict or "")) == (v.phase in phases)


def test_wrong_norm_of_constant_rows_fails() -> None:
    def shifted(operands: Operands, dout: Array) -> Outcome:
        return Outcome(beta_alone(operands) + np.float32(1e-3), correct_backward(operands, dout))

    [forward, _] = judge(*constant_rows(EPS), {"shifted": shifted})
    assert forward.passes is False


def test_row_that_can_decide_beside_one_that_cannot_has_a_verdict() -> None:
    operands, dout = random_operands("normal", "float32")
    operands.x[0], operands = 1.0, operands._replace(residual=None, eps=0.0)
    implementations: dict[str, Implementation] = {
        "right": lambda operands, _: Outcome(correct_forward(operands), "no backward pass"),
        "wrong": lambda operands, _: Outcome(beta_alone(operands), "no backward pass"),
    }
    verdicts = judge(operands, dout, implementations)
    assert verdict(verdicts, "right", "forward").passes
    assert verdict(verdicts, "wrong", "forward").passes is False


def test_onnxruntime_verdict_covers_the_forward_pass_only(
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
    assert verdicts[1].no_verdict == gradients
    in_float64 = judge(*random_operands(dtype="float64"), {"served": served})
    assert [v.no_verdict for v in in_float64] == ["a served graph computes in float32", gradients]
    assert [v.passes for v in in_float64] == [None, None]

    class NanSession:
        def run(self, _names: list[str], feeds: dict[str, Array]) -> list[Array]:
            return [np.full_like(feeds["x"], np.nan)]

    monkeypatch.setattr(
        layer_norm_implementations, "onnxruntime_session", lambda *_, **__: NanSession()
    )
    [forward, _] = judge(*large_mean_row(), {"served": served})
    assert forward.passes is False
    assert forward.comparisons[0].share_of_bound == np.inf


def test_triton_is_not_run_without_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    verdicts = judge(*random_operands(dtype="float32"))
    for phase in ("forward", "backward"):
        triton_verdict = verdict(verdicts, "triton", phase)
        assert triton_verdict.passes is None
        assert triton_verdict.no_verdict == "no CUDA device is available"
        assert not triton_verdict.comparisons


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_triton_passes_on_a_cuda_device(distribution: Distribution) -> None:
    triton = {"triton": IMPLEMENTATIONS["triton"]}
    for triton_verdict in judge(*random_operands(distribution, "float32", (4, 384)), triton):
        assert triton_verdict.passes, triton_verdict
    in_float64 = judge(*random_operands(distribution, "float64", (4, 384)), triton)
    assert {v.no_verdict for v in in_float64} == {
        "rows of this dtype and width run in ATen, not in Triton"
    }


def test_nan_passes_only_where_the_input_row_has_nan() -> None:
    operands, dout = random_case(dtype=np.float32)
    operands.x[1, 3] = np.nan
    correct = {name: IMPLEMENTATIONS[name] for name in ("reference", "aten")}
    assert all(v.passes for v in judge(operands, dout, correct))

    def nans(operands: Operands, dout: Array) -> Outcome:
        out, gradients = IMPLEMENTATIONS["reference"](operands, dout)
        assert not isinstance(out, str)
        out[2, 0] = np.nan
        return Outcome(out, gradients)

    def zeros(operands: Operands, dout: Array) -> Outcome:
        out, gradients = IMPLEMENTATIONS["reference"](operands, dout)
        assert not isinstance(out, str)
        return Outcome(np.nan_to_num(out), gradients)

    for wrong, index in ((nans, (2, 0)), (zeros, (1, 0))):
        [forward, backward] = judge(operands, dout, {"wrong": wrong})
        assert (forward.passes, backward.passes) == (False, True)
        assert forward.comparisons[0].worst_index == index
        assert forward.comparisons[0].max_abs == np.inf
    [mean, _] = judge(operands, dout, {"wrong": nans})[0].invariants
    assert (mean.passes, mean.row) == (False, 2)


def test_comparison_reports_location_and_size_of_the_error() -> None:
    def shifted(operands: Operands, dout: Array) -> Outcome:
        out = by_torch(operands, dout)["out"].astype(np.float32)
        out[2, 9] += 0.5
        return Outcome(out, "no backward pass")

    operands, dout = random_case(dtype=np.float32)
    [out] = verdict(judge(operands, dout, {"shifted": shifted}), "shifted", "forward").comparisons
    assert out.worst_index == (2, 9)
    assert out.max_abs == pytest.approx(0.5, rel=1e-5)
    largest = np.float32(np.abs(by_torch(operands, dout)["out"]).max())
    assert out.ulp == pytest.approx(0.5 / np.spacing(largest), rel=1e-5)


# Invalid input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (64, 65)}, r"the shape is 64 x 65; it must have 1 to 4096 elements"),
        ({"shape": (0, 4)}, r"the shape is 0 x 4"),
        ({"shape": (-4, -4)}, r"the shape is -4 x -4"),
        ({"distribution": "cauchy"}, r"unknown distribution 'cauchy'; allowed: normal, "),
        ({"dtype": "float16"}, r"the dtype of x is float16; it must be float32 or float64"),
    ],
)
def test_invalid_shape_distribution_or_dtype_raises_value_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        judge(*random_operands(**arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros(D)}, r"the shape of x is \(16,\); it must be \(N, D\)"),
        ({"x": np.zeros((0, D))}, r"the shape of x is \(0, 16\)"),
        (
            {"residual": np.zeros((N, 1))},
            r"the shape of residual is \(4, 1\); for x of shape \(4, 16\)",
        ),
        ({"gamma": np.zeros(N)}, r"gamma is \(4,\); for x of shape \(4, 16\) it must be \(16,\)"),
        ({"beta": np.zeros((1, D))}, r"beta is \(1, 16\)"),
        ({"eps": -1e-5}, r"eps is -1e-05; it must be finite and at least 0"),
        ({"eps": float("nan")}, r"eps is nan"),
        ({"eps": float("inf")}, r"eps is inf"),
    ],
)
def test_mismatched_operands_raise_value_error(changes: dict[str, object], message: str) -> None:
    operands, dout = random_case()
    for call in (trace, judge):
        with pytest.raises(ValueError, match=message):
            call(operands._replace(**changes), dout)  # type: ignore[arg-type]
