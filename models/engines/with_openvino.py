"""OpenVINO on CPUs."""

import queue

import numpy as np
from numpy.typing import NDArray

from models.engines.engine import CpuEngine, Engine, Hardware, Opened, Output, Precision, missing
from models.packing import PackedBatch, round_up


def open_on_cpu(graph: bytes, precision: Precision, hardware: Hardware) -> Engine:
    """Return the engine `openvino`; see `models.engines.Entry`."""
    import openvino

    core = openvino.Core()
    model = core.read_model(graph)

    def open_for(at_once: int) -> Opened:
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[precision],
                "INFERENCE_NUM_THREADS": hardware.threads,
                "NUM_STREAMS": at_once,
                # Two services on one machine would pin their threads to the same cores.
                "ENABLE_CPU_PINNING": False,
                # Of each node it keeps what it has prepared for so many shapes. A service meets
                # thousands: what it keeps of more takes memory, and saves no time.
                "CPU_RUNTIME_CACHE_CAPACITY": 64,
            },
        )
        idle: queue.LifoQueue[openvino.InferRequest] = queue.LifoQueue()
        requests = [compiled.create_infer_request() for _ in range(at_once)]
        for request in requests:
            idle.put(request)

        def run(batch: PackedBatch, output: Output) -> NDArray[np.float32]:
            # It prepares itself for every shape that it has not seen.
            rounded = round_up(batch, tokens=16, length=8)
            request = idle.get()
            try:
                request.infer(rounded.inputs(), share_inputs=True, share_outputs=True)
                # Copied, and nothing else: the next run of this request writes over it.
                result: NDArray[np.float32] = request.get_tensor(output).data.copy()
            finally:
                idle.put(request)
            return result if output == "pooled" else result[: len(batch.input_ids)]

        def cancel() -> None:
            for request in requests:
                request.cancel()

        return Opened(run, cancel)

    return CpuEngine("openvino", precision, hardware.threads, open_for)


def cpu_unusable(precision: Precision) -> str | None:
    """Return why it cannot be used here in a precision, or None."""
    if reason := missing("openvino", "cpu"):
        return reason
    import openvino

    if precision == "bfloat16":
        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in capabilities:
            return "this CPU has no bfloat16 instructions (AVX512-BF16 or AMX)"
    return None
