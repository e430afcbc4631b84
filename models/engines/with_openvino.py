"""OpenVINO on CPUs."""

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.engines.cpus import cpu_flags
from models.engines.engine import (
    CompiledGraph,
    CpuEngine,
    Engine,
    GraphFile,
    Hardware,
    check_inputs,
    how_to_install,
)
from models.engines.outputs import OUTPUTS, Precision
from models.manifest import Output
from models.packing import PackedBatch, round_up

if TYPE_CHECKING:
    import openvino

# Makes OpenVINO's import of its telemetry package fail, so that OpenVINO sends no telemetry.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


# Number of channels of a token that share a scale in int8; `models.export.int8` rounds weights for
# this number.
INT8_GROUP = 128
# Speed and quality are measured with these instructions only. Older ones add pairs of products
# of codes in 16 bits, which can saturate.
_INT8_FLAG = "avx512_vnni"


def open_on_cpu(graph: GraphFile, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine "openvino" for a graph; see `models.engines.EngineSpec`."""
    import openvino

    core = openvino.Core()
    model = core.read_model(graph.path)
    names = check_inputs(port.any_name for port in model.inputs)
    is_bf16 = precision == "bfloat16" or (precision == "int8" and _has_int8_between_bf16())

    def compile_graph(concurrent_runs: int) -> CompiledGraph:
        def compile_requests() -> _Requests:
            compiled = core.compile_model(
                model,
                "CPU",
                {
                    "INFERENCE_PRECISION_HINT": "bf16" if is_bf16 else "f32",
                    "DYNAMIC_QUANTIZATION_GROUP_SIZE": INT8_GROUP if precision == "int8" else 0,
                    "INFERENCE_NUM_THREADS": hardware.threads,
                    "NUM_STREAMS": concurrent_runs,
                    # Two processes on one machine would pin their threads to the same cores.
                    "ENABLE_CPU_PINNING": False,
                    # Number of input shapes cached per node. Batches have thousands of shapes: a
                    # larger cache takes memory and saves no time.
                    "CPU_RUNTIME_CACHE_CAPACITY": 64,
                },
            )
            return _Requests(compiled, concurrent_runs)

        runs = _Runs(compile_requests, names, in_caller=hardware.threads == 1)
        return CompiledGraph(runs.run, runs.cancel)

    return CpuEngine("openvino", precision, hardware, graph.weight_bytes, compile_graph)


class _Requests:
    """The idle requests of a compiled graph. Each is for one run at a time."""

    def __init__(self, compiled: "openvino.CompiledModel", count: int) -> None:
        self.is_cancelled = False
        self.idle: queue.LifoQueue[openvino.InferRequest] = queue.LifoQueue()
        for _ in range(count):
            self.idle.put(compiled.create_infer_request())


class _Runs:
    """Runs of a graph, which is compiled again after a run that was cancelled or failed.

    Such a run leaves shapes in the compiled graph: in OpenVINO 2026.4, later runs of other shapes
    failed, or returned wrong results.

    Args:
        compile_requests: Compiles the graph.
        names: Names of the inputs.
        in_caller: Whether OpenVINO would compute in the thread of the caller, as it does with one
            thread. It cannot cancel that.
    """

    def __init__(
        self, compile_requests: Callable[[], _Requests], names: Sequence[str], *, in_caller: bool
    ) -> None:
        self._compile = compile_requests
        self._names = names
        self._in_caller = in_caller
        self._lock = threading.Lock()
        self._current: _Requests | None = compile_requests()
        self._in_flight: set[tuple[_Requests, openvino.InferRequest]] = set()

    def run(self, batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
        """Run a batch and return the named outputs; see `Engine.run_outputs`.

        Raises:
            RuntimeError: The run was cancelled, or OpenVINO fails.
        """
        # Rounding makes shapes repeat: OpenVINO recompiles for every new shape. Attention is
        # slow on rows whose length is no multiple of 16, the number of floats in a register.
        rounded = round_up(batch, tokens=16, length=16)
        while (results := self._try(rounded, outputs)) is None:
            pass
        return [
            result[: len(batch.input_ids)] if OUTPUTS[output].per_token else result
            for output, result in zip(outputs, results, strict=True)
        ]

    def cancel(self) -> None:
        """Abort the runs in flight; a compilation is not waited for."""
        for requests, request in tuple(self._in_flight):
            requests.is_cancelled = True
            self._discard(requests)
            request.cancel()

    def _try(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]] | None:
        """Return the outputs of a run; None: another run has failed meanwhile."""
        requests, request = run = self._acquire()
        self._in_flight.add(run)
        try:
            inputs = batch.inputs(self._names)
            if self._in_caller:
                request.start_async(inputs, share_inputs=True)
                request.wait()
            else:
                request.infer(inputs, share_inputs=True, share_outputs=True)
            # Copied because the next run of this InferRequest overwrites the buffer.
            results = [request.get_tensor(output).data.copy() for output in outputs]
        except Exception:
            if requests is self._current or requests.is_cancelled:
                self._discard(requests)
                raise
            return None
        finally:
            self._in_flight.discard(run)
            requests.idle.put(request)
        if requests.is_cancelled:
            raise RuntimeError("the run was canceled")
        return results if requests is self._current else None

    def _acquire(self) -> "tuple[_Requests, openvino.InferRequest]":
        while True:
            with self._lock:
                if (requests := self._current) is None:
                    requests = self._current = self._compile()
            request = requests.idle.get()
            if requests is self._current:
                return requests, request
            requests.idle.put(request)

    def _discard(self, requests: _Requests) -> None:
        if requests is self._current:
            self._current = None


def cpu_unusable(precision: Precision) -> str | None:
    """Return why "openvino" is unusable in a precision on this machine; None if it is usable."""
    if reason := how_to_install("openvino", "cpu"):
        return reason
    if precision == "bfloat16" and not _has_bf16():
        return "this CPU has no bfloat16 instructions (AVX512-BF16 or AMX)"
    if precision == "int8" and _INT8_FLAG not in cpu_flags():
        return "this CPU has no AVX512-VNNI instructions, which int8 needs"
    return None


def _has_bf16() -> bool:
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _has_int8_between_bf16() -> bool:
    """Return whether products are in int8 where the values between them are in bfloat16.

    With AMX, OpenVINO 2026.4 multiplies in bfloat16 in place of int8, and results on one thread are
    wrong for products of 32 to 48 channels (cosines below 0).
    """
    return _has_bf16() and "amx_tile" not in cpu_flags()
