"""Engines run an artifact's graph: a packed batch in, vectors out. Torch-free.

One table, `ENGINES`: how to open a graph, in which precisions, and how to tell that it is usable.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.packing import PackedBatch, pack

Precision = Literal["float32"]
Output = Literal["pooled", "tokens"]

# The worst cosine between a check vector and the engine's own that still counts as the same model.
SELF_CHECK_COSINE: dict[Precision, float] = {"float32": 1 - 1e-6}


class EngineError(Exception):
    """An engine that was asked for cannot be used here, or does not give the model's vectors."""


class Engine(Protocol):
    """An opened graph. `run` may be called from one thread at a time."""

    name: str
    precision: Precision
    threads: int

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""


@dataclass(frozen=True)
class Entry:
    """A line of the table of engines.

    Attributes:
        target: The graph of an artifact that it runs.
        precisions: What it computes in; the first is its default.
        unusable: Why it cannot be used on this machine, or None.
        open: Opens the bytes of a graph with a number of threads.
    """

    target: str
    precisions: Sequence[Precision]
    unusable: Callable[[], str | None]
    open: Callable[[bytes, Precision, int], Engine]


class OnnxRuntimeCpu:
    """onnxruntime's CPU provider."""

    name = "onnxruntime"

    def __init__(self, graph: bytes, precision: Precision, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.precision = precision
        self.threads = threads
        self._session = ort.InferenceSession(
            graph,
            options,
            providers=["CPUExecutionProvider"],
            # Its fused kernel is several times slower than the pair that it replaces.
            disabled_optimizers=["SkipLayerNormFusion"],
        )

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""
        (result,) = self._session.run([output], batch.inputs())
        return result


def _missing(package: str, extra: str) -> str | None:
    if importlib.util.find_spec(package):
        return None
    return f"the package {package} is not installed; pip install 'vitrine[{extra}]' brings it"


# In the order of preference that `auto` follows.
ENGINES: dict[str, Entry] = {
    "onnxruntime": Entry(
        "cpu", ("float32",), lambda: _missing("onnxruntime", "cpu"), OnnxRuntimeCpu
    ),
}


def open_engine(
    artifact: Artifact, name: str = "auto", precision: Precision = "float32", threads: int = 0
) -> Engine:
    """Return the artifact's graph, opened.

    Args:
        artifact: Holds the graph.
        name: A line of `ENGINES`; "auto" takes the first usable one of that precision.
        precision: What it computes in.
        threads: Of one run; 0 means as many as the process may use.

    Raises:
        EngineError: The engine is unknown or not usable here, with the reason.
        ArtifactError: The artifact has no graph for it.
    """
    if name != "auto" and name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}; there are: auto, {', '.join(ENGINES)}")
    reasons: list[str] = []
    for candidate in ENGINES if name == "auto" else (name,):
        entry = ENGINES[candidate]
        reason = entry.unusable()
        if precision not in entry.precisions:
            reason = f"it computes in {', '.join(entry.precisions)} only"
        if reason is None:
            graph = artifact.read(artifact.graph(entry.target).file)
            return entry.open(graph, precision, threads or available_cpus())
        reasons.append(f"{candidate} in {precision} is not usable: {reason}")
    raise EngineError("; ".join(reasons))


def self_check(engine: Engine, artifact: Artifact) -> float:
    """Return the worst cosine between the artifact's check vectors and the engine's.

    Raises:
        EngineError: It is below the bound of the engine's precision, or not a number.
    """
    check = artifact.check()
    expected = np.asarray(check.vectors, np.float64)  # (B, D)
    worst = float(cosines(engine.run(pack(check.rows)), expected).min())
    bound = SELF_CHECK_COSINE[engine.precision]
    if not worst >= bound:
        raise EngineError(
            f"self-check failed: {engine.name} in {engine.precision} gives vectors with a cosine "
            f"of {worst:.7f} to those of the export; {bound} is needed"
        )
    return worst


def cosines(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the cosine of each row of `a` `(B, D)` and `b` `(B, D)`, `(B,)`, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    cosine: NDArray[np.float64] = (a * b).sum(1) / (
        np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    )
    return cosine


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use: its affinity, cut by a cgroup's quota."""
    allowed = len(os.sched_getaffinity(0))
    for file in ("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            quota = (root / file).read_text().split()
        except OSError:
            continue
        if len(quota) == 1:  # cgroup v1 keeps the period in a file beside it
            quota.append((root / file).with_name("cpu.cfs_period_us").read_text().strip())
        if quota[0] not in ("max", "-1"):
            return max(1, min(allowed, math.ceil(int(quota[0]) / int(quota[1]))))
    return allowed
