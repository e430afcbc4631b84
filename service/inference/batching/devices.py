"""The devices of a process, which its models share."""

from models.engines import CpuRuns, Engine
from service.inference.batching.streams import StreamPool


class Devices:
    """The CPU and the GPUs of a process. Models that share them are opened in one event loop.

    Attributes:
        cpu_runs: Runs in flight of all engines on CPU.
    """

    def __init__(self) -> None:
        self.cpu_runs = CpuRuns()
        self._pools: dict[str, StreamPool] = {}

    def pool(self, engine: Engine, gpu: int) -> StreamPool:
        """Return the streams of an engine's device.

        The device has as many streams as the first of its engines has threads.

        Args:
            engine: An engine on the device.
            gpu: CUDA device index; ignored for engines on CPU.
        """
        device = "cpu" if engine.target == "cpu" else f"cuda:{gpu}"
        if device not in self._pools:
            self._pools[device] = StreamPool(engine.threads, has_spare=device == "cpu")
        return self._pools[device]
