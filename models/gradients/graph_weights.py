"""Comparison of a served graph's weights with the reference model's weights.

A weight in the graph is identified by the node that uses it. Names do not identify weights, because
the exporter splits in_proj_weight in three, keeps only the first row of the token type table, and
stores equal weights under one name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.external_data_helper import ExternalDataInfo
from torch import Tensor

from models.gradients.reference_model import ReferenceModel
from models.gradients.results.parity import WeightDifference
from models.network.adapters import EmbeddingAdapters, LinearAdapters
from models.network.disentangled import CONTENT_TO_POSITION, POSITION_TO_CONTENT
from models.network.encoder import Encoder
from models.network.experts import Experts
from models.network.layer import EncoderLayer
from models.network.sentence_encoder import SentenceEncoder

Array = NDArray[np.float32]

# Maps patterns of parameter names to the kind of the weight. The first matching pattern counts.
_KINDS = {
    r"embeddings\.\w+\.adapters\.down": "table",
    r"adapters\.(down|up)": "matrix",
    r"experts\.bias": "row",
    r"embeddings\.(word|position)\.|relative_bias|distance_": "table",
    r"token_type": "row",
    r"norm\d?\.weight": "scale",
    r"norm\d?\.bias": "shift",
    r"weight$": "matrix",
    r"bias$": "bias",
    r"": "unknown",
}
# Node type of each norm in `models.network.norms.KINDS`.
NORM_OPS = {"layer_norm": "LayerNormalization", "rms_norm": "SimplifiedLayerNormalization"}
# Maps each node type to the kinds of weights that its inputs can be, by input index.
_INPUTS = {
    "Gather": {0: "table"},
    "Add": {0: "row", 1: "row"},
    "LayerNormalization": {1: "scale", 2: "shift"},
    "SimplifiedLayerNormalization": {1: "scale", 2: "shift"},
    "Gemm": {1: "matrix", 2: "bias"},
    "MatMul": {1: "matrix", 2: "bias"},
    "MatMulInteger": {1: "matrix"},
}
# Modules of a layer in the order of execution. Only the order among weights of one kind matters.
_PRE_NORM = (
    *("norm1", "self_attn", "branch_norm1", "norm2"),
    *("gate", "linear1", "linear2", "experts", "branch_norm2"),
)
_POST_NORM = (
    *("self_attn", "branch_norm1", "norm1"),
    *("gate", "linear1", "linear2", "experts", "norm2"),
)
# Suffixes of the three tensors that replace a weight in a graph quantized by onnxruntime.
_QUANTIZED, _SCALE, _ZERO_POINT = "_quantized", "_scale", "_zero_point"
# Tolerance for rounding errors of tables that the exporter computes from weights, relative to the
# largest element of the table.
_ROUNDING = 1e-5
# The exporter omits weights of these kinds if they are zero.
_LEFT_OUT_IF_ZERO = ("row", "bias")


class LoadedGraph(NamedTuple):
    """A graph without its external weights, and the folder of the weights file."""

    model: onnx.ModelProto
    folder: Path

    @classmethod
    def load(cls, file: Path) -> "LoadedGraph":
        """Load a graph from an ONNX file, without its external weights."""
        return cls(onnx.load(file, load_external_data=False), file.parent)


def compare_weights(graph: LoadedGraph, model: ReferenceModel) -> tuple[WeightDifference, ...]:
    """Compare every weight of the reference model with the corresponding weight in the graph.

    The differences are in the order of the forward pass.

    Args:
        graph: CPU graph in float32, or that graph after onnxruntime's dynamic quantization.
        model: Reference model of the graph.
    """
    order = {name: index for index, (name, _) in enumerate(_in_order_of_use(model.network))}
    used = _weights_of_nodes(graph)
    computed = _distance_tables(model.network.encoder).keys()
    differences = [
        WeightDifference(
            name,
            _weight_difference(kind, expected, actual, _ROUNDING if name in computed else 0.0),
        )
        for kind, weights in _model_weights(model).items()
        for (name, expected), actual in zip_longest(weights.items(), used[kind][: len(weights)])
        if expected is not None
    ]
    # Parts of a parameter follow its name in brackets.
    return tuple(sorted(differences, key=lambda weight: order[weight.name.partition("[")[0]]))


def _weight_difference(
    kind: str, expected: Array, actual: Array | None, rounding: float
) -> float | None:
    if actual is None and kind in _LEFT_OUT_IF_ZERO and not expected.any():
        return 0.0
    if actual is None or actual.shape != expected.shape:
        return None
    difference = float(np.abs(actual - expected).max())
    return 0.0 if difference <= rounding * np.abs(expected).max() else difference


def _model_weights(model: ReferenceModel) -> dict[str, dict[str, Array | None]]:
    """Return the reference model's weights by kind and name.

    The weights of each kind are in the order of the forward pass. Every matrix and every scale has
    an entry for its bias, which is None if there is none.
    """
    weights: dict[str, dict[str, Array | None]] = defaultdict(dict)
    for name, parameter in _in_order_of_use(model.network):
        kind = next(kind for pattern, kind in _KINDS.items() if re.search(pattern, name))
        value = parameter.detach().cpu().numpy()
        parts = {name: value}
        if "token_type" in name and kind == "row":
            # Only graphs of classifiers, which are not compared, have token types as an input. In
            # other graphs, all tokens have the first type.
            parts = {f"{name}[0]": value[0]}
        elif re.search(r"in_proj_(weight|bias)$", name):
            ends = np.cumsum(model.network.encoder.config.heads.widths)[:-1]
            own = zip(("query", "key", "value"), np.split(value, ends), strict=True)
            parts = {f"{name}[{part}]": array for part, array in own}
        weights[kind] |= parts
    for kind, of in ("bias", "matrix"), ("shift", "scale"):
        biases = (re.sub(r"weight\b(?=[^.]*$)", "bias", name) for name in weights[of])
        weights[kind] = {name: weights[kind].get(name) for name in biases}
    return weights


def norm_nodes(graph: onnx.ModelProto, model: ReferenceModel) -> dict[str, onnx.NodeProto]:
    """Return the node of each norm of the network, by module name without the prefix "encoder."."""
    names = (name for name, _ in _in_order_of_use(model.network))
    norms = [name for name in names if re.search(r"norm\d?\.weight$", name)]
    modules = (name.removeprefix("encoder.").removesuffix(".weight") for name in norms)
    nodes = (node for node in graph.graph.node if node.op_type in NORM_OPS.values())
    return dict(zip(modules, nodes, strict=False))


def _in_order_of_use(network: SentenceEncoder) -> Iterator[tuple[str, Tensor]]:
    """Yield names and parameters, those of the same role in the order of the forward pass.

    Parameters have the same role if they differ in the layer alone, such as all query weights.
    Those of a layer that runs several times are repeated for each run. Distance embeddings and
    their projections are replaced by the tables that the exporter computes from them. Adapters are
    stacked, and the weights of experts are separate matrices, `(F, D)` and `(D, F)`.
    """
    layers = "encoder.layers."
    named: dict[str, Tensor] = {
        name: p for name, p in network.named_parameters() if "distance_" not in name
    }
    for name in [name for name in named if name.endswith("adapters.down")]:
        module = name.removesuffix(".down")
        adapters = cast(LinearAdapters | EmbeddingAdapters, network.get_submodule(module))
        named[name], named[f"{module}.up"] = adapters.stack()
    for name in [name for name in named if name.endswith("experts.w1")]:
        module = name.removesuffix(".w1")
        experts = cast(Experts, network.get_submodule(module))
        del named[name], named[f"{module}.w2"]
        for e, (w1, w2) in enumerate(experts.matrices()):
            named |= {f"{module}.{e}.w1.weight": w1, f"{module}.{e}.w2.weight": w2.T}
    inner = {name: p for name, p in named.items() if name.startswith(layers)}
    order = _PRE_NORM if network.encoder.config.norm_first else _POST_NORM
    after = [name for name in named if re.match(r"(token_)?heads|encoder\.final_norm", name)]
    yield from ((name, p) for name, p in named.items() if name not in {*inner, *after})
    for run, index in enumerate(network.encoder.layer_order):
        own = f"{layers}{index}."
        parts = {name.removeprefix(own): p for name, p in inner.items() if name.startswith(own)}
        for name in sorted(parts, key=lambda name: order.index(name.split(".")[0])):
            yield f"{layers}{run}.{name}", parts[name]
    yield from _distance_tables(network.encoder).items()
    yield from ((name, named[name]) for name in after)


def _distance_tables(encoder: Encoder) -> dict[str, Tensor]:
    """Return each layer's keys and queries of the distance embeddings by name, in order of use."""
    if (embeddings := encoder.distance_embeddings) is None:
        return {}
    tables: dict[str, Tensor] = {}
    for run, index in enumerate(encoder.layer_order):
        layer = cast(EncoderLayer, encoder.layers[index])
        queries, keys = layer.self_attn.distance_tables(embeddings())
        for term, name, table in (
            (CONTENT_TO_POSITION, "keys", keys),
            (POSITION_TO_CONTENT, "queries", queries),
        ):
            if term in embeddings.terms:
                tables[f"encoder.layers.{run}.self_attn.distance_{name}"] = table
    return tables


