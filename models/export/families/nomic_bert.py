"""NomicBERT: BERT with rotary positions. Its feed-forward layers have gates, or some have experts.

Configs in Nomic's hub repositories have GPT-2's field names; those of transformers have BERT's.
Sources: Nussbaum et al. 2024, arXiv:2402.01613; Nussbaum and Duderstadt 2025, arXiv:2502.07972.
"""

from dataclasses import replace
from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import (
    Classifier,
    Family,
    Modules,
    Settings,
    read_biases,
    read_count,
    read_number,
    tensors,
)
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig
from models.network.experts import ExpertsConfig

# Names in Nomic's configs and in those of transformers.
_SIZES = (
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
)
# Bias of each field in Nomic's configs. The other configs have none of them.
_BIASES = {
    "qkv_proj_bias": ("in_proj", "out_proj"),
    "mlp_fc1_bias": ("linear1",),
    "mlp_fc2_bias": ("linear2",),
}
# `EncoderConfig` fields of each activation in Nomic's configs; None: as in those of transformers.
_ACTIVATIONS: dict[str | None, dict[str, Any]] = {
    None: {"gated": True},
    "swiglu": {"gated": True},
    "gelu": {"gated": False, "activation": "gelu"},
}
# Upper limit of the number of experts, each of which adds nodes to a graph.
_MAX_EXPERTS = 256


def _derive(config: Settings) -> dict[str, Any]:
    hidden, heads, count = (
        config[native] if config.get(own) is None else config[own] for own, native in _SIZES
    )
    if config.get("n_embd") is None:
        base, changes = ("rope_theta", 1000.0), {}
    else:  # Nomic's configs have other defaults
        base = ("rotary_emb_base", 10000.0)
        changes = {"norm_eps": read_number(config, "layer_norm_epsilon", 1e-5)}
    width = hidden // heads
    if config.get("head_dim") not in (width, None):
        raise CheckpointError(
            f"config.json: head_dim is {config['head_dim']!r}; only {width}, the width of the "
            "model divided by the number of heads, is supported"
        )
    positions = rotary.read_rotary(config, width, base[1], name=base[0])
    activation = config.get("activation_function")
    if not isinstance(activation, str | None) or activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: activation_function is {activation!r}; supported: swiglu, gelu"
        )
    own = config.get("hidden_act")
    if activation == "swiglu" and own not in ("silu", None):
        raise CheckpointError(
            f"config.json: hidden_act is {own!r}, which Nomic's code ignores and transformers "
            "follows; with activation_function 'swiglu', only 'silu' is supported"
        )
    return {
        "attention": (AttentionConfig(rotary=positions),) * count,
        "biases": read_biases(config, _BIASES) | {"norms"},
        "experts": _read_experts(config),
        **_ACTIVATIONS[activation],
        **changes,
    }


def _read_experts(config: Settings) -> ExpertsConfig | None:
    if not config.get("moe_every_n_layers") and not config.get("num_experts"):
        return None
    if config.get("activation_function") != "gelu":
        raise CheckpointError(
            f"config.json: num_experts is {config.get('num_experts')!r} with activation_function "
            f"{config.get('activation_function')!r}; experts are supported with 'gelu' only"
        )
    names = "num_experts", "moe_top_k", "moe_every_n_layers"
    if missing := [name for name in names if config.get(name) is None]:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    count = read_count(config, "num_experts", 1, _MAX_EXPERTS)
    every = read_count(config, "moe_every_n_layers", 1)
    if every == 1:  # Nomic's rule, index % every == 1, then selects no layer
        raise CheckpointError("config.json: moe_every_n_layers is 1; it must be at least 2")
    return ExpertsConfig(count, read_count(config, "moe_top_k", 1, count), every)


_MODULES: Modules = {
    "embeddings.norm": "emb_ln",
    "layers.{i}.self_attn.in_proj": "encoder.layers.{i}.attn.Wqkv",
    "layers.{i}.self_attn.out_proj": "encoder.layers.{i}.attn.out_proj",
    "layers.{i}.norm1": "encoder.layers.{i}.norm1",
    "layers.{i}.gate": "encoder.layers.{i}.mlp.fc12",
    "layers.{i}.linear1": "encoder.layers.{i}.mlp.fc11",
    "layers.{i}.linear2": "encoder.layers.{i}.mlp.fc2",
    "layers.{i}.norm2": "encoder.layers.{i}.norm2",
}
_EXPERTS = {
    "layers.{i}.experts.router.weight": "encoder.layers.{i}.mlp.router.layer.weight",
    "layers.{i}.experts.w1": "encoder.layers.{i}.mlp.experts.mlp.w1",
    "layers.{i}.experts.w2": "encoder.layers.{i}.mlp.experts.mlp.w2",
    "layers.{i}.experts.bias": "encoder.layers.{i}.mlp.experts.bias",
}

NOMIC_BERT = Family(
    config={
        "vocab_size": "vocab_size",
        "d_model": ("n_embd", "hidden_size"),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_heads": ("n_head", "num_attention_heads"),
        "dim_feedforward": ("n_inner", "intermediate_size"),
        "max_positions": ("n_positions", "max_position_embeddings"),
        "type_vocab_size": "type_vocab_size",
        "dropout": "hidden_dropout_prob",
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
    },
    defaults={**bert.DEFAULTS, "hidden_act": "silu"},
    constants={
        "position_embeddings": False,
    },
    derived=_derive,
    required={
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "is_causal": False,
        "use_rms_norm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "moe_normalize_expert_weights": False,
        "expert_choice_router": False,
        "num_shared_experts": 0,
        "ffn_div": 1,
    },
    layouts=(
        tensors(weights=rotary.EMBEDDINGS, modules=_MODULES),
        tensors(
            weights=rotary.EMBEDDINGS | _EXPERTS,
            modules={**_MODULES, "layers.{i}.linear1": "encoder.layers.{i}.mlp.fc1"},
        ),
        rotary.TENSORS,
    ),
    classifier=Classifier(dense="pooler.dense"),
    token_classifier=Classifier(),
    masked_lm=replace(bert.MASKED_LM, norm="cls.predictions.transform.layer_norm"),
    prefixes=("nomic_bert.", "bert."),
    ignored=(r"pooler\..*", r"cls\..*"),
    code=("NomicBert",),
)
