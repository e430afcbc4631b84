"""ModernBERT: pre-norm, rotary positions, gated feed-forward, windows in two of three layers.

Source: Warner et al. 2024, arXiv:2412.13663.
"""

from typing import Any

from models.export.families.family import (
    Classifier,
    Family,
    MaskedLM,
    Settings,
    TensorPart,
    read_biases,
    read_count,
    tensors,
)
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.network.config import AttentionConfig

# Parts of a layer that have a bias if a field of config.json is true, by field.
_BIASES = {
    "attention_bias": ("in_proj", "out_proj"),
    "mlp_bias": ("linear1", "linear2"),
    "norm_bias": ("norms",),
}


def _derive(config: Settings) -> dict[str, Any]:
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width = config["hidden_size"] // heads
    full = read_rotary(config, width, 160000.0, name="global_rope_theta", layer_type=FULL)
    # A null local_rope_theta stands for the base of full attention, an absent one for 10000.
    own = full.base if "local_rope_theta" in config else 10000.0
    sliding = read_rotary(config, width, own, name="local_rope_theta", layer_type=SLIDING)
    # `local_attention` covers both sides of a token. Tokens at exactly half of it are included.
    window = read_count(config, "local_attention", 128) // 2
    if config.get("sliding_window") is not None:  # one side; it has priority in transformers
        window = read_count(config, "sliding_window", 1)
    kinds = {
        FULL: AttentionConfig(rotary=full),
        SLIDING: AttentionConfig(rotary=sliding, window=window),
    }
    period = read_count(config, "global_attn_every_n_layers", 3)
    types = [SLIDING if i % period else FULL for i in range(count)]
    return {
        "attention": layers_of_types(config, kinds, types),
        "biases": read_biases(config, _BIASES),
    }


_CLASSIFIER = Classifier(
    dense="head.dense",
    dense_bias=False,
    activation="GELU",
    norm="head.norm",
    poolings={"cls": "cls", "mean": "mean"},
    pooling_field="classifier_pooling",
    required={"classifier_bias": False, "classifier_activation": "gelu"},
)

MODERNBERT = Family(
    config={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "dim_feedforward": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "dropout": "mlp_dropout",
        "activation": "hidden_activation",
        "norm_eps": "norm_eps",
    },
    defaults={
        "max_position_embeddings": 8192,
        "mlp_dropout": 0.0,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
    },
    constants={
        "gated": True,
        "norm_first": True,
        "first_norm": False,
        "position_embeddings": False,
    },
    derived=_derive,
    required={"is_causal": False, "rope_scaling": None},
    layouts=(
        tensors(
            weights={"embeddings.word.weight": "embeddings.tok_embeddings.weight"},
            modules={
                "embeddings.norm": "embeddings.norm",
                "layers.{i}.norm1": "layers.{i}.attn_norm",
                "layers.{i}.self_attn.in_proj": "layers.{i}.attn.Wqkv",
                "layers.{i}.self_attn.out_proj": "layers.{i}.attn.Wo",
                "layers.{i}.norm2": "layers.{i}.mlp_norm",
                "layers.{i}.gate": (TensorPart("layers.{i}.mlp.Wi", 0, 2),),
                "layers.{i}.linear1": (TensorPart("layers.{i}.mlp.Wi", 1, 2),),
                "layers.{i}.linear2": "layers.{i}.mlp.Wo",
                "final_norm": "final_norm",
            },
        ),
    ),
    classifier=_CLASSIFIER,
    token_classifier=_CLASSIFIER,
    masked_lm=MaskedLM(
        dense="head.dense",
        dense_bias=False,
        activation="gelu",
        norm="head.norm",
        decoder="decoder",
        required={"classifier_bias": False, "classifier_activation": "gelu", "decoder_bias": True},
    ),
    prefixes=("model.",),
    ignored=(r"head\..*", r"decoder\..*"),
)
