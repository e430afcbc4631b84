"""Graphs for CUDA on a CPU, whose onnxruntime lacks the kernel of `PackedMultiHeadAttention`."""

from pathlib import Path

import onnx
from onnxscript import FLOAT, INT32, opset20, script
from onnxscript.values import Opset

# onnxruntime prefers its own operators to functions of a graph with the same name.
_DOMAIN = "tests"


@script(Opset(_DOMAIN, 1), default_opset=opset20)  # type: ignore[untyped-decorator]
def packed_attention(
    q: FLOAT,
    k: FLOAT,
    v: FLOAT,
    bias: FLOAT,  # noqa: ARG001 - an input of the operator that no graph gives
    token_order: INT32,
    cumulative_lengths: INT32,
    num_heads: int,
) -> FLOAT:
    """Compute all scores; a query's row is read from one input, and a key's from the other."""
    tokens = opset20.Shape(q, start=0, end=1)
    order = opset20.Reshape(opset20.Cast(token_order, to=7), [-1])
    row_of_query = opset20.Slice(order, [0], tokens) / opset20.Shape(token_order, start=1)
    index = opset20.Range(0, opset20.Squeeze(tokens), 1)
    ends = opset20.Slice(opset20.Cast(cumulative_lengths, to=7), [1], [9223372036854775807])
    is_after = opset20.Unsqueeze(index, [1]) >= opset20.Unsqueeze(ends, [0])  # (T, B)
    row_of_key = opset20.ReduceSum(opset20.Cast(is_after, to=7), [1], keepdims=0)
    same = opset20.Equal(opset20.Unsqueeze(row_of_query, [1]), opset20.Unsqueeze(row_of_key, [0]))
    count = opset20.Reshape(opset20.Constant(value_int=num_heads), [1])
    heads = opset20.Concat([0], count, [-1], axis=0)
    queries = opset20.Transpose(opset20.Reshape(q, heads), perm=[1, 0, 2])  # (H, T, K)
    keys = opset20.Transpose(opset20.Reshape(k, heads), perm=[1, 2, 0])
    values = opset20.Transpose(opset20.Reshape(v, heads), perm=[1, 0, 2])
    width = opset20.CastLike(opset20.Shape(queries, start=2), q)
    scores = opset20.MatMul(queries, keys) / opset20.Sqrt(width)
    masked = opset20.Where(same, scores, opset20.CastLike(-30000.0, q))
    context = opset20.MatMul(opset20.Softmax(masked, axis=-1), values)
    return opset20.Reshape(opset20.Transpose(context, perm=[1, 0, 2]), opset20.Shape(q))


def for_cpu(graph: Path) -> bytes:
    """Return a graph for CUDA, with its weights, as the CPU can compute it."""
    model = onnx.load(graph)
    function = packed_attention.to_function_proto()
    model.functions.append(function)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    for node in model.graph.node:
        if node.op_type == "PackedMultiHeadAttention":
            node.domain, node.op_type = _DOMAIN, function.name
    return model.SerializeToString()
