"""`make bench-op`: times and bandwidth of the fused operator and its alternatives.

Each line is the median of several rounds in which all implementations take turns. "of copy" is the
bandwidth relative to a copy, on the same device in the same run, of the bytes that the pass must
move: forward 4NDe (read x and residual, write the norm and the sum), backward 3NDe (read dy and the
sum, write dx). All kernels of a pass count.
On CUDA the kernels run in a CUDA graph, and the L2 cache is flushed between runs. On CPU caches
stay warm, and freed memory is kept: page faults of new memory would dominate otherwise.
"""

import argparse
import ctypes
import importlib.util
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from models.add_layer_norm import add_layer_norm_with_sum, implementation
from tests.benchmarks.cuda_timer import capturable, cuda_seconds

EPS = 1e-5
Norm = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

GRIDS = {
    "cpu": ((16, 128, 512, 4096), (384, 768, 1024)),
    "cuda": ((1024, 4096, 16384, 65536), (384, 768, 1024, 4096)),
}
ROUNDS = 7
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Line:
    """One measurement. Without a time the implementation did not run; `note` says why."""

    implementation: str
    direction: str
    rows: int
    width: int
    dtype: str
    threads: int
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    of_copy: float | None = None
    note: str = ""


def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The unfused composition."""
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def fused(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The fused operator."""
    return add_layer_norm_with_sum(x, residual, weight, bias, EPS)


