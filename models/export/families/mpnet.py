"""MPNet: BERT with RoBERTa's positions and a relative position bias, without token types.

Source: Song et al. 2020, arXiv:2004.09297.
"""

from models.export.families import bert, roberta
from models.export.families.family import Classifier, Family, tensors

MPNET = Family(
    config={
        **{field: name for field, name in bert.CONFIG.items() if field != "type_vocab_size"},
        "relative_buckets": "relative_attention_num_buckets",
    },
    defaults={**bert.DEFAULTS, "relative_attention_num_buckets": 32},
    # transformers hard-codes the padding id 1 for position ids, regardless of pad_token_id.
    constants={"position_padding_id": 1},
    # transformers uses 32 buckets, regardless of the config.
    required={"relative_attention_num_buckets": 32},
    layouts=(
        tensors(
            weights={
                "embeddings.word.weight": "embeddings.word_embeddings.weight",
                "embeddings.position.weight": "embeddings.position_embeddings.weight",
                "relative_bias.weight": "encoder.relative_attention_bias.weight",
            },
            modules={
                **bert.MODULES,
                "layers.{i}.self_attn.in_proj": (
                    "encoder.layer.{i}.attention.attn.q",
                    "encoder.layer.{i}.attention.attn.k",
                    "encoder.layer.{i}.attention.attn.v",
                ),
                "layers.{i}.self_attn.out_proj": "encoder.layer.{i}.attention.attn.o",
                "layers.{i}.norm1": "encoder.layer.{i}.attention.LayerNorm",
            },
        ),
    ),
    classifier=Classifier(dense="classifier.dense", out="classifier.out_proj"),
    token_classifier=Classifier(),
    masked_lm=roberta.MASKED_LM,
    prefixes=("mpnet.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\..*"),
)
