"""Llama, and the config fields and tensor names of the families derived from it.

Layers are pre-norm, with RMS norm, rotary positions, grouped-query attention and a gated
feed-forward layer.
Source: Touvron et al. 2023, arXiv:2302.13971.
"""

import re
from dataclasses import replace
from typing import Any

from models.export.families.family import (
    MAX_HEADS,
    Classifier,
    Family,
    Modules,
    Settings,
    read_biases,
    read_count,
    read_flag,
    tensors,
)
from models.export.families.rotary import FULL, layers_of_types, read_rotary
from models.export.families.rotary_scaling import DECODER_TYPES
from models.export.model_folder import CheckpointError, classes_of
from models.network.config import AttentionConfig

CONFIG: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dim_feedforward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
}
CONSTANTS: dict[str, Any] = {
    "dropout": 0.0,
    "norm": "rms_norm",
    "norm_first": True,
    "gated": True,
    "position_embeddings": False,
    "embedding_norm": False,
}
# `per_layer_config` changes single layers in any family of transformers. Gemma 2 caps scores.
REQUIRED: dict[str, Any] = {"per_layer_config": None, "attn_logit_softcapping": None}
# Parts of a layer that have a bias if a field of config.json is true, by field.
ATTENTION_BIAS = {"attention_bias": ("in_proj", "out_proj")}
BIASES = {**ATTENTION_BIAS, "mlp_bias": ("linear1", "linear2")}


# Classes of transformers, whose attention has the direction that the config says.
_CLASS = re.compile(
    r"(Llama|Mistral|Ministral3|Qwen[23])"
    r"(Model|For(CausalLM|SequenceClassification|TokenClassification|QuestionAnswering))"
)


def is_causal(config: Settings) -> bool:
    """Return whether tokens of a decoder attend to earlier tokens and themselves only.

    As in transformers, `is_causal` decides, and is true by default. Some publishers write
    `use_bidirectional_attention` instead, which transformers ignores in these families.

    Raises:
        CheckpointError: A field is not a boolean, the two contradict each other, or `architectures`
            names another class than those of transformers, and `is_causal` is absent.
    """
    causal, both = config.get("is_causal", True), "use_bidirectional_attention"
    if not isinstance(causal, bool):
        raise CheckpointError(
            f"config.json: is_causal has the invalid value {causal!r}; it must be true or false"
        )
    if config.get(both) is not None and read_flag(config, both) == causal:
        raise CheckpointError(
            f"config.json: {both} is {config[both]}, but is_causal is {causal}, which transformers "
            f"follows; set is_causal to {str(not causal).lower()} if the model was trained so"
        )
    others = [name for name in classes_of(config) if not _CLASS.fullmatch(name)]
    if others and "is_causal" not in config:
        raise CheckpointError(
            f"config.json: architectures names {others[0]}, whose attention can have another "
            "direction than that of transformers' class; set is_causal to true or false"
        )
    return causal


def read_window(config: Settings, causal: bool) -> int:
    """Return the largest distance of tokens that attend to each other, from `sliding_window`.

    In causal attention, `sliding_window` counts the token itself.

    Raises:
        CheckpointError: `sliding_window` is not a positive integer.
    """
    return read_count(config, "sliding_window", 4096) - causal


def read_heads(config: Settings) -> dict[str, int]:
    """Return the `EncoderConfig` fields `num_kv_heads` and `head_width`.

    Raises:
        CheckpointError: `num_key_value_heads` or `head_dim` is not a positive integer.
    """
    count = config["num_attention_heads"]
    return {
        "num_kv_heads": read_count(config, "num_key_value_heads", count, MAX_HEADS),
        "head_width": read_count(config, "head_dim", max(1, config["hidden_size"] // count), 2**20),
    }


WEIGHTS = {"embeddings.word.weight": "embed_tokens.weight"}
MODULES: Modules = {
    "layers.{i}.norm1": "layers.{i}.input_layernorm",
    "layers.{i}.self_attn.in_proj": (
        "layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.self_attn.q_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.self_attn.k_norm": "layers.{i}.self_attn.k_norm",
    "layers.{i}.self_attn.out_proj": "layers.{i}.self_attn.o_proj",
    "layers.{i}.norm2": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.linear1": "layers.{i}.mlp.up_proj",
    "layers.{i}.linear2": "layers.{i}.mlp.down_proj",
    "final_norm": "norm",
}
# Names of poolings in NVIDIA's files.
POOLINGS = {"avg": "mean", "cls": "cls", "last": "last"}
# Head of transformers' generic class for decoders.
_CLASSIFIER = Classifier(
    out="score", out_bias=False, poolings={"last": "last"}, skips_padding_ids=True
)


def _derive(config: Settings) -> dict[str, Any]:
    heads = read_heads(config)
    rotary = read_rotary(config, heads["head_width"], 10000.0, types=DECODER_TYPES)
    kinds = {FULL: AttentionConfig(rotary=rotary, causal=is_causal(config))}
    return {
        **heads,
        "attention": layers_of_types(config, kinds, [FULL] * config["num_hidden_layers"]),
        "biases": read_biases(config, BIASES),
    }


LLAMA = Family(
    config=CONFIG,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    constants=CONSTANTS,
    derived=_derive,
    required={**REQUIRED, "sliding_window": None},
    layouts=(tensors(weights=WEIGHTS, modules=MODULES),),
    prefixes=("model.",),
    # Older files contain the rotary frequencies, which are computed.
    ignored=(r"lm_head\..*", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    causal_head="lm_head",
    classifier=_CLASSIFIER,
    token_classifier=Classifier(out="score", required={"token_classification_bias": True}),
)


def bidirectional(family: Family, code: str) -> Family:
    """Return the family of code that makes the attention of a family bidirectional.

    Args:
        family: Family of the network.
        code: Prefix of the code's class names in `auto_map`.
    """
    return replace(
        family,
        derived=lambda config: family.derived({**config, "is_causal": False}),
        required={**family.required, "is_causal": False},
        causal_head="",
        code=(code,),
    )


# NVIDIA's embedding models and rerankers, whose scores are divided by a temperature.
LLAMA_BIDIRECTIONAL = replace(
    bidirectional(LLAMA, "LlamaBidirectional"),
    poolings=POOLINGS,
    classifier=replace(
        _CLASSIFIER,
        poolings=POOLINGS,
        pooling_field="pooling",
        skips_padding_ids=False,
        required={"temperature": 1.0},
    ),
    token_classifier=None,
)
