"""Export of a sentence encoder to an ONNX graph with packed inputs."""

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnxscript import opset20 as op
from torch import Tensor, nn

from models.add_layer_norm.onnx_nodes import onnx_translations
from models.export.attention_nodes import lower_attention, packed_attention
from models.network.sentence_encoder import SentenceEncoder
from models.packing import INPUT_NAMES, WORD_NAMES

OPSET = 20
_NO_LIMIT = 2**31
# Minimum size of constants in the weights file; smaller constants stay in the ONNX file.
_MIN_EXTERNAL_BYTES = 1024


# Patterns of expected warnings, about the exporter's internals and about axes that deliberately
# share a name.
_EXPECTED_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"# The axis name: \w will not be used, since it shares the same shape constraints",
)


class _Packed(nn.Module):
    """Wrapper whose `forward` calls `forward_packed`, because the exporter traces `forward`.

    Args:
        model: Model to export.
        optional: Names of the additional inputs, which follow `INPUT_NAMES`.
    """

    def __init__(self, model: SentenceEncoder, optional: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.optional = tuple(optional)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        names = *INPUT_NAMES, *self.optional
        return self.model.forward_packed(**dict(zip(names, inputs, strict=True)))


def _lstm(x: Any, w: Any, r: Any, b: Any) -> Any:  # noqa: ANN401
    """Translate `torch.ops.vitrine.lstm` to the standard operator, which has an axis of directions.

    Its inputs and outputs have the words before the rows.
    """
    weights = (op.Unsqueeze(each, [0]) for each in (w, r, b))
    states, _, _ = op.LSTM(op.Transpose(x, perm=[1, 0, 2]), *weights, hidden_size=r.shape[1])
    return op.Transpose(op.Squeeze(states, [1]), perm=[1, 0, 2])


def _expert_outputs(x: Any, experts: Any, w1: Any, w2: Any, count: int) -> Any:  # noqa: ANN401
    """Translate `torch.ops.vitrine.expert_outputs`, as `models.network.experts` computes it.

    An expert computes the rows that `NonZero` finds, which may be none.
    """
    per_token, size = experts.shape[1], w1.shape[0] // count
    chosen = op.Reshape(experts, [-1])  # (T * K,)
    places, outputs = [], []
    for e in range(count):
        place = op.Reshape(op.NonZero(op.Equal(chosen, e)), [-1])
        rows = op.Gather(x, op.Div(place, per_token), axis=0)
        up, down = (op.Slice(w, [e * size], [(e + 1) * size], [0]) for w in (w1, w2))  # (F, D)
        inner = op.Gelu(op.MatMul(rows, op.Transpose(up, perm=[1, 0])))
        places.append(place)
        outputs.append(op.MatMul(inner, down))
    order = op.Concat(*places, axis=0)
    # The inverse of a permutation, which `argsort` returns in torch.
    indices = op.Range(0, op.Squeeze(op.Shape(order)), 1)
    inverse = op.ScatterElements(order, order, indices, axis=0)
    rows = op.Gather(op.Concat(*outputs, axis=0), inverse, axis=0)  # (T * K, D)
    return op.Reshape(rows, [-1, per_token, x.shape[-1]])


def trace(model: SentenceEncoder, target: str) -> ir.Model:
    """Return `model` as an ONNX graph that computes in the dtype of the model's weights.

    The inputs are fields of `models.packing.PackedBatch`, with dynamic B, L and T, and of its words
    for the output "spans". The outputs are `model.outputs`, of the shapes in
    `models.engines.OUTPUTS`, in float32. Each attention is a placeholder node, which `graph_for`
    replaces.

    Args:
        model: Model in evaluation mode.
        target: Target hardware, "cpu" or "cuda".
    """
    B, L, T = 3, 5, 11
    N, K, C, P = 7, 4, 6, 13
    shapes = {
        "input_ids": ("T",),
        "padded_index": ("B", "L"),
        "packed_index": ("T",),
        "attention_mask": ("B", "L"),
        "pooling_mask": ("B", "L"),
        "adapters": ("T",),
        "token_types": ("T",),
        "word_tokens": ("N",),
        "padded_words": ("B", "K"),
        "packed_words": ("N",),
        "word_counts": ("B",),
        "label_tokens": ("B", "C"),
        "pairs": ("P",),
    }
    sizes = {"B": B, "L": L, "T": T, "N": N, "K": K, "C": C, "P": P}
    dimensions = {name: torch.export.Dim(name) for name in sizes}
    dtypes = {"attention_mask": torch.float32, "pooling_mask": torch.float32}
    has = {"adapters": model.encoder.config.adapters, "token_types": model.has_token_types}
    has |= dict.fromkeys(WORD_NAMES, model.spans is not None)
    optional = [name for name, is_input in has.items() if is_input]
    names = [*INPUT_NAMES, *optional]
    inputs = tuple(
        torch.ones([sizes[d] for d in shapes[name]], dtype=dtypes.get(name, torch.int64))
        for name in names
    )
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        program = torch.onnx.export(
            _Packed(model, optional).eval(),
            inputs,
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=list(model.outputs),
            # One entry, because `forward` has one parameter, `*inputs`.
            dynamic_shapes=(
                tuple({i: dimensions[d] for i, d in enumerate(shapes[n])} for n in names),
            ),
            custom_translation_table={
                **onnx_translations(target),
                torch.ops.vitrine.packed_attention.default: packed_attention,
                torch.ops.vitrine.lstm.default: _lstm,
                torch.ops.vitrine.expert_outputs.default: _expert_outputs,
            },
            verbose=False,
            optimize=False,  # done below, after the norms of constants are folded
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned None")
    graph = program.model.graph
    initializers = list(graph.initializers.values())
    # Constants are folded here once, instead of each time an engine loads the graph.
    _fold_norms(graph)
    onnxscript.optimizer.optimize(
        program.model, input_size_limit=_NO_LIMIT, output_size_limit=_NO_LIMIT
    )
    # onnxscript's global rewrite rules keep the graph, whose inputs keep the initializers that were
    # folded: in BERT-large, 300 MB.
    for value in initializers:
        if value.name not in graph.initializers:
            value.const_value = None
    return program.model


def _fold_norms(graph: ir.Graph) -> None:
    """Fold layer norms of constants, which the optimizer skips due to their optional outputs."""
    for node in list(graph):
        constants = [value and value.const_value for value in node.inputs]
        if node.op_type != "LayerNormalization" or None in constants:
            continue
        x, weight, bias = (torch.tensor(constant.numpy()) for constant in constants if constant)
        eps = node.attributes["epsilon"].as_float()
        folded = nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        name = node.outputs[0].name
        value = ir.Value(name=name, const_value=ir.tensor(folded.numpy(), name=name))
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)
        graph.register_initializer(value)


def write_weights(graph: ir.Model, file: Path) -> None:
    """Write the weights of a graph to a file, and replace them with references to the file.

    Args:
        graph: Graph from `trace`; modified in place.
        file: File to write, in the directory of the ONNX files.
    """
    weights = {
        value: value.const_value
        for value in graph.graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= _MIN_EXTERNAL_BYTES
    }
    tensors = list(weights.values())
    external = ir.external_data.convert_tensors_to_external(tensors, file.parent, file.name)
    for value, tensor in zip(weights, external, strict=True):
        value.const_value = tensor


def graph_for(engine: str, graph: ir.Model) -> bytes:
    """Return a serialised copy of the graph with the attention nodes of an engine.

    Args:
        engine: Name in `models.engines.ENGINES`.
        graph: Graph from `trace`; not modified.
    """
    graph = graph.clone()
    lower_attention(graph, engine)
    proto = ir.to_proto(graph)
    _strip(proto)
    return proto.SerializeToString(deterministic=True)


def _strip(graph: onnx.ModelProto) -> None:
    """Remove the exporter's metadata, and the shapes of intermediate values.

    The metadata contains file paths, source lines and the build of PyTorch: the graph's hash, which
    is part of the model's version, would differ between builds for CPUs and for GPUs. The shapes
    describe the traced program and are wrong where the optimizer or a translation changed nodes.
    Shape inference and onnxruntime's quantizer reject a graph with wrong shapes.
    """
    graph.graph.ClearField("value_info")
    graph.ClearField("metadata_props")
    graph.ClearField("producer_version")
    graph.graph.ClearField("metadata_props")
    for part in (graph.graph.node, graph.graph.input, graph.graph.output):
        for item in part:
            item.ClearField("metadata_props")
    for initializer in graph.graph.initializer:
        initializer.ClearField("metadata_props")
        initializer.ClearField("doc_string")


VERSIONS = {
    "vitrine": version("vitrine"),
    "torch": torch.__version__,
    "onnx": onnx.__version__,
    "onnxscript": onnxscript.__version__,
}
