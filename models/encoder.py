"""The Transformer encoder: configuration, attention, layer, stack.

The same modules run dense `(B, L, D)` and packed `(T, D)`. Everything but the attention product
works on tokens one by one and does not care; attention alone needs rows, and `Rows` says where
they are.

Sources: Vaswani et al. 2017, arXiv:1706.03762; Devlin et al. 2018, arXiv:1810.04805; relative
positions: Raffel et al. 2019, arXiv:1910.10683.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.add_layer_norm import AddLayerNorm, LayerNorm

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swish": F.silu,
}

# Added to the score of a padding key. Finite in float16, and far enough below any real score that
# its softmax is exactly zero.
PADDING_SCORE = -30000.0


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The shape of an encoder. Field names are those of `torch.nn.TransformerEncoderLayer`.

    Attributes:
        max_positions: Rows of the position table.
        type_vocab_size: Rows of the token type table; 0 means that there is none.
        position_padding_id: RoBERTa's numbering: positions start behind this id, and tokens equal
            to it stand at this position. None numbers all tokens from 0.
        relative_buckets: Buckets of the relative position bias; 0 means that there is none.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    dim_feedforward: int
    max_positions: int
    type_vocab_size: int = 0
    dropout: float = 0.1
    activation: str = "gelu"
    layer_norm_eps: float = 1e-12
    norm_first: bool = False
    position_padding_id: int | None = None
    relative_buckets: int = 0

    @property
    def max_tokens(self) -> int:
        """The longest row that has a position for every token."""
        reserved = 0 if self.position_padding_id is None else self.position_padding_id + 1
        return self.max_positions - reserved


@dataclass(frozen=True)
class Rows:
    """How a batch lies in rows while attention looks at it.

    Attributes:
        bias: Added to the scores; broadcasts to `(B, H, L, L)`. None adds nothing.
        padded_index: `(B, L)`, the flat token at each place; None where the batch is dense.
        packed_index: `(T,)`, the place of each flat token in `B * L`; None where dense.
    """

    bias: Tensor | None = None
    padded_index: Tensor | None = None
    packed_index: Tensor | None = None

    def pad(self, x: Tensor) -> Tensor:
        """Return `(B, L, ...)` of packed `(T, ...)`; a dense batch is returned as it is."""
        if self.padded_index is None:
            return x
        # index_select, not x[index]: the exporter turns the latter into the slower GatherND.
        flat = x.index_select(0, self.padded_index.reshape(-1))  # (B * L, ...)
        return flat.view(*self.padded_index.shape, *x.shape[1:])

    def pack(self, x: Tensor) -> Tensor:
        """Return packed `(T, ...)` of `(B, L, ...)`; a dense batch is returned as it is."""
        if self.packed_index is None:
            return x
        return x.flatten(0, 1).index_select(0, self.packed_index)


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to the tokens of their row; weights as torch names them."""

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

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the attended tokens in the layout of `x`, `(B, L, D)` or `(T, D)`.

        A token whose every key has a score of minus infinity has a context of zero.
        """
        q, k, v = (
            rows.pad(part).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, L, K)
            for part in self.project(x)
        )
        dropout = self.dropout if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, rows.bias, dropout)  # (B, H, L, K)
        return self.out_proj(rows.pack(context.transpose(1, 2).flatten(2)))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each shaped as `x`."""
        # Not one product of all three, cut up after: an ONNX engine copies the pieces.
        weight = self.in_proj_weight.unflatten(0, (3, -1))  # (3, D, D)
        bias = None if self.in_proj_bias is None else self.in_proj_bias.unflatten(0, (3, -1))
        return tuple(
            F.linear(x, weight[i], None if bias is None else bias[i])  # (..., D)
            for i in range(3)
        )


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm.

    Equal to `torch.nn.TransformerEncoderLayer` with `batch_first=True`, and with its state dict.

    Args:
        d_model: Width of a token vector.
        num_heads: Attention heads; must divide `d_model`.
        dim_feedforward: Width of the feed-forward layer.
        dropout: Probability in training, on attention weights, activations and both sublayers.
        activation: A name in `ACTIVATIONS` or any callable.
        layer_norm_eps: Added to the variance in both norms.
        norm_first: Norm before each sublayer (pre-norm) rather than after.
        bias: False drops the bias of every linear layer and of both norms.

    Raises:
        ValueError: `d_model` is not divisible by `num_heads`, or the activation is not known.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
            activation = ACTIVATIONS[activation]
        self.self_attn = SelfAttention(d_model, num_heads, dropout, bias)
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias)
        first_norm = LayerNorm if norm_first else AddLayerNorm
        self.norm1 = first_norm(d_model, eps=layer_norm_eps, bias=bias)
        self.norm2 = AddLayerNorm(d_model, eps=layer_norm_eps, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return `(N, L, D)` of dense `src` `(N, L, D)`.

        Args:
            src: Tokens, `(N, L, D)`.
            src_mask: `(L, L)` or `(N * H, L, L)`. Floats are added to the scores; True or a
                non-zero integer forbids.
            src_key_padding_mask: `(N, L)`; True or any non-zero number means ignore.
            is_causal: Let no token see a later one, whether or not `src_mask` says so too.

        Raises:
            ValueError: A shape does not fit.
        """
        if src.dim() != 3:
            raise ValueError(f"src is {tuple(src.shape)}, (N, L, D) is needed")
        bias = attention_bias(
            src, self.self_attn.num_heads, src_mask, src_key_padding_mask, is_causal
        )
        return self.encode(src, Rows(bias))

    def encode(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the tokens after this layer, in the layout of `x`, `(B, L, D)` or `(T, D)`."""
        if self.norm_first:
            attended = self.dropout(self.self_attn(self.norm1(x), rows))
            normed, x = self.norm2.with_sum(attended, x)
            return x + self.dropout(self.feed_forward(normed))
        x = self.norm1(self.dropout(self.self_attn(x, rows)), x)
        return self.norm2(self.dropout(self.feed_forward(x)), x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward sublayer's output, shaped as `x`."""
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


def attention_bias(
    src: Tensor,
    num_heads: int,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """Return what to add to the scores, `(N or 1, H or 1, L or 1, L)`, in the dtype of `src`.

    Arguments are those of `EncoderLayer.forward`. Forbidden pairs get minus infinity.

    Raises:
        ValueError: A mask's shape does not fit `src`.
    """
    N, L, _ = src.shape
    if mask is not None and tuple(mask.shape) not in ((L, L), (N * num_heads, L, L)):
        raise ValueError(
            f"src_mask is {tuple(mask.shape)}, {(L, L)} or {(N * num_heads, L, L)} is needed"
        )
    if key_padding_mask is not None and tuple(key_padding_mask.shape) != (N, L):
        raise ValueError(f"src_key_padding_mask is {tuple(key_padding_mask.shape)}, not {(N, L)}")

    biases: list[Tensor] = []
    if mask is not None:
        wide = mask if mask.dim() == 2 else mask.view(N, num_heads, L, L)
        biases.append(wide.to(src) if wide.is_floating_point() else _forbid(wide, src))
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


class RelativePositionBias(nn.Module):
    """MPNet's bias: one learnt number per head and bucket of distances."""

    bucket_of: Tensor

    def __init__(self, buckets: int, num_heads: int, max_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, num_heads))
        nn.init.normal_(self.weight, std=0.02)
        self.max_positions = max_positions
        distance = torch.arange(1 - max_positions, max_positions)
        self.register_buffer("bucket_of", distance_bucket(distance, buckets), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Return `(1, H, L, L)` for L = `length`, indexed by query and key."""
        L = length
        places = torch.arange(L, device=self.weight.device)
        distance = places[None, :] - places[:, None] + self.max_positions - 1  # (L, L)
        bucket = self.bucket_of.index_select(0, distance.view(-1))  # (L * L,)
        return self.weight.index_select(0, bucket).view(1, L, L, -1).permute(0, 3, 1, 2)


def distance_bucket(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """Return the bucket of each key-minus-query distance, int64, shaped as `distance`.

    Half of the buckets are for keys before the query; in each half, the first half holds one
    distance a bucket and the rest grow by powers up to `max_distance`.
    """
    half = buckets // 2
    exact = half // 2
    size = distance.abs()
    ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(size < exact, size, coarse) + half * (distance > 0)


class Embeddings(nn.Module):
    """Word, position and token type tables, their sum normed."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        D = config.d_model
        self.word = nn.Embedding(config.vocab_size, D)
        self.position = nn.Embedding(config.max_positions, D)
        self.token_type = (
            nn.Embedding(config.type_vocab_size, D) if config.type_vocab_size else None
        )
        self.norm = AddLayerNorm(D, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """Return `(..., D)` of ids and positions `(...)`; no token types means type 0."""
        return self.place(self.word(ids), positions, token_types)

    def place(self, x: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """Return `(..., D)` of word vectors `(..., D)`: what `forward` does behind the table."""
        if self.token_type is not None:
            x = x + (
                self.token_type.weight[0] if token_types is None else self.token_type(token_types)
            )
        elif token_types is not None:
            raise ValueError("token types were given, and this encoder has none")
        return self.dropout(self.norm(x, self.position(positions)))


class Encoder(nn.Module):
    """Embeddings, layers, and a final norm where the layers are pre-norm."""

    relative_bias: RelativePositionBias | None
    final_norm: LayerNorm | None

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.relative_bias = (
            RelativePositionBias(config.relative_buckets, config.num_heads, config.max_positions)
            if config.relative_buckets
            else None
        )
        self.layers = nn.ModuleList(
            EncoderLayer(
                config.d_model,
                config.num_heads,
                config.dim_feedforward,
                config.dropout,
                config.activation,
                config.layer_norm_eps,
                config.norm_first,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = (
            LayerNorm(config.d_model, config.layer_norm_eps) if config.norm_first else None
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return token vectors `(B, L, D)` of a dense batch.

        Args:
            input_ids: `(B, L)`.
            attention_mask: `(B, L)`, non-zero at tokens and zero at padding; None: no padding.
            token_type_ids: `(B, L)`; None means type 0 everywhere.
        """
        x = self.embeddings(input_ids, self.positions(input_ids), token_type_ids)  # (B, L, D)
        if attention_mask is not None:
            attention_mask = attention_mask != 0
        return self.encode(x, Rows(self.attention_bias(x, input_ids.shape[1], attention_mask)))

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
    ) -> Tensor:
        """Return token vectors `(T, D)` of a packed batch, equal to the dense ones.

        Args:
            input_ids: `(T,)`, all rows end to end.
            padded_index: `(B, L)`, the flat token at each place; any token at padding.
            packed_index: `(T,)`, the place of each token in `B * L`.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
        """
        rows = Rows(None, padded_index, packed_index)
        positions = rows.pack(self.positions(rows.pad(input_ids)))  # (T,)
        x = self.embeddings(input_ids, positions, None)  # (T, D)
        bias = self.attention_bias(x, padded_index.shape[1], attention_mask)
        return self.encode(x, Rows(bias, padded_index, packed_index))

    def encode(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the tokens after all layers, in the layout of `x`, `(B, L, D)` or `(T, D)`."""
        for index in range(len(self.layers)):
            x = self.run_layer(index, x, rows)
        return x

    def run_layer(self, index: int, x: Tensor, rows: Rows) -> Tensor:
        """Return the tokens after one layer, which for the last one includes the final norm."""
        x = cast(EncoderLayer, self.layers[index]).encode(x, rows)
        is_last = index == len(self.layers) - 1
        return self.final_norm(x) if is_last and self.final_norm is not None else x

    def positions(self, input_ids: Tensor) -> Tensor:
        """Return the position of each token of `(B, L)`, shaped alike."""
        padding_id = self.config.position_padding_id
        if padding_id is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        counted = (input_ids != padding_id).long()
        return counted.cumsum(1) * counted + padding_id

    def attention_bias(
        self, x: Tensor, length: int, attention_mask: Tensor | None
    ) -> Tensor | None:
        """Return relative positions plus padding, broadcastable to `(B, H, L, L)`."""
        bias = None if self.relative_bias is None else self.relative_bias(length)
        if attention_mask is None:
            return bias
        padding = ((1.0 - attention_mask.to(x.dtype)) * PADDING_SCORE)[:, None, None, :]
        return padding if bias is None else bias + padding
