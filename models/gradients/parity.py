"""Parity: comparison of what is served with the reference model.

The comparisons complement each other: the files on disk, token ids, vectors of the serving engine,
weights of the CPU graph, its tokens after each layer, and LayerNormalization on numerically
difficult rows. A GPU graph is exported from the same weights as the CPU graph.

A weight in the graph is identified by the node that uses it, not by its name. The exporter splits
in_proj_weight in three, keeps only the first row of the token type table, and stores equal weights
under one name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.add_layer_norm.reference import forward_steps
from models.artifact import Artifact, sha256
from models.engines import OUTPUTS, Precision, available_cpus, cosines
from models.engines.with_onnxruntime import onnxruntime_session
from models.gradients.inputs import Row
from models.gradients.layer_norm_trace import norm_names
from models.gradients.reference_model import ReferenceModel
from models.gradients.results import (
    FileHash,
    LayerDifference,
    Parity,
    StressRow,
    TokenIds,
    VectorDifference,
    WeightDifference,
)
from models.network.taps import OutputTap
from models.packing import PackedBatch, pack

Array = NDArray[np.float32]

_EPSILON = float(np.finfo(np.float32).eps)

# Largest relative difference of the tokens after a layer. Correct graphs reach up to 18 float32
# epsilons after six layers, and rounding errors add up over more layers.
MAX_RELATIVE = 256 * _EPSILON

# Largest relative difference of two vectors, by precision of the engine. Correct engines reach 1e-5
# in float32 and 0.03 in the half precisions.
_MAX_RELATIVE_OF_VECTORS: dict[Precision, float] = {
    "float32": 1e-4,
    "float16": 0.1,
    "bfloat16": 0.1,
}

# Rows for LayerNormalization; the values are repeated up to the width of the norm. Much larger
# values overflow float32 when squared.
STRESS_ROWS: dict[str, tuple[float, ...]] = {
    "large mean": (40000, 40001, 40002, 40003),
    "larger mean": (1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3),
    "constant": (1234,),
    "zero": (0,),
    "tiny variance": (1, 1 + 2**-20, 1, 1 - 2**-20),
    "tiny values": (1e-20, -1e-20, 2e-20, 0),
    "huge": (1e15, -1e15, 2e15, 3e15),
}
# Error bound in the units of `layer_norm_stress`. Correct kernels reach up to 3. The means of the
# rows are exact in float32 at widths that are multiples of 4, even if a kernel rounds them.
_STRESS_UNITS = 64

# Maps patterns of parameter names to the kind of the weight. The first matching pattern counts.
_KINDS = {
    r"embeddings\.(word|position)|relative_bias": "table",
    r"token_type": "row",
    r"norm\d?\.weight": "scale",
    r"norm\d?\.bias": "shift",
    r"weight": "matrix",
    r"bias": "bias",
    r"": "unknown",
}
# Maps node types to the kind of weight that each input, by index, can be.
_INPUTS = {
    "Gather": {0: "table"},
    "Add": {0: "row", 1: "row"},
    "LayerNormalization": {1: "scale", 2: "shift"},
    "Gemm": {1: "matrix", 2: "bias"},
    "MatMul": {1: "matrix", 2: "bias"},
    "MatMulInteger": {1: "matrix"},
}
# Suffixes of the three tensors that onnxruntime's quantizer makes of a weight.
_QUANTIZED, _SCALE, _ZERO_POINT = "_quantized", "_scale", "_zero_point"
# The exporter omits weights of these kinds if they are zero.
_LEFT_OUT_IF_ZERO = ("row", "bias")


class Served(NamedTuple):
    """Vectors of some rows from the serving engine, before normalisation, `(B, W)`."""

    engine: str
    precision: Precision
    vectors: Array


class Tokenized(NamedTuple):
    """A text, its token ids from the served tokenizer, and those at export."""

    text: str
    served: Sequence[int]
    expected: Sequence[int]


def parity(
    artifact: Artifact,
    model: ReferenceModel,
    rows: Sequence[Row],
    served: Served,
    tokenized: Sequence[Tokenized] = (),
) -> Parity:
    """Compare what is served with the reference model of an artifact.

    Args:
        artifact: The exported artifact, as loaded before its files could change.
        model: Reference model of the artifact.
        rows: Inputs of the engine, the CPU graph and the reference model; at least one.
        served: Vectors of the rows.
        tokenized: Token ids of texts.

    Raises:
        ArtifactError: The artifact has no CPU graph.
        ValueError: `rows` is empty, or the widths of the vectors differ.
    """
    config = model.network.encoder.config
    files = tuple(_file_hashes(artifact))
    file = artifact.graph("cpu").file
    weights: tuple[WeightDifference, ...] = ()
    curve: tuple[LayerDifference, ...] = ()
    unreadable = first = None
    try:
        graph = (artifact.path / file).read_bytes()
        weights, (curve, first) = (
            compare_weights(graph, model),
            first_divergence(graph, model, rows),
        )
    except Exception as error:
        # A file that was changed can have any content, and onnxruntime has many kinds of errors.
        if all(f.actual == f.expected for f in files if f.name == file):
            raise
        # The message of an OSError has the path of the artifact.
        reason = error.strerror if isinstance(error, OSError) else error
        unreadable = f"{file} cannot be compared: {reason}"
    return Parity(
        files=files,
        unreadable=unreadable,
        tokenizer=tuple(compare_ids(*text) for text in tokenized),
        engine=served.engine,
        precision=served.precision,
        min_cosine=OUTPUTS["pooled"].bounds[served.precision].cosine,
        max_relative=_MAX_RELATIVE_OF_VECTORS[served.precision],
        vectors=compare_vectors(served.vectors, model, rows),
        weights=weights,
        curve=curve,
        first_divergence=first,
        layer_norm=layer_norm_stress(config.d_model, config.layer_norm_eps),
    )


def _file_hashes(artifact: Artifact) -> Iterator[FileHash]:
    for name, expected in artifact.manifest.files.items():
        path = artifact.path / name
        yield FileHash(name, expected, sha256(path) if path.is_file() else None)


def compare_ids(text: str, served: Sequence[int], expected: Sequence[int]) -> TokenIds:
    """Return the first difference between the token ids of a text from two tokenizers."""
    for position, ids in enumerate(zip_longest(served, expected)):
        if ids[0] != ids[1]:
            return TokenIds(text, position, *ids)
    return TokenIds(text, None, None, None)


def compare_vectors(
    served: Array, model: ReferenceModel, rows: Sequence[Row]
) -> tuple[VectorDifference, ...]:
    """Compare served vectors with the reference model's vectors, both before normalisation.

    Args:
        served: Served vectors of the rows, `(B, W)`.
        model: Reference model of the served graph.
        rows: Inputs of the reference model; at least one.

    Raises:
        ValueError: `rows` is empty, or the widths of the vectors differ.
    """
    expected = np.stack([model.vector(row).cpu().numpy() for row in rows])  # (B, W)
    if served.shape != expected.shape:
        raise ValueError(
            f"the served vectors have shape {served.shape}, "
            f"the reference model's have shape {expected.shape}"
        )
    differences = map(_difference, served, expected)
    return tuple(
        VectorDifference(float(cosine), *difference)
        for cosine, difference in zip(cosines(served, expected), differences, strict=True)
    )


def _pack(rows: Sequence[Row]) -> PackedBatch:
    return pack([row.ids for row in rows], [row.prompt_tokens for row in rows])


def _difference(served: Array, expected: Array) -> tuple[float, float]:
    """Return the largest absolute difference, and its ratio to the maximum of |expected|."""
    max_abs = float(np.abs(served - expected).max())
    return max_abs, max_abs / (float(np.abs(expected).max()) or 1.0)


def compare_weights(graph: bytes, model: ReferenceModel) -> tuple[WeightDifference, ...]:
    """Compare every weight of the reference model with the same weight in the graph.

    Args:
        graph: Serialised CPU graph, in float32.
        model: Reference model of the graph.
    """
    used = _weights_of_nodes(onnx.load_from_string(graph))
    return tuple(
        WeightDifference(name, _weight_difference(kind, expected, actual))
        for kind, weights in _model_weights(model).items()
        for (name, expected), actual in zip_longest(weights.items(), used[kind][: len(weights)])
        if expected is not None
    )


def _weight_difference(kind: str, expected: Array, actual: Array | None) -> float | None:
    if actual is None and kind in _LEFT_OUT_IF_ZERO and not expected.any():
        return 0.0
    if actual is None or actual.shape != expected.shape:
        return None
    return float(np.abs(actual - expected).max())


def _model_weights(model: ReferenceModel) -> dict[str, dict[str, Array | None]]:
    """Return the reference model's weights by kind and name.

    Weights of a kind are in the order of the forward pass. The bias of a matrix without bias is
    None.
    """
    weights: dict[str, dict[str, Array | None]] = defaultdict(dict)
    for name, parameter in model.network.named_parameters():
        kind = next(kind for pattern, kind in _KINDS.items() if re.search(pattern, name))
        value = parameter.detach().cpu().numpy()
        parts = {name: value}
        if kind == "row":
            # Packed inputs have no token types, so all tokens have the first token type.
            parts = {f"{name}[0]": value[0]}
        elif "in_proj" in name:
            thirds = zip(("query", "key", "value"), np.split(value, 3), strict=True)
            parts = {f"{name}[{part}]": third for part, third in thirds}
        weights[kind] |= parts
    biases = (name.replace("weight", "bias") for name in weights["matrix"])
    weights["bias"] = {name: weights["bias"].get(name) for name in biases}
    return weights


def _weights_of_nodes(model: onnx.ModelProto) -> dict[str, list[Array | None]]:
    """Return the graph's weights by kind, in the order of the nodes that use them.

    A weight that a node of this type can have, but this node does not have, is None. Weights that
    onnxruntime's quantizer has rounded to integers are returned as the floats they stand for.
    """
    weights = _floats(model)
    used = defaultdict(list)
    is_quantized = False
    for node in model.graph.node:
        kinds = _INPUTS.get(node.op_type, {})
        is_quantized |= node.op_type == "MatMulInteger"
        if is_quantized and node.op_type == "Add":
            kinds = {0: "bias", 1: "bias"}  # the quantizer splits Gemm in a product and an addition
        by_kind = {
            kinds[index]: weights[name]
            for index, name in enumerate(node.input)
            if index in kinds and name in weights
        }
        # Weights of torch's linear layers have the shape (out, in), like those of Gemm with transB.
        if "matrix" in by_kind and not any(a.name == "transB" and a.i for a in node.attribute):
            by_kind["matrix"] = by_kind["matrix"].T
        if by_kind:
            for kind in dict.fromkeys(kinds.values()):
                used[kind].append(by_kind.get(kind))
    return used


def _floats(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the graph's constant arrays of float32, and its quantized arrays as float32."""
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    floats = {n: v for n, v in constants.items() if v.dtype == np.float32 and v.ndim}
    for name, integers in constants.items():
        base = name.removesuffix(_QUANTIZED)
        if name != base and f"{base}{_SCALE}" in constants:
            zero = constants.get(f"{base}{_ZERO_POINT}", np.int8(0))
            shifted = integers.astype(np.float32) - np.asarray(zero, np.float32)
            floats[name] = shifted * constants[f"{base}{_SCALE}"]
    return floats


