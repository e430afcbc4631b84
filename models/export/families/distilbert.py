"""DistilBERT: BERT without token types.

Source: Sanh et al. 2019, arXiv:1910.01108.
"""

from models.export.families.family import Classifier, Family, MaskedLM, tensors

DISTILBERT = Family(
    config={
        "vocab_size": "vocab_size",
        # If a file has both names, transformers uses the first one.
        "d_model": ("hidden_size", "dim"),
        "num_layers": ("num_hidden_layers", "n_layers"),
        "num_heads": ("num_attention_heads", "n_heads"),
        "dim_feedforward": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "dropout": "dropout",
        "activation": "activation",
    },
    defaults={"dropout": 0.1, "activation": "gelu"},
    constants={"norm_eps": 1e-12},
    required={"is_causal": False, "pruned_heads": {}},
    layouts=(
        tensors(
            weights={
                "embeddings.word.weight": "embeddings.word_embeddings.weight",
                "embeddings.position.weight": "embeddings.position_embeddings.weight",
            },
            modules={
                "embeddings.norm": "embeddings.LayerNorm",
                "layers.{i}.self_attn.in_proj": (
                    "transformer.layer.{i}.attention.q_lin",
                    "transformer.layer.{i}.attention.k_lin",
                    "transformer.layer.{i}.attention.v_lin",
                ),
                "layers.{i}.self_attn.out_proj": "transformer.layer.{i}.attention.out_lin",
                "layers.{i}.norm1": "transformer.layer.{i}.sa_layer_norm",
                "layers.{i}.linear1": "transformer.layer.{i}.ffn.lin1",
                "layers.{i}.linear2": "transformer.layer.{i}.ffn.lin2",
                "layers.{i}.norm2": "transformer.layer.{i}.output_layer_norm",
            },
        ),
    ),
    classifier=Classifier(dense="pre_classifier", activation="ReLU"),
    token_classifier=Classifier(),
    masked_lm=MaskedLM(dense="vocab_transform", norm="vocab_layer_norm", decoder="vocab_projector"),
    prefixes=("distilbert.",),
    ignored=(r"embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*"),
)
