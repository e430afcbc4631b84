"""Steps b and c: the fused operator's results against float64, and its times."""

import itertools
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.add_layer_norm import op
from models.gradients.layer_norm_check import judge
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS
from models.gradients.layer_norm_operands import DISTRIBUTIONS, MAX_ELEMENTS, draw, rounded_to
from tests.benchmarks.bench_op import ARRAYS_MOVED, DTYPES, GRIDS
from tests.benchmarks.bench_op import measure as measure_op
from tests.benchmarks.comparison import Turns
from tests.gpu_report.results import Row
from tests.gpu_report.step import Run

_EPS = 1e-5
_ROOT = Path(__file__).parents[2]
# Bounds on the share of the copy rate that the kernels reach, for arrays of this size and more.
_BARS = {"forward": 0.92, "backward": 0.85}
_LARGE_BYTES = 64e6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTHS = (1, 2, 3, 64, 384, 768, 1000, 1024, 4096)
_NORMS = {"LayerNorm": True, "RMSNorm": False}


def check(run: Run) -> None:
    """Check the operator: tests, hostile rows, every dtype, double backward and compilation."""
    _hostile_rows(run)
    _every_dtype(run)
    _double_backward(run)
    _compiled(run)
    _tests(run)


def _hostile_rows(run: Run) -> None:
    """Compare the kernels in float32 with float64 for rows that are hard to normalise."""
    name = "cpp" if run.is_dry else "triton"
    kernels = {name: IMPLEMENTATIONS[name]}
    for (norm, centred), distribution in itertools.product(_NORMS.items(), DISTRIBUTIONS):
        for width in (3, 64) if run.is_dry else _WIDTHS:
            if not run.has_time(f"hostile rows: {norm}, {distribution}, width {width}"):
                return
            shape = (max(1, min(4, MAX_ELEMENTS // width)), width)
            operands = rounded_to(draw(shape, distribution, centred=centred), np.float32)
            for verdict in judge(operands, kernels):
                worst = max(verdict.comparisons, key=lambda c: c.share_of_bound, default=None)
                row: Row = {
                    "norm": norm,
                    "rows": distribution,
                    "width": width,
                    "pass": verdict.phase,
                    "worst error, of its bound": worst.share_of_bound if worst else None,
                    "in": worst.value if worst else verdict.no_verdict,
                }
                cause = "; ".join(verdict.failures)
                where = f"{norm}, {distribution}, width {width}, {verdict.phase}: "
                run.recorder.add(
                    "Hostile rows in float32",
                    row,
                    passes=verdict.passes,
                    cause=where + cause if cause else "",
                )


def _every_dtype(run: Run) -> None:
    """Compare the operator's results and gradients in each dtype with float64."""
    widths = (64,) if run.is_dry else _WIDTHS
    for (norm, centred), dtype, width in itertools.product(_NORMS.items(), _DTYPES, widths):
        if not run.has_time(f"dtypes: {norm}, {dtype}, width {width}"):
            return
        inputs, dy = _inputs(run.device, width, dtype, centred)
        y, total = op.add_norm(*inputs, _EPS, centred)
        actual = [y, *torch.autograd.grad(y, [t for t in inputs if t is not None], dy)]
        expected = _exact(total, inputs, dy, centred)
        unit = 4 * torch.finfo(torch.float32).eps
        unit += (dtype != torch.float32) * torch.finfo(dtype).eps
        names = ("y", "dx", "dresidual", "dweight", "dbias")
        terms = _terms(total, inputs, dy, centred)
        errors = {
            name: _error(value, reference, unit, terms if name in ("dx", "dresidual") else 0.0)
            for name, value, reference in zip(names, actual, expected, strict=False)
        }
        worst = max(errors, key=lambda name: errors[name])
        used = op.implementation(inputs[0])
        row: Row = {
            "norm": norm,
            "dtype": str(dtype).removeprefix("torch."),
            "width": width,
            "implementation": used,
            "worst error, of one rounding": errors[worst],
            "in": worst,
        }
        passes = errors[worst] <= 1
        cause = "" if passes else f"{norm} in {dtype}, width {width}: {worst} of {used}"
        run.recorder.add("Every dtype", row, passes=passes, cause=cause)


def _inputs(
    device: str, width: int, dtype: torch.dtype, centred: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return x, residual, weight and bias, which require gradients, and dy."""
    generator = torch.Generator().manual_seed(width)

    def draw_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    x, residual, dy = (draw_tensor(64, width, dtype=dtype) for _ in range(3))
    weight, bias = (draw_tensor(width) for _ in range(2))
    return (x, residual, weight, bias if centred else None), dy.detach()


def _exact(
    total: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], dy: Tensor, centred: bool
) -> list[Tensor]:
    """Return y, dx, dresidual, dweight and dbias by torch's own norms in float64."""
    leaves = _leaves_in_float64(total, inputs)
    y = _norm_in_float64(leaves, centred)
    dx, *others = torch.autograd.grad(y, leaves, dy.double())
    return [y, dx, dx, *others]


def _leaves_in_float64(
    total: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> list[Tensor]:
    """Return the sum, the weight and the bias, if there is one, as leaves of a graph."""
    return [
        tensor.detach().double().requires_grad_()
        for tensor in (total, *inputs[2:])
        if tensor is not None
    ]


def _norm_in_float64(leaves: list[Tensor], centred: bool) -> Tensor:
    total, weight = leaves[:2]
    shape = [total.shape[-1]]
    if centred:
        return F.layer_norm(total, shape, weight, leaves[2], _EPS)
    return F.rms_norm(total, shape, weight, _EPS)


def _terms(
    total: Tensor, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], dy: Tensor, centred: bool
) -> Tensor:
    """Return the size of the terms of dx in each row, `(N, 1)`; in a narrow row they cancel."""
    rows = total.detach().double()
    deviations = rows - rows.mean(-1, keepdim=True) if centred else rows
    rstd = (deviations.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    return (dy.double() * inputs[2].detach()).abs().mean(-1, keepdim=True) * rstd


def _error(actual: Tensor, expected: Tensor, unit: float, terms: Tensor | float) -> float:
    """Return the largest error, in units of one rounding of a value, the mean and the terms."""
    actual, expected = actual.detach(), expected.detach()
    scale = expected.abs() + expected.abs().mean() + terms + 1e-12
    return _largest((actual.double() - expected) / (unit * scale))


def _largest(errors: Tensor) -> float:
    """Return the largest absolute value; infinity if one is NaN, which no bound may pass."""
    return float(errors.abs().nan_to_num(nan=torch.inf).max())


def _double_backward(run: Run) -> None:
    """Compare the gradient of a gradient in float32 with float64."""
    for norm, centred in _NORMS.items():
        inputs, dy = _inputs(run.device, 64, torch.float32, centred)
        x, _, weight, _ = inputs
        y, total = op.add_norm(*inputs, _EPS, centred)
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        actual = torch.autograd.grad(dx.square().sum(), [x, weight])
        leaves = _leaves_in_float64(total, inputs)
        exact = _norm_in_float64(leaves, centred)
        (exact_dx,) = torch.autograd.grad(exact, leaves[0], dy.double(), create_graph=True)
        expected = torch.autograd.grad(exact_dx.square().sum(), leaves[:2])
        error = max(
            _largest((a.double() - e) / e.abs().max())
            for a, e in zip(actual, expected, strict=True)
        )
        row: Row = {"norm": norm, "worst error, of the largest value": error}
        run.recorder.add("Double backward in float32", row, passes=error <= 1e-5)


def _compiled(run: Run) -> None:
    """Compare the operator in `torch.compile` with the operator alone: both run one kernel."""
    for norm, centred in _NORMS.items():
        inputs, dy = _inputs(run.device, 64, torch.float32, centred)
        leaves = [tensor for tensor in inputs if tensor is not None]

        def whole(
            x: Tensor, r: Tensor, weight: Tensor, bias: Tensor | None, centred: bool = centred
        ) -> Tensor:
            y, total = op.add_norm(x, r, weight, bias, _EPS, centred)
            return y * 2 + total

        results: list[list[Tensor]] = []
        function: Callable[..., Tensor]
        for function in (whole, torch.compile(whole, backend=_backend(run))):
            y = function(*inputs)
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
        error = max(_largest((a - b) / b.abs().max()) for a, b in zip(*results, strict=True))
        row: Row = {"norm": norm, "worst difference, of the largest value": error}
        run.recorder.add("torch.compile", row, passes=error <= 1e-6)


def _backend(run: Run) -> str:
    """Return the backend of `torch.compile`; the C++ of inductor takes long to compile."""
    return "aot_eager" if run.is_dry else "inductor"


def _tests(run: Run) -> None:
    """Run the operator's tests with pytest; on a CPU, one of them."""
    if not run.has_time("the operator's tests", 20):
        return
    report = run.folder / "b-tests.xml"
    folder = _ROOT / "tests/models"
    judged = folder / "gradients/test_layer_norm_check.py"
    files = [folder / "test_triton_kernels.py", f"{judged}::test_triton_passes_on_a_cuda_device"]
    chosen = ["-k", "row_does_not_depend"] if run.is_dry else ["-k", "not compiled_kernels"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # The tests' own settings name plugins, and fixtures of the folder above need the service.
    command += ["-c", os.devnull, f"--rootdir={_ROOT}", "--import-mode=importlib"]
    command += [f"--confcutdir={folder}", f"--junit-xml={report}"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    subprocess.run([*command, *chosen, *map(str, files)], cwd=_ROOT, env=environment, check=False)
    suite = ET.parse(report).getroot()[0]  # noqa: S314 - written by pytest above
    failed = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    failed += [case for case in suite.iter("testcase") if case.find("error") is not None]
    row: Row = {"tests": suite.get("tests"), "skipped": suite.get("skipped"), "failed": len(failed)}
    run.recorder.add("Tests", row, passes=not failed and suite.get("tests") != "0")
    for case in failed:
        fault = next(child for child in case if child.tag in ("failure", "error"))
        message = (fault.get("message") or "").partition("\n")[0]
        failure: Row = {"failed test": case.get("name"), "message": message[:200]}
        run.recorder.add("Failed tests", failure, passes=False)


def measure(run: Run) -> None:
    """Measure the operator and its alternatives, large arrays first."""
    rows, widths = ((16,), (384,)) if run.is_dry else GRIDS["cuda"]
    grid = itertools.product(sorted(rows, reverse=True), sorted(widths, reverse=True))
    for (count, width), dtype in itertools.product(grid, ("bf16", "fp32")):
        if not run.has_time(f"times: {count} x {width}, {dtype}"):
            return
        comparison = Turns("copy")
        rounds = 1 if run.is_dry else 3
        measure_op(comparison, run.device, count, width, dtype, rounds, _backend(run))
        array = count * width * DTYPES[dtype].itemsize
        for figure, times in comparison.figures.items():
            direction = figure.partition(",")[0]
            for name in [name for name in times if name != "copy"]:
                us = comparison.median(figure, name)
                of_copy = comparison.median(figure, "copy") / us
                row: Row = {
                    "pass": direction,
                    "rows": count,
                    "width": width,
                    "dtype": dtype,
                    "implementation": name,
                    "us": us,
                    "GB/s": ARRAYS_MOVED[direction] * array / us / 1e3,
                    "of copy": of_copy,
                }
                is_judged = name.startswith("vitrine") and array >= _LARGE_BYTES
                passes = of_copy >= _BARS[direction] if is_judged else None
                run.recorder.add("Times", row, passes=passes)
