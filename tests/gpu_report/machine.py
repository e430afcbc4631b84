"""Step a: the GPU, its driver, the installed packages, and the machine's limits."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.utils.benchmark import Timer

from tests.benchmarks.cuda_timer import capturable, cuda_seconds
from tests.gpu_report.results import Row
from tests.gpu_report.step import Run

_PACKAGES = (
    *("torch", "triton", "numpy", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime"),
    *("transformers", "sentence-transformers", "tokenizers", "fastapi", "uvicorn", "pytest"),
)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def describe(run: Run) -> None:
    """Describe the machine, and measure a copy and a large matrix product."""
    for name, value in _facts(run.device).items():
        run.recorder.add("Device", {"fact": name, "value": value})
    for package in _PACKAGES:
        run.recorder.add("Packages", {"package": package, "version": _version(package)})
    with capturable(run.device):
        for megabytes in (1,) if run.is_dry else (64, 1024):
            run.recorder.add("Copies", {"MB": megabytes, "GB/s": copy_rate(run.device, megabytes)})
        size = 64 if run.is_dry else 8192
        for dtype in _DTYPES:
            rate = _product_rate(run.device, size, dtype)
            row: Row = {"size": size, "dtype": str(dtype).removeprefix("torch."), "TFLOP/s": rate}
            run.recorder.add("Matrix products", row)


def _facts(device: str) -> dict[str, str]:
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "Python": sys.version.split()[0],
        "system": platform.platform(),
        "CPUs": str(os.cpu_count()),
        "CUDA of torch": str(torch.version.cuda),
    }
    if device == "cpu":
        return {"device": "CPU (dry run)", **facts}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "multiprocessors": str(properties.multi_processor_count),
        "driver": _driver(),
        **facts,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer: {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def copy_rate(device: str, megabytes: float) -> float:
    """Return the GB/s of a copy on the device; bytes that are read and bytes that are written."""
    source = torch.empty(int(megabytes * 1e6), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(device, lambda: target.copy_(source)) / 1e9


def _product_rate(device: str, size: int, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a product of two square matrices of random values."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(device, lambda: a @ b) / 1e12


def _seconds(device: str, work: Callable[[], object]) -> float:
    if device != "cpu":
        return cuda_seconds(work)
    return Timer("work()", globals={"work": work}).timeit(5).median
