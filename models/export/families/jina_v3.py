"""Jina v3: XLM-RoBERTa with rotary positions, in the files of transformers.

Task adapters are not supported yet; files with them have other tensors, and are refused.
Source: Sturua et al. 2024, arXiv:2409.10173.
"""

from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import Family, Settings, tensors
from models.network.config import AttentionConfig


def _derived(config: Settings) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    attention = AttentionConfig(rotary=rotary.read_rotary(config, width, 20000.0))
    return {"attention": (attention,) * config["num_hidden_layers"]}


_FEED_FORWARD = {
    "layers.{i}.linear1": "layers.{i}.mlp.fc1",
    "layers.{i}.linear2": "layers.{i}.mlp.fc2",
}

JINA_V3 = Family(
    config=bert.CONFIG,
    defaults={**bert.DEFAULTS, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    constants={"position_embeddings": False},
    derived=_derived,
    required={"is_decoder": False, "add_cross_attention": False},
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={
                "embeddings.norm": "emb_ln",
                "layers.{i}.self_attn.in_proj": "encoder.layers.{i}.mixer.Wqkv",
                "layers.{i}.self_attn.out_proj": "encoder.layers.{i}.mixer.out_proj",
                "layers.{i}.norm1": "encoder.layers.{i}.norm1",
                "layers.{i}.linear1": "encoder.layers.{i}.mlp.fc1",
                "layers.{i}.linear2": "encoder.layers.{i}.mlp.fc2",
                "layers.{i}.norm2": "encoder.layers.{i}.norm2",
            },
        ),
        tensors(weights=rotary.EMBEDDINGS, modules={**rotary.MODULES, **_FEED_FORWARD}),
    ),
    prefixes=("roberta.",),
    ignored=(r"pooler\..*", r"lm_head\..*"),
)
