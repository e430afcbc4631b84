"""The interface of engines, and the CPU engine."""

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.engines.outputs import Output, Precision
from models.packing import PackedBatch

Run = Callable[[PackedBatch, Output], NDArray[np.float32]]


class EngineError(Exception):
    """An engine is unusable here, or does not reproduce the model's vectors."""


@dataclass(frozen=True)
class Hardware:
    """Hardware for an engine.

    Attributes:
        threads: Number of busy CPUs, for an engine on CPU.
        gpu: CUDA's index of the GPU, for an engine on GPU.
    """

    threads: int
    gpu: int


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes for an engine, in tokens.

    Attributes:
        max_tokens: Batch size at which throughput saturates.
        min_split_tokens: Minimum queue size that is worth splitting among the streams.
        fixed_cost: Cost of a batch, independent of its size.
    """

    max_tokens: int
    min_split_tokens: int
    fixed_cost: int


@dataclass(frozen=True)
class CompiledGraph:
    """A graph compiled for a number of concurrent runs.

    Attributes:
        run: See `Engine.run`.
        cancel: See `Engine.cancel`.
    """

    run: Run
    cancel: Callable[[], None]


class Engine(Protocol):
    """An opened graph.

    Attributes:
        target: Target of the graph, "cpu" or "cuda".
        threads: Number of CPUs kept busy by all streams together.
        streams: Maximum number of runs in flight.
    """

    name: str
    target: str
    precision: Precision
    threads: int
    streams: int
    batches: BatchSizes

    @property
    def runs(self) -> Sequence[Run]:
        """Compiled variants of `run`; the self-check tests each."""

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, W)`, or token vectors `(T, D)`."""

    def cancel(self) -> None:
        """Abort the runs in flight; each of them raises an error."""


# Larger batches overflow the caches. In bfloat16 a token takes a quarter of the time, while the
# fixed cost stays the same.
_ON_CPU: dict[Precision, BatchSizes] = {
    "float32": BatchSizes(max_tokens=384, min_split_tokens=64, fixed_cost=8),
    "bfloat16": BatchSizes(max_tokens=512, min_split_tokens=64, fixed_cost=32),
}


class CpuEngine:
    """A graph compiled twice: for concurrent batches, and for a single batch.

    Concurrent batches with one thread each give 1.1 to 1.2 times the throughput (two cores) of
    single batches on all threads, which synchronise at every node. A batch without concurrency gets
    all threads, for the lowest latency.
    """

    target = "cpu"

    def __init__(
        self,
        name: str,
        precision: Precision,
        threads: int,
        compile_graph: Callable[[int], CompiledGraph],
    ) -> None:
        self.name = name
        self.precision = precision
        self.threads = self.streams = threads
        self.batches = _ON_CPU[precision]
        concurrent = compile_graph(threads)
        self._graphs = (concurrent, concurrent if threads == 1 else compile_graph(1))
        self.runs = tuple(graph.run for graph in self._graphs)
        self._running = 0
        self._overlapping = False
        self._lock = threading.Lock()

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, W)`, or token vectors `(T, D)`."""
        concurrent, single = self.runs
        with self._lock:
            # Under load, gaps between runs are short. A run counts as single only if the previous
            # one started without concurrency as well.
            is_single = not (self._running or self._overlapping)
            self._overlapping = self._running > 0
            self._running += 1
        try:
            return (single if is_single else concurrent)(batch, output)
        finally:
            with self._lock:
                self._running -= 1

    def cancel(self) -> None:
        """Abort the runs in flight; each of them raises an error."""
        for graph in self._graphs:
            graph.cancel()


def missing(package: str, extra: str) -> str | None:
    """Return installation instructions for a missing package; None if it is installed."""
    if importlib.util.find_spec(package):
        return None
    return (
        f"the package {package} is not installed; install Vitrine with its extra {extra!r}: "
        f"run pip install '.[{extra}]' in the source folder"
    )
