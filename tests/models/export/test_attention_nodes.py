"""Attention on packed batches: the operator, and its nodes for each engine."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import openvino
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from models.engines import ENGINES
from models.export import attention_nodes
from models.export.attention_nodes import lower_attention
from models.manifest import TABLE_ENGINE
from models.network.packed_attention import PackedRows, Rows, packed_attention
from models.network.positions import Reach
from models.packing import pack, round_up

HEADS, WIDTH = 2, 8
# Rows alone, of equal length, and of different lengths: within a window of 3, within 4 windows, and
# beyond; the lengths are multiples of the window and not.
BATCHES = [
    *([1], [2], [3], [4], [5], [9], [12], [13], [40]),
    *([4, 4], [9, 9, 9], [20, 20]),
    *([1, 4, 2], [9, 5], [12, 1, 3], [2, 40, 7], [13, 13, 12]),
]


class Attention(nn.Module):
    """The operator as a module, for the exporter."""

    def __init__(self, reach: Reach, *, has_bias: bool = False) -> None:
        super().__init__()
        self.reach = reach
        self.bias = nn.Parameter(torch.tensor([[[[0.5]], [[-1.0]]]])) if has_bias else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
    ) -> Tensor:
        packed = PackedRows(Rows(padded_index, packed_index), attention_mask, self.reach)
        L = padded_index.shape[1]
        bias = None
        if self.bias is not None:  # a bias that differs by position
            bias = self.bias * torch.arange(L, dtype=q.dtype, device=q.device)  # (1, H, 1, L)
        return packed_attention(q, k, v, packed, bias, HEADS)


@cache
def traced(reach: Reach, has_bias: bool) -> ir.Model:
    """Return the graph of the operator with its placeholder node, the same for each engine."""
    T, B, L = (torch.export.Dim(name) for name in "TBL")
    tokens, rows, flat = {0: T}, {0: B, 1: L}, {0: T}
    program = torch.onnx.export(
        Attention(reach, has_bias=has_bias).eval(),
        (
            *(torch.randn(11, WIDTH) for _ in range(3)),
            *(torch.ones(3, 5, dtype=torch.int64), torch.ones(11, dtype=torch.int64)),
            torch.ones(3, 5),
        ),
        dynamo=True,
        opset_version=20,
        input_names=["q", "k", "v", "padded_index", "packed_index", "attention_mask"],
        output_names=["context"],
        dynamic_shapes=(tokens, tokens, tokens, rows, flat, rows),
        custom_translation_table={
            torch.ops.vitrine.packed_attention.default: attention_nodes.packed_attention
        },
        verbose=False,
    )
    assert program is not None
    return program.model


def lowered(engine: str, reach: Reach, has_bias: bool = False) -> onnx.ModelProto:
    """Return the graph of the operator for an engine."""
    model = traced(reach, has_bias).clone()
    lower_attention(model, engine)
    graph: onnx.ModelProto = ir.to_proto(model)
    onnx.checker.check_model(graph, full_check=True)
    return graph


def projections(tokens: int) -> list[Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(tokens, WIDTH) for _ in range(3)]


def unattended_tokens(lengths: Sequence[int], reach: Reach) -> list[int]:
    """Return a number of last tokens for each row that leaves each token another to attend to."""
    most = max(lengths) if reach.window is None else reach.window
    return [min(length // 3, most) for length in lengths]


def expected_context(
    lengths: Sequence[int],
    reach: Reach,
    has_bias: bool = False,
    unattended: Sequence[int] | None = None,
) -> Tensor:
    """Return the context, `(T, D)`, from PyTorch's attention on each row alone, in float64."""
    contexts: list[Tensor] = []
    parts = [x.double().split(list(lengths)) for x in projections(sum(lengths))]
    for q, k, v, last in zip(*parts, unattended or [0] * len(lengths), strict=True):
        L = len(q)
        distance = torch.arange(L)[None] - torch.arange(L)[:, None]
        mask = torch.zeros(1, HEADS, L, L, dtype=torch.float64)
        if has_bias:
            mask += torch.tensor([0.5, -1.0]).view(1, 2, 1, 1) * torch.arange(L)
        if reach.alibi:  # for two heads
            mask -= torch.tensor([2**-4, 2**-8]).view(1, 2, 1, 1) * distance.abs()
        if reach.window is not None:
            mask = mask.masked_fill(distance.abs() > reach.window, -torch.inf)
        if reach.causal:
            mask = mask.masked_fill(distance > 0, -torch.inf)
        mask[..., L - last :] = -torch.inf
        q, k, v = (x.view(1, L, HEADS, -1).transpose(1, 2) for x in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, mask)
        contexts.append(context.transpose(1, 2).reshape(L, WIDTH))
    return torch.cat(contexts)


def inputs(
    lengths: Sequence[int], unattended: Sequence[int] | None = None, *, rounded: bool = False
) -> dict[str, NDArray[Any]]:
    batch = pack([[0] * length for length in lengths], unattended=unattended)
    if rounded:
        batch = round_up(batch, tokens=16, length=16)
    T = len(batch.input_ids)
    tokens = [F.pad(x, (0, 0, 0, T - len(x))).numpy() for x in projections(sum(lengths))]
    arrays = batch.inputs()
    return {
        **dict(zip("qkv", tokens, strict=True)),
        **{name: arrays[name] for name in ("padded_index", "packed_index", "attention_mask")},
    }


