"""The interface of engines, and the CPU engine."""

import importlib.util
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.engines.outputs import Precision
from models.manifest import Output
from models.packing import COMPUTED_NAMES, WORD_NAMES, PackedBatch
from models.printable import printable

# Runs a batch and returns the named outputs, in the order of the names.
Run = Callable[[PackedBatch, Sequence[Output]], list[NDArray[np.float32]]]


class EngineError(Exception):
    """An engine is unknown or unusable on this machine, or its vectors differ from PyTorch's."""


@dataclass(frozen=True)
class GraphFile:
    """An ONNX file or a table whose SHA-256 was verified.

    Attributes:
        path: Path of the file. The weights of a graph are in another file of the same directory.
        weight_bytes: Size of the weights, in bytes.
        table_shape: Vocabulary size and width of the model, the shape of a table.
    """

    path: Path
    weight_bytes: int
    table_shape: tuple[int, int]


class CpuRuns:
    """Runs in flight on the CPU, of all engines that share it. Thread-safe."""

    def __init__(self) -> None:
        self._running = 0
        self._running_long = 0
        self._overlapping = False
        self._lock = threading.Lock()

    def begin(self, *, is_long: bool) -> bool:
        """Count a run, and return whether it should use all threads.

        Under load, a run may start in the short gap between two other runs. A run therefore has the
        CPU for itself only if no run is in flight now, and none was when the previous run started.
        A long run uses all threads beside short runs too, because it may outlast all of them.

        Args:
            is_long: Whether the batch contains a long row; see `BatchSizes.long_row`.
        """
        with self._lock:
            is_alone = not (self._running or self._overlapping)
            uses_all = is_alone or (is_long and not self._running_long)
            self._overlapping = self._running > 0
            self._running += 1
            self._running_long += is_long
        return uses_all

    def end(self, *, is_long: bool) -> None:
        """Count a run no longer."""
        with self._lock:
            self._running -= 1
            self._running_long -= is_long


@dataclass(frozen=True)
class Hardware:
    """CPU and GPU resources for an engine.

    Attributes:
        threads: Number of threads to compute with, for an engine on CPU.
        gpu: CUDA device index, for an engine on GPU.
        cpu_runs: Runs in flight on the CPU.
    """

    threads: int
    gpu: int
    cpu_runs: CpuRuns


@dataclass(frozen=True)
class BatchSizes:
    """Parameters for forming an engine's batches, all in tokens.

    Attributes:
        max_tokens: Batch size at which throughput saturates.
        min_split_tokens: Minimum batch size when queued tokens are split among the streams.
        fixed_cost: Fixed cost of a batch, as the number of tokens that take the same time.
        padding_cost: Cost of a position of the padded batch, as a part of a token's.
    """

    max_tokens: int
    min_split_tokens: int
    fixed_cost: int
    padding_cost: float = 0.0

    @property
    def long_row(self) -> int:
        """Length in tokens above which a row runs on all threads, one such row at a time."""
        return 4 * self.max_tokens


@dataclass(frozen=True)
class CompiledGraph:
    """A graph compiled for a certain number of concurrent runs.

    Attributes:
        run: Runs a batch and returns the named outputs; see `Engine.run_outputs`.
        cancel: Aborts the runs in flight; see `Engine.cancel`.
    """

    run: Run
    cancel: Callable[[], None]


class Engine(Protocol):
    """A loaded graph, ready to run.

    Attributes:
        name: Name in `models.engines.ENGINES`.
        target: Target of the graph, "cpu" or "cuda".
        precision: Precision of the computation.
        threads: Number of CPUs that all streams together keep busy.
        streams: Maximum number of runs in flight.
        weight_bytes: Size of the graph's weights, in bytes.
        batches: Parameters for forming batches.
    """

    name: str
    target: str
    precision: Precision
    threads: int
    streams: int
    weight_bytes: int
    batches: BatchSizes

    @property
    def runs(self) -> Sequence[Run]:
        """Run functions of all compiled variants of the graph, for the self-check."""

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return the vectors of an output, such as one per row, `(B, W)`; see `OutputSpec`."""

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Return several outputs of one forward pass, in the order of their names."""

    def cancel(self) -> None:
        """Abort the runs in flight; each aborted run raises an error in its caller."""

    def close(self) -> None:
        """Free the graph and its weights; runs in flight keep them until they end."""


