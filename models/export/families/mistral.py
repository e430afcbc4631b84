"""Mistral: Llama without biases, and with windows in all layers.

Source: Jiang et al. 2023, arXiv:2310.06825.
"""

from typing import Any

from models.export.families import llama
from models.export.families.family import Family, Settings
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.network.config import AttentionConfig


def _derived(config: Settings) -> dict[str, Any]:
    heads = llama.read_heads(config)
    causal = llama.is_causal(config)
    has_windows = config.get("sliding_window", 4096) is not None
    attention = AttentionConfig(
        rotary=read_rotary(config, heads["head_width"], 10000.0),
        window=llama.read_window(config, causal) if has_windows else None,
        causal=causal,
    )
    # transformers ignores `layer_types` here: all layers are of one type.
    kind = SLIDING if has_windows else FULL
    types = [kind] * config["num_hidden_layers"]
    return {**heads, "attention": layers_of_types(config, {kind: attention}, types)}


MISTRAL = Family(
    config=llama.CONFIG,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
    },
    constants={**llama.CONSTANTS, "biases": frozenset()},
    derived=_derived,
    required=llama.REQUIRED,
    layouts=(llama.TENSORS,),
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    causal_head=llama.CAUSAL_HEAD,
    classifier=llama.CLASSIFIER,
    token_classifier=llama.TOKEN_CLASSIFIER,
)
