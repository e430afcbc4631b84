"""OpenVINO on CPUs."""

import queue
import sys
from collections.abc import Sequence

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
                # Number of input shapes cached per node. Batches have thousands of shapes: a larger
                # cache takes memory and saves no time.
                "CPU_RUNTIME_CACHE_CAPACITY": 64,
            },
        )
        idle: queue.LifoQueue[openvino.InferRequest] = queue.LifoQueue()
        requests = [compiled.create_infer_request() for _ in range(concurrent_runs)]
        for request in requests:
            idle.put(request)

        def run(batch: PackedBatch, outputs: Sequence[Output]) -> list[NDArray[np.float32]]:
            # Rounding makes shapes repeat: OpenVINO recompiles for every new shape. Attention is
            # slow on rows whose length is no multiple of 16, the number of floats in a register.
            rounded = round_up(batch, tokens=16, length=16)
            request = idle.get()
            try:
                request.infer(rounded.inputs(names), share_inputs=True, share_outputs=True)
                # Copied because the next run of this InferRequest overwrites the buffer.
                results = {output: request.get_tensor(output).data.copy() for output in outputs}
            finally:
                idle.put(request)
            return [
                result[: len(batch.input_ids)] if OUTPUTS[output].per_token else result
                for output, result in results.items()
            ]

        def cancel() -> None:
            for request in requests:
                request.cancel()

        return CompiledGraph(run, cancel)

    return CpuEngine("openvino", precision, hardware, graph.weight_bytes, compile_graph)


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
