"""The add + LayerNorm check fails wrong implementations and passes correct ones."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.add_layer_norm.op import add_norm
from models.add_layer_norm.reference import Array
from models.gradients import layer_norm_implementations
from models.gradients.inputs import Distribution
from models.gradients.layer_norm_check import judge, judge_candidate
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, PassOutcome
from models.gradients.layer_norm_operands import (
    DISTRIBUTIONS,
    EPS,
    MAX_ELEMENTS,
    Operands,
    draw,
    rounded_to,
)
from models.gradients.layer_norm_trace import trace
from models.gradients.results.layer_norm import ImplementationVerdict
from tests.models.gradients.layer_norm_faults import (
    WRONG_BACKWARD,
    WRONG_FORWARD,
    Backward,
    Forward,
    Gradients,
    Outputs,
    correct_backward,
    correct_forward,
    correct_gradients,
    implementation_of,
    outputs,
)
from tests.models.gradients.toys import D, N, by_torch, random_case


def random_operands(
    distribution: Distribution = "normal",
    dtype: str = "float64",
    shape: tuple[int, int] = (N, D),
    seed: int = 0,
    *,
    centred: bool = True,
) -> Operands:
    return rounded_to(draw(shape, distribution, seed, centred=centred), np.dtype(dtype).type)


@pytest.mark.parametrize("centred", [True, False])
def test_correct_implementations_pass_beside_a_row_with_infinity(centred: bool) -> None:
    operands = random_operands(dtype="float32", centred=centred)
    x = operands.x.copy()
    x[1, 2] = np.inf
    for verdict in judge(operands._replace(x=x)):
        assert verdict.passes in (True, None), verdict


def test_layer_norm_in_place_of_rms_norm_fails() -> None:
    operands = random_operands("normal", "float32", centred=False)

    def layer_norm(operands: Operands) -> PassOutcome:
        outputs, gradients = IMPLEMENTATIONS["cpp"](operands._replace(centred=True))
        assert isinstance(gradients, dict)
        return PassOutcome(outputs, {n: g for n, g in gradients.items() if n != "dbeta"})

    assert [v.passes for v in judge(operands, {"wrong": layer_norm})] == [False, False]


def test_beta_of_rms_norm_raises_value_error() -> None:
    operands = random_operands(dtype="float32")._replace(centred=False)
    with pytest.raises(ValueError, match="beta must be zeros, because RMS norm has no beta"):
        judge(operands)


def verdict(
    verdicts: tuple[ImplementationVerdict, ...], implementation: str, phase: str
) -> ImplementationVerdict:
    [result] = [v for v in verdicts if (v.implementation, v.phase) == (implementation, phase)]
    return result


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (N, D), (2, 384), (1, MAX_ELEMENTS)])
@pytest.mark.parametrize("centred", [True, False])
def test_correct_implementations_pass_on_every_distribution(
    distribution: Distribution, dtype: str, shape: tuple[int, int], centred: bool
) -> None:
    operands = random_operands(distribution, dtype, shape, seed=3, centred=centred)
    ran = [v for v in judge(operands) if v.comparisons]
    assert {v.implementation for v in ran} >= {"reference", "cpp", "aten"}
    for v in ran:
        is_forward, width = v.phase == "forward", shape[1]
        if not centred and width == 1 and not is_forward:
            # The RMS norm of one element is 1 or -1: but for eps, its gradient is zero.
            assert v.passes is not False, v
        elif centred and (width == 1 or distribution == "constant_row"):
            assert v.passes is None, v  # the norm of equal elements is zero
        elif centred and (width, distribution, is_forward) == (2, "huge", False):
            # The norm of two elements is 1 and -1: but for eps, its gradient is zero.
            assert v.passes is None, v
        else:
            # onnxruntime subtracts the mean once.
            is_inexact = v.implementation == "onnxruntime" and distribution == "large_mean"
            assert v.passes is (not (centred and is_inexact)), v
        assert len(v.invariants) == (1 if is_forward else 2) + centred
        values = [c.value for c in v.comparisons if c.against == "float64"]
        backward = ["dbeta"] * centred + ["dgamma", "dresidual", "dx"]
        assert sorted(values) == (["out", "sum"] if is_forward else backward)


def test_finite_differences_are_compared_in_float64_only() -> None:
    for dtype, expected in (("float32", []), ("float64", ["dx", "dgamma", "dbeta"])):
        backward = verdict(judge(random_operands(dtype=dtype)), "aten", "backward")
        differences = [c.value for c in backward.comparisons if c.against == "finite differences"]
        assert differences == expected


def verdicts_by_phase(
    forward: Forward,
    backward: Backward,
    distribution: Distribution = "normal",
    dtype: str = "float32",
) -> dict[str, ImplementationVerdict]:
    run = implementation_of(forward, backward)
    return {v.phase: v for v in judge(random_operands(distribution, dtype), {"numpy": run})}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_pass_implementation_passes(distribution: Distribution, dtype: str) -> None:
    verdicts = verdicts_by_phase(correct_forward, correct_backward, distribution, dtype)
    expected = None if distribution == "constant_row" else True
    assert [verdict.passes for verdict in verdicts.values()] == [expected, expected]


@pytest.mark.parametrize(
    ("fault", "wrong_values"),
    [
        ("no term for the mean", {"dx", "dresidual"}),
        ("dsum in dx only", {"dresidual"}),
        ("variance divided by D - 1", {"dx", "dresidual", "dgamma"}),
        ("dgamma and dbeta swapped", {"dgamma", "dbeta"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_failed_comparisons_name_the_wrong_gradients(
    fault: str, wrong_values: set[str], dtype: str
) -> None:
    verdicts = verdicts_by_phase(correct_forward, WRONG_BACKWARD[fault], dtype=dtype)
    failed = [c for c in verdicts["backward"].comparisons if not c.passes]
    assert {c.value for c in failed if c.against == "float64"} == wrong_values
    if dtype == "float64":
        differences = {c.value for c in failed if c.against == "finite differences"}
        assert differences == wrong_values - {"dresidual"}


def test_missing_gradient_is_named_and_fails() -> None:
    backward = verdicts_by_phase(correct_forward, WRONG_BACKWARD["dx missing"])["backward"]
    assert (backward.passes, backward.no_verdict, backward.missing) == (False, None, ("dx",))
    assert {c.value for c in backward.comparisons} == {"dresidual", "dgamma", "dbeta"}
    assert all(c.passes for c in backward.comparisons)


def test_op_without_a_gradient_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def detached(x: Tensor, residual: Tensor, weight: Tensor, *others: Any) -> object:  # noqa: ANN401
        return add_norm(x, residual, weight.detach(), *others)

    monkeypatch.setattr(layer_norm_implementations, "add_norm", detached)
    verdicts = judge(random_operands(dtype="float32"), {"op": layer_norm_implementations.on_cpu})
    backward = verdict(verdicts, "op", "backward")
    assert (backward.passes, backward.missing) == (False, ("dgamma",))


def shifted(operands: Operands) -> Outputs:
    return outputs(operands, correct_forward(operands)["out"] + np.float32(1e-3))


@pytest.mark.parametrize(
    ("forward", "backward", "broken"),
    [
        (correct_forward, correct_backward, set()),
        (shifted, correct_backward, {"mean(xhat) = 0"}),
        (
            WRONG_FORWARD["variance divided by D - 1"],
            correct_backward,
            {"mean(xhat^2) = var / (var + eps)"},
        ),
        (correct_forward, WRONG_BACKWARD["no term for the mean"], {"sum(dx) = 0"}),
        (
            correct_forward,
            WRONG_BACKWARD["no term for the variance"],
            {"sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"},
        ),
        (correct_forward, WRONG_BACKWARD["dresidual halved"], {"dx = dresidual"}),
    ],
)
def test_each_fault_breaks_its_invariant(
    forward: Forward, backward: Backward, broken: set[str]
) -> None:
    verdicts = verdicts_by_phase(forward, backward)
    failed = {i.name for v in verdicts.values() for i in v.invariants if not i.passes}
    assert broken <= failed
    assert bool(broken) == bool(failed)


def test_broken_invariant_fails_the_verdict_despite_correct_values() -> None:
    def wrong_with_unit_gamma(operands: Operands) -> Gradients:
        plain = bool((operands.gamma == 1).all())
        return (WRONG_BACKWARD["dresidual halved"] if plain else correct_backward)(operands)

    verdicts = verdicts_by_phase(correct_forward, wrong_with_unit_gamma)
    assert verdicts["forward"].passes
    assert all(c.passes for c in verdicts["backward"].comparisons)
    assert verdicts["backward"].passes is False


def test_finite_differences_detect_a_relative_error_of_1e_6() -> None:
    def larger(operands: Operands) -> Gradients:
        return {n: g * (1 + 1e-6) for n, g in correct_gradients(operands).items()}

    backward = verdicts_by_phase(correct_forward, larger, dtype="float64")["backward"]
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


def large_mean_row() -> Operands:
    row = np.array([[40000, 40001, 40002, 40003]], np.float32)
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    dout = np.eye(1, 4, dtype=np.float32)
    return Operands(row, np.zeros_like(row), gamma, beta, EPS, dout, None)


def test_row_with_large_mean_passes_and_fails_the_squares_formula() -> None:
    for implementation in ("reference", "cpp", "aten"):
        forward = verdict(judge(large_mean_row()), implementation, "forward")
        [out, _] = forward.comparisons
        assert forward.passes, implementation
        assert out.max_abs < 1e-6
    squares = implementation_of(WRONG_FORWARD["single-pass variance"], correct_backward)
    [forward, _] = judge(large_mean_row(), {"squares": squares})
    assert forward.passes is False


def constant_rows(eps: float) -> Operands:
    operands = random_operands("constant_row", "float32")
    return operands._replace(residual=None, dsum=None, eps=eps)


NO_DOUT = np.zeros((N, D), np.float32)


def without_gamma() -> Operands:
    return random_operands("normal", "float32")._replace(gamma=np.zeros(D, np.float32))


def without_dout() -> Operands:
    return random_operands("normal", "float32")._replace(dout=NO_DOUT)


def overflowing_rows() -> Operands:
    operands = random_operands("normal", "float32")
    return operands._replace(x=operands.x * np.float32(1e30))


@pytest.mark.parametrize(
    ("rows", "backward"),
    [
        (constant_rows(EPS), "dgamma"),
        (constant_rows(0.0), "dx, dgamma"),
        (overflowing_rows(), "dx, dgamma, dresidual"),
        (without_gamma(), "dx, dresidual"),
        (without_dout(), "dx, dgamma, dresidual"),
    ],
)
def test_results_on_which_the_rows_cannot_decide_have_no_verdict(
    rows: Operands, backward: str
) -> None:
    undecided = {"forward": "out", "backward": backward}
    for v in judge(rows, {name: IMPLEMENTATIONS[name] for name in ("reference", "aten")}):
        names = undecided[v.phase]
        if v.phase == "forward" and rows.dout is NO_DOUT:
            assert v.passes
            continue
        assert v.passes is None, v
        listed = (v.no_verdict or "").partition(" on ")[2].partition(":")[0]
        assert set(listed.split(", ")) == set(names.split(", "))


def test_wrong_norm_of_constant_rows_fails() -> None:
    [forward, _] = judge(
        constant_rows(EPS), {"shifted": implementation_of(shifted, correct_backward)}
    )
    assert forward.passes is False


def test_row_that_can_decide_beside_one_that_cannot_has_a_verdict() -> None:
    operands = random_operands("normal", "float32")
    operands.x[0], operands = 1.0, operands._replace(residual=None, dsum=None, eps=0.0)
    implementations = {
        "right": implementation_of(correct_forward, correct_backward),
        "wrong": implementation_of(WRONG_FORWARD["beta alone"], correct_backward),
    }
    verdicts = judge(operands, implementations)
    assert verdict(verdicts, "right", "forward").passes
    assert verdict(verdicts, "wrong", "forward").passes is False


def test_onnxruntime_verdict_covers_the_forward_pass_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = IMPLEMENTATIONS["onnxruntime"]
    for residual in (True, False):
        operands = random_case(residual, np.float32)
        made, gradients = served(operands)
        assert not isinstance(made, str)
        np.testing.assert_allclose(made["out"], by_torch(operands)["out"], rtol=1e-4, atol=1e-5)
        assert gradients == "a served graph has no backward pass"
    verdicts = judge(operands, {"served": served})
    assert [v.passes for v in verdicts] == [True, None]
    assert verdicts[1].no_verdict == gradients
    in_float64 = judge(random_operands(dtype="float64"), {"served": served})
    assert [v.no_verdict for v in in_float64] == [
        "a served graph computes in float32, not in float64",
        gradients,
    ]
    assert [v.passes for v in in_float64] == [None, None]

    class NanSession:
        def run(self, _names: list[str], feeds: dict[str, Array]) -> list[Array]:
            return [np.full_like(feeds["x"], np.nan)] * 2

    monkeypatch.setattr(
        layer_norm_implementations, "onnxruntime_session", lambda *_, **__: NanSession()
    )
    [forward, _] = judge(large_mean_row(), {"served": served})
    assert forward.passes is False
    assert forward.comparisons[0].share_of_bound == np.inf


def test_triton_is_not_run_without_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    verdicts = judge(random_operands(dtype="float32"))
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
    for triton_verdict in judge(random_operands(distribution, "float32", (4, 384)), triton):
        assert triton_verdict.passes or distribution == "constant_row", triton_verdict
        assert triton_verdict.passes is not False, triton_verdict
    in_float64 = judge(random_operands(distribution, "float64", (4, 384)), triton)
    assert {v.no_verdict for v in in_float64} == {
        "Triton is not installed or has no kernels for this dtype and width"
    }


def test_nan_passes_only_where_the_input_row_has_nan() -> None:
    operands = random_case(dtype=np.float32)
    operands.x[1, 3] = np.nan
    correct = {name: IMPLEMENTATIONS[name] for name in ("reference", "aten")}
    assert all(v.passes for v in judge(operands, correct))

    def nans(operands: Operands) -> Outputs:
        made = correct_forward(operands)
        made["out"][2, 0] = np.nan
        return made

    def zeros(operands: Operands) -> Outputs:
        made = correct_forward(operands)
        return {**made, "out": np.nan_to_num(made["out"])}

    for wrong, index in ((nans, (2, 0)), (zeros, (1, 0))):
        wrong_forward = {"wrong": implementation_of(wrong, correct_backward)}
        [forward, backward] = judge(operands, wrong_forward)
        assert (forward.passes, backward.passes) == (False, True)
        assert forward.comparisons[0].worst_index == index
        assert forward.comparisons[0].max_abs == np.inf
    [forward, _] = judge(operands, {"wrong": implementation_of(nans, correct_backward)})
    [mean, _] = forward.invariants
    assert (mean.passes, mean.row) == (False, 2)


def test_comparison_reports_location_and_size_of_the_error() -> None:
    def one_off(operands: Operands) -> Outputs:
        out = by_torch(operands)["out"].astype(np.float32)
        out[2, 9] += 0.5
        return {"out": out}

    operands = random_case(dtype=np.float32)
    [forward, _] = judge(operands, {"one off": implementation_of(one_off, correct_backward)})
    [out] = forward.comparisons
    assert out.worst_index == (2, 9)
    assert out.max_abs == pytest.approx(0.5, rel=1e-5)
    largest = np.float32(np.abs(by_torch(operands)["out"]).max())
    assert out.ulp == pytest.approx(0.5 / np.spacing(largest), rel=1e-5)


# Results of other implementations.


def candidate_results(operands: Operands) -> dict[str, Array]:
    return {**correct_forward(operands), **correct_gradients(operands)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_candidate_has_a_verdict_on_each_pass_with_results(dtype: str) -> None:
    operands = random_operands(dtype=dtype)
    results = candidate_results(operands)
    for names, phases in (
        (list(results), ["forward", "backward"]),
        (["sum"], ["forward"]),
        (["dgamma", "dbeta"], ["backward"]),
    ):
        verdicts = judge_candidate(operands, {name: results[name] for name in names})
        assert [v.phase for v in verdicts] == phases
        assert {c.value for v in verdicts for c in v.comparisons} == set(names)
        for v in verdicts:
            assert (v.implementation, v.passes, v.invariants) == ("candidate", True, ())


@pytest.mark.parametrize("name", ["out", "sum", "dx", "dresidual", "dgamma", "dbeta"])
def test_wrong_result_of_a_candidate_fails(name: str) -> None:
    operands = random_operands(dtype="float32")
    results = candidate_results(operands)
    verdicts = judge_candidate(operands, {**results, name: results[name] * np.float32(1.001)})
    assert [c.value for v in verdicts for c in v.comparisons if not c.passes] == [name]
    assert sorted(str(v.passes) for v in verdicts) == ["False", "True"]


def test_results_of_a_candidate_that_no_norm_changes_are_decidable_on_constant_rows() -> None:
    operands = random_operands("constant_row", "float32")._replace(eps=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        results = candidate_results(operands)
    for names, passes in ((("sum",), True), (("dbeta",), True), (("out", "sum"), None)):
        [only] = judge_candidate(operands, {name: results[name] for name in names})
        assert only.passes is passes


@pytest.mark.parametrize(
    "results", [{"y": np.zeros((N, D))}, {"out": np.zeros((D, N))}, {"dbeta": np.zeros((N, D))}]
)
def test_candidate_result_of_another_name_or_shape_raises_value_error(
    results: dict[str, Array],
) -> None:
    with pytest.raises(ValueError, match=r"result \w+ of shape .+ is invalid; allowed: out, sum"):
        judge_candidate(random_operands(dtype="float32"), results)


# Numbers beyond the range of float32.


def test_row_whose_variance_underflows_without_eps_has_no_verdict() -> None:
    operands = random_operands("normal", "float32")
    rows = operands.x * np.float32(1e-24)
    tiny = operands._replace(x=rows, residual=None, dsum=None, eps=0.0)
    for v in judge(tiny, {"reference": IMPLEMENTATIONS["reference"]}):
        assert v.passes is None
        assert "cannot decide" in (v.no_verdict or "")


def test_result_beyond_float32_must_be_infinite_or_the_largest_number() -> None:
    operands = random_operands("normal", "float32")
    operands.gamma[3] = 3e38
    operands = operands._replace(dout=operands.dout / np.float32(3e38))
    for v in judge(operands, {"reference": IMPLEMENTATIONS["reference"]}):
        assert all(c.passes for c in v.comparisons), v
    with np.errstate(over="ignore"):
        out = correct_forward(operands)["out"]
    assert np.isinf(out).any()
    [forward] = judge_candidate(operands, {"out": np.where(np.isinf(out), np.float32(7), out)})
    assert forward.passes is False


@pytest.mark.parametrize("wrong", [7.0, -np.inf])
def test_infinite_sum_must_be_infinite(wrong: float) -> None:
    x = np.array([[3e38, 1, 2], [1, 2, 4]], np.float32)
    residual = np.array([[3e38, 0, 0], [0, 0, 0]], np.float32)
    ones = np.ones(3, np.float32)
    operands = Operands(x, residual, ones, ones, EPS, np.ones_like(x), None)
    with np.errstate(over="ignore"):
        total = x + residual
    for value, passes in ((np.inf, True), (wrong, False)):
        total[0, 0] = value
        [forward] = judge_candidate(operands, {"sum": total})
        assert forward.passes is passes


@pytest.mark.parametrize(("scale", "dout"), [(1e15, 1e-30), (1e15, 1e-20), (1.0, 1e-42)])
def test_underflow_of_gradients_fails_no_correct_implementation(scale: float, dout: float) -> None:
    operands = random_operands("normal", "float32")
    operands = operands._replace(
        x=operands.x * np.float32(scale), dout=operands.dout * np.float32(dout)
    )
    for v in judge(operands._replace(residual=None, dsum=None)):
        assert v.passes is not False, v


@pytest.mark.parametrize("name", ["x", "residual", "gamma", "beta", "dout", "dsum"])
@pytest.mark.parametrize("sign", ["one", "random"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("centred", [True, False])
def test_sums_that_overflow_fail_no_correct_implementation(
    name: str, sign: str, dtype: str, centred: bool
) -> None:
    operands = random_operands(dtype=dtype, centred=centred)
    if name == "x":
        operands = operands._replace(residual=None, dsum=None)
    old: Array = getattr(operands, name)
    signs = np.random.default_rng(0).choice([-1, 1], old.shape) if sign == "random" else 1
    largest = np.finfo(old.dtype).max * (centred or name != "beta")
    changes: Any = {name: np.full_like(old, largest) * signs}
    operands = operands._replace(**changes)
    for v in judge(rounded_to(operands, np.dtype(dtype).type)):
        assert v.passes is not False, v


# Of the sum of dxhat * xmu, and of steps that are divided by the small deviation.
@pytest.mark.parametrize(("of_input", "of_gamma"), [(1e3, 1e35), (1e-15, 1e37)])
@pytest.mark.parametrize("centred", [True, False])
def test_steps_backward_that_overflow_fail_no_correct_implementation(
    of_input: float, of_gamma: float, centred: bool
) -> None:
    operands = random_operands(seed=8, centred=centred)
    x, gamma = of_input * operands.x, of_gamma * operands.gamma
    operands = operands._replace(x=x, gamma=gamma, residual=None, dsum=None)
    for v in judge(rounded_to(operands, np.float32)):
        assert v.passes is not False, v


@pytest.mark.parametrize("rows", [100, 128, 256])
@pytest.mark.parametrize("constant", [0.1, 0.3, 0.7])
def test_equal_gradients_of_many_rows_fail_no_correct_implementation(
    rows: int, constant: float
) -> None:
    operands = random_operands(dtype="float32", shape=(rows, 4))
    operands = operands._replace(dout=np.full_like(operands.dout, constant))
    for v in judge(operands):
        assert v.passes is not False, v


@pytest.mark.parametrize("row", [[7.0] * 4, [1e200, -1e200, 3e200, 0.0], [np.inf, 1.0, 2.0, 4.0]])
def test_correct_implementations_pass_in_float64_beside_a_row_without_a_norm(
    row: list[float],
) -> None:
    x, dout = np.array([row, [1.0, 2.0, 3.0, 5.0]]), np.eye(2, 4)
    operands = Operands(x, None, np.ones(4), np.zeros(4), 0.0, dout, None)
    assert all(v.passes is not False for v in judge(operands))


@pytest.mark.parametrize(
    "fault", ["dgamma a mean", "dgamma of the first row alone", "dgamma of out in place of xhat"]
)
def test_fault_of_dgamma_does_not_pass_beside_a_row_without_a_norm(fault: str) -> None:
    operands = random_operands(dtype="float32")._replace(residual=None, dsum=None, eps=0.0)
    operands.x[0] = 1.0
    wrong = implementation_of(correct_forward, WRONG_BACKWARD[fault])
    with np.errstate(all="ignore"):
        [_, backward] = judge(operands, {fault: wrong})
    assert backward.passes is None
    assert "dgamma" in (backward.no_verdict or "")


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
        judge(random_operands(**arguments))


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
        ({"dsum": np.zeros(D)}, r"the shape of dsum is \(16,\)"),
        ({"residual": None, "dsum": np.zeros((N, D))}, r"dsum needs a residual"),
    ],
)
def test_mismatched_operands_raise_value_error(changes: dict[str, object], message: str) -> None:
    operands = random_case()
    for call in (trace, judge):
        with pytest.raises(ValueError, match=message):
            call(operands._replace(**changes))  # type: ignore[arg-type]
