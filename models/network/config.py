"""Hyperparameters of an encoder: the choices in which model families differ."""

from dataclasses import dataclass

from models.network.adapters import AdapterConfig
from models.network.attention import Heads
from models.network.disentangled import DistanceConfig
from models.network.experts import ExpertsConfig
from models.network.layer import BIASES
from models.network.norms import NormConfig
from models.network.positions import Reach, Rotary


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Hyperparameters of the attention of one layer.

    Attributes:
        rotary: Rotary positions; None: queries and keys are not rotated.
        window: Largest distance of two tokens that attend to each other; None: no limit.
        causal: Whether tokens attend to earlier tokens and themselves only.
        alibi: Whether attention scores fall with the distance of tokens.
    """

    rotary: Rotary | None = None
    window: int | None = None
    causal: bool = False
    alibi: bool = False

    @property
    def reach(self) -> Reach:
        """Position-dependent masks and bias of the layer's attention."""
        return Reach(self.window, self.causal, self.alibi)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Hyperparameters of an encoder.

    `d_model`, `dim_feedforward` and `dropout` are as in `torch.nn.TransformerEncoderLayer`.

    Attributes:
        activation: Name in `models.network.layer.ACTIVATIONS`.
        max_positions: Number of position embeddings; in a model without position embeddings,
            maximum number of tokens in a row.
        type_vocab_size: Number of token type embeddings; 0: none.
        embedding_width: Width of the embeddings, which a linear layer then maps to `d_model`; 0:
            the embeddings have the width `d_model`, and there is no such layer.
        distinct_layers: Number of layers with their own parameters, each of which runs several
            times in succession; 0: every layer has its own parameters.
        num_kv_heads: Number of key/value heads, each shared by `num_heads / num_kv_heads` query
            heads; 0: as many as `num_heads`.
        head_width: Width of a head; 0: `d_model / num_heads`.
        qk_norm: Scope of the norm of queries and keys, before rotary positions: "head" (each head),
            "all" (all heads together) or "" (no norm).
        query_scale: Factor of the attention scores, which the weights of the query norm contain.
        norm: Name of the norm in `models.network.norms.KINDS`.
        norm_eps: Constant added to the variance (layer norm) or mean square (RMS norm).
        biases: Names of the parts of a layer that have a bias, in `models.network.layer.BIASES`.
        gated: Whether the feed-forward layer has a gate; see `EncoderLayer`.
        norm_first: Whether norms precede the sublayers (pre-norm) or follow them (post-norm).
        branch_norms: Whether the sublayers have additional norms; see `EncoderLayer`.
        embedding_norm: Whether the embeddings have a norm. With position embeddings, they always
            have one.
        first_norm: Whether a norm precedes the attention of the first layer. Only for pre-norm
            encoders.
        position_embeddings: Whether a position embedding is added to each token.
        position_padding_id: Token id of padding, for RoBERTa's numbering of positions; None:
            positions are numbered from 0. See `models.network.positions.position_ids`.
        relative_buckets: Number of buckets of the relative position bias; 0: no bias.
        distances: Hyperparameters of disentangled attention; None: attention is not disentangled.
        adapters: Hyperparameters of adapters; None: no adapters.
        experts: Hyperparameters of the layers with experts; None: there are none.
        attention: Hyperparameters of each layer's attention; empty: full attention without rotary
            positions in all layers.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    dim_feedforward: int
    max_positions: int
    type_vocab_size: int = 0
    embedding_width: int = 0
    distinct_layers: int = 0
    dropout: float = 0.1
    activation: str = "gelu"
    num_kv_heads: int = 0
    head_width: int = 0
    qk_norm: str = ""
    query_scale: float = 1.0
    norm: str = "layer_norm"
    norm_eps: float = 1e-12
    biases: frozenset[str] = BIASES
    gated: bool = False
    norm_first: bool = False
    branch_norms: bool = False
    embedding_norm: bool = True
    first_norm: bool = True
    position_embeddings: bool = True
    position_padding_id: int | None = None
    relative_buckets: int = 0
    distances: DistanceConfig | None = None
    adapters: AdapterConfig | None = None
    experts: ExpertsConfig | None = None
    attention: tuple[AttentionConfig, ...] = ()

    @property
    def heads(self) -> Heads:
        """Number and width of the attention heads."""
        width = self.head_width or self.d_model // self.num_heads
        return Heads(self.num_heads, self.num_kv_heads or self.num_heads, width)

    @property
    def norms(self) -> NormConfig:
        """Hyperparameters of the encoder's norms."""
        return NormConfig(self.norm, self.norm_eps, "norms" in self.biases)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Largest distance of tokens that attend to each other, by layer; None: no limit."""
        own = tuple(layer.window for layer in self.attention)
        return own or (None,) * self.num_layers

    @property
    def can_compute_first_tokens(self) -> bool:
        """Whether the last layer can compute the outputs of first tokens alone."""
        last = self.attention[-1].reach if self.attention else Reach()
        return not (self.distances or self.adapters or last.causal or last.alibi)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a row."""
        reserved = 0 if self.position_padding_id is None else self.position_padding_id + 1
        return self.max_positions - reserved
