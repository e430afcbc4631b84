"""ONNX nodes of attention on packed batches, by engine.

The exporter writes each attention as one placeholder node. `lower_attention` replaces the
placeholders with nodes for an engine. Shapes: T tokens in B rows of up to L tokens, H heads of
width K.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnx_ir.tape import Tape
from onnxscript.values import Op, Opset

from models.network.packed_attention import MASKED_SCORE
from models.network.positions import alibi_slopes

_DOMAIN, _OP = "vitrine", "PackedAttention"
_NO_WINDOW = -1


def _placeholder() -> Op:
    formal = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    attribute = onnx.defs.OpSchema.Attribute
    floats = ["tensor(float)", "tensor(float16)"]
    schema = onnx.defs.OpSchema(
        _OP,
        _DOMAIN,
        1,
        inputs=[
            *(formal(name, "T") for name in ("q", "k", "v")),
            *(formal(name, "I") for name in ("padded_index", "packed_index")),
            formal("attention_mask", "M"),
            formal("bias", "T", param_option=optional),
        ],
        outputs=[formal("context", "T")],
        type_constraints=[
            ("T", floats, ""),
            ("I", ["tensor(int64)"], ""),
            ("M", ["tensor(float)"], ""),
        ],
        attributes=[
            attribute(name, onnx.defs.OpSchema.AttrType.INT)
            for name in ("num_heads", "window", "causal", "alibi")
        ],
    )
    return Op(Opset(_DOMAIN, 1), _OP, schema)


_PLACEHOLDER = _placeholder()


def packed_attention(*inputs: Any) -> Any:  # noqa: ANN401
    """Translate `torch.ops.vitrine.packed_attention` to the placeholder node."""
    *tensors, num_heads, window, causal, alibi = inputs
    window = _NO_WINDOW if window is None else window
    return _PLACEHOLDER(
        *tensors, num_heads=num_heads, window=window, causal=int(causal), alibi=int(alibi)
    )


@dataclass(frozen=True)
class _Attention:
    """Inputs and attributes of one placeholder node, and values computed from the inputs.

    Attributes:
        shape: The numbers B and L, as an int64 vector `(2,)`.
        flat_index: `padded_index`, flattened to `(B * L,)`.
        padding: Bias of the attention scores that masks padding and tokens that no token attends
            to, `(B, 1, 1, L)`.
        window, causal, alibi: See `models.network.positions.Reach`.
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    packed_index: ir.Value
    attention_mask: ir.Value
    bias: ir.Value | None
    shape: ir.Value
    flat_index: ir.Value
    padding: ir.Value
    num_heads: int
    window: int | None
    causal: bool
    alibi: bool

    @property
    def width(self) -> int:
        """Width of queries, keys and values, `H * K`."""
        shape = self.v.shape
        if shape is None or not isinstance(shape[-1], int):
            raise ValueError("the width of the attention's values must be static, not dynamic")
        return shape[-1]


