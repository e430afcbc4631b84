"""Jina v3: XLM-RoBERTa with rotary positions and task adapters.

Checkpoints with adapters store each adapted weight W as a PyTorch parametrization: W itself, and
its low-rank matrices A and B, stacked over the tasks. The update of W is proportional to B A in
linear layers, and to A B in embeddings.
Source: Sturua et al. 2024, arXiv:2409.10173.
"""

from dataclasses import replace
from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import (
    Classifier,
    Family,
    Modules,
    Settings,
    TensorPart,
    Tensors,
    read_count,
    read_flag,
    read_number,
    tensors,
)
from models.export.model_folder import CheckpointError
from models.network.adapters import AdapterConfig
from models.network.config import AttentionConfig

# Prefix of the paths of Jina's classes in `auto_map`.
CODE = "jinaai/xlm-roberta-flash-implementation--"
_BASE = "rotary_emb_base"
_PARAMETRIZATION = "parametrizations.weight"
_MODULES: Modules = {
    "embeddings.norm": "emb_ln",
    "layers.{i}.self_attn.in_proj": "encoder.layers.{i}.mixer.Wqkv",
    "layers.{i}.self_attn.out_proj": "encoder.layers.{i}.mixer.out_proj",
    "layers.{i}.norm1": "encoder.layers.{i}.norm1",
    "layers.{i}.linear1": "encoder.layers.{i}.mlp.fc1",
    "layers.{i}.linear2": "encoder.layers.{i}.mlp.fc2",
    "layers.{i}.norm2": "encoder.layers.{i}.norm2",
}
# Adapted checkpoint module of each adapter module of the encoder.
_ADAPTED = {
    "embeddings.word.adapters": "embeddings.word_embeddings",
    "embeddings.token_type.adapters": "embeddings.token_type_embeddings",
    "layers.{i}.self_attn.in_proj_adapters": "encoder.layers.{i}.mixer.Wqkv",
    "layers.{i}.self_attn.out_proj.adapters": "encoder.layers.{i}.mixer.out_proj",
    "layers.{i}.linear1.adapters": "encoder.layers.{i}.mlp.fc1",
    "layers.{i}.linear2.adapters": "encoder.layers.{i}.mlp.fc2",
}
_FEED_FORWARD = {
    "layers.{i}.linear1": "layers.{i}.mlp.fc1",
    "layers.{i}.linear2": "layers.{i}.mlp.fc2",
}


def _derive(config: Settings) -> dict[str, Any]:
    width = config["hidden_size"] // config["num_attention_heads"]
    if config.get("rotary_emb_dim") not in (width, None):
        raise CheckpointError(
            f"config.json: rotary_emb_dim is {config['rotary_emb_dim']!r}; only the width of a "
            f"head, {width}, is supported"
        )
    if config.get("auto_map") and config.get(_BASE) is None:
        raise CheckpointError(f"config.json lacks {_BASE}")
    name = _BASE if config.get(_BASE) is not None else "rope_theta"
    rotation = rotary.read_rotary(config, width, 20000.0, name=name)
    return {
        "attention": (AttentionConfig(rotary=rotation),) * config["num_hidden_layers"],
        "adapters": _read_adapters(config),
    }


def _read_adapters(config: Settings) -> AdapterConfig | None:
    if not read_flag(config, "load_trained_adapters"):
        return None
    names = config.get("lora_adaptations")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CheckpointError(
            f"config.json: lora_adaptations has the invalid value {names!r}; it must be a "
            "non-empty list of strings"
        )
    rank = read_count(config, "lora_rank", 4)
    return AdapterConfig(tuple(names), rank, read_number(config, "lora_alpha", 1) / rank)


def _with_adapters(layout: Tensors) -> Tensors:
    """Return a layout with the tensor names of a checkpoint with adapters."""
    originals = {
        f"{module}.weight": f"{module}.{_PARAMETRIZATION}.original" for module in _ADAPTED.values()
    }
    updates = {
        f"{module}.{ours}": (TensorPart(f"{source}.{_PARAMETRIZATION}.0.lora_{theirs}"),)
        for module, source in _ADAPTED.items()
        for ours, theirs in (("down", "A"), ("up", "B"))
    }
    renamed = {
        key: tuple(replace(part, name=originals.get(part.name, part.name)) for part in parts)
        for key, parts in layout.items()
    }
    return {**renamed, **updates}


_PLAIN = tensors(weights=rotary.EMBEDDINGS, modules=_MODULES)

JINA_V3 = Family(
    config=bert.CONFIG,
    defaults={**bert.DEFAULTS, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    constants={"position_embeddings": False},
    derived=_derive,
    required={
        "is_causal": False,
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "rotary",
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
    },
    layouts=(
        _with_adapters(_PLAIN),
        _PLAIN,
        tensors(weights=rotary.EMBEDDINGS, modules={**rotary.MODULES, **_FEED_FORWARD}),
    ),
    classifier=Classifier(dense="classifier.dense", out="classifier.out_proj"),
    token_classifier=Classifier(),
    prefixes=("roberta.",),
    ignored=(r"pooler\..*", r"lm_head\..*"),
    code=("XLMRoberta",),
)
