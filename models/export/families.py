"""Hugging Face model families: config fields and tensor names of each `model_type`. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Name of a checkpoint tensor, or names of several to concatenate along the first axis.
Names = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Mapping from checkpoints of one `model_type` to `Encoder`.

    Attributes:
        config: Name in config.json of each field of `EncoderConfig`.
        defaults: Default values of optional fields of config.json.
        constants: Values of `EncoderConfig` fields that transformers hard-codes.
        required: Fields of config.json for which only this one value is supported.
        tensors: Names of the checkpoint tensors for each key of the encoder's state dict; `{i}`
            stands for the index of a layer.
        prefixes: Prefixes that all tensor names may have, in checkpoints with a task head.
        ignored: Regular expressions for the names of tensors that a sentence encoder does not use.
    """

    config: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Names]
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _linear(module: str, *sources: str) -> dict[str, Names]:
    """Map weight and bias of `module` to those of `sources`, concatenated along the first axis."""
    return {
        f"{module}.{part}": tuple(f"{name}.{part}" for name in sources)
        for part in ("weight", "bias")
    }


def _attention(*projections: str) -> dict[str, Names]:
    """Map torch's in_proj weight and bias to those of the query, key and value projections."""
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
        **{field: key for field, key in _BERT_CONFIG.items() if field != "type_vocab_size"},
        "relative_buckets": "relative_attention_num_buckets",
    },
    defaults={**_BERT_DEFAULTS, "relative_attention_num_buckets": 32},
    # transformers hard-codes the padding id 1 for position ids, regardless of pad_token_id.
    constants={"position_padding_id": 1},
    # transformers uses 32 buckets, regardless of the config.
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