def first_divergence(
    graph: bytes, model: ReferenceModel, rows: Sequence[Row]
) -> tuple[tuple[LayerDifference, ...], str | None]:
    """Compare the tokens after each layer, and find the first layer that diverges.

    Args:
        graph: Serialised CPU graph.
        model: Reference model of the graph.
        rows: Inputs of graph and reference model; at least one.

    Returns:
        A difference for each layer from "embeddings" on, and the name of the first layer whose
        relative difference exceeds `MAX_RELATIVE`, or None.
    """
    onnx_model = onnx.load_from_string(graph)
    names = _layer_outputs(onnx_model, model)
    onnx_model.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name)
        for name in names.values()
        if name != "tokens"
    )
    session = onnxruntime_session(onnx_model.SerializeToString(), available_cpus())
    outputs = session.run(list(names.values()), _pack(rows).inputs())
    served = dict(zip(names, outputs, strict=True))
    passes = [_outputs(model, row) for row in rows]
    curve = []
    for name in model.layer_names[1:]:
        step = model.steps[name]
        expected = np.concatenate([steps[step][0].cpu().numpy() for steps in passes])  # (T, D)
        curve.append(LayerDifference(name, *_difference(served.get(name, np.nan), expected)))
    return tuple(curve), next((d.layer for d in curve if not d.relative <= MAX_RELATIVE), None)


