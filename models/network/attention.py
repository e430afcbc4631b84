"""Multi-head self-attention on dense (padded) and packed batches.

Attention is the only step that depends on which tokens share a row. All other steps treat each
token separately.

Source: Vaswani et al. 2017, arXiv:1706.03762.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.norms import NormConfig
from models.network.packed_attention import PackedRows, packed_attention
from models.network.positions import Rotation, rotate


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a layer's attention besides the token vectors.

    Attributes:
        bias: Added to the attention scores, broadcastable to `(B, H, L, L)`; None: no bias. In a
            dense batch it includes the masks of padding and reach, and ALiBi.
        rotation: Rotation of queries and keys by their positions; None: no rotation.
        packed: Layout and reach of a packed batch; None for a dense batch.
    """

    bias: Tensor | None = None
    rotation: Rotation | None = None
    packed: PackedRows | None = None


NO_INPUTS = AttentionInputs()


@dataclass(frozen=True)
class Heads:
    """Shape of attention's heads.

    Attributes:
        count: Number of heads of queries, H.
        kv_count: Number of heads of keys and values, G, each of which `H / G` heads share.
        width: Width of a head, K.

    Raises:
        ValueError: `count` is not a multiple of `kv_count`.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (shared heads).
    """

    count: int
    kv_count: int
    width: int

    def __post_init__(self) -> None:
        if self.count % self.kv_count:
            raise ValueError(f"{self.kv_count} heads of keys cannot serve {self.count} heads")

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values: `H * K`, `G * K` and `G * K`."""
        shared = self.kv_count * self.width
        return self.count * self.width, shared, shared


class SelfAttention(nn.Module):
    """Multi-head attention within each row; parameters named as in `nn.MultiheadAttention`.

    Args:
        d_model: Width of a token vector, D.
        heads: Shape of the heads.
        dropout: Dropout probability of attention weights.
        bias: Whether the linear layers have a bias.
        norm: The norm of queries and keys.
        qk_norm: Scope of that norm: "head" (each head), "all" (all heads together) or "" (no norm).
    """

    def __init__(
        self,
        d_model: int,
        heads: Heads,
        dropout: float,
        bias: bool,
        norm: NormConfig,
        qk_norm: str = "",
    ) -> None:
        super().__init__()
        self.shape = heads
        self.dropout = dropout
        width = sum(heads.widths)
        self.in_proj_weight = nn.Parameter(torch.empty(width, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.out_proj = nn.Linear(heads.count * heads.width, d_model, bias=bias)
        self.qk_norm = qk_norm
        q_width, k_width, _ = heads.widths if qk_norm == "all" else (heads.width,) * 3
        self.q_norm = norm.norm(q_width) if qk_norm else None
        self.k_norm = norm.norm(k_width) if qk_norm else None
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, inputs: AttentionInputs = NO_INPUTS) -> Tensor:
        """Return the attention output in the layout of `x`, `(B, L, D)` or `(T, D)`.

        If all scores of a query are minus infinity, its context is zero instead of NaN.
        """
        q, k, v = self.rotated(self.project(x), inputs)
        if inputs.packed is not None:
            k, v = self.repeated(k), self.repeated(v)
            context = packed_attention(q, k, v, inputs.packed, inputs.bias, self.shape.count)
            return self.out_proj(context)
        q, k, v = (self.heads(part) for part in (q, k, v))  # (B, H, L, K)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, inputs.bias, dropout)  # (B, H, L, K)
        return self.out_proj(context.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """Return queries, keys or values of dense rows, split into heads, `(B, H, L, K)`."""
        return self.repeated(x).unflatten(-1, (self.shape.count, -1)).transpose(1, 2)

    def repeated(self, x: Tensor) -> Tensor:
        """Return keys or values `(..., G * K)` repeated for each head, `(..., H * K)`."""
        repeats = self.shape.count * self.shape.width // x.shape[-1]
        if repeats == 1:
            return x
        grouped = x.unflatten(-1, (-1, 1, self.shape.width))  # (..., G, 1, K)
        return grouped.expand(*grouped.shape[:-2], repeats, -1).flatten(-3)

    def rotated(
        self, projections: tuple[Tensor, ...], inputs: AttentionInputs
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values with queries and keys rotated, shaped as they are."""
        if (rotation := inputs.rotation) is None:
            return projections
        q, k, v = projections
        q, k = (
            rotate(part.unflatten(-1, (-1, self.shape.width)), rotation).flatten(-2)
            for part in (q, k)
        )
        return q, k, v

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries `(..., H * K)`, keys and values `(..., G * K)`, after their norms."""
        # Three matrix products instead of one, whose three slices ONNX engines would copy. The
        # slices of weights become constants when the model is exported.
        ends = list(itertools.accumulate(self.shape.widths))
        bias = self.in_proj_bias
        q, k, v = (
            F.linear(x, self.in_proj_weight[a:b], None if bias is None else bias[a:b])
            for a, b in zip([0, *ends], ends, strict=False)
        )
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm, q), (self.k_norm, k)
            if self.qk_norm == "all":
                q, k = (norm(x) for norm, x in norms)
            else:
                q, k = (
                    norm(x.unflatten(-1, (-1, self.shape.width))).flatten(-2) for norm, x in norms
                )
        return q, k, v


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
