"""Recording of the forward and backward pass that `flow` measures."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gradients.inputs import InputRow, Objective
from models.gradients.objectives import OBJECTIVES
from models.gradients.reference_model import ReferenceModel
from models.network.attention import LayerInputs, SelfAttention
from models.network.norms import AddNorm
from models.network.taps import Tap


class _Rounded(torch.autograd.Function):
    """Rounding of values and gradients, as between operators in half-precision training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)  # keeps a missing gradient None instead of zeros
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ANN401
        return None if dy is None else dy.to(ctx.dtype).to(dy.dtype), None


@dataclass
class Step:
    """Recorded inputs and outputs of a step: one call per row, or one call for the objective.

    Attributes:
        parameters: Parameters of the step's module.
        inputs: Input tensors of each call, without constants.
        outputs: Output of each call.
    """

    parameters: tuple[nn.Parameter, ...]
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class RecordingTap(Tap):
    """Tap that records every step, and the gradients with respect to all recorded tensors.

    The fused add + norm is recorded as two steps, such as "layers.0.sum1" and "layers.0.norm1",
    because each of them can overflow by itself. With rounding, attention is recorded as several
    steps: "layers.0.attention.projections" (queries, keys and values), ".rotated" (with rotary
    positions), ".scores", ".scaled_scores", ".distance_scores" (with disentangled attention),
    ".softmax", ".context" and, for the output, "layers.0.attention".

    Args:
        dtype: Dtype to which each step's output and its gradient are rounded; None: no rounding.

    Attributes:
        steps: Recorded steps by name, in the order of the forward pass.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.steps: dict[str, Step] = {}
        # Gradients before rounding, by tensor; None if no gradient reached the tensor.
        self.gradients: Mapping[Tensor, Tensor | None] = {}

    def step(
        self, name: str, module: nn.Module | None, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """Return `function(*inputs)`, rounded to `dtype`; record the inputs and the output."""
        # Several steps can have the same input. A view per step keeps their gradients separate.
        inputs = tuple(x.view_as(x) for x in inputs)
        y = self.round(function(*inputs))
        if not y.requires_grad:  # a step that detaches its output still records its gradient
            y.requires_grad_()
        parameters = () if module is None else tuple(module.parameters())
        step = self.steps.setdefault(name, Step(parameters))
        # The attention bias of a local window requires no gradient: it is constant.
        step.inputs.append(tuple(x for x in inputs if x.requires_grad))
        step.outputs.append(y)
        return y

    def attention(
        self, name: str, attention: SelfAttention, x: Tensor, inputs: LayerInputs
    ) -> Tensor:
        """Return `attention(x, inputs)`; with rounding, record its parts as separate steps.

        The parts are those of transformers' eager attention: products of queries and keys are
        rounded before they are scaled. DeBERTa is an exception in transformers, which scales its
        keys before the product and its distance scores after it. Here, its scores are scaled after
        the product, as in other models, and its distance embeddings before it. All parameters of
        the attention are recorded with the last step.
        """
        if self.dtype is None:
            return super().attention(name, attention, x, inputs)
        widths = list(attention.shape.widths)
        projections = self.step(
            f"{name}.projections",
            None,
            lambda x: torch.cat(attention.project(x, inputs.scales), -1),
            x,
        )  # (B, L, H * K + 2 * G * K)
        if inputs.rotation is not None:
            projections = self.step(
                f"{name}.rotated",
                None,
                lambda p: torch.cat(attention.rotate_projections(p.split(widths, -1), inputs), -1),
                projections,
            )

        def heads(projections: Tensor, index: int) -> Tensor:
            return attention.heads(projections.split(widths, -1)[index])  # (B, H, L, K)

        scores = self.step(
            f"{name}.scores",
            None,
            lambda p: heads(p, 0) @ heads(p, 1).transpose(-1, -2),
            projections,
        )  # (B, H, L, L)
        scale = math.sqrt(attention.shape.width)
        scaled = self.step(f"{name}.scaled_scores", None, lambda s: s / scale, scores)
        biases = [] if inputs.bias is None else [inputs.bias]
        if (distances := inputs.distances) is not None:

            def distance_scores(projections: Tensor, embeddings: Tensor) -> Tensor:
                q, k, _ = projections.split(widths, -1)
                return attention.distance_scores(q, k, replace(distances, embeddings=embeddings))

            step = f"{name}.distance_scores"
            biases.append(  # (B, H, L, L)
                self.step(step, None, distance_scores, projections, distances.embeddings)
            )
        weights = self.step(
            f"{name}.softmax", None, lambda s, *b: sum(b, start=s).softmax(-1), scaled, *biases
        )
        context = self.step(
            f"{name}.context",
            None,
            lambda w, p: (w @ heads(p, 2)).transpose(1, 2).flatten(2),
            weights,
            projections,
        )  # (B, L, H * K)
        return self.step(name, attention, lambda x: attention.out_proj(x, inputs.scales), context)

    def add_norm(
        self, sum_name: str, name: str, norm: AddNorm, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `norm(x + residual)` and the sum; record both as separate steps."""
        total = self.step(sum_name, None, torch.add, x, residual)
        return self.step(name, norm, lambda x: norm(x, torch.zeros_like(x)), total), total

    def round(self, x: Tensor) -> Tensor:
        """Return a tensor rounded to `dtype`; scalars (the objective's value) stay unchanged."""
        # Autocast keeps the loss in float32, too: the usual initial loss scale, 65536, overflows
        # float16.
        if self.dtype is None or x.dim() == 0:
            return x
        return _Rounded.apply(x, self.dtype)

    def backward(self, y: Tensor) -> None:
        """Compute the gradients of the scalar `y` with respect to all recorded tensors."""
        tensors = [
            x
            for step in self.steps.values()
            for x in (*step.parameters, *step.outputs, *chain(*step.inputs))
        ]
        gradients = torch.autograd.grad(y, tensors, allow_unused=True)
        self.gradients = dict(zip(tensors, gradients, strict=True))

    def existing_gradients(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients with respect to the tensors; omit tensors without a gradient."""
        return [g for x in tensors if (g := self.gradients[x]) is not None]


def objective_value(
    tap: RecordingTap, model: ReferenceModel, rows: Sequence[InputRow], objective: Objective
) -> Tensor:
    """Return the objective's value for the rows, a scalar; run every step through the tap."""
    kind = OBJECTIVES[objective.name]
    vectors = [model.run(row, tap) for row in rows]  # (1, W) each
    if model.normalize or kind.min_pairs:
        vectors = [tap.step("normalize", None, F.normalize, vector) for vector in vectors]
    x = torch.cat(vectors)  # (B, W)
    constants = torch.tensor(objective.vectors, dtype=x.dtype, device=x.device)  # (G, W)
    return tap.step("objective", None, lambda x: kind.value(x, constants), x)
