"""Engines run an artifact's graph: a packed batch in, vectors out. Torch-free.

One table, `ENGINES`: how to open a graph, in which precisions, and how to tell that it is usable.
"""

import ctypes
import importlib.util
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact, ArtifactError
from models.packing import PackedBatch, pack, round_up

if TYPE_CHECKING:
    import onnxruntime

Precision = Literal["float32", "float16", "bfloat16"]
Output = Literal["pooled", "tokens"]
Run = Callable[[PackedBatch, Output], NDArray[np.float32]]

# The worst cosine between a check vector and the engine's own that still counts as the same model.
SELF_CHECK_COSINE: dict[Precision, float] = {
    "float32": 1 - 1e-6,
    "float16": 0.9995,
    "bfloat16": 0.9995,
}


class EngineError(Exception):
    """An engine that was asked for cannot be used here, or does not give the model's vectors."""


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


@dataclass(frozen=True)
class Entry:
    """A line of the table of engines.

    Attributes:
        target: Of the graphs that it runs.
        precisions: What it computes in -> the dtype of the graph that it takes for that.
        unusable: Why it cannot be used on this machine in a precision, or None.
        open: Takes the bytes of a graph, the precision, a number of threads and that of a GPU.
    """

    target: str
    precisions: Mapping[Precision, str]
    unusable: Callable[[Precision], str | None]
    open: Callable[[bytes, Precision, int, int], Engine]


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


class CudaEngine:
    """A graph on a GPU, which computes one batch while the next one is laid out and copied."""

    name = target = "cuda"
    threads = lanes = 2
    # A large GPU is to be busy for longer than it takes to tell it what to do. An estimate.
    batches = BatchSizes(most=16_384, divided=4_096, overhead=512)

    def __init__(self, precision: Precision, opened: Opened) -> None:
        self.precision = precision
        self.runs = (opened.run,)
        self.cancel = opened.cancel

    def run(self, batch: PackedBatch, output: Output = "pooled") -> NDArray[np.float32]:
        """Return row vectors `(B, D)`, or token vectors `(T, D)`."""
        return self.runs[0](batch, output)


