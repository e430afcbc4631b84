"""Engines: runtimes that execute an artifact's ONNX graph or table on packed batches. Torch-free.

`ENGINES` lists the engines with their precisions, availability checks and constructors.
`outputs.OUTPUTS` lists the outputs of a graph with the bounds of the self-check.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import with_numpy, with_onnxruntime, with_openvino
from models.engines.cpus import MAX_THREADS, available_cpus
from models.engines.engine import (
    BatchSizes,
    CompiledGraph,
    CpuEngine,
    CpuRuns,
    Engine,
    EngineError,
    GraphFile,
    Hardware,
    Run,
)
from models.engines.onnx_file import read_onnx
from models.engines.outputs import OUTPUTS, Agreement, Precision, compare, cosines, int8_bounds
from models.manifest import TABLE_ENGINE, ArtifactError, Check, Graph, Output
from models.packing import pack_check
from models.printable import printable, reason_of

__all__ = [
    "ENGINES",
    "OUTPUTS",
    "Agreement",
    "BatchSizes",
    "CompiledGraph",
    "CpuEngine",
    "CpuRuns",
    "Engine",
    "EngineError",
    "EngineSpec",
    "GraphFile",
    "Hardware",
    "Output",
    "Precision",
    "Run",
    "available_cpus",
    "cosines",
    "graph_of",
    "measure_check",
    "open_engine",
    "select_engine",
    "self_check",
    "weight_bytes",
]


@dataclass(frozen=True)
class EngineSpec:
    """Entry of `ENGINES`: the hardware, precisions and constructor of an engine.

    Attributes:
        target: Hardware of the engine, "cpu" or "cuda".
        precisions: Required dtype of the graph's weights for each supported compute precision.
        unusable: Returns the reason why the engine cannot compute in a precision on this machine;
            None if it can.
        open: Returns the engine for a graph, a precision and the hardware.
        refused_operators: Types of operators that a graph may not have, because the engine cannot
            cancel them: a loop might have no end.
    """

    target: str
    precisions: Mapping[Precision, str]
    unusable: Callable[[Precision], str | None]
    open: Callable[[GraphFile, Precision, Hardware], Engine]
    refused_operators: frozenset[str] = frozenset()


# Maximum size of the self-check's batches, in tokens with padding. The attention scores of larger
# batches take hundreds of megabytes.
_MAX_PADDED = 512

# Options of `vitrine-export` that add a graph with weights of a dtype, besides `--dtype`.
_EXPORT_OPTIONS = {"int8": "--precision int8"}

# "auto" selects the first usable engine in this order.
ENGINES: dict[str, EngineSpec] = {
    "cuda": EngineSpec(
        "cuda",
        {"float32": "float32", "float16": "float16"},
        with_onnxruntime.gpu_unusable,
        with_onnxruntime.open_on_gpu,
    ),
    "onnxruntime": EngineSpec(
        "cpu", {"float32": "float32"}, with_onnxruntime.cpu_unusable, with_onnxruntime.open_on_cpu
    ),
    "openvino": EngineSpec(
        "cpu",
        {"float32": "float32", "bfloat16": "float32", "int8": "int8"},
        with_openvino.cpu_unusable,
        with_openvino.open_on_cpu,
        frozenset({"Loop", "Scan"}),
    ),
    TABLE_ENGINE: EngineSpec("cpu", {"float32": "float32"}, lambda _: None, with_numpy.open_table),
}


def open_engine(
    artifact: Artifact,
    name: str = "auto",
    precision: Precision = "float32",
    threads: int = 0,
    gpu: int = 0,
    cpu_runs: CpuRuns | None = None,
) -> Engine:
    """Return an engine that runs a graph of the artifact.

    Args:
        artifact: Artifact that contains the graph.
        name: Name in `ENGINES`; "auto" selects the first engine that supports the precision on this
            machine and for which the artifact has a graph.
        precision: Precision of the computation.
        threads: Number of CPU threads to compute with; 0: one per CPU that the process may use.
            Ignored for "cuda".
        gpu: CUDA device index for "cuda".
        cpu_runs: Runs in flight of all engines on CPU that the process uses; None: of this one.

    Raises:
        EngineError: The engine is unknown or unusable, or cannot open the graph, or has more than
            `MAX_THREADS` threads; the message gives the reason.
        ArtifactError: A file of the graph cannot be read, or its SHA-256 differs from the
            manifest's. Or the graph has weights in other files than the manifest says.
    """
    if threads > MAX_THREADS:
        raise EngineError(
            f"threads is {threads}; at most 16 per CPU of this machine are allowed: {MAX_THREADS}"
        )
    name = select_engine(artifact, name, precision)
    graph = graph_of(artifact, name, precision)
    weights = artifact.verify(graph.weights)
    if graph.engine != TABLE_ENGINE:
        _check_graph(graph, artifact.read(graph.file))
    table_shape = artifact.manifest.vocab_size, artifact.manifest.width
    file = GraphFile(artifact.path / graph.file, weights.stat().st_size, table_shape)
    hardware = Hardware(threads or available_cpus(), gpu, cpu_runs or CpuRuns())
    try:
        return ENGINES[name].open(file, precision, hardware)
    except EngineError:
        raise
    except Exception as error:  # runtimes document no errors
        raise EngineError(f"{name} cannot open {graph.file}: {reason_of(error)}") from error


def _check_graph(graph: Graph, content: bytes) -> None:
    """Check an ONNX file before an engine opens it.

    Raises:
        ArtifactError: It is invalid, has weights in another file than the manifest says, or an
            operator that its engine cannot cancel.
    """
    try:
        file = read_onnx(content)
    except ValueError as error:
        raise ArtifactError(f"{graph.file} is invalid: {error}") from error
    if refused := file.operators & ENGINES[graph.engine].refused_operators:
        raise ArtifactError(
            f"{graph.file} has the operator {min(refused)}, which {graph.engine} cannot cancel"
        )
    if others := file.files - {graph.weights}:
        raise ArtifactError(
            f"{graph.file} has weights in {printable(min(others))}; the manifest says that they "
            f"are in {graph.weights}"
        )


def weight_bytes(artifact: Artifact, name: str = "auto", precision: Precision = "float32") -> int:
    """Return the size of the file of weights that an engine of the artifact maps, in bytes.

    Arguments are those of `open_engine`.

    Raises:
        EngineError: The engine is unknown or unusable; the message gives the reason.
    """
    graph = graph_of(artifact, select_engine(artifact, name, precision), precision)
    return (artifact.path / graph.weights).stat().st_size


def graph_of(artifact: Artifact, name: str, precision: Precision) -> Graph:
    """Return the description of the graph that an engine runs in a precision.

    Args:
        artifact: Artifact of the graph.
        name: Name in `ENGINES`.
        precision: Precision of the engine.

    Raises:
        ArtifactError: The artifact has no such graph.
    """
    return artifact.graph(name, ENGINES[name].precisions[precision])


def select_engine(artifact: Artifact | None, name: str, precision: Precision) -> str:
    """Return the name of the engine that `open_engine` opens; the arguments are the same.

    Without an artifact, it is the one for an artifact with graphs for all engines.

    Raises:
        EngineError: The engine is unknown or unusable; the message gives the reason.
    """
    if name != "auto" and name not in ENGINES:
        raise EngineError(f"unknown engine {name!r}; engines: auto, {', '.join(ENGINES)}")
    reasons: list[str] = []
    is_static = artifact is not None and artifact.manifest.is_static
    usual = [own for own in ENGINES if (own == TABLE_ENGINE) == is_static]
    for candidate in usual if name == "auto" else (name,):
        reason = _unusable(candidate, precision, artifact)
        if reason is None:
            return candidate
        reasons.append(f"{candidate} in {precision} is not usable: {reason}")
    raise EngineError("; ".join(reasons))


def _unusable(name: str, precision: Precision, artifact: Artifact | None) -> str | None:
    spec = ENGINES[name]
    if precision not in spec.precisions:
        return f"it supports only {', '.join(spec.precisions)}"
    dtype = spec.precisions[precision]
    if artifact is not None and (name == TABLE_ENGINE) != artifact.manifest.is_static:
        kind = "a static model" if artifact.manifest.is_static else "no static model"
        return (
            f"the artifact {artifact.path.name} is {kind}, and static models alone run on "
            f"{TABLE_ENGINE}; choose the engine auto"
        )
    if artifact is not None and (name, dtype) not in {
        (graph.engine, graph.dtype) for graph in artifact.manifest.graphs
    }:
        options = _EXPORT_OPTIONS.get(dtype, f"--target {spec.target} --dtype {dtype}")
        return (
            f"the artifact {artifact.path.name} has no graph for {name} in {dtype}; "
            f"export it with {options}"
        )
    if artifact is not None and artifact.manifest.has_experts and precision != "float32":
        # In bfloat16, 3 to 7% of the rows of a random model of 12 layers differ beyond the bounds
        # in `OUTPUTS`, down to a cosine of 0.83.
        return (
            f"the artifact {artifact.path.name} has experts, and rounding lets tokens choose "
            "others; choose the precision float32"
        )
    return spec.unusable(precision)


def self_check(engine: Engine, artifact: Artifact) -> dict[Output, Agreement]:
    """Compare the engine's vectors with the artifact's reference vectors.

    Returns:
        The worst agreement over all vectors and all compiled variants of the graph, by output name.

    Raises:
        EngineError: The agreement of an output is outside the bounds in `OUTPUTS` for the engine's
            precision, or of an int8 graph outside twice the deviations that its export measured;
            or the deviations in the manifest are outside the bounds in `OUTPUTS`.
    """
    bounds_of = {output: _bounds(engine, artifact, output) for output in artifact.manifest.outputs}
    agreements = measure_check(engine, artifact)
    for output, worst in agreements.items():
        bounds = bounds_of[output]
        if not worst.is_within(bounds):
            raise EngineError(
                f"self-check failed: the output {output!r} of {engine.name} in {engine.precision} "
                f"has a worst cosine of {worst.cosine:.7f} ({bounds.cosine:.7g} required) and a "
                f"worst norm difference of {worst.norm:.1e} ({bounds.norm:.3g} allowed)"
            )
    return agreements


def _bounds(engine: Engine, artifact: Artifact, output: Output) -> Agreement:
    bounds = OUTPUTS[output].bounds[engine.precision]
    if engine.precision != "int8":
        return bounds
    quality = artifact.graph(engine.name, "int8").quality
    measured = quality.check.get(output) if quality else None
    if measured is None or not Agreement(**measured).is_within(bounds):
        raise EngineError(
            f"the manifest has no acceptable check of the int8 graph's output {output!r}: "
            f"{measured}; a cosine of {bounds.cosine:g} and a norm difference of {bounds.norm:g} "
            "are required: export again"
        )
    return int8_bounds(output, measured)


def measure_check(engine: Engine, artifact: Artifact) -> dict[Output, Agreement]:
    """Return the worst agreement with the artifact's reference vectors; see `self_check`.

    Raises:
        EngineError: The graph cannot compute the outputs, or computes vectors of another shape.
        ArtifactError: Any error of `Artifact.check`, under the same conditions.
    """
    check = artifact.check()
    outputs = artifact.manifest.outputs
    try:
        results = [_results(run, outputs, check) for run in engine.runs]
    except Exception as error:  # runtimes document no errors
        names = ", ".join(map(repr, outputs))
        raise EngineError(
            f"self-check failed: the graph of {engine.name} cannot compute the outputs {names}: "
            f"{reason_of(error)}"
        ) from error
    agreements: dict[Output, Agreement] = {}
    for output in outputs:
        reference = np.asarray(check.outputs[output], np.float64)
        actual = [_first(result[output], reference.shape, output) for result in results]
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN is outside any bounds
            runs = [compare(output, each, reference) for each in actual]
        # np.min and np.max propagate NaN, which is outside any bounds.
        agreements[output] = Agreement(
            float(np.min([run.cosine for run in runs])), float(np.max([run.norm for run in runs]))
        )
    return agreements


def _first(
    actual: NDArray[np.float32], shape: tuple[int, ...], output: Output
) -> NDArray[np.float32]:
    """Return as many of the vectors as there are references, which must have the same width."""
    if actual.shape[1:] != shape[1:] or len(actual) < shape[0]:
        raise EngineError(
            f"self-check failed: the output {output!r} has the shape {actual.shape}; the "
            f"reference vectors have the shape {shape}"
        )
    return actual[: shape[0]]


def _results(
    run: Run, outputs: Sequence[Output], check: Check
) -> dict[Output, NDArray[np.float32]]:
    """Return all vectors of the check inputs in their order, run in batches of similar length."""
    results: dict[Output, dict[int, NDArray[np.float32]]] = {output: {} for output in outputs}
    for indices in _similar(list(map(len, check.rows))):
        # (B, W), (T, W) or (P, W)
        vectors = run(pack_check(check, indices), outputs)
        for output, result in zip(outputs, vectors, strict=True):
            sizes = [1] * len(indices)
            if OUTPUTS[output].per_token:
                sizes = [len(check.rows[i]) for i in indices]
            elif OUTPUTS[output].per_pair:
                sizes = [len(check.words[i]) * len(check.labels[i]) for i in indices]
            parts = np.split(result, np.cumsum(sizes)[:-1])
            results[output].update(zip(indices, parts, strict=True))
    rows = range(len(check.rows))
    return {output: np.concatenate([parts[i] for i in rows]) for output, parts in results.items()}


def _similar(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of row indices, short rows first, of up to `_MAX_PADDED` padded tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > _MAX_PADDED:
            yield batch
            batch = []
        batch.append(index)
    yield batch
