"""Multi-head self-attention on dense (padded) and packed batches.

Attention is the only step that depends on which tokens share a row. All other steps treat each
token separately.

Source: Vaswani et al. 2017, arXiv:1706.03762.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.packed_attention import PackedRows, packed_attention
from models.network.positions import Rotation, rotate


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a layer's attention besides the token vectors.

    Attributes:
        bias: Added to the attention scores, broadcastable to `(B, H, L, L)`; None: no bias. In a
            dense batch it includes the masks of padding and of the window.
        rotation: Rotation of queries and keys by their positions; None: no rotation.
        packed: Layout and window of a packed batch; None for a dense batch.
    """

    bias: Tensor | None = None
    rotation: Rotation | None = None
    packed: PackedRows | None = None


NO_INPUTS = AttentionInputs()


class SelfAttention(nn.Module):
    """Multi-head attention within each row; parameters named as in `nn.MultiheadAttention`."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, bias: bool = True) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model)) if bias else None
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, inputs: AttentionInputs = NO_INPUTS) -> Tensor:
        """Return the attention output in the layout of `x`, `(B, L, D)` or `(T, D)`.

        If all scores of a query are minus infinity, its context is zero instead of NaN.
        """
        q, k, v = self.rotated(self.project(x), inputs)
        if inputs.packed is not None:
            context = packed_attention(q, k, v, inputs.packed, inputs.bias, self.num_heads)
            return self.out_proj(context)
        q, k, v = (self.heads(part) for part in (q, k, v))  # (B, H, L, K)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, inputs.bias, dropout)  # (B, H, L, K)
        return self.out_proj(context.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """Return `x` `(B, L, D)` split into heads, `(B, H, L, K)`."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def rotated(
        self, projections: tuple[Tensor, ...], inputs: AttentionInputs
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values `(..., D)`, with queries and keys rotated."""
        if (rotation := inputs.rotation) is None:
            return projections
        q, k, v = projections
        q, k = (
            rotate(part.unflatten(-1, (self.num_heads, -1)), rotation).flatten(-2)
            for part in (q, k)
        )
        return q, k, v

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each shaped as `x`."""
        # Three matrix products instead of one, whose three slices ONNX engines would copy.
        weight = self.in_proj_weight.unflatten(0, (3, -1))  # (3, D, D)
        bias = None if self.in_proj_bias is None else self.in_proj_bias.unflatten(0, (3, -1))
        return tuple(
            F.linear(x, weight[i], None if bias is None else bias[i])  # (..., D)
            for i in range(3)
        )


def attention_bias(
    src: Tensor,
    num_heads: int,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Return the sum of all masks as a bias of the attention scores; None without a mask.

    The bias is minus infinity for masked query-key pairs. Its shape is
    `(N or 1, H or 1, L or 1, L)`, its dtype that of `src`. Arguments are those of
    `EncoderLayer.forward`.

    Raises:
        ValueError: The shape of a mask does not match `src`.
    """
    N, L, _ = src.shape
    if mask is not None and tuple(mask.shape) not in ((L, L), (N * num_heads, L, L)):
        raise ValueError(
            f"src_mask is {tuple(mask.shape)}; it must be {(L, L)} or {(N * num_heads, L, L)}"
        )
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (N, L):
        raise ValueError(
            f"src_key_padding_mask is {tuple(key_padding_mask.shape)}; it must be {(N, L)}"
        )

    biases: list[Tensor] = []
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask.view(N, num_heads, L, L)
        biases.append(mask.to(src) if mask.is_floating_point() else _forbid(mask, src))
    if is_causal:
        biases.append(_forbid(torch.ones(L, L, device=src.device).triu(1), src))
    if key_padding_mask is not None:
        biases.append(_forbid(key_padding_mask, src)[:, None, None, :])
    if not biases:
        return None
    bias = sum(biases[1:], start=biases[0])
    return bias.view((1,) * (4 - bias.dim()) + bias.shape)


def _forbid(mask: Tensor, src: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=src.dtype).masked_fill(mask != 0, -math.inf)
