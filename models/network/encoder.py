"""The Transformer encoder: embeddings and layers, for dense `(B, L)` and packed `(T,)` batches.

Source: Devlin et al. 2018, arXiv:1810.04805.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from models.add_layer_norm import AddLayerNorm, LayerNorm
from models.network.attention import DENSE, PADDING_SCORE, Rows
from models.network.layer import EncoderLayer
from models.network.positions import RelativePositionBias, position_ids
from models.network.taps import NO_TAP, Tap


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Hyperparameters of an encoder, named as in `torch.nn.TransformerEncoderLayer`.

    Attributes:
        max_positions: Number of position embeddings.
        type_vocab_size: Number of token type embeddings; 0: none.
        position_padding_id: Position id of padding in RoBERTa's numbering; None: positions are
            numbered from 0. See `positions.position_ids`.
        relative_buckets: Number of buckets of the relative position bias; 0: no bias.
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
        """Maximum number of tokens in a row, limited by the number of position embeddings."""
        reserved = 0 if self.position_padding_id is None else self.position_padding_id + 1
        return self.max_positions - reserved


class Embeddings(nn.Module):
    """Sum of word, position and token type embeddings, followed by a norm."""

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

    def forward(
        self,
        words: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        tap: Tap = NO_TAP,
    ) -> Tensor:
        """Return the input of the first layer, `(..., D)`.

        Args:
            words: Word embeddings, `(..., D)`.
            positions: Position of each token, `(...)`.
            token_types: Type of each token, `(...)`; None: type 0.
            tap: Tap that runs each step.

        Raises:
            ValueError: `token_types` is given, but the encoder has no token type embeddings.
        """
        if self.token_type is None and token_types is not None:
            raise ValueError("token_types must be None: this encoder has no token type embeddings")
        if self.token_type is not None:
            table = self.token_type

            def add_type(words: Tensor) -> Tensor:
                return words + (table.weight[0] if token_types is None else table(token_types))

            words = tap.step("embeddings.types", table, add_type, words)
        offsets = tap.step("embeddings.positions", self.position, lambda: self.position(positions))
        x, _ = tap.add_norm("embeddings.sum", "embeddings.norm", self.norm, words, offsets)
        return self.dropout(x)


class Encoder(nn.Module):
    """Embeddings and layers, followed by a final norm if the layers are pre-norm.

    Attributes:
        layer_steps: Name of each layer's last step, whose output is the layer's output.
        last_step: Name of the encoder's last step, whose output is the encoder's output.
    """

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
        layers = [
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
        ]
        self.layers = nn.ModuleList(layers)
        self.layer_steps = tuple(f"layers.{i}.{layer.last_step}" for i, layer in enumerate(layers))
        self.final_norm = (
            LayerNorm(config.d_model, config.layer_norm_eps) if config.norm_first else None
        )
        self.last_step = self.layer_steps[-1] if self.final_norm is None else "final_norm"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
        tap: Tap = NO_TAP,
    ) -> Tensor:
        """Return the token vectors `(B, L, D)` of a dense batch.

        Args:
            input_ids: Token ids, `(B, L)`.
            attention_mask: `(B, L)`, non-zero at tokens and zero at padding; None: no padding.
            token_type_ids: Type of each token, `(B, L)`; None: type 0.
            positions: Position of each token, `(B, L)`; None: computed by `positions`.
            tap: Tap that runs each step.
        """
        positions = self.positions(input_ids) if positions is None else positions
        x = self.embed(input_ids, positions, token_type_ids, tap)  # (B, L, D)
        if attention_mask is not None:
            attention_mask = attention_mask != 0
        bias = self.attention_bias(x, input_ids.shape[1], attention_mask, tap)
        return self.encode(x, bias, tap=tap)

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
    ) -> Tensor:
        """Return the token vectors `(T, D)` of a packed batch, equal to those of a dense batch.

        Args:
            input_ids: Token ids of all rows, concatenated, `(T,)`.
            padded_index: `(B, L)`, index into the T packed tokens for each padded position; any
                valid index at padding.
            packed_index: `(T,)`, index into the `B * L` padded positions for each packed token.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
        """
        rows = Rows(padded_index, packed_index)
        positions = rows.pack(self.positions(rows.pad(input_ids)))  # (T,)
        x = self.embed(input_ids, positions)  # (T, D)
        bias = self.attention_bias(x, padded_index.shape[1], attention_mask)
        return self.encode(x, bias, rows)

    def embed(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        tap: Tap = NO_TAP,
    ) -> Tensor:
        """Return the input of the first layer, `(..., D)`.

        Token ids, positions and token types all have the shape `(...)`.
        """
        word = self.embeddings.word
        words = tap.step("embeddings.words", word, lambda: word(input_ids))  # (..., D)
        return self.embeddings(words, positions, token_types, tap)

    def encode(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        rows: Rows = DENSE,
        tap: Tap = NO_TAP,
        first_layer: int = 0,
    ) -> Tensor:
        """Run the layers and the final norm; return token vectors in the layout of `x`.

        Args:
            x: Input of the layer `first_layer`, `(B, L, D)` or `(T, D)`.
            bias: Bias of the attention scores; see `attention_bias`.
            rows: Index maps of a packed batch; `DENSE` for a dense batch.
            tap: Tap that runs each step.
            first_layer: Index of the first layer to run. If it equals the number of layers, `x` is
                returned unchanged, without the final norm.
        """
        if first_layer == len(self.layers):
            return x
        for index in range(first_layer, len(self.layers)):
            layer = cast(EncoderLayer, self.layers[index])
            x = layer.encode(x, bias, rows, tap, f"layers.{index}")
        if self.final_norm is None:
            return x
        return tap.step("final_norm", self.final_norm, self.final_norm, x)

    def positions(self, input_ids: Tensor) -> Tensor:
        """Return the position of each token, `(B, L)`, numbered as the config requires."""
        return position_ids(input_ids, self.config.position_padding_id)

    def attention_bias(
        self, x: Tensor, length: int, attention_mask: Tensor | None = None, tap: Tap = NO_TAP
    ) -> Tensor | None:
        """Return the bias of the attention scores, broadcastable to `(B, H, L, L)`.

        It is the sum of the relative position bias and the mask of padding keys; None without
        either.

        Args:
            x: Input of the first layer, for its dtype.
            length: Length of the longest row, L.
            attention_mask: `(B, L)`, 1 or True at tokens, 0 or False at padding; None: no padding.
            tap: Tap that runs each step.
        """
        bias = None
        if (relative := self.relative_bias) is not None:
            bias = tap.step("relative_bias", relative, lambda: relative(length))  # (1, H, L, L)
        if attention_mask is None:
            return bias
        padding = ((1.0 - attention_mask.to(x.dtype)) * PADDING_SCORE)[:, None, None, :]
        return padding if bias is None else bias + padding
