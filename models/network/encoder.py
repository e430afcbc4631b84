"""The Transformer encoder: embeddings and layers, for dense `(B, L)` and packed `(T,)` batches.

Source: Devlin et al. 2018, arXiv:1810.04805.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from models.network.attention import LayerInputs
from models.network.config import AttentionConfig, EncoderConfig
from models.network.disentangled import DistanceEmbeddings
from models.network.embeddings import InputEmbeddings
from models.network.layer import EncoderLayer
from models.network.norms import Norm
from models.network.packed_attention import PackedRows, Rows, mask_bias
from models.network.positions import RelativePositionBias, position_ids, rotation
from models.network.taps import NO_TAP, Tap


class Encoder(nn.Module):
    """Embeddings and layers, followed by a final norm if the layers are pre-norm.

    Attributes:
        layers: Layers with their own parameters, in the order of their first use.
        layer_order: Indices into `layers` in the order of execution; a layer that runs several
            times repeats.
        layer_steps: Name of each layer's last step, whose output is the layer's output.
        last_step: Name of the encoder's last step, whose output is the encoder's output.

    Raises:
        ValueError: `attention` in the config does not have one entry per layer, the number of
            attention heads is not a multiple of `num_kv_heads`, or the activation is unknown.
    """

    relative_bias: RelativePositionBias | None
    distance_embeddings: DistanceEmbeddings | None
    final_norm: Norm | None

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = InputEmbeddings(config)
        self.relative_bias = (
            RelativePositionBias(config.relative_buckets, config.num_heads, config.max_positions)
            if config.relative_buckets
            else None
        )
        self.distance_embeddings = (
            DistanceEmbeddings(config.distances, config.norms, config.d_model, config.max_positions)
            if config.distances
            else None
        )
        count, experts = config.num_layers, config.experts
        self._attention = config.attention or (AttentionConfig(),) * count
        if len(self._attention) != count:
            raise ValueError(f"attention has {len(self._attention)} entries for {count} layers")
        distinct = config.distinct_layers or count
        layers = [
            EncoderLayer(
                config.d_model,
                config.num_heads,
                config.dim_feedforward,
                config.dropout,
                config.activation,
                config.norm_eps,
                config.norm_first,
                config.biases,
                config.gated,
                first_norm=config.first_norm or i > 0,
                branch_norms=config.branch_norms,
                norm=config.norm,
                heads=config.heads,
                qk_norm=config.qk_norm,
                distances=config.distances,
                adapters=config.adapters,
                experts=experts if experts and experts.in_layer(i) else None,
            )
            for i in range(distinct)
        ]
        self.layers = nn.ModuleList(layers)
        # The formula of transformers' AlbertTransformer, with its floating-point division.
        self.layer_order = tuple(int(i / (count / distinct)) for i in range(count))
        self.layer_steps = tuple(
            f"layers.{i}.{layers[index].last_step}" for i, index in enumerate(self.layer_order)
        )
        self.final_norm = config.norms.norm(config.d_model) if config.norm_first else None
        self.last_step = self.layer_steps[-1] if self.final_norm is None else "final_norm"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
        tap: Tap = NO_TAP,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return the token vectors `(B, L, D)` of a dense batch.

        Args:
            input_ids: Token ids, `(B, L)`.
            attention_mask: `(B, L)`, non-zero at tokens and zero at padding; None: no padding.
            token_type_ids: Type of each token, `(B, L)`; None: type 0.
            positions: Position of each token, `(B, L)`; None: computed by `Encoder.positions`.
            tap: Tap that each step passes through.
            adapters: Index of each row's adapter, `(B,)`; -1: no adapter. None: no adapters.
        """
        positions = self.positions(input_ids) if positions is None else positions
        scales = self.scales(None if adapters is None else adapters[:, None])  # (B, 1, N * R)
        x = self.embed(input_ids, positions, token_type_ids, tap, scales)  # (B, L, D)
        if attention_mask is not None:
            attention_mask = attention_mask != 0
        length = input_ids.shape[1]
        inputs = self.layer_inputs(x, positions, length, attention_mask, tap=tap, scales=scales)
        return self.encode(x, inputs, tap)

    def forward_packed(
        self,
        input_ids: Tensor,
        padded_index: Tensor,
        packed_index: Tensor,
        attention_mask: Tensor,
        adapters: Tensor | None = None,
        token_types: Tensor | None = None,
        *,
        first_only: bool = False,
    ) -> Tensor:
        """Return the token vectors of a packed batch, `(T, D)`, or `(B, D)` with `first_only`.

        Up to rounding, the vectors are equal to those that `forward` returns for the same rows.

        Args:
            input_ids: Token ids of all rows, concatenated, `(T,)`.
            padded_index: `(B, L)`, index into the T packed tokens for each padded position; any
                valid index at padding.
            packed_index: `(T,)`, index into the `B * L` padded positions for each packed token.
            attention_mask: `(B, L)`, 1.0 at tokens and 0.0 at padding.
            adapters: Index of each token's adapter, `(T,)`; -1: no adapter. None: no adapters.
            token_types: Type of each token, `(T,)`; None: type 0.
            first_only: Whether the last layer computes each row's first token alone; see
                `EncoderConfig.can_compute_first_tokens`.
        """
        rows = Rows(padded_index, packed_index)
        positions = rows.pack(self.positions(rows.pad(input_ids)))  # (T,)
        scales = self.scales(adapters)  # (T, N * R)
        x = self.embed(input_ids, positions, token_types, scales=scales)  # (T, D)
        length = padded_index.shape[1]
        inputs = self.layer_inputs(x, positions, length, attention_mask, rows, scales=scales)
        if first_only:
            inputs = (*inputs[:-1], replace(inputs[-1], first=padded_index[:, 0]))
        return self.encode(x, inputs)

    def scales(self, adapters: Tensor | None) -> Tensor | None:
        """Return the scale of each rank of the adapters, `(..., N * R)`; None: no adapters.

        Args:
            adapters: Index of each token's adapter, `(...)`; -1: no adapter. None: no adapters.

        Raises:
            ValueError: `adapters` is given, but the encoder has no adapters.
        """
        if adapters is None:
            return None
        if (config := self.config.adapters) is None:
            raise ValueError("adapters must be None: this encoder has no adapters")
        return config.scales(adapters, self.embeddings.word.weight.dtype)

    def embed(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_types: Tensor | None = None,
        tap: Tap = NO_TAP,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the first layer, `(..., D)`.

        Token ids, positions and token types have the shape `(...)`. The scales of the adapters have
        the shape `(..., N * R)`; see `scales`.
        """
        word = self.embeddings.word
        words = tap.step("embeddings.words", word, lambda: word(input_ids, scales))  # (..., E)
        return self.embeddings(words, positions, token_types, tap, scales)

    def encode(
        self,
        x: Tensor,
        inputs: tuple[LayerInputs, ...],
        tap: Tap = NO_TAP,
        first_layer: int = 0,
    ) -> Tensor:
        """Run the layers and the final norm; return token vectors in the layout of `x`.

        Args:
            x: Input of the layer `first_layer`, `(B, L, D)` or `(T, D)`.
            inputs: Inputs of each layer besides the token vectors, from `layer_inputs`.
            tap: Tap that each step passes through.
            first_layer: Index of the first layer to run. If it is the number of layers, `x` is
                returned unchanged, and the final norm does not run.
        """
        if first_layer == len(self.layer_order):
            return x
        for i in range(first_layer, len(self.layer_order)):
            layer = cast(EncoderLayer, self.layers[self.layer_order[i]])
            x = layer.encode(x, inputs[i], tap, f"layers.{i}")
        if self.final_norm is None:
            return x
        return tap.step("final_norm", self.final_norm, self.final_norm, x)

    def positions(self, input_ids: Tensor) -> Tensor:
        """Return the position of each token, `(B, L)`, in the numbering that the config selects."""
        return position_ids(input_ids, self.config.position_padding_id)

    def layer_inputs(
        self,
        x: Tensor,
        positions: Tensor,
        length: int,
        attention_mask: Tensor | None = None,
        rows: Rows | None = None,
        tap: Tap = NO_TAP,
        scales: Tensor | None = None,
    ) -> tuple[LayerInputs, ...]:
        """Return the inputs of each layer besides the token vectors.

        Layers with equal masks share one bias, and layers with equal rotary positions one rotation.

        Args:
            x: Input of the first layer, of which only the dtype and device are used.
            positions: Position of each token, `(B, L)` or `(T,)`.
            length: Length of the longest row, L.
            attention_mask: `(B, L)`, 1 or True at tokens, 0 or False at padding; None: no padding.
                Required for a packed batch.
            rows: Index maps of a packed batch; None for a dense batch.
            tap: Tap that each step passes through.
            scales: Scale of each rank of the adapters, `(..., N * R)`; None: no adapters.
        """
        relative = None
        if (module := self.relative_bias) is not None:
            relative = tap.step("relative_bias", module, lambda: module(length))  # (1, H, L, L)
        distances = None
        if (table := self.distance_embeddings) is not None:
            distances = table.distances(tap.step("distance_embeddings", table, table), length)
        width = self.config.heads.width
        rotations = {
            rotary: None if rotary is None else rotation(positions, rotary, width, x.dtype)
            for rotary in {attention.rotary for attention in self._attention}
        }
        reaches = {attention.reach for attention in self._attention}
        if rows is not None and attention_mask is not None:
            packed = {reach: PackedRows(rows, attention_mask, reach) for reach in reaches}
            return tuple(
                LayerInputs(relative, rotations[a.rotary], distances, packed[a.reach], scales)
                for a in self._attention
            )
        heads = self.config.num_heads
        masks = {reach: mask_bias(x, length, heads, attention_mask, reach) for reach in reaches}
        biases = {
            reach: relative if mask is None else mask if relative is None else relative + mask
            for reach, mask in masks.items()
        }
        return tuple(
            LayerInputs(biases[a.reach], rotations[a.rotary], distances, scales=scales)
            for a in self._attention
        )
