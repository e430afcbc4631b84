"""Whether the graph for CPUs is still the model that gradients are taken of.

One for GPUs, exported from the same weights, is compared by its vectors at every start.

Four comparisons, each of which sees what the others miss: the vectors that come out, the weights
inside, the tokens on the way from layer to layer, and the served norm on rows that are hard for it.

A weight is looked up in the graph by the place where it is used, not by its name: the exporter cuts
in_proj_weight into three, folds away all of the token type table but its first row, and lets equal
weights share one name.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from models.add_layer_norm.reference import forward_steps
from models.artifact import TWIN, Artifact, sha256
from models.encoder import Rows
from models.engines import available_cpus, cosines
from models.engines.with_onnxruntime import onnxruntime_session
from models.gradients.twin import Row, Twin
from models.packing import PackedBatch, pack

Array = NDArray[np.float32]

_EPSILON = float(np.finfo(np.float32).eps)

# Float32 on both sides; good graphs show 1 - 1e-12 and 1.4e-6.
MIN_COSINE = 0.99999
MAX_ABS = 1e-4

# Good graphs show up to 18 float32 epsilons behind six layers; rounding adds up over more of them.
MAX_RELATIVE = 256 * _EPSILON

# Repeated up to the width of the norm. Squares of anything much larger leave float32.
STRESS_ROWS: dict[str, tuple[float, ...]] = {
    "large mean": (40000, 40001, 40002, 40003),
    "larger mean": (1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3),
    "constant": (1234,),
    "zero": (0,),
    "tiny variance": (1, 1 + 2**-20, 1, 1 - 2**-20),
    "tiny values": (1e-20, -1e-20, 2e-20, 0),
    "huge": (1e15, -1e15, 2e15, 3e15),
}
# Good kernels show up to 3 of the unit that their error is counted in.
_STRESS_UNITS = 64

# The twin's name of a weight -> what it is to a node; the first pattern that is found counts.
_KINDS = {
    r"embeddings\.(word|position)|relative_bias": "table",
    r"token_type": "row",
    r"norm\d?\.weight": "scale",
    r"norm\d?\.bias": "shift",
    r"weight": "matrix",
    r"bias": "bias",
    r"": "unknown",
}
# A node -> what its inputs are to it, where they are weights.
_INPUTS = {
    "Gather": {0: "table"},
    "Add": {0: "row", 1: "row"},
    "LayerNormalization": {1: "scale", 2: "shift"},
    "Gemm": {1: "matrix", 2: "bias"},
    "MatMul": {1: "matrix", 2: "bias"},
}
# The exporter leaves these out where they add nothing.
_LEFT_OUT_IF_ZERO = ("row", "bias")


@dataclass(frozen=True)
class File:
    """A file's SHA-256: as the manifest has it, and as found; None where there is no file."""

    name: str
    expected: str
    found: str | None


@dataclass(frozen=True)
class VectorDifference:
    """A row's served vector against the twin's; `relative` to the twin's largest number."""

    cosine: float
    max_abs: float
    relative: float


@dataclass(frozen=True)
class WeightDifference:
    """A weight in the graph against the twin's.

    Attributes:
        name: Of the twin's parameter, and in brackets what of it the graph holds apart.
        max_abs: 0 where equal; None where the graph has nothing of its shape in its place.
    """

    name: str
    max_abs: float | None

    @property
    def status(self) -> str:
        """One of "equal", "differs" and "absent"."""
        return {0.0: "equal", None: "absent"}.get(self.max_abs, "differs")


@dataclass(frozen=True)
class PointDifference:
    """Tokens in the graph against the twin's; `relative` to the twin's largest number there.

    NaN where the graph does not get to that point.
    """

    point: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class Stress:
    """The error of the served norm on a hard row, which is within `bound` for a good one."""

    row: str
    finite: bool
    error: float
    bound: float


