"""What an engine is, whatever runs it."""

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from models.packing import PackedBatch

Precision = Literal["float32", "float16", "bfloat16"]
Output = Literal["pooled", "tokens"]
Run = Callable[[PackedBatch, Output], NDArray[np.float32]]


class EngineError(Exception):
    """An engine that was asked for cannot be used here, or does not give the model's vectors."""


@dataclass(frozen=True)
class Hardware:
    """What an engine may use.

    Attributes:
        threads: CPUs that one on CPU keeps busy.
        gpu: Where one on a GPU computes, as CUDA numbers those that the process may use.
    """

    threads: int
    gpu: int


@dataclass(frozen=True)
class BatchSizes:
    """Batches that suit an engine, in tokens.

    Attributes:
        most: Above it a batch gives no more vectors a second.
        divided: From so many on, what waits is better divided among the lanes.
        overhead: What a batch costs, however small it is.
    """

    most: int
    divided: int
    overhead: int


@dataclass(frozen=True)
class Opened:
    """A graph that is ready for some runs at once.

    Attributes:
        run: See `Engine.run`.
        cancel: Makes the runs that are under way raise, soon.
    """

    run: Run
    cancel: Callable[[], None]


class Engine(Protocol):
    """An opened graph.

    Attributes:
        target: Of the graph.
        threads: CPUs that it keeps busy, when all its lanes are.
        lanes: Runs that may be under way at once.
    """

    name: str
    target: str
    precision: Precision
    threads: int
    lanes: int
    batches: BatchSizes

    @property
    def runs(self) -> Sequence[Run]:
        """Everything that `run` may call; the self-check tries each."""

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""

    def cancel(self) -> None:
        """Make the runs that are under way raise, soon."""


# Activations of more do not stay near the cores. In bfloat16 a token takes a quarter of the time,
# and what surrounds it as long as ever.
_ON_CPU: dict[Precision, BatchSizes] = {
    "float32": BatchSizes(most=384, divided=64, overhead=8),
    "bfloat16": BatchSizes(most=512, divided=64, overhead=32),
}


class CpuEngine:
    """A graph that is opened twice, for many batches at once and for one.

    Batches that run side by side, on one thread each, give more vectors than one after the other
    on all threads, which wait for each other at every node (1.1 to 1.2 times as many on two cores).
    A batch that is alone gets all threads, for the shortest time to its answer.
    """

    target = "cpu"

    def __init__(
        self, name: str, precision: Precision, threads: int, open_for: Callable[[int], Opened]
    ) -> None:
        self.name = name
        self.precision = precision
        self.threads = self.lanes = threads
        self.batches = _ON_CPU[precision]
        side_by_side = open_for(threads)
        self._opened = (side_by_side, side_by_side if threads == 1 else open_for(1))
        self.runs = tuple(opened.run for opened in self._opened)
        self._running = 0
        self._overlapping = False
        self._lock = threading.Lock()

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""
        side_by_side, alone = self.runs
        with self._lock:
            # Under load there is a moment without another run now and then, which is soon over; so
            # the run before must have been alone too.
            is_alone = not (self._running or self._overlapping)
            self._overlapping = self._running > 0
            self._running += 1
        try:
            return (alone if is_alone else side_by_side)(batch, output)
        finally:
            with self._lock:
                self._running -= 1

    def cancel(self) -> None:
        """Make the runs that are under way raise, soon."""
        for opened in self._opened:
            opened.cancel()


def missing(package: str, extra: str) -> str | None:
    """Return what to do where a package is not installed."""
    if importlib.util.find_spec(package):
        return None
    return f"the package {package} is not installed; pip install 'vitrine[{extra}]' brings it"
