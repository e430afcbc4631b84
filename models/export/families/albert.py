"""ALBERT: BERT with narrower embeddings, and layers that share parameters.

Source: Lan et al. 2019, arXiv:1909.11942.
"""

from models.export.families import bert
from models.export.families.family import Classifier, Family, MaskedLM, tensors

_GROUP = "encoder.albert_layer_groups.{i}.albert_layers.0"

ALBERT = Family(
    config={
        **bert.CONFIG,
        "embedding_width": "embedding_size",
        "distinct_layers": "num_hidden_groups",
    },
    defaults={
        **bert.DEFAULTS,
        "hidden_act": "gelu_new",
        "embedding_size": 128,
        "num_hidden_groups": 1,
    },
    required={**bert.REQUIRED, "inner_group_num": 1},
    layouts=(
        tensors(
            weights=bert.EMBEDDINGS,
            modules={
                "embeddings.norm": "embeddings.LayerNorm",
                "embeddings.projection": "encoder.embedding_hidden_mapping_in",
                "layers.{i}.self_attn.in_proj": (
                    f"{_GROUP}.attention.query",
                    f"{_GROUP}.attention.key",
                    f"{_GROUP}.attention.value",
                ),
                "layers.{i}.self_attn.out_proj": f"{_GROUP}.attention.dense",
                "layers.{i}.norm1": f"{_GROUP}.attention.LayerNorm",
                "layers.{i}.linear1": f"{_GROUP}.ffn",
                "layers.{i}.linear2": f"{_GROUP}.ffn_output",
                "layers.{i}.norm2": f"{_GROUP}.full_layer_layer_norm",
            },
        ),
    ),
    classifier=Classifier(dense="pooler"),
    token_classifier=Classifier(),
    masked_lm=MaskedLM(
        dense="predictions.dense",
        norm="predictions.LayerNorm",
        decoder="predictions.decoder",
        decoder_bias="predictions.bias",
    ),
    prefixes=("albert.",),
    ignored=(
        r"embeddings\.position_ids",
        r"pooler\..*",
        r"predictions\..*",
        r"sop_classifier\..*",
    ),
)
