"""Qwen3: Llama with norms of queries and keys. Attention is causal.

Source: Zhang et al. 2025, arXiv:2506.05176 (Qwen3-Embedding).
"""

from typing import Any

from models.export.families import llama
from models.export.families.family import (
    Classifier,
    Family,
    Settings,
    read_biases,
    read_count,
    read_flag,
)
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.network.config import AttentionConfig


def _derived(config: Settings) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    heads = llama.read_heads(config)
    rotary = read_rotary(config, heads["head_width"], 10000.0)
    kinds = {FULL: AttentionConfig(rotary=rotary, causal=True)}
    types = [FULL] * count
    if read_flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None:
        # `sliding_window` counts the token itself.
        window = read_count(config, "sliding_window", 4096) - 1
        kinds[SLIDING] = AttentionConfig(rotary=rotary, window=window, causal=True)
        first = config.get("max_window_layers")
        first = 0 if first == 0 else read_count(config, "max_window_layers", 28)
        types = [SLIDING if i >= first else FULL for i in range(count)]
    return {
        **heads,
        "attention": layers_of_types(config, kinds, types),
        "biases": read_biases(config, {"attention_bias": ("attention",)}),
    }


QWEN3 = Family(
    config=llama.CONFIG,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
    },
    constants={**llama.CONSTANTS, "qk_norm": "head"},
    derived=_derived,
    required=llama.REQUIRED,
    layouts=(llama.TENSORS,),
    token_classifier=Classifier(out="score", required={"token_classification_bias": True}),
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    classifier=Classifier(
        out="score", out_bias=False, poolings={"last": "last"}, skips_padding_ids=True
    ),
)