class _Nodes:
    """Builder of ONNX nodes. Equal constants share one initializer of the graph.

    Names are unique in the graph and all its subgraphs, because onnxruntime rejects duplicates.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.tape = Tape()
        self.constants: dict[Any, ir.Value] = {}
        self.names = itertools.count()

    def subgraph(self) -> "_Nodes":
        """Return a builder without nodes that shares graph, constants and names with this one."""
        nodes = copy.copy(self)
        nodes.tape = Tape()
        return nodes

    def __call__(
        self,
        op: str,
        *inputs: ir.Value | None,
        domain: str = "",
        **attributes: Any,  # noqa: ANN401
    ) -> ir.Value:
        """Add a node and return its output."""
        output = ir.Value(name=f"attention_{next(self.names)}")
        return self.tape.op(op, inputs, attributes, domain=domain, output=output)

    def constant(self, value: Any, dtype: type[np.generic] = np.int64) -> ir.Value:  # noqa: ANN401
        """Return a constant, as an initializer of the graph."""
        array: NDArray[Any] = np.asarray(value, dtype)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"attention_constant_{len(self.constants)}"
            self.constants[key] = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            self.graph.register_initializer(self.constants[key])
        return self.constants[key]

    def batch_input(self, name: str, *shape: int | str) -> ir.Value:
        """Return an int32 input of the graph, a property of `PackedBatch`."""
        for value in self.graph.inputs:
            if value.name == name:
                return value
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def branches(
        self, condition: ir.Value, a: _Attention, then: "_Lowering", otherwise: "_Lowering"
    ) -> ir.Value:
        """Add an `If` node and return its output.

        Args:
            condition: Bool scalar.
            a: Inputs of the attention.
            then: Adds the nodes of the true branch and returns their output.
            otherwise: Adds the nodes of the false branch and returns their output.
        """
        graphs = {}
        for name, build in (("then_branch", then), ("else_branch", otherwise)):
            nodes = self.subgraph()
            result = build(nodes, a)
            result.type, result.shape = a.q.type, a.q.shape
            graphs[name] = ir.Graph((), (result,), nodes=nodes.tape.nodes, name=name)
        return self("If", condition, **graphs)  # type: ignore[arg-type] # `graphs` has no key `domain`

    def loop(
        self, count: ir.Value, like: ir.Value, body: Callable[["_Nodes", ir.Value], ir.Value]
    ) -> ir.Value:
        """Add a `Loop` node and return the results of all iterations, stacked along a new axis 0.

        Args:
            count: Number of iterations, an int64 scalar.
            like: Value with the type of the results.
            body: Adds the nodes of an iteration and returns their output. Its arguments are the
                builder of the nodes and the index of the iteration.
        """
        nodes = self.subgraph()
        index, condition = (ir.Value(name=f"attention_{next(self.names)}") for _ in range(2))
        for value, dtype in ((index, ir.DataType.INT64), (condition, ir.DataType.BOOL)):
            value.type, value.shape = ir.TensorType(dtype), ir.Shape([])
        result = body(nodes, index)
        result.type = like.type
        next_condition = nodes("Identity", condition)
        next_condition.type, next_condition.shape = condition.type, condition.shape
        graph = ir.Graph(
            (index, condition), (next_condition, result), nodes=nodes.tape.nodes, name="body"
        )
        always = self.constant(True, np.bool_)
        return self("Loop", count, always, body=graph)


# Adds the nodes of an attention and returns its context.
_Lowering = Callable[[_Nodes, _Attention], ir.Value]


def _heads(nodes: _Nodes, a: _Attention) -> list[ir.Value]:
    """Return queries, keys and values in the padded layout, `(B, L, H, K)` each."""
    heads = nodes("Concat", a.shape, nodes.constant([a.num_heads, -1]), axis=0)
    return [
        nodes("Reshape", nodes("Gather", x, a.flat_index, axis=0), heads) for x in (a.q, a.k, a.v)
    ]


def _pack(nodes: _Nodes, a: _Attention, context: ir.Value) -> ir.Value:
    """Convert the context of padded rows, `(B, L, H, K)`, to the packed layout `(T, H * K)`."""
    flat = nodes("Reshape", context, nodes.constant([-1, a.width]))
    return nodes("Gather", flat, a.packed_index, axis=0)


def _pad(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention on padded rows, with all scores `(B, H, L, L)` in memory."""
    q, k, v = _heads(nodes, a)
    bias = a.padding if a.bias is None else nodes("Add", a.bias, a.padding)
    L = nodes("Gather", a.shape, nodes.constant(1), axis=0)
    positions = nodes("Range", nodes.constant(0), L, nodes.constant(1))
    queries = nodes("Unsqueeze", positions, nodes.constant([1]))
    bias = _with_positions(nodes, a, nodes("Sub", positions, queries), bias)
    return _pack(nodes, a, _attend(nodes, a, q, k, v, bias))


def _attend(
    nodes: _Nodes, a: _Attention, q: ir.Value, k: ir.Value, v: ir.Value, bias: ir.Value
) -> ir.Value:
    """Return the attention of queries `(N, L, H, K)` to keys and values, with a bias."""
    # Scaling the query (L x K) is L / K times cheaper than scaling the scores (L x L).
    scale = nodes("CastLike", nodes.constant((a.width / a.num_heads) ** -0.5, np.float32), a.q)
    q = nodes("Transpose", nodes("Mul", q, scale), perm=[0, 2, 1, 3])
    scores = nodes("MatMul", q, nodes("Transpose", k, perm=[0, 2, 3, 1]))  # (N, H, L, L)
    weights = nodes("Softmax", nodes("Add", scores, bias), axis=-1)
    context = nodes("MatMul", weights, nodes("Transpose", v, perm=[0, 2, 1, 3]))
    return nodes("Transpose", context, perm=[0, 2, 1, 3])


