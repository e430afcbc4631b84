"""Multi-head self-attention on dense (padded) and packed batches.

Attention is the only step of the encoder that combines tokens, so it is the only step that depends
on how tokens are grouped into rows.

Source: Vaswani et al. 2017, arXiv:1706.03762.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.adapters import AdaptedLinear, AdapterConfig, LinearAdapters
from models.network.disentangled import (
    CONTENT_TO_POSITION,
    POSITION_TO_CONTENT,
    DistanceConfig,
    Distances,
    distance_scores,
)
from models.network.norms import NormConfig
from models.network.packed_attention import PackedRows, packed_attention
from models.network.positions import Rotation, rotate


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a layer besides the token vectors.

    Attributes:
        bias: Added to the attention scores, broadcastable to `(B, H, L, L)`; None: no bias. In a
            dense batch, it includes the masks for padding, window and causality, and ALiBi.
        rotation: Rotation of queries and keys by their positions; None: no rotation.
        distances: Distance embeddings of disentangled attention; None: attention is not
            disentangled.
        packed: Layout and attention pattern of a packed batch; None for a dense batch.
        scales: Scale of each rank of the adapters, `(..., N * R)`; None: no adapters.
        first: Index of each row's first token in a packed batch, `(B,)`, if the layer computes the
            outputs of these tokens alone; None: it computes those of all tokens.
    """

    bias: Tensor | None = None
    rotation: Rotation | None = None
    distances: Distances | None = None
    packed: PackedRows | None = None
    scales: Tensor | None = None
    first: Tensor | None = None

    def select(self, x: Tensor) -> Tensor:
        """Return the values `(B, ...)` of the first tokens, or all values `(T, ...)`."""
        return x if self.first is None else x.index_select(0, self.first)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Inputs that earlier steps may have computed: bias and distance embeddings, if present."""
        embeddings = None if self.distances is None else self.distances.embeddings
        return tuple(x for x in (self.bias, embeddings) if x is not None)

    def with_outputs(self, outputs: Sequence[Tensor]) -> "LayerInputs":
        """Return a copy of these inputs with `outputs` replaced by other tensors, in order."""
        given = iter(outputs)
        bias = None if self.bias is None else next(given)
        distances = self.distances and replace(self.distances, embeddings=next(given))
        return replace(self, bias=bias, distances=distances)


NO_INPUTS = LayerInputs()


@dataclass(frozen=True)
class Heads:
    """Number and width of the attention heads.

    Attributes:
        count: Number of query heads, H.
        kv_count: Number of key/value heads, G. Each of them is shared by `H / G` query heads.
        width: Width of a head, K.

    Raises:
        ValueError: `count` is not a multiple of `kv_count`.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped-query attention).
    """

    count: int
    kv_count: int
    width: int

    def __post_init__(self) -> None:
        if self.count % self.kv_count:
            raise ValueError(
                f"{self.kv_count} key/value heads do not evenly divide {self.count} query heads"
            )

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values: `H * K`, `G * K` and `G * K`."""
        shared = self.kv_count * self.width
        return self.count * self.width, shared, shared