def _open_onnxruntime(graph: bytes, precision: Precision, threads: int, _gpu: int) -> Engine:
    def open_for(at_once: int) -> Opened:
        return _opened(onnxruntime_session(graph, threads // at_once))

    return CpuEngine("onnxruntime", precision, threads, open_for)


def _open_cuda(graph: bytes, precision: Precision, _threads: int, gpu: int) -> Engine:
    import onnxruntime

    onnxruntime.preload_dlls()  # CUDA's libraries, from where pip put them
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        graph,
        options,
        # A product in TF32 has ten bits less than float32.
        providers=[("CUDAExecutionProvider", {"device_id": gpu, "use_tf32": 0})],
        # It would go on on the CPU, at the first error as well.
        enable_fallback=0,
    )
    if "CUDAExecutionProvider" not in session.get_providers():
        raise EngineError(
            f"cuda in {precision} is not usable: onnxruntime cannot compute on GPU {gpu} of this "
            "machine; it has logged why"
        )
    return CudaEngine(precision, _opened(session))


def _opened(session: "onnxruntime.InferenceSession") -> Opened:
    import onnxruntime

    under_way: set[onnxruntime.RunOptions] = set()

    def run(batch: PackedBatch, output: Output) -> NDArray[np.float32]:
        options = onnxruntime.RunOptions()
        under_way.add(options)
        try:
            (result,) = session.run([output], batch.inputs(), options)
        finally:
            under_way.discard(options)
        return result

    def cancel() -> None:
        for options in tuple(under_way):
            options.terminate = True

    return Opened(run, cancel)


def onnxruntime_session(
    graph: bytes, threads: int, profile: str = ""
) -> "onnxruntime.InferenceSession":
    """Return a session on CPU.

    Args:
        graph: A graph for "cpu".
        threads: Of one run.
        profile: How the file begins that it writes the times of its nodes to; empty: none.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_profiling = bool(profile)
    options.profile_file_prefix = profile
    options.log_severity_level = 3
    # Between runs its threads would go on spinning, on cores that others need.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(
        graph,
        options,
        providers=["CPUExecutionProvider"],
        # Its fused kernel is several times slower than the pair that it replaces.
        disabled_optimizers=["SkipLayerNormFusion"],
    )


def _open_openvino(graph: bytes, precision: Precision, threads: int, _gpu: int) -> Engine:
    import openvino

    core = openvino.Core()
    model = core.read_model(graph)

    def open_for(at_once: int) -> Opened:
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[precision],
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": at_once,
                # Two services on one machine would pin their threads to the same cores.
                "ENABLE_CPU_PINNING": False,
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
                request.infer(rounded.inputs(), share_inputs=True)
                # Copied: the next run of this request writes over it.
                result: NDArray[np.float32] = request.get_tensor(output).data.copy()
            finally:
                idle.put(request)
            return result if output == "pooled" else result[: len(batch.input_ids)]

        def cancel() -> None:
            for request in requests:
                request.cancel()

        return Opened(run, cancel)

    return CpuEngine("openvino", precision, threads, open_for)


def _onnxruntime_unusable(_precision: Precision) -> str | None:
    return _missing("onnxruntime", "cpu")


def _openvino_unusable(precision: Precision) -> str | None:
    if missing := _missing("openvino", "cpu"):
        return missing
    import openvino

    if precision == "bfloat16":
        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in capabilities:
            return "this CPU has no bfloat16 instructions (AVX512-BF16 or AMX)"
    return None


def _cuda_unusable(_precision: Precision) -> str | None:
    if missing := _missing("onnxruntime", "gpu"):
        return missing
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return (
            "the onnxruntime that is installed computes on CPUs only; "
            "pip uninstall it, then pip install 'vitrine[gpu]'"
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is here (libcuda.so.1)"
    return None


def _missing(package: str, extra: str) -> str | None:
    if importlib.util.find_spec(package):
        return None
    return f"the package {package} is not installed; pip install 'vitrine[{extra}]' brings it"


# In the order of preference that `auto` follows.
ENGINES: dict[str, Entry] = {
    "cuda": Entry("cuda", {"float32": "float32", "float16": "float16"}, _cuda_unusable, _open_cuda),
    "onnxruntime": Entry("cpu", {"float32": "float32"}, _onnxruntime_unusable, _open_onnxruntime),
    "openvino": Entry(
        "cpu", {"float32": "float32", "bfloat16": "float32"}, _openvino_unusable, _open_openvino
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
        threads: CPUs to keep busy; 0 means as many as the process may use.
        gpu: Where "cuda" computes, as CUDA numbers those that it may use.

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
        engine = entry.open(graph, precision, threads or available_cpus(), gpu)
        if entry.target == "cuda":
            _warm_up(engine, artifact.manifest.max_tokens)
        return engine
    raise EngineError("; ".join(reasons))


def _unusable(entry: Entry, precision: Precision, artifact: Artifact) -> str | None:
    if precision not in entry.precisions:
        return f"it computes in {', '.join(entry.precisions)} only"
    try:
        graph = artifact.graph(entry.target)
    except ArtifactError as error:
        return str(error)
    if graph.dtype != (dtype := entry.precisions[precision]):
        return (
            f"the artifact {artifact.path.name} has its graph in {graph.dtype}; "
            f"export it with --target {entry.target} --dtype {dtype}"
        )
    return entry.unusable(precision)


def _warm_up(engine: Engine, max_tokens: int) -> None:
    """Run a full batch of rows of each size, so that no caller waits for memory or for kernels."""
    length = max_tokens
    while length:
        engine.run(pack([[0] * length] * max(1, engine.batches.most // length)))
        length //= 2


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
