"""Attention on a packed batch, registered as one operator.

As one operator, it reaches the ONNX export whole, and each engine gets the nodes that it runs
fastest. The implementation here defines its results.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from models.network.positions import Reach, alibi_bias

# Added to the attention scores of masked keys. It is finite in float16, and low enough that the
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
        """Return packed values `(T, ...)` as `(B, L, ...)`."""
        # index_select, because the ONNX exporter translates x[index] to GatherND, which is slower.
        flat = x.index_select(0, self.padded_index.reshape(-1))  # (B * L, ...)
        return flat.view(*self.padded_index.shape, *x.shape[1:])

    def pack(self, x: Tensor) -> Tensor:
        """Return padded values `(B, L, ...)` as `(T, ...)`."""
        return x.flatten(0, 1).index_select(0, self.packed_index)


@dataclass(frozen=True)
class PackedRows:
    """Layout of a packed batch, and which of its tokens attend to each other.

    Attributes:
        rows: Index maps of the batch.
        attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
        reach: Which tokens of a row attend to each other.
    """

    rows: Rows
    attention_mask: Tensor
    reach: Reach


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedRows, bias: Tensor | None, num_heads: int
) -> Tensor:
    """Return the context of each token, `(T, D)`; tokens attend within their row only.

    Args:
        q: Queries, `(T, D)`.
        k: Keys, `(T, D)`.
        v: Values, `(T, D)`.
        packed: Layout of the batch.
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


# Composite: autograd and torch.compile see the functions that it calls.
_LIBRARY.impl("packed_attention", _packed_attention, "CompositeImplicitAutograd")


def mask_bias(
    x: Tensor, length: int, num_heads: int, attention_mask: Tensor | None, reach: Reach
) -> Tensor | None:
    """Return a bias with `MASKED_SCORE` at padding keys and at keys out of reach of the query.

    Args:
        x: Any tensor with the dtype and device of the bias.
        length: Length of the longest row, L.
        num_heads: Number of heads, H.
        attention_mask: `(B, L)`, 1 or True at tokens, 0 or False at padding; None: no padding.
        reach: Which tokens of a row attend to each other.

    Returns:
        A bias that is broadcastable to `(B, H, L, L)`; None if nothing is masked.
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