class SelfAttention(nn.Module):
    """Multi-head attention within each row; parameters named as in `nn.MultiheadAttention`.

    Args:
        d_model: Width of a token vector, D.
        heads: Number and width of the attention heads.
        dropout: Dropout probability of attention weights.
        biases: Names of the linear layers with a bias, "in_proj" and "out_proj"; other names are
            ignored.
        norm: Hyperparameters of the norm of queries and keys.
        qk_norm: Scope of the norm of queries and keys: "head" (each head), "all" (all heads
            together) or "" (no norm).
        distances: Hyperparameters of disentangled attention; None: attention is not disentangled.
        adapters: Hyperparameters of adapters; None: no adapters.
    """

    def __init__(
        self,
        d_model: int,
        heads: Heads,
        dropout: float,
        biases: Collection[str],
        norm: NormConfig,
        qk_norm: str = "",
        distances: DistanceConfig | None = None,
        adapters: AdapterConfig | None = None,
    ) -> None:
        super().__init__()
        self.shape = heads
        self.dropout = dropout
        width = sum(heads.widths)
        self.in_proj_weight = nn.Parameter(torch.empty(width, d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(width)) if "in_proj" in biases else None
        self.in_proj_adapters = LinearAdapters(adapters, d_model, width) if adapters else None
        has_bias = "out_proj" in biases
        self.out_proj = AdaptedLinear(heads.count * heads.width, d_model, has_bias, adapters)
        self.qk_norm = qk_norm
        q_width, k_width, _ = heads.widths if qk_norm == "all" else (heads.width,) * 3
        self.q_norm = norm.norm(q_width) if qk_norm else None
        self.k_norm = norm.norm(k_width) if qk_norm else None
        terms = distances.terms if distances is not None and not distances.shared else ()
        self.distance_queries, self.distance_keys = (
            nn.Linear(d_model, heads.widths[0]) if term in terms else None
            for term in (POSITION_TO_CONTENT, CONTENT_TO_POSITION)
        )
        nn.init.xavier_uniform_(self.in_proj_weight)
        if has_bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, inputs: LayerInputs = NO_INPUTS) -> Tensor:
        """Return the attention output in the layout of `x`, `(B, L, D)` or `(T, D)`.

        The output is `(B, D)` if only that of first tokens is computed. If all scores of a query
        are minus infinity, its context is zero instead of NaN.
        """
        if inputs.first is not None:
            return self.out_proj(self._context_of_first(x, inputs))
        q, k, v = self.rotate_projections(self.project(x, inputs.scales), inputs)
        bias = self.bias(q, k, inputs)
        if inputs.packed is not None:
            k, v = self.repeat(k), self.repeat(v)
            context = packed_attention(q, k, v, inputs.packed, bias, self.shape.count)
            return self.out_proj(context, inputs.scales)
        q, k, v = (self.heads(part) for part in (q, k, v))  # (B, H, L, K)
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, bias, dropout)  # (B, H, L, K)
        return self.out_proj(context.transpose(1, 2).flatten(2), inputs.scales)

    def _context_of_first(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the context of each row's first token in a packed batch, `(B, H * K)`."""
        assert inputs.packed is not None  # noqa: S101 - see `Encoder.forward_packed`
        q, k, v = self.project(x, queries=inputs.select(x))  # (B, H * K), (T, G * K) twice
        if (rotation := inputs.rotation) is not None:
            of_first = Rotation(inputs.select(rotation.cos), inputs.select(rotation.sin))
            q, k = self._rotate(q, of_first), self._rotate(k, rotation)
        rows = inputs.packed.rows
        q, k, v = (self.heads(part) for part in (q[:, None], rows.pad(k), rows.pad(v)))
        bias = inputs.packed.bias_of_first(q)  # (B, 1, 1, L)
        if inputs.bias is not None:
            bias = bias + inputs.bias[:, :, :1]
        scores = q * self.shape.width**-0.5 @ k.transpose(2, 3) + bias  # (B, H, 1, L)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(1)

    def bias(self, q: Tensor, k: Tensor, inputs: LayerInputs) -> Tensor | None:
        """Return the sum of the bias in `inputs` and the distance terms of the attention scores.

        Args:
            q: Queries in the layout of the batch, `(B, L, H * K)` or `(T, H * K)`.
            k: Keys in the layout of the batch, `(B, L, G * K)` or `(T, G * K)`.
            inputs: Inputs of the layer besides the token vectors.

        Returns:
            A bias that is broadcastable to `(B, H, L, L)`; None: no bias.
        """
        if (distances := inputs.distances) is None:
            return inputs.bias
        if inputs.packed is not None:
            q, k = (inputs.packed.rows.pad(x) for x in (q, k))  # (B, L, ...)
        scores = self.distance_scores(q, k, distances)
        return scores if inputs.bias is None else scores + inputs.bias

    def distance_scores(self, q: Tensor, k: Tensor, distances: Distances) -> Tensor:
        """Return the distance terms of the attention scores, `(B, H, L, L)`.

        Args:
            q: Queries in the padded layout, `(B, L, H * K)`.
            k: Keys in the padded layout, `(B, L, G * K)`.
            distances: Distance embeddings, and their indices in rows of L tokens.
        """
        tables = self.distance_tables(distances.embeddings)
        return distance_scores((self.heads(q), self.heads(k)), tables, distances)

    def distance_tables(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Project distance embeddings to queries and keys, `(2 * S, H * K)` each.

        Both are divided by `sqrt(K)`, so that their products have the scale of attention scores.
        """
        queries, keys, _ = self.project(embeddings)
        if self.distance_queries is not None:
            queries = self.distance_queries(embeddings)
        if self.distance_keys is not None:
            keys = self.distance_keys(embeddings)
        scale = self.shape.width**-0.5
        return queries * scale, self.repeat(keys) * scale

    def heads(self, x: Tensor) -> Tensor:
        """Split padded queries, keys or values `(B, L, H * K or G * K)` into `(B, H, L, K)`."""
        return self.repeat(x).unflatten(-1, (self.shape.count, -1)).transpose(1, 2)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat keys or values `(..., G * K)` for each query head; return `(..., H * K)`."""
        repeats = self.shape.count * self.shape.width // x.shape[-1]
        if repeats == 1:
            return x
        grouped = x.unflatten(-1, (-1, 1, self.shape.width))  # (..., G, 1, K)
        return grouped.expand(*grouped.shape[:-2], repeats, -1).flatten(-3)

    def rotate_projections(
        self, projections: tuple[Tensor, ...], inputs: LayerInputs
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values, with queries and keys rotated by their positions.

        Shapes do not change. If `inputs` has no rotation, the projections are returned unchanged.
        """
        if (rotation := inputs.rotation) is None:
            return projections
        q, k, v = projections
        return self._rotate(q, rotation), self._rotate(k, rotation), v

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate queries or keys `(..., H * K or G * K)`; the shape does not change."""
        return rotate(x.unflatten(-1, (-1, self.shape.width)), rotation).flatten(-2)

    def project(
        self, x: Tensor, scales: Tensor | None = None, queries: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Project token vectors to queries `(..., H * K)`, and keys and values `(..., G * K)`.

        Queries and keys are normalised if the attention has such norms.

        Args:
            x: Token vectors, `(..., D)`.
            scales: Scale of each rank of the adapters; None: no adapters.
            queries: Token vectors to project to queries; None: all.
        """
        # Three matrix products instead of one: ONNX engines would copy the slices of its output.
        # The slices of the weights become constants in the exported graph.
        ends = list(itertools.accumulate(self.shape.widths))
        bias = self.in_proj_bias
        q, k, v = (
            F.linear(part, self.in_proj_weight[a:b], None if bias is None else bias[a:b])
            for part, a, b in zip(
                (x if queries is None else queries, x, x), [0, *ends], ends, strict=False
            )
        )
        if self.in_proj_adapters is not None and scales is not None:
            updates = self.in_proj_adapters(x, scales).split(self.shape.widths, -1)
            q, k, v = (y + update for y, update in zip((q, k, v), updates, strict=True))
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

    The bias is minus infinity at masked query-key pairs. It has the shape
    `(N or 1, H or 1, L or 1, L)` and the dtype of `src`. `mask` and `key_padding_mask` are the
    arguments `src_mask` and `src_key_padding_mask` of `EncoderLayer.forward`.

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
