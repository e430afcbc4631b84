"""DeBERTa v2 and v3: BERT with disentangled attention.

Sources: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543 (v3).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.export.families import bert
from models.export.families.family import Classifier, Family, Settings, read_flag, tensors
from models.export.model_folder import CheckpointError
from models.network.config import EncoderConfig
from models.network.disentangled import TERMS, DistanceConfig

_SELF = "encoder.layer.{i}.attention.self"


def _derive(config: Settings) -> dict[str, Any]:
    if config.get("embedding_size", config["hidden_size"]) != config["hidden_size"]:
        raise CheckpointError("config.json: embedding_size must be equal to hidden_size")
    return {
        "position_embeddings": read_flag(config, "position_biased_input"),
        "distances": _read_distances(config),
    }


def _read_distances(config: Settings) -> DistanceConfig | None:
    """Return the hyperparameters of disentangled attention; None if there is none."""
    terms = _read_terms(config)
    if read_flag(config, "relative_attention") != bool(terms):
        raise CheckpointError(
            "config.json: relative_attention must be true with pos_att_type, and false without it"
        )
    if not terms:
        return None
    longest = _read_size(config, "max_relative_positions") or config["max_position_embeddings"]
    buckets = _read_size(config, "position_buckets")
    if buckets and not 2 <= buckets <= 2 * longest - 4:
        raise CheckpointError(
            f"config.json: position_buckets has the invalid value {buckets}; it must be 0, or from "
            "2 to 2 * max_relative_positions - 4"
        )
    norms = str(config.get("norm_rel_ebd", "none")).lower().split("|")
    return DistanceConfig(
        span=buckets or longest,
        max_distance=longest if buckets else 0,
        terms=terms,
        shared=read_flag(config, "share_att_key"),
        norm="layer_norm" in [name.strip() for name in norms],
    )


def _read_terms(config: Settings) -> frozenset[str]:
    value = config.get("pos_att_type") or []
    names = value.lower().split("|") if isinstance(value, str) else value
    names = names if isinstance(names, list) else [names]
    terms = {name.strip() if isinstance(name, str) else "" for name in names}
    if not terms <= TERMS:
        raise CheckpointError(
            f"config.json: pos_att_type is {value!r}; supported: {', '.join(sorted(TERMS))}"
        )
    return frozenset(terms)


def _read_size(config: Settings, name: str) -> int:
    """Return an integer field of config.json; 0 if it is absent or negative, as in transformers."""
    value = config.get(name, -1)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {name} has the invalid value {value!r}; it must be an integer"
        )
    return max(value, 0)


def _scale(query: Tensor, config: EncoderConfig) -> Tensor:
    """Return the weight or bias of queries divided by sqrt(N), with N terms of attention scores.

    DeBERTa divides the scores by sqrt(N K), with K the width of a head. The network divides them by
    sqrt(K) only.
    """
    terms = config.distances.terms if config.distances else ()
    return query * (1 + len(terms)) ** -0.5


def _with_scaled_query(projections: Tensor, config: EncoderConfig) -> Tensor:
    query, others = projections.tensor_split([config.heads.widths[0]])
    return torch.cat([_scale(query, config), others])


DEBERTA = Family(
    config=bert.CONFIG,
    defaults={
        **bert.DEFAULTS,
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "position_biased_input": True,
    },
    derived=_derive,
    required={"conv_kernel_size": 0},
    layouts=(
        tensors(
            weights={
                **bert.EMBEDDINGS,
                "distance_embeddings.weight": "encoder.rel_embeddings.weight",
            },
            modules={
                **bert.MODULES,
                "distance_embeddings.norm": "encoder.LayerNorm",
                "layers.{i}.self_attn.in_proj": (
                    f"{_SELF}.query_proj",
                    f"{_SELF}.key_proj",
                    f"{_SELF}.value_proj",
                ),
                "layers.{i}.self_attn.distance_queries": f"{_SELF}.pos_query_proj",
                "layers.{i}.self_attn.distance_keys": f"{_SELF}.pos_key_proj",
            },
        ),
    ),
    values={
        r"layers\.\d+\.self_attn\.in_proj_(weight|bias)": _with_scaled_query,
        r"layers\.\d+\.self_attn\.distance_queries\.(weight|bias)": _scale,
    },
    classifier=Classifier(
        dense="pooler.dense", activation="GELU", required={"pooler_hidden_act": "gelu"}
    ),
    token_classifier=Classifier(),
    masked_lm=replace(bert.MASKED_LM, required={"legacy": True}),
    prefixes=("deberta.",),
    ignored=(
        r"embeddings\.position_(ids|embeddings\.weight)",
        r"encoder\.LayerNorm\..*",  # also present without disentangled attention
        r"pooler\..*",
        r"(lm_predictions|mask_predictions|cls)\..*",
    ),
)
