"""Config fields and tensor names that encoders derived from Llama share.

Layers are pre-norm, with RMS norm, rotary positions, grouped-query attention and a gated
feed-forward layer.
"""

from typing import Any

from models.export.families.family import MAX_HEADS, Modules, Settings, read_count, tensors

CONFIG: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dim_feedforward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
}
CONSTANTS: dict[str, Any] = {
    "dropout": 0.0,
    "norm": "rms_norm",
    "norm_first": True,
    "gated": True,
    "position_embeddings": False,
    "embedding_norm": False,
}
# Fields that transformers accepts in any family, and that change the attention or single layers.
REQUIRED: dict[str, Any] = {"is_causal": True, "per_layer_config": None}
# Parts of a layer that have a bias if a field of config.json is true, by field.
BIASES = {"attention_bias": ("attention",), "mlp_bias": ("linear1", "linear2")}


def read_heads(config: Settings) -> dict[str, int]:
    """Return the `EncoderConfig` fields `num_kv_heads` and `head_width`.

    Raises:
        CheckpointError: `num_key_value_heads` or `head_dim` is not a positive integer.
    """
    count = config["num_attention_heads"]
    return {
        "num_kv_heads": read_count(config, "num_key_value_heads", count, MAX_HEADS),
        "head_width": read_count(config, "head_dim", max(1, config["hidden_size"] // count), 2**20),
    }


WEIGHTS = {"embeddings.word.weight": "embed_tokens.weight"}
MODULES: Modules = {
    "layers.{i}.norm1": "layers.{i}.input_layernorm",
    "layers.{i}.self_attn.in_proj": (
        "layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj",
    ),
    "layers.{i}.self_attn.q_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.self_attn.k_norm": "layers.{i}.self_attn.k_norm",
    "layers.{i}.self_attn.out_proj": "layers.{i}.self_attn.o_proj",
    "layers.{i}.norm2": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.linear1": "layers.{i}.mlp.up_proj",
    "layers.{i}.linear2": "layers.{i}.mlp.down_proj",
    "final_norm": "norm",
}
TENSORS = tensors(weights=WEIGHTS, modules=MODULES)
PREFIXES = ("model.",)
IGNORED = (r"lm_head\..*",)
