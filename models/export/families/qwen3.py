"""Qwen3: Qwen2 with norms of queries and keys, and other biases; and its bidirectional variants.

Source: Zhang et al. 2025, arXiv:2506.05176 (Qwen3-Embedding).
"""

from dataclasses import replace
from typing import Any

from models.export.families import llama, qwen2
from models.export.families.family import Settings, read_biases


def _derive(config: Settings) -> dict[str, Any]:
    biases = read_biases(config, llama.ATTENTION_BIAS)
    return {**qwen2.read_layers(config), "biases": biases}


QWEN3 = replace(
    qwen2.QWEN2,
    defaults={**qwen2.QWEN2.defaults, "head_dim": 128},
    constants={**llama.CONSTANTS, "qk_norm": "head"},
    derived=_derive,
    required=llama.REQUIRED,
)

# Perplexity's pplx-embed and Voyage's voyage-4-nano.
PPLX = llama.bidirectional(QWEN3, "PPLXQwen3")
VOYAGE = replace(llama.bidirectional(QWEN3, "VoyageQwen3Bidirectional"), projection="linear")
