"""onnxruntime on CPUs, and on GPUs with CUDA."""

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.engines.engine import (
    BatchSizes,
    CpuEngine,
    Engine,
    EngineError,
    Hardware,
    Opened,
    Output,
    Precision,
    missing,
)
from models.packing import PackedBatch

if TYPE_CHECKING:
    import onnxruntime


def open_on_cpu(graph: bytes, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine `onnxruntime`; see `models.engines.Entry`."""

    def open_for(at_once: int) -> Opened:
        return _opened(onnxruntime_session(graph, hardware.threads // at_once))

    return CpuEngine("onnxruntime", precision, hardware.threads, open_for)


def cpu_unusable(_precision: Precision) -> str | None:
    """Return why it cannot be used here, or None."""
    return missing("onnxruntime", "cpu")


def onnxruntime_session(
    graph: bytes, threads: int, profile: str = ""
) -> "onnxruntime.InferenceSession":
    """Return a session on CPU.

    Args:
        graph: A graph for "cpu".
        threads: Of one run.
        profile: How the file begins that it writes the times of its nodes to; empty: none.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_profiling = bool(profile)
    options.profile_file_prefix = profile
    options.log_severity_level = 3
    # Between runs its threads would go on spinning, on cores that others need.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(
        graph,
        options,
        providers=["CPUExecutionProvider"],
        # Its fused kernel is several times slower than the pair that it replaces.
        disabled_optimizers=["SkipLayerNormFusion"],
    )


class CudaEngine:
    """A graph on a GPU, which computes one batch while the next one is laid out and copied."""

    name = target = "cuda"
    lanes = 2
    threads = lanes  # each waits for the GPU without rest
    # A large GPU is to be busy for longer than it takes to tell it what to do. An estimate.
    batches = BatchSizes(most=16_384, divided=4_096, overhead=512)

    def __init__(self, precision: Precision, opened: Opened) -> None:
        self.precision = precision
        self.runs = (opened.run,)
        self.cancel = opened.cancel

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""
        return self.runs[0](batch, output)


def open_on_gpu(graph: bytes, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine `cuda`; see `models.engines.Entry`.

    Raises:
        EngineError: onnxruntime cannot compute on that GPU.
    """
    import onnxruntime

    onnxruntime.preload_dlls()  # CUDA's libraries, from where pip put them
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # what is left to the CPU are a few sizes
    options.log_severity_level = 3
    refusal = f"cuda in {precision} is not usable: onnxruntime cannot compute on GPU {hardware.gpu}"
    try:
        session = onnxruntime.InferenceSession(
            graph,
            options,
            # A product in TF32 has ten bits less than float32.
            providers=[("CUDAExecutionProvider", {"device_id": hardware.gpu, "use_tf32": 0})],
            # It would go on on the CPU, at the first error as well.
            enable_fallback=0,
        )
    except RuntimeError as error:
        raise EngineError(f"{refusal}: {error}") from error
    if "CUDAExecutionProvider" not in session.get_providers():
        raise EngineError(f"{refusal}; it has logged why")
    return CudaEngine(precision, _opened(session))


def gpu_unusable(_precision: Precision) -> str | None:
    """Return why no GPU can be used here, or None."""
    if reason := missing("onnxruntime", "gpu"):
        return reason
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return (
            "the onnxruntime that is installed computes on CPUs only; "
            "pip uninstall it, then pip install 'vitrine[gpu]'"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is here (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU here"
    return None


def _opened(session: "onnxruntime.InferenceSession") -> Opened:
    import onnxruntime

    under_way: set[onnxruntime.RunOptions] = set()

    def run(batch: PackedBatch, output: Output) -> NDArray[np.float32]:
        options = onnxruntime.RunOptions()
        under_way.add(options)
        try:
            (result,) = session.run([output], batch.inputs(), options)
        finally:
            under_way.discard(options)
        return result

    def cancel() -> None:
        for options in tuple(under_way):
            options.terminate = True

    return Opened(run, cancel)
