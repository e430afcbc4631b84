"""Qwen3: Qwen2 with norms of queries and keys, and other biases; and its bidirectional variants.

Source: Zhang et al. 2025, arXiv:2506.05176 (Qwen3-Embedding).
"""

from dataclasses import replace
from typing import Any

from models.export.families import llama, qwen2
from models.export.families.family import Family, Settings, read_biases


def _derive(config: Settings) -> dict[str, Any]:
    biases = read_biases(config, llama.ATTENTION_BIAS)
    return {**qwen2.read_layers(config), "biases": biases}


QWEN3 = Family(
    config=llama.CONFIG,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
    },
    constants={**llama.CONSTANTS, "qk_norm": "head"},
    derived=_derive,
    required=llama.REQUIRED,
    layouts=(llama.TENSORS,),
    prefixes=llama.PREFIXES,
    ignored=llama.IGNORED,
    causal_head=llama.CAUSAL_HEAD,
    classifier=llama.CLASSIFIER,
    token_classifier=llama.TOKEN_CLASSIFIER,
)

# Perplexity's pplx-embed and Voyage's voyage-4-nano.
PPLX = llama.bidirectional(QWEN3, "PPLXQwen3")
VOYAGE = replace(llama.bidirectional(QWEN3, "VoyageQwen3Bidirectional"), projection="linear")
