"""Matrix products of a graph with constant weights: their inputs, and their int8 form."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, helper, numpy_helper

from models.engines import available_cpus
from models.engines.with_onnxruntime import onnxruntime_session
from models.export.int8.rounding import Matrix, Rounded
from models.packing import PackedBatch

# Maximum size of the activations that are in memory at a time, in bytes.
_MAX_BYTES = 2**30
_PREFIX, _SUFFIX = "model.encoder.", ".weight"


@dataclass(frozen=True)
class Products:
    """The products with one input.

    Attributes:
        name: Name of the layer, for reports.
        x: Name of the input.
        outputs: Rows of each product in `weights`, by name of its output.
        weights: Weights of all products, `(O, K)`, in the order of the outputs.
    """

    name: str
    x: str
    outputs: Mapping[str, slice]
    weights: Matrix


def find_products(graph: onnx.GraphProto, per_token: Collection[str]) -> list[Products]:
    """Return the products of packed tokens by constant weights, grouped by input.

    Args:
        graph: Graph with its weights.
        per_token: Names of values with an axis of all T tokens. Heads of pooled vectors are
            computed per row, and stay in float32.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    groups: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        if _has_weights(node, constants) and node.input[0] in per_token:
            groups.setdefault(node.input[0], []).append(node)
    products: list[Products] = []
    next_layer = ""
    for x, nodes in reversed(groups.items()):
        first = nodes[0].input[1]
        if first.startswith(_PREFIX):
            name = first.removeprefix(_PREFIX).removesuffix(_SUFFIX)
            next_layer = name.rpartition(".")[0]
        else:  # parts of one matrix, of which the optimizer made constants
            name = f"{next_layer}.in_proj"
        weights = [_weights(node, constants) for node in nodes]
        ends = np.cumsum([len(own) for own in weights]).tolist()
        rows = {
            node.output[0]: slice(end - len(own), end)
            for node, own, end in zip(nodes, weights, ends, strict=True)
        }
        products.append(Products(name, x, rows, np.concatenate(weights)))
    return products[::-1]


def _has_weights(node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in constants:
        return False
    return len(constants[node.input[1]].dims) == 2


def _weights(node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> Matrix:
    """Return the weights of a product, `(O, K)`."""
    weights: Matrix = numpy_helper.to_array(constants[node.input[1]])
    is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return weights if is_transposed else weights.T


def per_token_values(file: Path, batch: PackedBatch) -> set[str]:
    """Return the names of the inputs of products that have an axis of all T tokens.

    Args:
        file: File of the graph.
        batch: Batch with fewer rows than tokens.
    """
    graph = onnx.load(file, load_external_data=False)
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    names = [node.input[0] for node in graph.graph.node if _has_weights(node, constants)]
    values = _Values(file, graph, dict.fromkeys(names)).run(batch)
    return {name for name, value in values.items() if value.shape[:-1] == batch.input_ids.shape}


class _Values:
    """Values of a float graph, computed by onnxruntime."""

    def __init__(self, file: Path, graph: onnx.ModelProto, names: Collection[str]) -> None:
        kept = onnx.ModelProto()
        kept.CopyFrom(graph)
        del kept.graph.output[:]
        kept.graph.output.extend(
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names
        )
        self._names = list(names)
        self._session = onnxruntime_session(
            kept.SerializeToString(), available_cpus(), folder=file.parent
        )
        self._inputs = [port.name for port in self._session.get_inputs()]

    def run(self, batch: PackedBatch) -> dict[str, NDArray[np.float32]]:
        results = self._session.run(self._names, batch.inputs(self._inputs))
        return dict(zip(self._names, results, strict=True))


def activations(
    file: Path, products: Sequence[Products], batches: Sequence[PackedBatch]
) -> Iterator[tuple[Products, Matrix]]:
    """Yield the products with their inputs `(N, K)` for the N tokens of all batches.

    The graph runs several times, so that the inputs of few products are in memory at a time.
    """
    graph = onnx.load(file, load_external_data=False)
    tokens = sum(len(batch.input_ids) for batch in batches)
    part: list[Products] = []
    for index, own in enumerate(products):
        part.append(own)
        following = products[index + 1 : index + 2]
        size = sum(other.weights.shape[1] for other in [*part, *following]) * tokens * 4
        if following and size <= _MAX_BYTES:
            continue
        values = _Values(file, graph, [other.x for other in part])
        results = [values.run(batch) for batch in batches]
        for other in part:
            yield other, np.concatenate([result[other.x] for result in results])
        part = []


def write_int8(
    source: onnx.ModelProto, rounded: Sequence[tuple[Products, Rounded]], file: Path, weights: str
) -> None:
    """Write the graph with the given products in int8.

    OpenVINO recognises the dequantised weights, and multiplies int8 codes.

    Args:
        source: Float graph with its weights.
        rounded: Products, with what replaces them.
        file: File to write.
        weights: Name of the file of weights beside it.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source)
    graph = model.graph
    by_output = {o: (p.x, r, rows) for p, r in rounded for o, rows in p.outputs.items()}
    nodes = list(graph.node)
    del graph.node[:]
    smoothed: set[str] = set()

    def constant(name: str, value: NDArray[np.generic]) -> str:
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(op: str, inputs: Sequence[str], output: str) -> None:
        graph.node.append(helper.make_node(op, inputs, [output]))

    for node in nodes:
        output = node.output[0]
        if output not in by_output:
            graph.node.append(node)
            continue
        x, own, rows = by_output[output]
        if x not in smoothed:
            smoothed.add(x)
            add("Mul", [x, constant(f"{x}_inverse", 1 / own.smoothing)], f"{x}_scaled")
            start = constant(f"{x}_start", -own.shift / own.smoothing)
            add("Add", [f"{x}_scaled", start], f"{x}_smoothed")
        codes = constant(f"{output}_codes", own.weights[rows].T)
        scales = constant(f"{output}_scales", own.scales[rows])
        weights_node = helper.make_node(
            "DequantizeLinear", [codes, scales], [f"{output}_weights"], axis=1
        )
        graph.node.append(weights_node)
        add("MatMul", [f"{x}_smoothed", f"{output}_weights"], f"{output}_product")
        bias = own.bias[rows]
        if len(node.input) > 2:
            named = next(t for t in source.graph.initializer if t.name == node.input[2])
            bias = bias + numpy_helper.to_array(named)
        add("Add", [f"{output}_product", constant(f"{output}_bias", bias)], output)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.save_model(model, file, save_as_external_data=True, location=weights, size_threshold=1024)