# Larger batches overflow the CPU caches. In bfloat16, a token takes a quarter of its float32 time,
# but a batch has the same fixed cost, which therefore equals four times as many tokens.
_ON_CPU: dict[Precision, BatchSizes] = {
    "float32": BatchSizes(max_tokens=384, min_split_tokens=64, fixed_cost=8),
    "bfloat16": BatchSizes(max_tokens=512, min_split_tokens=64, fixed_cost=32),
    "int8": BatchSizes(max_tokens=512, min_split_tokens=64, fixed_cost=32),
}


# Size of the weights above which a graph is compiled only once: each compilation copies them.
_MAX_BYTES_COMPILED_TWICE = 256 * 2**20


class CpuEngine:
    """A graph compiled for a single batch and, unless it is large, also for concurrent batches.

    A single batch uses all threads, for the lowest latency. Concurrent batches, of this engine or
    of others, have one thread each and give more throughput, because threads that share a batch
    synchronise at every node. Measured gains are 3% for all-MiniLM-L6-v2 and 2% for BERT-base (full
    batches in onnxruntime, two cores of an AMD EPYC with AVX2). A large graph always uses all
    threads.

    Args:
        name: Name in `models.engines.ENGINES`.
        precision: Precision of the computation.
        hardware: Threads to compute with, and runs in flight.
        weight_bytes: Size of the graph's weights, in bytes.
        compile_graph: Compiles the graph for a number of concurrent runs.
    """

    target = "cpu"

    def __init__(
        self,
        name: str,
        precision: Precision,
        hardware: Hardware,
        weight_bytes: int,
        compile_graph: Callable[[int], CompiledGraph],
    ) -> None:
        self.name = name
        self.precision = precision
        self.threads = threads = hardware.threads
        self.streams = threads if weight_bytes <= _MAX_BYTES_COMPILED_TWICE else 1
        self.weight_bytes = weight_bytes
        self.batches = _ON_CPU[precision]
        with ThreadPoolExecutor() as compilers:  # libraries release the interpreter's lock
            graphs = compilers.map(compile_graph, sorted({1, self.streams}))
            self._graphs: Sequence[CompiledGraph] = tuple(graphs)
        self.runs: Sequence[Run] = tuple(graph.run for graph in self._graphs)
        self._cpu_runs = hardware.cpu_runs

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return one vector per row, `(B, W)`, or per token, `(T, W)`; see `engines.OUTPUTS`."""
        return self.run_outputs(batch, (output,))[0]

    def run_outputs(
        self, batch: PackedBatch, outputs: Sequence[Output]
    ) -> list[NDArray[np.float32]]:
        """Return several outputs of one forward pass, in the order of their names."""
        single, concurrent = self.runs[0], self.runs[-1]
        is_long = batch.padded_index.shape[1] > self.batches.long_row
        uses_all = self._cpu_runs.begin(is_long=is_long)
        try:
            return (single if uses_all else concurrent)(batch, outputs)
        finally:
            self._cpu_runs.end(is_long=is_long)

    def cancel(self) -> None:
        """Abort the runs in flight; each aborted run raises an error in its caller."""
        for graph in self._graphs:
            graph.cancel()

    def close(self) -> None:
        """Free the graph and its weights; runs in flight keep them until they end."""
        self._graphs, self.runs = (), ()


def check_inputs(names: Iterable[str]) -> list[str]:
    """Return the names of a graph's inputs, each an array of `PackedBatch` or of its words.

    Raises:
        EngineError: The graph has another input.
    """
    own = list(names)
    known = {field.name for field in fields(PackedBatch)} - {"words"}
    known |= {*COMPUTED_NAMES, *WORD_NAMES}
    if unknown := {*own} - known:
        raise EngineError(f"the graph has an unknown input: {printable(min(unknown))}")
    return own


def how_to_install(package: str, extra: str) -> str | None:
    """Return how to install a missing package; None if it is installed.

    Args:
        package: Import name of the package.
        extra: Extra of Vitrine that installs the package.
    """
    if importlib.util.find_spec(package):
        return None
    return (
        f"the package {package} is not installed; install Vitrine with its extra {extra!r}: "
        f"run pip install '.[{extra}]' in the source folder"
    )