REACHES = [
    *(Reach(window) for window in (None, 3, 1, 0)),
    *(Reach(window, causal=True) for window in (None, 3, 0)),
    *(Reach(alibi=True), Reach(3, causal=True, alibi=True)),
]


def runtime(engine: str, graph: onnx.ModelProto) -> Callable[[dict[str, NDArray[Any]]], Any]:
    """Return a function that runs a graph; the nodes for CUDA run on the CPU."""
    if engine == "openvino":
        core = openvino.Core()
        model = core.read_model(graph.SerializeToString())
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda arrays: compiled(arrays)[0]
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return lambda arrays: session.run(None, arrays)[0]


def assert_equal(
    engine: str, graph: onnx.ModelProto, reach: Reach, *, has_bias: bool = False
) -> None:
    """Compare the graph with attention on each row alone."""
    run = runtime(engine, graph)
    for lengths in BATCHES:
        for unattended in (None, unattended_tokens(lengths, reach)):
            expected = expected_context(lengths, reach, has_bias, unattended)
            for rounded in (False, True)[: 1 + (engine == "openvino")]:
                actual = run(inputs(lengths, unattended, rounded=rounded))
                context = torch.from_numpy(np.asarray(actual)[: sum(lengths)]).double()
                torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-6)


BASIC = [Reach(), Reach(3), Reach(3, causal=True, alibi=True)]
OTHERS = [pytest.param(reach, marks=pytest.mark.slow) for reach in REACHES if reach not in BASIC]


@pytest.mark.parametrize("reach", [*BASIC, *OTHERS], ids=str)
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
@pytest.mark.parametrize("engine", sorted(ENGINES.keys() - {TABLE_ENGINE}))
def test_context_equals_attention_on_each_row_alone(engine: str, reach: Reach) -> None:
    assert_equal(engine, lowered(engine, reach), reach)


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
@pytest.mark.parametrize("engine", sorted(ENGINES.keys() - {TABLE_ENGINE}))
def test_context_with_a_bias_equals_attention_on_each_row_alone(engine: str) -> None:
    assert_equal(engine, lowered(engine, Reach(), has_bias=True), Reach(), has_bias=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
@pytest.mark.parametrize(
    "reach",
    [
        *(Reach(causal=True), Reach(alibi=True)),
        # Rows of a few windows, and rows that a window covers.
        *(Reach(3), Reach(3, causal=True), Reach(20, causal=True)),
    ],
    ids=str,
)
def test_attention_in_blocks_equals_attention_on_each_row_alone(
    reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_nodes, "_BLOCKS_FROM", 3)
    monkeypatch.setattr(attention_nodes, "_BLOCK_QUERIES", 4)
    monkeypatch.setattr(attention_nodes, "_BLOCK_SCORES", 40)
    assert_equal("onnxruntime", lowered("onnxruntime", reach), reach)


@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_operator_equals_attention_on_each_row_alone(reach: Reach) -> None:
    for lengths, has_unattended in itertools.product(BATCHES, (False, True)):
        unattended = unattended_tokens(lengths, reach) if has_unattended else None
        arrays = inputs(lengths, unattended)
        arguments = [torch.from_numpy(array) for array in arrays.values()]
        actual = Attention(reach)(*arguments).double()
        expected = expected_context(lengths, reach, unattended=unattended)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operator_is_registered_correctly() -> None:
    arrays = inputs([3, 9, 2])
    q, k, v, *layout = (torch.from_numpy(array) for array in arrays.values())
    for x in (q, k, v):
        x.requires_grad_()
    torch.library.opcheck(
        torch.ops.vitrine.packed_attention.default,
        (q, k, v, *layout, None, HEADS, 3, True, True),
        test_utils=("test_schema", "test_faketensor"),
    )
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    module = Attention(Reach(3, causal=True, alibi=True))
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, *layout), (q, k, v))


# Arguments: the graph, and files with the inputs of a short and a long row. The peak of a process
# never falls, so each graph has a process of its own.
LONG_ROW = """
import resource, sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
peaks = []
for file in sys.argv[2:]:
    session.run(None, dict(numpy.load(file)))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
@pytest.mark.parametrize(
    "reach",
    [
        *(Reach(), Reach(3), Reach(causal=True), Reach(alibi=True)),
        # The mask in a graph grows with the square of the window: 0.3 GB for 5,400.
        *(Reach(2700), Reach(2700, causal=True), Reach(5400, causal=True)),
    ],
    ids=str,
)
def test_onnxruntime_keeps_no_scores_of_a_long_row(
    reach: Reach, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("graph")
    files = [folder / name for name in ("attention.onnx", "short.npz", "long.npz")]
    onnx.save(lowered("onnxruntime", reach), files[0])
    for file, length in zip(files[1:], (64, 4000), strict=True):
        np.savez(file, **inputs([length]))  # type: ignore[arg-type]
    command = [sys.executable, "-c", LONG_ROW, *map(str, files)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    scores_kib = HEADS * 4000**2 * 4 / 1024  # 125,000
    assert int(output) < scores_kib / 10
