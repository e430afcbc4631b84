"""onnxruntime on CPUs and on CUDA GPUs."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.engines.engine import (
    BatchSizes,
    CompiledGraph,
    CpuEngine,
    Engine,
    EngineError,
    GraphFile,
    Hardware,
    Run,
    check_inputs,
    how_to_install,
)
from models.engines.outputs import Precision
from models.manifest import Output
from models.packing import PackedBatch
from models.printable import printable

if TYPE_CHECKING:
    import onnxruntime

# onnxruntime reads this variable when it is imported.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# Number of tokens, padding included, above which a batch on CPU releases its memory when it ends.
# 8,192 tokens of a model like all-MiniLM-L6-v2 take 0.2 GB.
_MAX_PADDED_IN_ARENA = 1024


def open_on_cpu(graph: GraphFile, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine "onnxruntime" for a graph; see `models.engines.EngineSpec`."""

    def compile_graph(concurrent_runs: int) -> CompiledGraph:
        return _compile(onnxruntime_session(graph.path, hardware.threads // concurrent_runs))

    return CpuEngine("onnxruntime", precision, hardware, graph.weight_bytes, compile_graph)


def cpu_unusable(_precision: Precision) -> str | None:
    """Return the reason why "onnxruntime" is unusable on this machine; None if it is usable."""
    return how_to_install("onnxruntime", "cpu")


def onnxruntime_session(
    graph: Path | bytes, threads: int, profile: str = "", folder: Path | None = None
) -> "onnxruntime.InferenceSession":
    """Return an onnxruntime session on CPU.

    Args:
        graph: Path of a graph, or a serialised graph.
        threads: Number of threads per run.
        profile: Path prefix of the profile file, which lists the time of each node; "": no
            profiling.
        folder: Folder with the weights of a serialised graph; None: the graph contains them.

    Raises:
        EngineError: The path is not valid UTF-8.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_profiling = bool(profile)
    options.profile_file_prefix = profile
    options.log_severity_level = 3
    # onnxruntime stores an allocation plan for each input shape. Plans save no time, and the second
    # run of a row of 8,192 tokens takes 50 MB more with its plan than the first run without it.
    options.enable_mem_pattern = False
    # By default, idle threads busy-wait between runs and take CPU time from other threads.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(folder))
    return onnxruntime.InferenceSession(
        graph if isinstance(graph, bytes) else _utf8(graph),
        options,
        providers=["CPUExecutionProvider"],
        # On CPU, SkipLayerNormalization is 4 to 9 times slower than Add and LayerNormalization.
        disabled_optimizers=["SkipLayerNormFusion"],
    )


def _utf8(graph: Path) -> str:
    """Return a path as onnxruntime takes it.

    Raises:
        EngineError: It is not valid UTF-8.
    """
    name = str(graph)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise EngineError(
            f"onnxruntime cannot open {printable(name)}, because its path is not valid UTF-8; "
            "rename the folder, or use another engine"
        ) from None
    return name


class CudaEngine:
    """A graph on a CUDA GPU. Two streams overlap computation with copies to and from the GPU.

    On an H100 and an H200 they have 1.0 to 1.2 times the rate of one; four are not faster than two.
    """

    name = target = "cuda"
    streams = 2
    threads = streams  # each stream keeps one CPU busy while it waits for the GPU
    # On an H100 with two streams, batches of 32,768 tokens have 1.2 times the rate of batches of
    # 8,192 with the shape of all-MiniLM-L6-v2, and 1.06 times with that of BERT-base, but requests
    # wait longer for them. Smaller GPUs were not measured, and the fixed cost is an estimate.
    batches = BatchSizes(max_tokens=16_384, min_split_tokens=4_096, fixed_cost=512)

    def __init__(self, precision: Precision, weight_bytes: int, graph: CompiledGraph) -> None:
        self.precision = precision
        self.weight_bytes = weight_bytes
        self.runs: Sequence[Run] = (graph.run,)
        self.cancel = graph.cancel

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return one vector per row, `(B, W)`, or per token, `(T, W)`; see `engines.OUTPUTS`."""
        return self.run_outputs(batch, (output,))[0]

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Return several outputs of one forward pass, in the order of their names."""
        return self.runs[0](batch, outputs)

    def close(self) -> None:
        """Free the graph and its weights; runs in flight keep them until they end."""
        self.runs, self.cancel = (), lambda: None


def open_on_gpu(graph: GraphFile, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine "cuda" for a graph; see `models.engines.EngineSpec`.

    Raises:
        EngineError: onnxruntime cannot run the graph on the GPU.
    """
    import onnxruntime

    onnxruntime.preload_dlls()  # the CUDA libraries installed by pip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # only shape computations stay on the CPU
    options.log_severity_level = 3
    refusal = f"cuda in {precision} is not usable: onnxruntime cannot compute on GPU {hardware.gpu}"
    try:
        session = onnxruntime.InferenceSession(
            _utf8(graph.path),
            options,
            # TF32 would reduce float32's 23 mantissa bits to 10.
            providers=[("CUDAExecutionProvider", {"device_id": hardware.gpu, "use_tf32": 0})],
            # No silent fallback to the CPU, neither at startup nor after an error.
            enable_fallback=0,
        )
    except RuntimeError as error:
        raise EngineError(f"{refusal}: {error}") from error
    if "CUDAExecutionProvider" not in session.get_providers():
        raise EngineError(f"{refusal}; see the log of onnxruntime")
    return CudaEngine(precision, graph.weight_bytes, _compile(session))


def gpu_unusable(_precision: Precision) -> str | None:
    """Return the reason why "cuda" is unusable on this machine; None if it is usable."""
    if reason := how_to_install("onnxruntime", "gpu"):
        return reason
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return (
            "the installed onnxruntime supports CPUs only; uninstall it and install Vitrine with "
            "its extra 'gpu'"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1 is missing)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    return None


def _compile(session: "onnxruntime.InferenceSession") -> CompiledGraph:
    import onnxruntime

    in_flight: set[onnxruntime.RunOptions] = set()
    names = check_inputs(port.name for port in session.get_inputs())
    is_on_cpu = session.get_providers() == ["CPUExecutionProvider"]

    def run(batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
        options = onnxruntime.RunOptions()
        if is_on_cpu and batch.padded_index.size > _MAX_PADDED_IN_ARENA:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        in_flight.add(options)
        try:
            results: list[NDArray[np.float32]] = session.run(
                list(outputs), batch.inputs(names), options
            )
        finally:
            in_flight.discard(options)
        return results

    def cancel() -> None:
        for options in tuple(in_flight):
            options.terminate = True

    return CompiledGraph(run, cancel)