@dataclass(frozen=True)
class Parity:
    """What was compared.

    Attributes:
        files: The graph, and those of the twin's weights.
        vectors: One for each row.
        weights: All of the twin's.
        curve: One for each point from "embeddings" on.
        first_divergence: The first point beyond `MAX_RELATIVE`.
        layer_norm: One for each of `STRESS_ROWS`.
    """

    files: tuple[File, ...]
    vectors: tuple[VectorDifference, ...]
    weights: tuple[WeightDifference, ...]
    curve: tuple[PointDifference, ...]
    first_divergence: str | None
    layer_norm: tuple[Stress, ...]

    @property
    def passes(self) -> bool:
        """Whether nothing was wrong."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """What was wrong, in sentences."""
        return [
            *(f"{f.name} is not what was exported" for f in self.files if f.found != f.expected),
            *(
                f"{w.name} is absent from the graph"
                if w.max_abs is None
                else f"{w.name} differs by {w.max_abs:.1e}"
                for w in self.weights
                if w.status != "equal"
            ),
            *(
                f"the vector of row {row} differs by {v.max_abs:.1e}, its cosine is {v.cosine:.7f}"
                for row, v in enumerate(self.vectors)
                if not (v.cosine >= MIN_COSINE and v.max_abs <= MAX_ABS)
            ),
            *(
                f"tokens diverge from {p.point} on, there by {p.max_abs:.1e}"
                for p in self.curve
                if p.point == self.first_divergence
            ),
            *(
                f"LayerNormalization is off by {s.error:.1e} on the row {s.row!r}"
                for s in self.layer_norm
                if not s.error <= s.bound
            ),
        ]


def parity(
    artifact: Artifact, twin: Twin, rows: Sequence[Row] | None = None, graph: bytes | None = None
) -> Parity:
    """Return how the graph for CPU compares with the twin.

    Args:
        artifact: Says what the files should be.
        twin: Of that artifact.
        rows: What both are run on; None: the artifact's check inputs.
        graph: Stands in for the artifact's.

    Raises:
        ArtifactError: The artifact's own graph or check inputs cannot be read.
        ValueError: There is no row, or the graph's vectors are not as wide as the twin's.
    """
    file = artifact.graph("cpu").file
    graph = artifact.read(file) if graph is None else graph
    rows = [Row(ids) for ids in artifact.check().rows] if rows is None else rows
    session = onnxruntime_session(graph, available_cpus())
    config = twin.model.encoder.config
    hashed = File(file, artifact.manifest.files[file], hashlib.sha256(graph).hexdigest())
    curve, first = first_divergence(graph, twin, rows)
    return Parity(
        files=(hashed, *_weight_files(artifact)),
        vectors=compare_vectors(lambda b: session.run(["pooled"], b.inputs())[0], twin, rows),
        weights=compare_weights(graph, twin),
        curve=curve,
        first_divergence=first,
        layer_norm=layer_norm_stress(config.d_model, config.layer_norm_eps),
    )


def _weight_files(artifact: Artifact) -> Iterator[File]:
    for name, expected in artifact.manifest.weights_sha256.items():
        path = artifact.path / TWIN / name
        found = sha256(path) if path.is_file() else None
        yield File(f"{TWIN}/{name}", expected, found)


def compare_vectors(
    run: Callable[[PackedBatch], Array], twin: Twin, rows: Sequence[Row]
) -> tuple[VectorDifference, ...]:
    """Return how each row's served vector compares with the twin's, both not normalised.

    Args:
        run: Gives the served vectors `(B, W)` of a batch, as an engine's `run` does.
        twin: Of the served graph.
        rows: B of them, at least one.

    Raises:
        ValueError: There is no row, or the vectors are not as wide as the twin's.
    """
    served = run(_pack(rows))  # (B, W)
    wanted = np.stack([twin.vector(row).cpu().numpy() for row in rows])  # (B, W)
    if served.shape != wanted.shape:
        raise ValueError(f"the served vectors are {served.shape}, the twin's {wanted.shape}")
    differences = map(_difference, served, wanted)
    return tuple(
        VectorDifference(float(cosine), *difference)
        for cosine, difference in zip(cosines(served, wanted), differences, strict=True)
    )


def _pack(rows: Sequence[Row]) -> PackedBatch:
    return pack([row.ids for row in rows], [row.unpooled for row in rows])


def _difference(served: Array, wanted: Array) -> tuple[float, float]:
    """Return the largest difference, and that as a share of the largest number wanted."""
    max_abs = float(np.abs(served - wanted).max())
    return max_abs, max_abs / (float(np.abs(wanted).max()) or 1.0)


def compare_weights(graph: bytes, twin: Twin) -> tuple[WeightDifference, ...]:
    """Return how every weight of the twin compares with what the graph has in its place.

    Args:
        graph: For "cpu", in float32.
        twin: Of that graph.
    """
    used = _weights_of_nodes(onnx.load_from_string(graph))
    return tuple(
        WeightDifference(name, _weight_difference(kind, wanted, found))
        for kind, weights in _weights_of_twin(twin).items()
        for (name, wanted), found in zip_longest(weights.items(), used[kind][: len(weights)])
        if wanted is not None
    )


def _weight_difference(kind: str, wanted: Array, found: Array | None) -> float | None:
    if found is None and kind in _LEFT_OUT_IF_ZERO and not wanted.any():
        return 0.0
    if found is None or found.shape != wanted.shape:
        return None
    return float(np.abs(found - wanted).max())


def _weights_of_twin(twin: Twin) -> dict[str, dict[str, Array | None]]:
    """Return weights by kind and name; within a kind, a forward pass uses them in this order.

    Every matrix has a bias, be it None.
    """
    weights: dict[str, dict[str, Array | None]] = defaultdict(dict)
    for name, parameter in twin.model.named_parameters():
        kind = next(kind for pattern, kind in _KINDS.items() if re.search(pattern, name))
        value = parameter.detach().cpu().numpy()
        parts = {name: value}
        if kind == "row":
            # Packed inputs carry no token types, so all tokens are of the first.
            parts = {f"{name}[0]": value[0]}
        elif "in_proj" in name:
            thirds = zip(("query", "key", "value"), np.split(value, 3), strict=True)
            parts = {f"{name}[{part}]": third for part, third in thirds}
        weights[kind] |= parts
    biases = (name.replace("weight", "bias") for name in weights["matrix"])
    weights["bias"] = {name: weights["bias"].get(name) for name in biases}
    return weights


def _weights_of_nodes(model: onnx.ModelProto) -> dict[str, list[Array | None]]:
    """Return the weights by kind, in the order of the nodes that use them.

    What a node can do without is None where it does.
    """
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims
    }
    used = defaultdict(list)
    for node in model.graph.node:
        kinds = _INPUTS.get(node.op_type, {})
        found = {
            kinds[place]: weights[name]
            for place, name in enumerate(node.input)
            if place in kinds and name in weights
        }
        # A linear layer of torch holds (out, in), which a Gemm takes when told to transpose.
        if "matrix" in found and not any(a.name == "transB" and a.i for a in node.attribute):
            found["matrix"] = found["matrix"].T
        if found:
            for kind in dict.fromkeys(kinds.values()):
                used[kind].append(found.get(kind))
    return used


def first_divergence(
    graph: bytes, twin: Twin, rows: Sequence[Row]
) -> tuple[tuple[PointDifference, ...], str | None]:
    """Return how far apart the tokens are at each point, and the first point that is too far.

    Args:
        graph: For "cpu".
        twin: Of that graph. Its norms stand behind the sublayers, as those of all families do.
        rows: What both are run on; at least one.

    Returns:
        A difference for each point from "embeddings" on, and the first point beyond
        `MAX_RELATIVE`, or None.
    """
    model = onnx.load_from_string(graph)
    norms = [n.output[0] for n in model.graph.node if n.op_type == "LayerNormalization"]
    *points, last = twin.points[1:]
    # One norm behind the embeddings, and two in each layer, of which the second ends it.
    names = {**dict(zip(points, norms[::2], strict=False)), last: "tokens"}
    model.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name)
        for name in names.values()
        if name != "tokens"
    )
    session = onnxruntime_session(model.SerializeToString(), available_cpus())
    found = session.run(list(names.values()), _pack(rows).inputs())
    served = dict(zip(names, found, strict=True))
    wanted = zip(*(_tokens_of_twin(twin, row) for row in rows), strict=True)
    curve = tuple(
        PointDifference(point, *_difference(served.get(point, np.nan), np.concatenate(tokens)))
        for point, tokens in zip((*points, last), wanted, strict=True)  # (T, D)
    )
    return curve, next((p.point for p in curve if not p.relative <= MAX_RELATIVE), None)


def _tokens_of_twin(twin: Twin, row: Row) -> list[Array]:
    """Return the row's tokens `(L, D)` at each point from "embeddings" on, in one pass."""
    encoder = twin.model.encoder
    tokens = [twin.tokens("embeddings", row)[None]]  # (1, L, D)
    dense = Rows(encoder.attention_bias(tokens[0], len(row.ids), None))
    with torch.no_grad():
        for index in range(len(encoder.layers)):
            tokens.append(encoder.run_layer(index, tokens[-1], dense))
    return [x[0].cpu().numpy() for x in tokens]


