"""`make bench-op`: times of the fused operator and its alternatives.

All implementations take turns, beside a copy on the same device of the bytes that the pass must
move: forward 4NDe (read x and residual, write the norm and the sum), backward 3NDe (read dy and the
sum, write dx). All kernels of a pass count. On CUDA the kernels run in a CUDA graph, and the L2
cache is flushed between runs. On CPU caches stay warm, and freed memory is kept: page faults of new
memory would dominate otherwise.
"""

import ctypes
import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from models.add_layer_norm import add_layer_norm_with_sum, implementation
from tests.benchmarks.comparison import Measure, Turns, parser, report
from tests.benchmarks.cuda_timer import capturable, cuda_seconds

EPS = 1e-5
Norm = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

GRIDS = {
    "cpu": ((16, 128, 512, 4096), (384, 768, 1024)),
    "cuda": ((1024, 4096, 16384, 65536), (384, 768, 1024, 4096)),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Arrays that a pass reads and writes at least.
ARRAYS_MOVED = {"forward": 4, "backward": 3}


def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The unfused composition."""
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def fused(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The fused operator."""
    return add_layer_norm_with_sum(x, residual, weight, bias, EPS)


def measure(
    comparison: Turns,
    device: str,
    rows: int,
    width: int,
    dtype: str,
    rounds: int,
    backend: str = "inductor",
) -> None:
    """Measure every implementation and a copy at one size, forward and backward, in microseconds.

    The figures have the name "{pass}, {dtype}, {rows} x {width}, {threads} threads: us". The
    backend is that of `torch.compile`.
    """
    torch.compiler.reset()  # after eight sizes, torch.compile would run the function uncompiled
    with capturable(device):
        x, residual, dy = (
            torch.randn(rows, width, device=device, dtype=DTYPES[dtype]) for _ in range(3)
        )
        weight, bias = (torch.randn(width, device=device, dtype=DTYPES[dtype]) for _ in range(2))
        inputs = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]
        for direction, arrays in ARRAYS_MOVED.items():
            is_backward = direction == "backward"
            norms: dict[str, Norm] = {
                f"vitrine ({implementation(x, backward=is_backward)})": fused,
                "eager": eager,
                "torch.compile": torch.compile(eager, dynamic=False, backend=backend),
            }
            make = _backward_of if is_backward else _forward_of
            runs = {name: make(norm, inputs, dy) for name, norm in norms.items()}
            bytes_read = arrays * rows * width * x.element_size() // 2
            source = torch.empty(bytes_read, dtype=torch.uint8, device=device)
            runs["copy"] = partial(torch.empty_like(source).copy_, source)
            title = f"{direction}, {dtype}, {rows} x {width}, {torch.get_num_threads()} threads: "
            timers = {name: timer(run, device) for name, run in runs.items()}
            comparison.measure(timers, rounds, title=title, warm_up=False)


def timer(run: Callable[[], object], device: str) -> Measure:
    """Return a function that measures the median time of some work, after a warm-up."""
    if device.startswith("cuda"):
        return lambda: {"us": 1e6 * cuda_seconds(run)}
    on_cpu = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    loops = max(1, int(0.02 / on_cpu.timeit(3).median))
    return lambda: {"us": 1e6 * on_cpu.timeit(loops).median}


def _forward_of(norm: Norm, inputs: list[Tensor], _dy: Tensor) -> Callable[[], object]:
    """Return a forward pass as inference runs it."""
    x, residual, weight, bias = (tensor.detach() for tensor in inputs)

    def run() -> object:
        with torch.inference_mode():
            return norm(x, residual, weight, bias)

    return run


def _backward_of(norm: Norm, inputs: list[Tensor], dy: Tensor) -> Callable[[], object]:
    x, residual, weight, bias = inputs
    y, _ = norm(x, residual, weight, bias)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory; by default that depends on earlier allocations."""
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    for option in (trim_threshold, mmap_threshold):
        if not libc.mallopt(option, 2**30):
            raise OSError("the C library does not take mallopt's options")


def main() -> None:
    """Measure all sizes on this device, and print the table."""
    options = parser(__doc__, rounds=7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", choices=GRIDS, default=device)
    arguments = options.parse_args()
    rows, widths = GRIDS[arguments.device]
    threads = {torch.get_num_threads()}
    if arguments.device == "cpu":
        keep_freed_memory()
        threads |= {1}
    comparison = Turns("eager")
    for number, dtype, width, count in itertools.product(sorted(threads), DTYPES, widths, rows):
        torch.set_num_threads(number)
        measure(comparison, arguments.device, count, width, dtype, arguments.rounds)
    on = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    report(f"On {on}, torch {torch.__version__}", comparison)


if __name__ == "__main__":
    main()
