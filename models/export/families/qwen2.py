"""Qwen2: Llama with biases of queries, keys and values, and windows in the last layers.

Source: Yang et al. 2024, arXiv:2407.10671.
"""

from dataclasses import replace
from typing import Any

from models.export.families import llama
from models.export.families.family import Settings, read_count, read_flag
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.export.families.rotary_scaling import DECODER_TYPES
from models.network.config import AttentionConfig


def read_layers(config: Settings) -> dict[str, Any]:
    """Return the `EncoderConfig` fields of the heads and of each layer's attention.

    Raises:
        CheckpointError: A field of config.json is invalid or not supported.
    """
    count = config["num_hidden_layers"]
    heads = llama.read_heads(config)
    rotary = read_rotary(config, heads["head_width"], 10000.0, types=DECODER_TYPES)
    causal = llama.is_causal(config)
    kinds = {FULL: AttentionConfig(rotary=rotary, causal=causal)}
    types = [FULL] * count
    if read_flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        window = llama.read_window(config, causal)
        kinds[SLIDING] = AttentionConfig(rotary=rotary, window=window, causal=causal)
        first = config.get("max_window_layers")
        first = 0 if first == 0 else read_count(config, "max_window_layers", 28)
        types = [SLIDING if i >= first else FULL for i in range(count)]
    return {**heads, "attention": layers_of_types(config, kinds, types)}


QWEN2 = replace(
    llama.LLAMA,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    constants={**llama.CONSTANTS, "biases": frozenset({"in_proj"})},
    derived=read_layers,
    required={**llama.REQUIRED, "use_mrope": False},
)