def _with_positions(nodes: _Nodes, a: _Attention, distance: ir.Value, bias: ir.Value) -> ir.Value:
    """Return an attention bias combined with ALiBi, the sliding-window mask and the causal mask.

    Args:
        nodes: Builder of nodes.
        a: Inputs of the attention.
        distance: Position of the key minus position of the query, `(queries, keys)`.
        bias: Attention bias, broadcastable to the scores.
    """
    if a.alibi:
        slopes = nodes.constant([[[-slope]] for slope in alibi_slopes(a.num_heads)], np.float32)
        size = nodes("Cast", nodes("Abs", distance), to=ir.DataType.FLOAT)
        bias = nodes("Add", bias, nodes("CastLike", nodes("Mul", size, slopes), a.q))
    excluded = []
    if a.causal:
        excluded.append(nodes("Greater", distance, nodes.constant(0)))
    if a.window is not None:
        excluded.append(nodes("Greater", nodes("Abs", distance), nodes.constant(a.window)))
    masked = nodes("CastLike", nodes.constant(MASKED_SCORE, np.float32), a.q)
    for outside in excluded:
        bias = nodes("Where", outside, masked, bias)
    return bias


def _unpad(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention on rows of equal length, by onnxruntime's `MultiHeadAttention` kernel.

    The kernel does not keep all scores in memory, unless attention is causal.
    """
    shape = nodes("Concat", a.shape, nodes.constant([a.width]), axis=0)
    q, k, v = (nodes("Reshape", x, shape) for x in (a.q, a.k, a.v))  # (B, L, D)
    context = nodes(
        "MultiHeadAttention",
        *(q, k, v),
        domain="com.microsoft",
        num_heads=a.num_heads,
        unidirectional=int(a.causal),
    )  # (B, L, H * K)
    return nodes("Reshape", context, nodes.constant([-1, a.width]))


def _attend_in_window(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention within a window, computed in the packed layout.

    There are `(T, H, 3 * window)` scores. Tokens are split into blocks of the window's size, so
    that the window of each token lies in its block and the two neighbouring blocks.
    """
    window = a.window or 0
    size = max(1, window)  # tokens per block
    constant, D = nodes.constant, a.width
    T = nodes("Shape", a.packed_index)  # (1,)
    blocks = nodes("Div", nodes("Add", T, constant([size - 1])), constant([size]))  # (1,), N
    padding = nodes("Sub", nodes("Mul", blocks, constant([size])), T)
    zero, before = constant([0]), constant([size])
    after = nodes("Add", padding, before)

    L = nodes("Slice", a.shape, constant([1]), constant([2]))
    row = nodes("Div", a.packed_index, L)  # (T,)
    attended = nodes("Gather", nodes("Reshape", a.attention_mask, constant([-1])), a.packed_index)
    is_key = nodes("Greater", attended, constant(0, np.float32))
    row_of_key = nodes("Where", is_key, row, constant(-2))  # (T,)

    def neighbours(x: ir.Value, *shape: int, fill: ir.Value | None = None) -> ir.Value:
        """Return the values of each block and its two neighbours, `(N, 3 * size, ...)`."""
        ends = (before, zero, after, zero) if shape else (before, after)
        padded = nodes("Pad", x, nodes("Concat", *ends, axis=0), fill)
        split = nodes("Reshape", padded, constant([-1, size, *shape]))  # (N + 2, size, ...)
        parts = [
            nodes("Slice", split, constant([i]), nodes("Add", blocks, constant([i])))
            for i in range(3)
        ]
        return nodes("Concat", *parts, axis=1)

    per_head = constant([0, 0, a.num_heads, -1])
    queries = nodes("Pad", a.q, nodes("Concat", zero, zero, padding, zero, axis=0))
    q = nodes("Reshape", queries, constant([-1, size, a.num_heads, D // a.num_heads]))
    k, v = (nodes("Reshape", neighbours(x, D), per_head) for x in (a.k, a.v))
    ends = nodes("Concat", zero, padding, axis=0)
    own = nodes("Reshape", nodes("Pad", row, ends, constant(-1)), constant([-1, size, 1]))
    theirs = nodes("Unsqueeze", neighbours(row_of_key, fill=constant(-2)), constant([1]))
    distance = np.arange(3 * size)[None] - size - np.arange(size)[:, None]
    within = np.abs(distance) <= window
    near = constant(within & (distance <= 0) if a.causal else within, np.bool_)  # (size, 3 * size)
    allowed = nodes("And", nodes("Equal", own, theirs), near)  # (N, size, 3 * size)
    open_, masked = constant(0, np.float32), constant(MASKED_SCORE, np.float32)
    bias = nodes("Unsqueeze", nodes("Where", allowed, open_, masked), constant([1]))
    context = _attend(nodes, a, q, k, v, nodes("CastLike", bias, a.q))  # (N, size, H, K)
    return nodes("Slice", nodes("Reshape", context, constant([-1, D])), zero, T)


# Bounds for a block of queries: attention scores per row and head, and number of queries.
_BLOCK_SCORES, _BLOCK_QUERIES = 2**20, 128


def _in_blocks(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention computed in blocks of queries, with `(B, H, block, L)` scores in memory.

    In causal attention, the keys of a block end at its last query, which saves half of the scores.
    """
    constant = nodes.constant
    L = nodes("Slice", a.shape, constant([1]), constant([2]))
    most = nodes("Div", constant([_BLOCK_SCORES]), L)
    size = nodes("Clip", most, constant(1), constant(_BLOCK_QUERIES))
    count = nodes("Div", nodes("Sub", nodes("Add", L, size), constant([1])), size)
    scale = nodes("CastLike", constant((a.width / a.num_heads) ** -0.5, np.float32), a.q)
    q, k, v = _heads(nodes, a)
    padding = nodes("Sub", nodes("Mul", count, size), L)
    pads = nodes("Concat", constant([0] * 5), padding, constant([0, 0]), axis=0)
    q = nodes("Transpose", nodes("Pad", nodes("Mul", q, scale), pads), perm=[0, 2, 1, 3])
    k, v = nodes("Transpose", k, perm=[0, 2, 3, 1]), nodes("Transpose", v, perm=[0, 2, 1, 3])
    positions = nodes("Range", constant(0), nodes("Squeeze", L), constant(1))  # (L,)
    within = nodes("Range", constant(0), nodes("Squeeze", size), constant(1))  # (block,)
    within = nodes("Unsqueeze", within, constant([1]))  # (block, 1)

    def block(nodes: _Nodes, index: ir.Value) -> ir.Value:
        start = nodes("Mul", nodes("Unsqueeze", index, constant([0])), size)
        end = nodes("Add", start, size)

        def first(x: ir.Value, axis: int) -> ir.Value:
            """Return `x` without the keys, along `axis`, that the block does not attend to."""
            return nodes("Slice", x, constant([0]), end, constant([axis])) if a.causal else x

        queries = nodes("Slice", q, start, end, constant([2]))  # (B, H, block, K)
        distance = nodes("Sub", first(positions, 0), nodes("Add", within, start))
        bias = _with_positions(nodes, a, distance, first(a.padding, 3))
        scores = nodes("Add", nodes("MatMul", queries, first(k, 3)), bias)
        context = nodes("MatMul", nodes("Softmax", scores, axis=-1), first(v, 2))
        return nodes("Transpose", context, perm=[0, 2, 1, 3])  # (B, block, H, K)

    blocks = nodes.loop(nodes("Squeeze", count), a.q, block)  # (N, B, block, H, K)
    rows = nodes("Transpose", blocks, perm=[1, 0, 2, 3, 4])
    whole = nodes("Reshape", rows, constant([0, -1, a.num_heads, a.width // a.num_heads]))
    return _pack(nodes, a, nodes("Slice", whole, constant([0]), L, constant([1])))


# Row length above which `_in_blocks` takes no more time than `_pad`, and less memory.
_BLOCKS_FROM = 512
# Row length, in windows, above which `_attend_in_window` takes less time than `_pad`. Measured with
# windows of 64 and 256 tokens, on two cores of an AMD EPYC with AVX2.
_BANDED_FROM = 4


def _for_onnxruntime(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention by the cheapest implementation, which `If` nodes select for each batch.

    The selection takes no measurable time. On rows of equal length, a model with `_unpad` takes
    0.94 (9 tokens) to 0.90 (512 tokens) of its time with `_pad`. On a row of 8,192 tokens,
    `_attend_in_window` with a window of 64 takes 0.09 of the time of attention without a window.
    """
    longest = nodes("Gather", a.shape, nodes.constant(1), axis=0)
    if a.bias is not None:
        return _pad(nodes, a)
    is_short = nodes("LessOrEqual", longest, nodes.constant(_BLOCKS_FROM))

    def padded_or_blocks(nodes: _Nodes, a: _Attention) -> ir.Value:
        return nodes.branches(is_short, a, _pad, _in_blocks)

    if a.alibi:
        return padded_or_blocks(nodes, a)
    is_full = nodes("Cast", nodes("ReduceMin", a.attention_mask, keepdims=0), to=ir.DataType.BOOL)

    def padded_or_not(nodes: _Nodes, a: _Attention) -> ir.Value:
        return nodes.branches(is_full, a, _unpad, _pad)

    def whole_rows(nodes: _Nodes, a: _Attention) -> ir.Value:
        # A window that covers all rows has no effect, so it can be omitted.
        whole = replace(a, window=None)
        if not a.causal:
            return padded_or_not(nodes, whole)
        return nodes.branches(is_short, whole, padded_or_not, _in_blocks)

    if (window := a.window) is None:
        return whole_rows(nodes, a)
    is_covered = nodes("LessOrEqual", longest, nodes.constant(window + 1))
    has_few_windows = nodes("LessOrEqual", longest, nodes.constant(_BANDED_FROM * window))

    def part_of_rows(nodes: _Nodes, a: _Attention) -> ir.Value:
        return nodes.branches(has_few_windows, a, padded_or_blocks, _attend_in_window)

    return nodes.branches(is_covered, a, whole_rows, part_of_rows)


def _for_cuda(nodes: _Nodes, a: _Attention) -> ir.Value:
    """Return attention by onnxruntime's `PackedMultiHeadAttention` kernel where it can compute it.

    The kernel computes nothing on padding and keeps no scores in memory. On an H100, texts of mixed
    lengths have 1.5 to 1.9 times the rate of `_pad`. All tokens of a row attend to each other,
    which those of a query of ColBERT need not. In float32 the kernel may compute in TF32.
    """
    is_plain = a.bias is None and a.window is None and not (a.causal or a.alibi)
    has_queries = any(output.name == "multi" for output in nodes.graph.outputs)
    if not is_plain or has_queries or a.q.dtype != ir.DataType.FLOAT16:
        return _pad(nodes, a)
    return nodes(
        "PackedMultiHeadAttention",
        *(a.q, a.k, a.v, None),
        nodes.batch_input("token_order", "B", "L"),
        nodes.batch_input("cumulative_lengths", "B + 1"),
        domain="com.microsoft",
        num_heads=a.num_heads,
    )  # (T, H * K)


# OpenVINO fuses the nodes of `_pad`, and then does not keep the scores in memory. With `If`
# nodes, OpenVINO 2026.4 returns wrong results.
_LOWERINGS: dict[str, _Lowering] = {
    "onnxruntime": _for_onnxruntime,
    "openvino": _pad,
    "cuda": _for_cuda,
}


def _read(nodes: _Nodes, node: ir.Node) -> _Attention:
    """Return the inputs and attributes of a placeholder node, and values computed from them."""
    inputs = [value for value in node.inputs if value is not None]
    q, k, v, padded_index, packed_index, attention_mask, *bias = inputs
    padding = nodes("Sub", nodes.constant(1, np.float32), attention_mask)  # (B, L)
    padding = nodes("Mul", padding, nodes.constant(MASKED_SCORE, np.float32))
    window = node.attributes["window"].as_int()
    return _Attention(
        q=q,
        k=k,
        v=v,
        packed_index=packed_index,
        attention_mask=attention_mask,
        bias=bias[0] if bias else None,
        shape=nodes("Shape", padded_index),
        flat_index=nodes("Reshape", padded_index, nodes.constant([-1])),
        padding=nodes("CastLike", nodes("Unsqueeze", padding, nodes.constant([1, 2])), q),
        num_heads=node.attributes["num_heads"].as_int(),
        window=None if window == _NO_WINDOW else window,
        causal=bool(node.attributes["causal"].as_int()),
        alibi=bool(node.attributes["alibi"].as_int()),
    )


def lower_attention(model: ir.Model, engine: str) -> None:
    """Replace the placeholder nodes of attention with nodes for an engine, in place.

    Args:
        model: Graph with placeholder nodes.
        engine: Name in `models.engines.ENGINES`.
    """
    graph = model.graph
    nodes = _Nodes(graph)
    for node in list(graph):
        if (node.domain, node.op_type) != (_DOMAIN, _OP):
            continue
        nodes = nodes.subgraph()
        attention = _read(nodes, node)
        context = _LOWERINGS[engine](nodes, attention)
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], nodes.tape.nodes, node.outputs, [context]
        )
    if any(node.domain == "com.microsoft" for node in graph.all_nodes()):
        model.opset_imports["com.microsoft"] = 1
    model.opset_imports.pop(_DOMAIN, None)
    RemoveUnusedNodesPass()(model)
    CommonSubexpressionEliminationPass()(model)  # merges equal nodes of different layers
