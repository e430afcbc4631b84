"""ModernBERT: pre-norm, rotary positions, a gate, and a window in two of three layers.

Source: Warner et al. 2024, arXiv:2412.13663.
"""

from typing import Any

from models.export.families.family import Family, Part, Settings, read_number, tensors
from models.export.families.rotary import read_rotary
from models.export.model_folder import CheckpointError
from models.network.config import AttentionConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Fields of config.json that give parts of a layer a bias.
_BIASES = {
    "attention_bias": ("attention",),
    "mlp_bias": ("linear1", "linear2"),
    "norm_bias": ("norms",),
}


def _derived(config: Settings) -> dict[str, Any]:
    count, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width = config["hidden_size"] // heads
    full = read_rotary(config, width, 160000.0, name="global_rope_theta", layer_type=_FULL)
    # A null base for windows is that of the other layers; an absent one is 10000.
    own = full.base if "local_rope_theta" in config else 10000.0
    sliding = read_rotary(config, width, own, name="local_rope_theta", layer_type=_SLIDING)
    # Tokens at half the window on either side, both included.
    window = int(read_number(config, "local_attention", 128)) // 2
    kinds = {
        _FULL: AttentionConfig(rotary=full),
        _SLIDING: AttentionConfig(rotary=sliding, window=window),
    }
    period = read_number(config, "global_attn_every_n_layers", 3)
    types = config.get("layer_types")
    if types is None:
        types = [_SLIDING if i % period else _FULL for i in range(count)]
    for name in ("layer_types", "rope_parameters"):
        unknown = [kind for kind in config.get(name) or () if kind not in list(kinds)]
        if unknown:
            raise CheckpointError(
                f"config.json: {name} has {unknown[0]!r}; supported: {', '.join(kinds)}"
            )
    if len(types) != count:
        raise CheckpointError(
            f"config.json: layer_types has length {len(types)}; the model has {count} layers"
        )
    biases: list[str] = []
    for name, parts in _BIASES.items():
        if not isinstance(config.get(name, False), bool):
            raise CheckpointError(f"config.json: {name} has the invalid value {config[name]!r}")
        biases += parts if config.get(name) else ()
    return {"attention": tuple(kinds[kind] for kind in types), "biases": frozenset(biases)}


MODERNBERT = Family(
    config={
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "dim_feedforward": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "dropout": "mlp_dropout",
        "activation": "hidden_activation",
        "layer_norm_eps": "norm_eps",
    },
    defaults={
        "max_position_embeddings": 8192,
        "mlp_dropout": 0.0,
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
    },
    constants={
        "gated": True,
        "norm_first": True,
        "first_norm": False,
        "position_embeddings": False,
    },
    derived=_derived,
    required={"rope_scaling": None},
    layouts=(
        tensors(
            weights={"embeddings.word.weight": "embeddings.tok_embeddings.weight"},
            modules={
                "embeddings.norm": "embeddings.norm",
                "layers.{i}.norm1": "layers.{i}.attn_norm",
                "layers.{i}.self_attn.in_proj": "layers.{i}.attn.Wqkv",
                "layers.{i}.self_attn.out_proj": "layers.{i}.attn.Wo",
                "layers.{i}.norm2": "layers.{i}.mlp_norm",
                "layers.{i}.gate": (Part("layers.{i}.mlp.Wi", 0, 2),),
                "layers.{i}.linear1": (Part("layers.{i}.mlp.Wi", 1, 2),),
                "layers.{i}.linear2": "layers.{i}.mlp.Wo",
                "final_norm": "final_norm",
            },
        ),
    ),
    prefixes=("model.",),
    ignored=(r"head\..*", r"decoder\..*"),
)