def _weights_of_nodes(graph: LoadedGraph) -> dict[str, list[Array | None]]:
    """Return the graph's weights by kind, in the order of the nodes that use them.

    None stands for a weight that nodes of a type can have, but a node of this type lacks. Quantized
    weights are dequantized.
    """
    weights = _floats(graph)
    used = defaultdict(list)
    is_quantized = False
    for node in graph.model.graph.node:
        kinds = _INPUTS.get(node.op_type, {})
        is_quantized |= node.op_type == "MatMulInteger"
        if is_quantized and node.op_type == "Add":
            kinds = {0: "bias", 1: "bias"}  # the quantizer splits Gemm into a product and an Add
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


def _array(tensor: onnx.TensorProto, folder: Path) -> Array:
    """Return the values of an initializer.

    Raises:
        ValueError: The initializer is outside the folder, or its file is too short.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    # Not by `to_array`, which refuses files with several hard links. Copies of an artifact may
    # share their weights.
    data = ExternalDataInfo(tensor)
    if Path(data.location).name != data.location:
        raise ValueError(f"{tensor.name} is stored outside the artifact")
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = math.prod(tensor.dims)
    array = np.fromfile(folder / data.location, dtype, count, offset=data.offset or 0)
    return array.reshape(tensor.dims)


def _floats(graph: LoadedGraph) -> dict[str, Array]:
    """Return the graph's float32 weights, and its quantized weights dequantized, without scalars.

    Keys are the names of the initializers; for quantized weights, with the suffix `_quantized`.
    """
    constants = {
        tensor.name: _array(tensor, graph.folder) for tensor in graph.model.graph.initializer
    }
    floats = {n: v for n, v in constants.items() if v.dtype == np.float32 and v.ndim}
    for name, integers in constants.items():
        base = name.removesuffix(_QUANTIZED)
        if name != base and f"{base}{_SCALE}" in constants:
            zero = constants.get(f"{base}{_ZERO_POINT}", np.int8(0))
            shifted = integers.astype(np.float32) - np.asarray(zero, np.float32)
            floats[name] = shifted * constants[f"{base}{_SCALE}"]
    return floats
