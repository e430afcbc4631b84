"""Hugging Face model families: their config fields and tensor names, and ours. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# One of their tensors, or several that are stacked along the first axis.
Names = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one `model_type` is read.

    Attributes:
        config: Field of `EncoderConfig` -> field of their config.json.
        defaults: Value of a field of theirs where config.json leaves it out.
        constants: Fields of `EncoderConfig` that their code fixes.
        required: Fields of theirs that must have this value, if they are there at all.
        tensors: Our tensor -> theirs; `{i}` is the number of a layer.
        prefixes: What stands before every name in a checkpoint saved with a task head.
        ignored: Patterns of tensors that a sentence encoder does not use.
    """

    config: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Names]
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _linear(ours: str, *theirs: str) -> dict[str, Names]:
    """A weight and a bias; several of theirs are stacked into ours."""
    return {
        f"{ours}.{part}": tuple(f"{name}.{part}" for name in theirs) for part in ("weight", "bias")
    }


def _attention(*projections: str) -> dict[str, Names]:
    """Query, key and value, stacked under torch's name for the three."""
    return {
        f"layers.{{i}}.self_attn.in_proj_{part}": tuple(f"{name}.{part}" for name in projections)
        for part in ("weight", "bias")
    }


_BERT_CONFIG = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dim_feedforward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "activation": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
}

_BERT_DEFAULTS = {"hidden_dropout_prob": 0.1, "hidden_act": "gelu", "layer_norm_eps": 1e-12}

_BERT_TENSORS: dict[str, Names] = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
    **_linear("embeddings.norm", "embeddings.LayerNorm"),
    **_attention(
        *(f"encoder.layer.{{i}}.attention.self.{name}" for name in ("query", "key", "value"))
    ),
    **_linear("layers.{i}.self_attn.out_proj", "encoder.layer.{i}.attention.output.dense"),
    **_linear("layers.{i}.norm1", "encoder.layer.{i}.attention.output.LayerNorm"),
    **_linear("layers.{i}.linear1", "encoder.layer.{i}.intermediate.dense"),
    **_linear("layers.{i}.linear2", "encoder.layer.{i}.output.dense"),
    **_linear("layers.{i}.norm2", "encoder.layer.{i}.output.LayerNorm"),
}

_PLAIN = {"is_decoder": False, "add_cross_attention": False, "pruned_heads": {}}

_BERT = Family(
    config=_BERT_CONFIG,
    defaults={**_BERT_DEFAULTS, "type_vocab_size": 2},
    required={**_PLAIN, "position_embedding_type": "absolute"},
    tensors=_BERT_TENSORS,
    prefixes=("bert.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"cls\..*"),
)

_ROBERTA = Family(
    config={**_BERT_CONFIG, "position_padding_id": "pad_token_id"},
    defaults={**_BERT_DEFAULTS, "type_vocab_size": 2, "pad_token_id": 1},
    required={**_PLAIN, "position_embedding_type": "absolute"},
    tensors=_BERT_TENSORS,
    prefixes=("roberta.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\..*"),
)

_DISTILBERT = Family(
    config={
        "vocab_size": "vocab_size",
        "d_model": "dim",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "dim_feedforward": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "dropout": "dropout",
        "activation": "activation",
    },
    defaults={"dropout": 0.1, "activation": "gelu"},
    constants={"layer_norm_eps": 1e-12},
    required={"pruned_heads": {}},
    tensors={
        "embeddings.word.weight": "embeddings.word_embeddings.weight",
        "embeddings.position.weight": "embeddings.position_embeddings.weight",
        **_linear("embeddings.norm", "embeddings.LayerNorm"),
        **_attention(*(f"transformer.layer.{{i}}.attention.{name}_lin" for name in "qkv")),
        **_linear("layers.{i}.self_attn.out_proj", "transformer.layer.{i}.attention.out_lin"),
        **_linear("layers.{i}.norm1", "transformer.layer.{i}.sa_layer_norm"),
        **_linear("layers.{i}.linear1", "transformer.layer.{i}.ffn.lin1"),
        **_linear("layers.{i}.linear2", "transformer.layer.{i}.ffn.lin2"),
        **_linear("layers.{i}.norm2", "transformer.layer.{i}.output_layer_norm"),
    },
    prefixes=("distilbert.",),
    ignored=(r"embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*"),
)

_MPNET = Family(
    config={
        **{ours: theirs for ours, theirs in _BERT_CONFIG.items() if ours != "type_vocab_size"},
        "relative_buckets": "relative_attention_num_buckets",
    },
    defaults={**_BERT_DEFAULTS, "relative_attention_num_buckets": 32},
    # Their embeddings count from this id whatever pad_token_id says.
    constants={"position_padding_id": 1},
    # Their code buckets by 32 whatever the config says.
    required={"relative_attention_num_buckets": 32},
    tensors={
        "embeddings.word.weight": "embeddings.word_embeddings.weight",
        "embeddings.position.weight": "embeddings.position_embeddings.weight",
        **_linear("embeddings.norm", "embeddings.LayerNorm"),
        "relative_bias.weight": "encoder.relative_attention_bias.weight",
        **_attention(*(f"encoder.layer.{{i}}.attention.attn.{name}" for name in "qkv")),
        **_linear("layers.{i}.self_attn.out_proj", "encoder.layer.{i}.attention.attn.o"),
        **_linear("layers.{i}.norm1", "encoder.layer.{i}.attention.LayerNorm"),
        **_linear("layers.{i}.linear1", "encoder.layer.{i}.intermediate.dense"),
        **_linear("layers.{i}.linear2", "encoder.layer.{i}.output.dense"),
        **_linear("layers.{i}.norm2", "encoder.layer.{i}.output.LayerNorm"),
    },
    prefixes=("mpnet.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\..*"),
)

FAMILIES: Mapping[str, Family] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
    "mpnet": _MPNET,
}
