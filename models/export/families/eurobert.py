"""EuroBERT: Llama with bidirectional attention.

Source: Boizard et al. 2025, arXiv:2503.05500.
"""

from dataclasses import replace
from typing import Any

from models.export.families import llama
from models.export.families.family import Classifier, Settings, read_biases
from models.export.families.rotary import read_rotary
from models.network.config import AttentionConfig


def _derive(config: Settings) -> dict[str, Any]:
    heads = llama.read_heads(config)
    rotary = read_rotary(config, heads["head_width"], 10000.0)
    return {
        **heads,
        "attention": (AttentionConfig(rotary=rotary),) * config["num_hidden_layers"],
        "biases": read_biases(config, llama.BIASES),
    }


EUROBERT = replace(
    llama.LLAMA,
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    derived=_derive,
    required={**llama.REQUIRED, "is_causal": False},
    causal_head="",
    token_classifier=Classifier(),
    classifier=Classifier(
        dense="dense",
        activation="GELU",
        poolings={"late": "late", "bos": "cls", "mean": "mean"},
        pooling_field="classifier_pooling",
    ),
    code=("EuroBert",),
)