def _layer_outputs(onnx_model: onnx.ModelProto, model: ReferenceModel) -> dict[str, str]:
    """Return the name of the ONNX value that holds each layer's output, by layer name.

    Norms have the same order in the graph and in the model. The last step of a layer is a norm, or
    a sum that is the input of the next norm.
    """
    nodes = (node for node in onnx_model.graph.node if node.op_type == "LayerNormalization")
    norms = dict(zip(norm_names(model), nodes, strict=False))
    steps = list(_outputs(model, Row([0])))
    values = {"output": "tokens"}
    for layer_name in model.layer_names[1:-1]:
        step = model.steps[layer_name]
        if step in norms:
            values[layer_name] = norms[step].output[0]
        else:
            next_norm = next(name for name in steps[steps.index(step) :] if name in norms)
            values[layer_name] = norms[next_norm].input[0]
    return values


def _outputs(model: ReferenceModel, row: Row) -> dict[str, Tensor]:
    """Return the output of every step of one forward pass."""
    tap = OutputTap()
    with torch.no_grad():
        model.run(row, tap)
    return tap.outputs


def layer_norm_stress(width: int, eps: float) -> tuple[StressRow, ...]:
    """Return the errors of onnxruntime's LayerNormalization on the rows in `STRESS_ROWS`.

    Errors are against float64. The bound of a row is a multiple of its rounding error, which is
    the float32 epsilon times (1 + max|output|), whatever the row's mean.

    Args:
        width: Width of the norm, D.
        eps: Constant added to the variance.
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
    bound = _STRESS_UNITS * _EPSILON * (1 + np.abs(steps.out).max(1))  # (N,)
    finite = np.isfinite(served).all(1)  # (N,)
    columns = (finite.tolist(), error.tolist(), bound.tolist())
    return tuple(map(StressRow, STRESS_ROWS, *columns))


def _add_layer_norm_graph(width: int, eps: float) -> bytes:
    """Return a serialised graph of `Add` and `LayerNormalization`, the nodes of a CPU norm."""
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]>
        add_layer_norm (float[N, {width}] x, float[N, {width}] residual,
                        float[{width}] scale, float[{width}] shift) => (float[N, {width}] y) {{
            total = Add(x, residual)
            y = LayerNormalization <axis = -1, epsilon = {float(eps)!r}> (total, scale, shift)
        }}
    """).SerializeToString()
