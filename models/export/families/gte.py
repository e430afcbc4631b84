"""GTE: BERT with rotary positions and gated feed-forward layers.

The `model_type` is "new" in Alibaba's configs, and "gte" in those of Snowflake and transformers.
Source: Zhang et al. 2024, arXiv:2407.19669.
"""

from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import Classifier, Family, Settings, TensorPart, tensors
from models.network.config import AttentionConfig


def _derive(config: Settings) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "new":
        positions = rotary.read_rotary(config, width, 10000.0, types=("default", "ntk"))
    else:
        positions = rotary.read_rotary(config, width, 160000.0)
    return {"attention": (AttentionConfig(rotary=positions),) * config["num_hidden_layers"]}


GTE = Family(
    config=bert.CONFIG,
    defaults={**bert.DEFAULTS, "type_vocab_size": 1},
    constants={
        "gated": True,
        "biases": frozenset({"in_proj", "out_proj", "linear2", "norms"}),
        "position_embeddings": False,
    },
    derived=_derive,
    required={
        "is_causal": False,
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    },
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{i}.self_attn.in_proj": "encoder.layer.{i}.attention.qkv_proj",
                "layers.{i}.self_attn.out_proj": "encoder.layer.{i}.attention.o_proj",
                "layers.{i}.norm1": "encoder.layer.{i}.attn_ln",
                "layers.{i}.gate": (TensorPart("encoder.layer.{i}.mlp.up_gate_proj", 1, 2),),
                "layers.{i}.linear1": (TensorPart("encoder.layer.{i}.mlp.up_gate_proj", 0, 2),),
                "layers.{i}.linear2": "encoder.layer.{i}.mlp.down_proj",
                "layers.{i}.norm2": "encoder.layer.{i}.mlp_ln",
            },
        ),
        rotary.TENSORS,
    ),
    classifier=Classifier(dense="pooler.dense"),
    token_classifier=Classifier(),
    prefixes=("new.", "gte."),
    ignored=(r"pooler\..*", r"lm_head\..*"),
    # gte-multilingual-base, without names of labels, also has a head for sparse vectors.
    ignored_heads={
        "NewForTokenClassification": (r"classifier\..*",),
        "GteForTokenClassification": (r"classifier\..*",),
    },
    code=("New", "Gte"),
)
