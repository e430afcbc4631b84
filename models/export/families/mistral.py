"""Mistral: Llama without biases, and with windows in all layers; and Ministral 3.

Source: Jiang et al. 2023, arXiv:2310.06825.
"""

from dataclasses import replace
from typing import Any

from models.export.families import llama
from models.export.families.family import Settings, read_number
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.export.families.rotary_scaling import DECODER_TYPES, original_length
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig


def _derive(config: Settings) -> dict[str, Any]:
    heads = llama.read_heads(config)
    causal = llama.is_causal(config)
    has_windows = config.get("sliding_window", 4096) is not None
    attention = AttentionConfig(
        rotary=read_rotary(config, heads["head_width"], 10000.0, types=DECODER_TYPES),
        window=llama.read_window(config, causal) if has_windows else None,
        causal=causal,
    )
    # transformers ignores `layer_types` here: all layers are of one type.
    kind = SLIDING if has_windows else FULL
    types = [kind] * config["num_hidden_layers"]
    return {**heads, "attention": layers_of_types(config, {kind: attention}, types)}


MISTRAL = replace(
    llama.LLAMA,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
    },
    constants={**llama.CONSTANTS, "biases": frozenset()},
    derived=_derive,
    required=llama.REQUIRED,
)


def _ministral3(config: Settings) -> dict[str, Any]:
    growth, rotary = "llama_4_scaling_beta", config.get("rope_parameters")
    if not isinstance(rotary, dict) or growth not in rotary:
        raise CheckpointError(f"config.json: rope_parameters must be an object with {growth}")
    read_number(rotary, growth, 1)
    # transformers ignores this copy of `max_position_embeddings`.
    own = {k: v for k, v in rotary.items() if k not in (growth, "max_position_embeddings")}
    longest = original_length(config, rotary)
    # Queries beyond the original length grow with their positions, which the network cannot do.
    return {**_derive({**config, "rope_parameters": own}), "max_positions": longest}


MINISTRAL3 = replace(
    MISTRAL,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
    },
    derived=_ministral3,
    poolings=llama.POOLINGS,
)
