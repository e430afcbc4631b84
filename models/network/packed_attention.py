"""Attention on a packed batch, registered as one operator.

The ONNX exporter translates the operator to one placeholder node, which the export replaces with
nodes for each engine. Their results must match the implementation here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from models.network.positions import Reach, alibi_bias

# Value added to the attention scores of masked keys. It is finite in float16, and so low that
# softmax gives masked keys a weight of exactly zero.
MASKED_SCORE = -30000.0

_LIBRARY = Library("vitrine", "FRAGMENT")
_LIBRARY.define(
    "packed_attention(Tensor q, Tensor k, Tensor v, Tensor padded_index, Tensor packed_index, "
    "Tensor attention_mask, Tensor? bias, int num_heads, int? window, bool causal, "
    "bool alibi) -> Tensor"
)


@dataclass(frozen=True)
class Rows:
    """Index maps between the packed layout `(T, D)` and the padded layout `(B, L, D)` of a batch.

    Attributes:
        padded_index: `(B, L)`, index into the T packed tokens for each padded position.
        packed_index: `(T,)`, index into the `B * L` padded positions for each packed token.
    """

    padded_index: Tensor
    packed_index: Tensor

    def pad(self, x: Tensor) -> Tensor:
        """Convert packed values `(T, ...)` to the padded layout `(B, L, ...)`."""
        # index_select, because the ONNX exporter translates x[index] to GatherND, which is slower.
        flat = x.index_select(0, self.padded_index.reshape(-1))  # (B * L, ...)
        return flat.view(*self.padded_index.shape, *x.shape[1:])

    def pack(self, x: Tensor) -> Tensor:
        """Convert padded values `(B, L, ...)` to the packed layout `(T, ...)`."""
        return x.flatten(0, 1).index_select(0, self.packed_index)


@dataclass(frozen=True)
class PackedRows:
    """Layout and attention pattern of a packed batch.

    Attributes:
        rows: Index maps of the batch.
        attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
        reach: Position-dependent masks and bias of attention within a row.
    """

    rows: Rows
    attention_mask: Tensor
    reach: Reach

    def bias_of_first(self, x: Tensor) -> Tensor:
        """Return the attention bias of each row's first token, `(B, 1, 1, L)`, like `x` in dtype.

        Padding and keys outside the window are masked. Not for causal attention and ALiBi.
        """
        bias = ((1.0 - self.attention_mask.to(x.dtype)) * MASKED_SCORE)[:, None, None, :]
        if self.reach.window is None:
            return bias
        outside = torch.arange(bias.shape[-1], device=x.device) > self.reach.window
        return torch.where(outside, x.new_tensor(MASKED_SCORE), bias)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, bias: Tensor | None, num_heads: int
) -> Tensor:
    """Return the context of each token, `(T, H * K)`. Tokens attend only within their row.

    Args:
        q: Queries, `(T, H * K)`.
        k: Keys, `(T, H * K)`.
        v: Values, `(T, H * K)`.
        packed: Layout and attention pattern of the batch.
        bias: Added to the attention scores, broadcastable to `(B, H, L, L)`; None: no bias.
        num_heads: Number of heads, H.
    """
    layout = packed.rows.padded_index, packed.rows.packed_index, packed.attention_mask
    choices = num_heads, packed.reach.window, packed.reach.causal, packed.reach.alibi
    return torch.ops.vitrine.packed_attention(q, k, v, *layout, bias, *choices)


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded_index: Tensor,
    packed_index: Tensor,
    attention_mask: Tensor,
    bias: Tensor | None,
    num_heads: int,
    window: int | None,
    causal: bool,
    alibi: bool,
) -> Tensor:
    rows = Rows(padded_index, packed_index)
    q, k, v = (
        rows.pad(x).unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v)
    )  # (B, H, L, K)
    length, reach = padded_index.shape[1], Reach(window, causal, alibi)
    mask = mask_bias(q, length, num_heads, attention_mask, reach)
    bias = mask if bias is None or mask is None else bias + mask
    context = F.scaled_dot_product_attention(q, k, v, bias)  # (B, H, L, K)
    return rows.pack(context.transpose(1, 2).flatten(2))


# CompositeImplicitAutograd: autograd and torch.compile trace the functions inside the operator.
_LIBRARY.impl("packed_attention", _packed_attention, "CompositeImplicitAutograd")


def mask_bias(
    x: Tensor, length: int, num_heads: int, attention_mask: Tensor | None, reach: Reach
) -> Tensor | None:
    """Return a bias that masks padding and keys excluded by `reach`, and includes ALiBi.

    The bias of masked keys is `MASKED_SCORE`; at padding, the ALiBi bias is added to it.

    Args:
        x: Any tensor with the dtype and device of the bias.
        length: Length of the longest row, L.
        num_heads: Number of heads, H.
        attention_mask: `(B, L)`, 1 or True at tokens, 0 or False at padding; None: no padding.
        reach: Position-dependent masks and bias of attention within a row.

    Returns:
        A bias that is broadcastable to `(B, H, L, L)`; None without any mask or ALiBi.
    """
    bias = None
    if attention_mask is not None:
        bias = ((1.0 - attention_mask.to(x.dtype)) * MASKED_SCORE)[:, None, None, :]
    if reach.alibi:
        slopes = alibi_bias(length, num_heads, x)
        bias = slopes if bias is None else bias + slopes
    if (excluded := reach.excludes(length, x.device)) is not None:
        masked = x.new_tensor(MASKED_SCORE)
        bias = torch.where(excluded, masked, x.new_zeros(()) if bias is None else bias)
        bias = bias.view((1,) * (4 - bias.dim()) + bias.shape)
    return bias
