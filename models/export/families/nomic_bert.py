"""NomicBERT: BERT with rotary positions and gated feed-forward layers. Only norms have biases.

Configs in Nomic's hub repositories have GPT-2's field names; those of transformers have BERT's.
Source: Nussbaum et al. 2024, arXiv:2402.01613.
"""

from dataclasses import replace
from typing import Any

from models.export.families import bert, rotary
from models.export.families.family import Classifier, Family, Settings, read_number, tensors
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig

# Names in Nomic's configs and in those of transformers.
_SIZES = (
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
)


def _derived(config: Settings) -> dict[str, Any]:
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
    return {"attention": (AttentionConfig(rotary=positions),) * count, **changes}


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
        "gated": True,
        "biases": frozenset({"norms"}),
        "position_embeddings": False,
    },
    derived=_derived,
    required={
        "activation_function": "swiglu",
        "prenorm": False,
        "parallel_block": False,
        "causal": False,
        "use_rms_norm": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "num_experts": 0,
        "moe_every_n_layers": 0,
    },
    layouts=(
        tensors(
            weights=rotary.EMBEDDINGS,
            modules={
                "embeddings.norm": "emb_ln",
                "layers.{i}.self_attn.in_proj": "encoder.layers.{i}.attn.Wqkv",
                "layers.{i}.self_attn.out_proj": "encoder.layers.{i}.attn.out_proj",
                "layers.{i}.norm1": "encoder.layers.{i}.norm1",
                "layers.{i}.gate": "encoder.layers.{i}.mlp.fc12",
                "layers.{i}.linear1": "encoder.layers.{i}.mlp.fc11",
                "layers.{i}.linear2": "encoder.layers.{i}.mlp.fc2",
                "layers.{i}.norm2": "encoder.layers.{i}.norm2",
            },
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
