"""The Triton kernels: their arguments, on a GPU or in the interpreter, and resources when compiled.

`test_exactness` compares their results with float64.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.add_layer_norm import add_layer_norm, implementation
from models.add_layer_norm import triton_kernels as kernels

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_optional_residual_weight_and_bias_may_be_omitted(
    residual: bool, weight: bool, bias: bool
) -> None:
    x, r, dy = (randn(2, 3, 20, seed=i) for i in range(3))
    w = randn(20, seed=3) if weight else None
    b = randn(20, seed=4) if bias else None
    y, total = kernels.forward(x, r if residual else None, w, b, EPS, True)
    assert residual or total is x
    summed = (x + r if residual else x).requires_grad_()
    expected = F.layer_norm(summed, [20], w, b, EPS)
    torch.testing.assert_close(y, expected)
    expected.backward(dy)
    dx, _, _ = kernels.backward(dy, None, total, w, EPS, True)
    torch.testing.assert_close(dx, summed.grad)


def test_partial_sums_count_every_row_once_when_rows_exceed_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if DEVICE == "cpu":  # the interpreter takes seconds for 256 programs
        monkeypatch.setattr(kernels, "MAX_PARTIALS", 16)
    rows = 2 * kernels.MAX_PARTIALS + 5
    total, dy = randn(rows, 6), randn(rows, 6, seed=1)
    exact = total.double().requires_grad_()
    weight = torch.ones(6, dtype=torch.float64, device=DEVICE).requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    F.layer_norm(exact, [6], weight, bias, EPS).backward(dy.double())
    actual = kernels.backward(dy, None, total, None, EPS, True)
    for value, leaf in zip(actual, (exact, weight, bias), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(value.double(), leaf.grad, rtol=1e-5, atol=1e-4)
    again = kernels.backward(dy, None, total, None, EPS, True)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


def test_row_does_not_depend_on_its_batch() -> None:
    x, residual = randn(9, 100), randn(9, 100, seed=1)
    whole, _ = kernels.forward(x, residual, None, None, EPS, True)
    alone, _ = kernels.forward(x[4:5], residual[4:5], None, None, EPS, True)
    assert torch.equal(alone[0], whole[4])


def test_views_and_empty_tensors_are_accepted() -> None:
    x, residual = randn(6, 4).t(), randn(4, 12, seed=1)[:, ::2]
    weight, bias = randn(12, seed=2)[::2], randn(12, seed=3)[::2]
    y, total = kernels.forward(x, residual, weight, bias, EPS, True)
    summed = (x + residual).requires_grad_()
    expected = F.layer_norm(summed, [6], weight, bias, EPS)
    torch.testing.assert_close(y, expected)
    assert total.is_contiguous()
    dy = randn(1, 6, seed=4).expand(4, 6)
    expected.backward(dy)
    torch.testing.assert_close(kernels.backward(dy, None, total, weight, EPS, True)[0], summed.grad)
    empty = randn(0, 6)
    assert kernels.forward(empty, empty, None, None, EPS, True)[0].shape == (0, 6)
    dx, dweight, dbias = kernels.backward(empty, None, empty, None, EPS, True)
    assert dx.shape == (0, 6)
    assert not dweight.any()
    assert not dbias.any()


def test_compiled_kernels_hardly_spill_use_no_float64_and_need_few_instructions() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "tests.models.compile_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    reports = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(reports) == 2 * 5 * 2 * 2 * 2 + 2
    for report in reports:
        assert report["spilled_bytes"] <= 40, report  # two kernels spill 4 and 10 registers
        assert report["float64"] is False, report
        assert report["registers"] is not None, report
        assert report["shared_bytes"] <= 99 * 1024, report  # what consumer cards have
        # With more of them, the kernel would wait for its instructions rather than for memory.
        limit = 38 if report["width"] == 384 else 32
        if report["kernel"] == "_backward_kernel":
            assert 0 < report["instructions_per_element"] <= limit, report


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device is available")
@pytest.mark.parametrize("dtype", DTYPES)
def test_op_on_a_gpu_uses_the_triton_kernels(dtype: torch.dtype) -> None:
    inputs = [randn(64, 768, seed=i, dtype=dtype).requires_grad_() for i in range(2)]
    inputs += [randn(768, seed=i).requires_grad_() for i in (2, 3)]
    dy = randn(64, 768, seed=4, dtype=dtype)
    assert implementation(inputs[0]) == implementation(inputs[0], backward=True) == "triton"
    y = add_layer_norm(inputs[0], inputs[1], inputs[2], inputs[3], EPS)
    actual = [y, *torch.autograd.grad(y, inputs, dy)]
    weight, bias = (t.detach().double().cpu().requires_grad_() for t in inputs[2:])
    total = (inputs[0] + inputs[1]).detach().double().cpu().requires_grad_()
    expected = F.layer_norm(total, [768], weight, bias, EPS)
    gradients = torch.autograd.grad(expected, [total, weight, bias], dy.double().cpu())
    exact = [expected, gradients[0], *gradients]
    unit = 4 * torch.finfo(torch.float32).eps + (dtype != torch.float32) * torch.finfo(dtype).eps
    for value, reference in zip(actual, exact, strict=True):
        scale = reference.abs() + reference.abs().mean()
        assert ((value.double().cpu() - reference).abs() <= unit * scale).all()
