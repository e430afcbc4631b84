"""One Transformer layer: attention and feed-forward, each with a residual connection and a norm."""

from collections.abc import Callable, Collection
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.network.adapters import AdaptedLinear, AdapterConfig
from models.network.attention import (
    NO_INPUTS,
    Heads,
    LayerInputs,
    SelfAttention,
    attention_bias,
)
from models.network.disentangled import DistanceConfig
from models.network.experts import Experts, ExpertsConfig
from models.network.norms import AddNorm, Norm, NormConfig
from models.network.taps import NO_TAP, Tap

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "swish": F.silu,
}


# Parts of a layer that can have a bias. "in_proj" is that of queries, keys and values; "linear1"
# includes the gate.
BIASES = frozenset({"in_proj", "out_proj", "linear1", "linear2", "norms"})


class EncoderLayer(nn.Module):
    """Attention and feed-forward sublayers, each with a residual connection and a norm.

    If `bias` is a bool and all arguments after it have their defaults, the layer is equivalent to
    `torch.nn.TransformerEncoderLayer` with `batch_first=True`, and has the same state dict.

    Args:
        d_model: Width of a token vector.
        num_heads: Number of attention heads, a divisor of `d_model`. Ignored if `heads` is given.
        dim_feedforward: Width of the feed-forward layer.
        dropout: Dropout probability for attention weights, feed-forward activations and the outputs
            of both sublayers.
        activation: Name in `ACTIVATIONS`, or a callable.
        layer_norm_eps: Constant added to the variance (layer norm) or mean square (RMS norm).
        norm_first: Whether norms precede the sublayers (pre-norm) or follow them (post-norm).
        bias: Whether all linear layers and norms have a bias, or the names in `BIASES` of the parts
            with a bias.
        gated: Whether the feed-forward layer is `linear2(activation(gate(x)) * linear1(x))` instead
            of `linear2(activation(linear1(x)))`.
        first_norm: Whether a norm precedes the attention. False for a first layer whose input is
            already normalised. Only for pre-norm layers.
        branch_norms: Whether the sublayers have additional norms. In pre-norm layers, the outputs
            of attention and feed-forward are normalised before the residual is added. In post-norm
            layers, the residual of the attention is added twice, and a norm follows each addition.
        norm: Name of the norm in `models.network.norms.KINDS`.
        heads: Number and width of the attention heads; None: `num_heads` heads of width
            `d_model / num_heads`.
        qk_norm: Scope of the norm of queries and keys: "head" (each head), "all" (all heads
            together) or "" (no norm).
        distances: Hyperparameters of disentangled attention; None: attention is not disentangled.
        adapters: Hyperparameters of adapters; None: no adapters.
        experts: Hyperparameters of the experts that replace the feed-forward layer, without
            adapters; None: no experts.

    Sources: Vaswani et al. 2017, arXiv:1706.03762; Shazeer 2020, arXiv:2002.05202 (gates).

    Raises:
        ValueError: `heads` is None and `d_model` is not divisible by `num_heads`, or the activation
            is unknown.
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
        bias: bool | Collection[str] = True,
        gated: bool = False,
        first_norm: bool = True,
        branch_norms: bool = False,
        norm: str = "layer_norm",
        heads: Heads | None = None,
        qk_norm: str = "",
        distances: DistanceConfig | None = None,
        adapters: AdapterConfig | None = None,
        experts: ExpertsConfig | None = None,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise ValueError(f"activation {activation!r} is not one of {sorted(ACTIVATIONS)}")
            activation = ACTIVATIONS[activation]
        biases = (BIASES if bias else ()) if isinstance(bias, bool) else bias
        norms = NormConfig(norm, layer_norm_eps, "norms" in biases)
        linear1_bias, linear2_bias = "linear1" in biases, "linear2" in biases
        if heads is None:
            if num_heads < 1 or d_model % num_heads:
                raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
            heads = Heads(num_heads, num_heads, d_model // num_heads)
        self.self_attn = SelfAttention(
            d_model, heads, dropout, biases, norms, qk_norm, distances, adapters
        )
        self.experts = Experts(d_model, dim_feedforward, experts) if experts else None
        if experts is None:
            inner = d_model, dim_feedforward, linear1_bias, adapters
            self.gate = AdaptedLinear(*inner) if gated else None
            self.linear1 = AdaptedLinear(*inner)
            self.linear2 = AdaptedLinear(dim_feedforward, d_model, linear2_bias, adapters)
        self.norm1: Norm | AddNorm | None = None
        if not norm_first:
            self.norm1 = norms.add_norm(d_model)
        elif first_norm:
            self.norm1 = norms.norm(d_model)
        self.norm2 = norms.add_norm(d_model)
        self.branch_norm1: Norm | AddNorm | None = None
        self.branch_norm2: Norm | None = None
        if branch_norms:
            self.branch_norm1 = norms.norm(d_model) if norm_first else norms.add_norm(d_model)
            self.branch_norm2 = norms.norm(d_model) if norm_first else None
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
        """Return the output of this layer, `(N, L, D)`.

        Args:
            src: Token vectors, `(N, L, D)`.
            src_mask: `(L, L)` or `(N * H, L, L)`. A float mask is added to the attention scores; in
                a bool or integer mask, True or non-zero values forbid attention.
            src_key_padding_mask: `(N, L)`, True or non-zero at padding.
            is_causal: Whether to forbid attention to later tokens, in addition to `src_mask`.

        Raises:
            ValueError: `src` is not three-dimensional, or the shape of a mask does not match `src`.
        """
        if src.dim() != 3:
            raise ValueError(f"src is {tuple(src.shape)}; it must be (N, L, D)")
        bias = attention_bias(
            src, self.self_attn.shape.count, src_mask, src_key_padding_mask, is_causal
        )
        return self.encode(src, LayerInputs(bias))

    def encode(
        self,
        x: Tensor,
        inputs: LayerInputs = NO_INPUTS,
        tap: Tap = NO_TAP,
        name: str = "layer",
    ) -> Tensor:
        """Return the output of this layer, in the layout of `x`; `(B, D)` for first tokens alone.

        Args:
            x: Token vectors, `(B, L, D)` or `(T, D)`.
            inputs: Inputs of the layer besides the token vectors.
            tap: Tap that each step passes through.
            name: Prefix of the step names, without the dot, such as "layers.0".
        """
        norm1 = self.norm1
        if self.norm_first:
            normed = x if norm1 is None else tap.step(f"{name}.norm1", norm1, norm1, x)
            branch, x = self._attend(normed, inputs, tap, name), inputs.select(x)
            if (norm := self.branch_norm1) is not None:
                branch = tap.step(f"{name}.branch_norm1", norm, norm, branch)
            normed, x = tap.add_norm(f"{name}.sum1", f"{name}.norm2", self.norm2, branch, x)
            branch = self._expand(normed, inputs.scales, tap, name)
            if (norm := self.branch_norm2) is not None:
                branch = tap.step(f"{name}.branch_norm2", norm, norm, branch)
            return tap.step(f"{name}.sum2", None, torch.add, branch, x)
        attended, x = self._attend(x, inputs, tap, name), inputs.select(x)
        if (inner := self.branch_norm1) is not None:
            steps = f"{name}.branch_sum1", f"{name}.branch_norm1"
            attended, _ = tap.add_norm(*steps, cast(AddNorm, inner), attended, x)
        x, _ = tap.add_norm(f"{name}.sum1", f"{name}.norm1", cast(AddNorm, norm1), attended, x)
        expanded = self._expand(x, inputs.scales, tap, name)
        return tap.add_norm(f"{name}.sum2", f"{name}.norm2", self.norm2, expanded, x)[0]

    @property
    def last_step(self) -> str:
        """Name of this layer's last step, without a prefix such as "layers.0."."""
        return "sum2" if self.norm_first else "norm2"

    def _attend(self, x: Tensor, inputs: LayerInputs, tap: Tap, name: str) -> Tensor:
        return self.dropout(tap.attention(f"{name}.attention", self.self_attn, x, inputs))

    def _expand(self, x: Tensor, scales: Tensor | None, tap: Tap, name: str) -> Tensor:
        if (experts := self.experts) is not None:
            return tap.step(f"{name}.experts", experts, lambda x: self.dropout(experts(x)), x)

        def activation_of(linear: AdaptedLinear) -> Activation:
            return lambda x: self.activation(linear(x, scales))

        if (gate := self.gate) is None:
            x = tap.step(
                f"{name}.linear1", self.linear1, activation_of(self.linear1), x
            )  # (..., F)
        else:
            gates = tap.step(f"{name}.gate", gate, activation_of(gate), x)  # (..., F)
            x = tap.step(f"{name}.linear1", self.linear1, lambda x: self.linear1(x, scales), x)
            x = tap.step(f"{name}.product", None, torch.mul, gates, x)
        return tap.step(
            f"{name}.linear2",
            self.linear2,
            lambda x: self.dropout(self.linear2(self.dropout(x), scales)),
            x,
        )  # (..., D)
