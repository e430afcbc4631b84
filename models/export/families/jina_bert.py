"""JinaBERT v2 and its code variant: BERT with gated feed-forward layers, and ALiBi positions.

Both have the `model_type` "bert" and are recognised by `auto_map`. The code variant also normalises
queries and keys, and adds the attention's residual twice, each time followed by a norm.
Sources: Günther et al. 2023, arXiv:2310.19923; Press et al. 2021, arXiv:2108.12409 (ALiBi).
"""

from dataclasses import replace
from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import Family, Settings, TensorPart, tensors
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig

_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


def _derive(config: Settings) -> dict[str, Any]:
    kind = config.get("feed_forward_type")
    if not isinstance(kind, str) or kind not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: feed_forward_type is {kind!r}; supported: {', '.join(_ACTIVATIONS)}"
        )
    return {
        "activation": _ACTIVATIONS[kind],
        "attention": (AttentionConfig(alibi=True),) * config["num_hidden_layers"],
    }


JINA_BERT = Family(
    config=bert.CONFIG,
    defaults=bert.DEFAULTS,
    constants={
        "gated": True,
        "biases": frozenset({"in_proj", "out_proj", "linear2", "norms"}),
        "position_embeddings": False,
    },
    derived=_derive,
    required={**bert.REQUIRED, "position_embedding_type": "alibi"},
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={
                **bert.MODULES,
                "layers.{i}.gate": (TensorPart("encoder.layer.{i}.mlp.gated_layers", 0, 2),),
                "layers.{i}.linear1": (TensorPart("encoder.layer.{i}.mlp.gated_layers", 1, 2),),
                "layers.{i}.linear2": "encoder.layer.{i}.mlp.wo",
                "layers.{i}.norm2": "encoder.layer.{i}.mlp.layernorm",
            },
        ),
    ),
    prefixes=bert.BERT.prefixes,
    ignored=bert.BERT.ignored,
    code=("JinaBert",),
)

JINA_BERT_CODE = replace(
    JINA_BERT,
    constants={**JINA_BERT.constants, "qk_norm": "all", "branch_norms": True},
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={
                **bert.MODULES,
                "layers.{i}.self_attn.q_norm": "encoder.layer.{i}.attention.self.layer_norm_q",
                "layers.{i}.self_attn.k_norm": "encoder.layer.{i}.attention.self.layer_norm_k",
                "layers.{i}.branch_norm1": "encoder.layer.{i}.attention.output.LayerNorm",
                "layers.{i}.norm1": "encoder.layer.{i}.layer_norm_1",
                "layers.{i}.linear1": (TensorPart("encoder.layer.{i}.mlp.up_gated_layer", 0, 2),),
                "layers.{i}.gate": (TensorPart("encoder.layer.{i}.mlp.up_gated_layer", 1, 2),),
                "layers.{i}.linear2": "encoder.layer.{i}.mlp.down_layer",
                "layers.{i}.norm2": "encoder.layer.{i}.layer_norm_2",
            },
        ),
    ),
)
