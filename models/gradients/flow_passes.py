"""The twin's forward and backward pass, place by place, for `flow`.

It is the model's own pass, written once more with a name for each step: hooks of modules would see
neither the sums between them nor the two sides of a residual.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.encoder import EncoderLayer, Rows
from models.gradients.objectives import OBJECTIVES, Objective
from models.gradients.twin import Row, Twin
from models.pooling import pool


class _Rounded(torch.autograd.Function):
    """Rounds forward and backward, as between two operators in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)  # a missing gradient must not become one of zeros
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ANN401
        return None if dy is None else dy.to(ctx.dtype).to(dy.dtype), None


@dataclass
class Step:
    """What went through a place: one entry for each row, but only one for the objective."""

    parameters: tuple[nn.Parameter, ...]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class Passes:
    """Runs steps, and keeps what gradients are taken by.

    Args:
        dtype: What goes from step to step is rounded to it, both ways; None rounds nothing.

    Attributes:
        steps: By their names, in the order of the forward pass.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.steps: dict[str, Step] = {}
        # Not rounded yet; None where nothing came back.
        self.gradients: Mapping[Tensor, Tensor | None] = {}

    def __call__(
        self, name: str, owner: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return the function's output at a place that owns the parameters of a module."""
        # Two places may read one tensor: a view for each keeps apart what they send back.
        inputs = tuple(x.view_as(x) for x in inputs)
        y = self.rounded(function(*inputs))
        if not y.requires_grad:  # the place cuts the graph, and a gradient still comes so far
            y.requires_grad_()
        step = self.steps.setdefault(name, Step(() if owner is None else tuple(owner.parameters())))
        step.inputs.append(inputs)
        step.outputs.append(y)
        return y

    def rounded(self, x: Tensor) -> Tensor:
        """Return what the next step gets of a step's output."""
        # The objective is one number, which autocast too leaves wide: the usual first loss scale,
        # 65536, is infinite in float16.
        if self.dtype is None or x.dim() == 0:
            return x
        return cast(Tensor, _Rounded.apply(x, self.dtype))

    def go_back(self, y: Tensor) -> None:
        """Take the gradient of a number by all that went through the steps."""
        tensors = [
            x
            for step in self.steps.values()
            for x in (*step.parameters, *step.outputs, *chain(*step.inputs))
        ]
        found = torch.autograd.grad(y, tensors, allow_unused=True)
        self.gradients = dict(zip(tensors, found, strict=True))

    def came_back(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients by those of the tensors that have one."""
        return [g for x in tensors if (g := self.gradients[x]) is not None]


def objective_of(at: Passes, twin: Twin, rows: Sequence[Row], objective: Objective) -> Tensor:
    """Run rows forward to the value of their objective, a number."""
    kind = OBJECTIVES[objective.kind]
    vectors = [_vector(at, twin, row) for row in rows]
    if twin.normalize or kind.least_pairs:
        vectors = [at("normalize", None, F.normalize, vector) for vector in vectors]
    x = torch.cat(vectors)  # (B, W)
    given = torch.tensor(objective.vectors, dtype=x.dtype, device=x.device)  # (G, W)
    return at("objective", None, lambda x: kind.value(x, given), x)


def _vector(at: Passes, twin: Twin, row: Row) -> Tensor:
    """`SentenceEncoder.forward` of one row, step by step: `(1, W)`."""
    model, encoder, embeddings = twin.model, twin.model.encoder, twin.model.encoder.embeddings
    ids = torch.tensor([row.ids], device=embeddings.word.weight.device)  # (1, L)
    L = len(row.ids)

    def look_up() -> Tensor:
        x = embeddings.word(ids)  # (1, L, D)
        if embeddings.token_type is not None:
            x = x + embeddings.token_type.weight[0]
        return x + embeddings.position(encoder.positions(ids))

    tables = (embeddings.word, embeddings.position, embeddings.token_type)
    x = at("embeddings.sum", nn.ModuleList(table for table in tables if table is not None), look_up)
    x = at("embeddings.norm", embeddings.norm, _after_sum(embeddings.norm), x)
    bias: tuple[Tensor, ...] = ()
    if (relative := encoder.relative_bias) is not None:
        bias = (at("relative_bias", relative, lambda: relative(L)),)  # (1, H, L, L)
    for index, layer in enumerate(encoder.layers):
        x = _layer(at, f"layers.{index}", cast(EncoderLayer, layer), x, bias)
    if encoder.final_norm is not None:
        x = at("final_norm", encoder.final_norm, encoder.final_norm, x)
    pooled = (torch.arange(L, device=x.device) >= row.unpooled).to(x)[None]  # (1, L)
    x = at("pooling", None, lambda x: pool(model.pooling, x, pooled), x)  # (1, W)
    for index, head in enumerate(model.heads):
        x = at(f"heads.{index}", head, head, x)
    return x


def _layer(
    at: Passes, name: str, layer: EncoderLayer, x: Tensor, bias: tuple[Tensor, ...]
) -> Tensor:
    """`EncoderLayer.encode`, step by step."""

    def attend(x: Tensor, *bias: Tensor) -> Tensor:
        return layer.self_attn(x, Rows(*bias))

    def feed_forward(x: Tensor) -> Tensor:
        x = at(f"{name}.linear1", layer.linear1, lambda x: layer.activation(layer.linear1(x)), x)
        return at(f"{name}.linear2", layer.linear2, layer.linear2, x)

    if layer.norm_first:
        normed = at(f"{name}.norm1", layer.norm1, layer.norm1, x)
        attended = at(f"{name}.attention", layer.self_attn, attend, normed, *bias)
        x = at(f"{name}.sum1", None, torch.add, attended, x)
        normed = at(f"{name}.norm2", layer.norm2, _after_sum(layer.norm2), x)
        return at(f"{name}.sum2", None, torch.add, feed_forward(normed), x)
    attended = at(f"{name}.attention", layer.self_attn, attend, x, *bias)
    x = at(f"{name}.sum1", None, torch.add, attended, x)
    x = at(f"{name}.norm1", layer.norm1, _after_sum(layer.norm1), x)
    x = at(f"{name}.sum2", None, torch.add, feed_forward(x), x)
    return at(f"{name}.norm2", layer.norm2, _after_sum(layer.norm2), x)


def _after_sum(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """The twin's own op, with its sum taken before: a place, for it can overflow by itself."""
    return lambda total: norm(total, torch.zeros_like(total))
