"""BERT: the layout that most encoder families share.

Source: Devlin et al. 2018, arXiv:1810.04805.
"""

from models.export.families.family import Classifier, Family, MaskedLM, Modules, tensors

CONFIG = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dim_feedforward": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
}
DEFAULTS = {
    "hidden_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
REQUIRED = {
    "is_causal": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "position_embedding_type": "absolute",
}
EMBEDDINGS = {
    "embeddings.word.weight": "embeddings.word_embeddings.weight",
    "embeddings.position.weight": "embeddings.position_embeddings.weight",
    "embeddings.token_type.weight": "embeddings.token_type_embeddings.weight",
}
MODULES: Modules = {
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.self_attn.in_proj": (
        "encoder.layer.{i}.attention.self.query",
        "encoder.layer.{i}.attention.self.key",
        "encoder.layer.{i}.attention.self.value",
    ),
    "layers.{i}.self_attn.out_proj": "encoder.layer.{i}.attention.output.dense",
    "layers.{i}.norm1": "encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.linear1": "encoder.layer.{i}.intermediate.dense",
    "layers.{i}.linear2": "encoder.layer.{i}.output.dense",
    "layers.{i}.norm2": "encoder.layer.{i}.output.LayerNorm",
}

MASKED_LM = MaskedLM(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    decoder_bias="cls.predictions.bias",
)

BERT = Family(
    config=CONFIG,
    defaults=DEFAULTS,
    required=REQUIRED,
    layouts=(tensors(weights=EMBEDDINGS, modules=MODULES),),
    classifier=Classifier(dense="pooler.dense"),
    token_classifier=Classifier(),
    masked_lm=MASKED_LM,
    prefixes=("bert.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"cls\..*"),
)