def liger(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """An addition and Liger's LayerNorm, which has no residual input."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    total = x + residual
    return LigerLayerNormFunction.apply(total, weight, bias, EPS), total


def norms(device: str) -> dict[str, Norm | str]:
    """Return implementations by name; a string is the reason why one cannot run here."""
    implementations: dict[str, Norm | str] = {
        "eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    if device == "cpu":
        return {**implementations, "liger": "not run: its kernels are for GPUs"}
    if not importlib.util.find_spec("liger_kernel"):
        return {**implementations, "liger": "not run: liger-kernel is not installed"}
    return {**implementations, "liger": liger}


def seconds(
    runs: dict[str, Callable[[], object]], device: str, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median time of each in seconds, measured in turns."""
    on_gpu = device.startswith("cuda")
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        for name, run in runs.items()
    }
    loops = {
        name: 1 if on_gpu else max(1, int(0.02 / timer.timeit(3).median))
        for name, timer in timers.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(
                cuda_seconds(run) if on_gpu else timers[name].timeit(loops[name]).median
            )
    return {name: statistics.median(values) for name, values in times.items()}


def measure(device: str, rows: int, width: int, dtype: str, rounds: int = ROUNDS) -> list[Line]:
    """Measure every implementation at one size, forward and backward."""
    torch.compiler.reset()  # after eight sizes, torch.compile would run the function uncompiled
    with capturable(device):
        return list(_measured(device, rows, width, dtype, rounds))


def _measured(device: str, rows: int, width: int, dtype: str, rounds: int) -> Iterator[Line]:
    x, residual, dy = (
        torch.randn(rows, width, device=device, dtype=DTYPES[dtype]) for _ in range(3)
    )
    weight, bias = (torch.randn(width, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    inputs = [x, residual, weight, bias]
    for tensor in inputs:
        tensor.requires_grad_()
    array = rows * width * x.element_size()
    for direction, moved, make in (
        ("forward", 4 * array, _forward_of),
        ("backward", 3 * array, _backward_of),
    ):
        ours = f"vitrine ({implementation(x, backward=direction == 'backward')})"
        implementations = {ours: fused, **norms(device)}
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        runs = {
            n: make(norm, inputs, dy)
            for n, norm in implementations.items()
            if not isinstance(norm, str)
        }
        copy = {"copy": lambda t=target, s=source: t.copy_(s)}
        times = seconds({**copy, **runs}, device, rounds)
        for name, norm in implementations.items():
            if isinstance(norm, str):
                yield Line(name, direction, rows, width, dtype, torch.get_num_threads(), note=norm)
                continue
            took = times[name]
            yield Line(
                name,
                direction,
                rows,
                width,
                dtype,
                torch.get_num_threads(),
                took * 1e6,
                moved / took / 1e9,
                times["copy"] / took,
            )


def _forward_of(norm: Norm, inputs: list[Tensor], _dy: Tensor) -> Callable[[], object]:
    """A forward pass as inference runs it."""
    x, residual, weight, bias = (tensor.detach() for tensor in inputs)

    def run() -> object:
        with torch.inference_mode():
            return norm(x, residual, weight, bias)

    return run


def _backward_of(norm: Norm, inputs: list[Tensor], dy: Tensor) -> Callable[[], object]:
    x, residual, weight, bias = inputs
    y, _ = norm(x, residual, weight, bias)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def table(lines: list[Line]) -> str:
    """Return the measurements as a table in Markdown, the first implementation's ratio last."""
    header = (
        "| pass | rows x D | dtype | threads | implementation | us | GB/s | of copy "
        "| times vitrine |"
    )
    text = [header, "|---|---|---|---|---|---|---|---|---|"]
    for line in lines:
        case = f"| {line.direction} | {line.rows} x {line.width} | {line.dtype} | {line.threads} "
        if line.microseconds is None:
            text.append(f"{case}| {line.implementation} | {line.note} | | | |")
            continue
        ours = next(
            other.microseconds
            for other in lines
            if other.implementation.startswith("vitrine")
            and (other.direction, other.rows, other.width, other.dtype, other.threads)
            == (line.direction, line.rows, line.width, line.dtype, line.threads)
        )
        text.append(
            f"{case}| {line.implementation} | {line.microseconds:.1f} "
            f"| {line.gigabytes_per_second:.1f} | {line.of_copy:.2f} "
            f"| {line.microseconds / (ours or 1):.2f} |"
        )
    return "\n".join(text)


def plot(lines: list[Line], title: str, file: Path) -> None:
    """Plot the fraction of copy bandwidth over the array size, per implementation.

    On CPU: of the measurements on all cores.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(DTYPES), 2, figsize=(11, 8), sharex=True, sharey=True, layout="constrained"
    )
    panels = itertools.product(DTYPES, ("forward", "backward"))
    for axis, (dtype, direction) in zip(axes.flat, panels, strict=True):
        shown = [
            line
            for line in lines
            if line.of_copy
            and (line.dtype, line.direction, line.threads) == (dtype, direction, lines[-1].threads)
        ]
        for name in dict.fromkeys(line.implementation for line in shown):
            points = sorted(
                (line.rows * line.width, line.of_copy)
                for line in shown
                if line.implementation == name
            )
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xscale="log", title=f"{direction}, {dtype}")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.supxlabel("elements of one array, rows x D")
    figure.supylabel("share of copy bandwidth")
    figure.suptitle(title)
    figure.savefig(file, dpi=130)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory; by default that depends on earlier allocations."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    for option in (trim_threshold, mmap_threshold):
        if not libc.mallopt(option, 2**30):
            raise OSError("the C library does not take mallopt's options")


def main() -> int:
    """Measure all sizes on this device; write table, data and plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-op"))
    parser.add_argument("--device", choices=GRIDS, default=None)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    title = f"add + layer_norm on {name}, torch {torch.__version__}"
    rows, widths = GRIDS[device]
    threads = [torch.get_num_threads()]
    if device == "cpu":
        keep_freed_memory()
        threads = sorted({1, *threads})
    lines: list[Line] = []
    for number, dtype, width, count in itertools.product(threads, DTYPES, widths, rows):
        torch.set_num_threads(number)
        lines += measure(device, count, width, dtype)
        print(f"{number} threads, {dtype}, {count} x {width}", file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    text = f"{title}\n\n{table(lines)}\n"
    (options.out / "table.md").write_text(text)
    (options.out / "data.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))
    plot(lines, title, options.out / "plot.png")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
