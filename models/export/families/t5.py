"""T5 encoders, such as sentence-t5 and gtr-t5: pre-norm layers with a relative position bias.

The first layer's bias serves all layers. Layers have RMS norm and no biases, and attention scores
are not scaled.
Sources: Raffel et al. 2019, arXiv:1910.10683; Ni et al. 2021, arXiv:2108.08877 (sentence-t5).
"""

import math
from typing import Any

import torch
from torch import Tensor

from models.export.families.family import (
    MAX_SIZE,
    Classifier,
    Family,
    Modules,
    Settings,
    read_count,
    read_flag,
    tensors,
)
from models.export.model_folder import CheckpointError
from models.network.config import EncoderConfig

_BUCKETS = "relative_attention_num_buckets"
# Half the buckets are for each direction, and half of these cover one distance below 128 each.
_MIN_BUCKETS, _MAX_BUCKETS = 4, 511
_ATTENTION = "encoder.block.{i}.layer.0.SelfAttention"
_FEED_FORWARD = "encoder.block.{i}.layer.1.DenseReluDense"
_MODULES: Modules = {
    "layers.{i}.norm1": "encoder.block.{i}.layer.0.layer_norm",
    "layers.{i}.self_attn.in_proj": tuple(f"{_ATTENTION}.{name}" for name in "qkv"),
    "layers.{i}.self_attn.out_proj": f"{_ATTENTION}.o",
    "layers.{i}.norm2": "encoder.block.{i}.layer.1.layer_norm",
    "layers.{i}.linear2": f"{_FEED_FORWARD}.wo",
    "final_norm": "encoder.final_layer_norm",
}
_PLAIN: Modules = {"layers.{i}.linear1": f"{_FEED_FORWARD}.wi"}
_GATED: Modules = {
    "layers.{i}.gate": f"{_FEED_FORWARD}.wi_0",
    "layers.{i}.linear1": f"{_FEED_FORWARD}.wi_1",
}
# The encoder's embeddings are shared with the decoder, and stored under either name. If both are
# present, transformers' encoder has its own.
_EMBEDDINGS = ("encoder.embed_tokens.weight", "shared.weight")


def _derive(config: Settings) -> dict[str, Any]:
    kind = str(config["feed_forward_proj"])
    gate, _, activation = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise CheckpointError(
            f"config.json: feed_forward_proj is {kind!r}; supported: an activation, and 'gated-' "
            "and an activation"
        )
    if kind == "gated-gelu":  # in T5 1.1, the approximation with tanh
        activation = "gelu_new"
    buckets = read_count(config, _BUCKETS, 32)
    if not _MIN_BUCKETS <= buckets <= _MAX_BUCKETS:
        raise CheckpointError(
            f"config.json: {_BUCKETS} is {buckets}; it must be from {_MIN_BUCKETS} to "
            f"{_MAX_BUCKETS}"
        )
    return {
        # As in transformers, these two fields have priority if files have them.
        "activation": str(config.get("dense_act_fn", activation)),
        "gated": read_flag(config, "is_gated_act") if "is_gated_act" in config else bool(gate),
        "head_width": read_count(
            config, "d_kv" if config.get("head_dim") is None else "head_dim", 64, MAX_SIZE
        ),
        "relative_buckets": buckets,
    }


def _unscale(weight: Tensor, config: EncoderConfig) -> Tensor:
    """Return the projections with queries multiplied by the divisor of the network's scores."""
    queries, others = weight.tensor_split([config.heads.widths[0]])
    return torch.cat([queries * math.sqrt(config.heads.width), others])


T5 = Family(
    config={
        "vocab_size": "vocab_size",
        # If a file has both names, transformers uses the first one.
        "d_model": ("hidden_size", "d_model"),
        "num_layers": ("num_hidden_layers", "num_layers"),
        "num_heads": ("num_attention_heads", "num_heads"),
        "dim_feedforward": "d_ff",
        "norm_eps": "layer_norm_epsilon",
    },
    defaults={"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6},
    constants={
        "dropout": 0.0,
        # Distances have no limit. Tables of buckets have one entry per distance.
        "max_positions": 4096,
        "norm": "rms_norm",
        "norm_first": True,
        "biases": frozenset(),
        "position_embeddings": False,
        "embedding_norm": False,
    },
    derived=_derive,
    required={
        "is_causal": False,
        "is_decoder": False,
        "relative_attention_max_distance": 128,
        "per_layer_config": None,
    },
    layouts=tuple(
        tensors(
            weights={
                "embeddings.word.weight": embeddings,
                "relative_bias.weight": _ATTENTION.format(i=0) + ".relative_attention_bias.weight",
            },
            modules={**_MODULES, **feed_forward},
        )
        for embeddings in _EMBEDDINGS
        for feed_forward in (_PLAIN, _GATED)
    ),
    values={r".*\.in_proj_weight": _unscale},
    token_classifier=Classifier(),
    prefixes=("transformer.",),
    # The decoder of the whole model.
    ignored=(r"shared\.weight", r"decoder\..*", r"lm_head\..*"),
)
