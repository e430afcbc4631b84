"""Engines run an artifact's graph: a packed batch in, vectors out. Torch-free.

One table, `ENGINES`: how to open a graph, in which precisions, and how to tell that it is usable.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import with_onnxruntime, with_openvino
from models.engines.engine import (
    BatchSizes,
    CpuEngine,
    Engine,
    EngineError,
    Hardware,
    Opened,
    Output,
    Precision,
    Run,
)
from models.packing import pack

__all__ = [
    "ENGINES",
    "SELF_CHECK_COSINE",
    "BatchSizes",
    "CpuEngine",
    "Engine",
    "EngineError",
    "Entry",
    "Hardware",
    "Opened",
    "Output",
    "Precision",
    "Run",
    "available_cpus",
    "cosines",
    "open_engine",
    "self_check",
]

# The worst cosine between a check vector and the engine's own that still counts as the same model.
SELF_CHECK_COSINE: dict[Precision, float] = {
    "float32": 1 - 1e-6,
    "float16": 0.9995,
    "bfloat16": 0.9995,
}


@dataclass(frozen=True)
class Entry:
    """A line of the table of engines.

    Attributes:
        target: Of the graphs that it runs.
        precisions: What it computes in -> the dtype of the graph that it takes for that.
        unusable: Why it cannot be used on this machine in a precision, or None.
        open: Takes the bytes of a graph, the precision and what it may use.
    """

    target: str
    precisions: Mapping[Precision, str]
    unusable: Callable[[Precision], str | None]
    open: Callable[[bytes, Precision, Hardware], Engine]


# In the order of preference that `auto` follows.
ENGINES: dict[str, Entry] = {
    "cuda": Entry(
        "cuda",
        {"float32": "float32", "float16": "float16"},
        with_onnxruntime.gpu_unusable,
        with_onnxruntime.open_on_gpu,
    ),
    "onnxruntime": Entry(
        "cpu", {"float32": "float32"}, with_onnxruntime.cpu_unusable, with_onnxruntime.open_on_cpu
    ),
    "openvino": Entry(
        "cpu",
        {"float32": "float32", "bfloat16": "float32"},
        with_openvino.cpu_unusable,
        with_openvino.open_on_cpu,
    ),
}


def open_engine(
    artifact: Artifact,
    name: str = "auto",
    precision: Precision = "float32",
    threads: int = 0,
    gpu: int = 0,
) -> Engine:
    """Return an engine with the artifact's graph opened.

    Args:
        artifact: Holds the graph.
        name: A line of `ENGINES`; "auto" takes the first one that is usable here in that
            precision and has a graph.
        precision: What it computes in.
        threads: CPUs to keep busy; 0 means as many as the process may use. A GPU's engine has two.
        gpu: Where "cuda" computes; see `Hardware`.

    Raises:
        EngineError: The engine is unknown or not usable here, with the reason.
        ArtifactError: The graph is not the one that was exported.
    """
    if name != "auto" and name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}; there are: auto, {', '.join(ENGINES)}")
    reasons: list[str] = []
    for candidate in ENGINES if name == "auto" else (name,):
        entry = ENGINES[candidate]
        if reason := _unusable(entry, precision, artifact):
            reasons.append(f"{candidate} in {precision} is not usable: {reason}")
            continue
        graph = artifact.read(artifact.graph(entry.target).file)
        return entry.open(graph, precision, Hardware(threads or available_cpus(), gpu))
    raise EngineError("; ".join(reasons))


def _unusable(entry: Entry, precision: Precision, artifact: Artifact) -> str | None:
    if precision not in entry.precisions:
        return f"it computes in {', '.join(entry.precisions)} only"
    wanted = (entry.target, entry.precisions[precision])
    if wanted not in {(graph.target, graph.dtype) for graph in artifact.manifest.graphs}:
        return (
            f"the artifact {artifact.path.name} has no graph for {wanted[0]} in {wanted[1]}; "
            f"export it with --target {wanted[0]} --dtype {wanted[1]}"
        )
    return entry.unusable(precision)


def self_check(engine: Engine, artifact: Artifact) -> float:
    """Return the worst cosine between the artifact's check vectors and the engine's.

    Raises:
        EngineError: It is below the bound of the engine's precision, or not a number.
    """
    check = artifact.check()
    expected = np.asarray(check.vectors, np.float64)  # (B, D)
    batch = pack(check.rows)
    # numpy's minimum, to which a NaN is one.
    worst = float(np.min([cosines(run(batch, "pooled"), expected) for run in engine.runs]))
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