def layer_norm_stress(width: int, eps: float) -> tuple[Stress, ...]:
    """Return how the norm of the installed onnxruntime does on rows that are hard for one.

    The error is against float64. Its bound counts in what rounding alone does to an output:
    float32's epsilon of it, and of the row's largest magnitude over the standard deviation.

    Args:
        width: D, of the norm.
        eps: Added to the variance.
    """
    rows = np.stack([np.resize(row, width) for row in STRESS_ROWS.values()])  # (N, D)
    half = (rows / 2).astype(np.float32)  # (N, D)
    session = onnxruntime_session(_add_layer_norm_graph(width, eps), threads=1)
    scale, shift = np.ones(width, np.float32), np.zeros(width, np.float32)  # (D,)
    inputs = {"x": half, "residual": half, "scale": scale, "shift": shift}
    (served,) = session.run(["y"], inputs)  # (N, D)
    exact = half.astype(np.float64)  # (N, D)
    steps = forward_steps(exact, scale, shift, float(np.float32(eps)), exact)
    error = np.abs(served - steps.out).max(1)  # (N,)
    condition = np.abs(steps.x).max(1) / steps.sqrtvar[:, 0]  # (N,)
    bound = _STRESS_UNITS * _EPSILON * (condition + np.abs(steps.out).max(1))  # (N,)
    finite = np.isfinite(served).all(1)  # (N,)
    columns = (finite.tolist(), error.tolist(), bound.tolist())
    return tuple(map(Stress, STRESS_ROWS, *columns))


def _add_layer_norm_graph(width: int, eps: float) -> bytes:
    """Return the two nodes that a graph for CPU has for each norm."""
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]>
        add_layer_norm (float[N, {width}] x, float[N, {width}] residual,
                        float[{width}] scale, float[{width}] shift) => (float[N, {width}] y) {{
            total = Add(x, residual)
            y = LayerNormalization <axis = -1, epsilon = {float(eps)!r}> (total, scale, shift)
        }}
    """).SerializeToString()
