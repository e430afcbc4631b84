"""Gemma 3 text models such as EmbeddingGemma: Llama with additional norms and windows.

Queries, keys and the outputs of the sublayers have norms too. By default, five of six layers use
sliding-window attention. Attention is bidirectional if `use_bidirectional_attention` is true.
Source: Schechter Vera et al. 2025, arXiv:2509.20354 (EmbeddingGemma).
"""

import math
from typing import Any

from models.export.families import llama
from models.export.families.family import (
    Family,
    Settings,
    read_biases,
    read_count,
    read_flag,
    read_number,
    tensors,
)
from models.export.families.rotary import FULL, SLIDING, layers_of_types, read_rotary
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig


def _derive(config: Settings) -> dict[str, Any]:
    heads = llama.read_heads(config)
    width = heads["head_width"]
    causal = not read_flag(config, "use_bidirectional_attention")
    if config.get("sliding_window", 4096) is None:
        raise CheckpointError(
            "config.json: sliding_window has the invalid value None; it must be a positive integer"
        )
    # `sliding_window` counts the token itself. A bidirectional window is half as long on each side.
    size = read_count(config, "sliding_window", 4096)
    window = size - 1 if causal else size // 2
    full = read_rotary(config, width, 1e6, layer_type=FULL)
    sliding = read_rotary(
        {**config, "rope_scaling": None},
        width,
        1e4,
        name="rope_local_base_freq",
        layer_type=SLIDING,
    )
    kinds = {
        FULL: AttentionConfig(rotary=full, causal=causal),
        SLIDING: AttentionConfig(rotary=sliding, window=window, causal=causal),
    }
    period = read_count(config, "sliding_window_pattern", 6)
    types = [SLIDING if (i + 1) % period else FULL for i in range(config["num_hidden_layers"])]
    return {
        **heads,
        "attention": layers_of_types(config, kinds, types),
        "biases": read_biases(config, llama.ATTENTION_BIAS),
        "query_scale": math.sqrt(width / read_number(config, "query_pre_attn_scalar", 256)),
    }


GEMMA3 = Family(
    config={**llama.CONFIG, "activation": "hidden_activation"},
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    constants={**llama.CONSTANTS, "qk_norm": "head", "branch_norms": True},
    derived=_derive,
    required={**llama.REQUIRED, "is_causal": True},
    layouts=(
        tensors(
            weights=llama.WEIGHTS,
            modules={
                **llama.MODULES,
                "layers.{i}.branch_norm1": "layers.{i}.post_attention_layernorm",
                "layers.{i}.norm2": "layers.{i}.pre_feedforward_layernorm",
                "layers.{i}.branch_norm2": "layers.{i}.post_feedforward_layernorm",
            },
        ),
    ),
    # Checkpoints store norm weights minus 1, and embeddings before scaling by sqrt(d_model). Scores
    # are divided by the root of `query_pre_attn_scalar`, and in the network by that of the width.
    values={
        r".*\.q_norm\.weight": lambda weight, config: (1.0 + weight) * config.query_scale,
        r".*norm\d?\.weight": lambda weight, _: 1.0 + weight,
        r"embeddings\.word\.weight": lambda weight, config: weight * math.sqrt(config.d_model),
    },
    prefixes=llama.LLAMA.prefixes,
    ignored=llama.LLAMA.ignored,
)
