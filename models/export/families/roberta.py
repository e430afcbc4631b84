"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with position ids that start at `pad_token_id + 1`.

Source: Liu et al. 2019, arXiv:1907.11692.
"""

from models.export.families.bert import CONFIG, DEFAULTS, EMBEDDINGS, MODULES, REQUIRED
from models.export.families.family import Classifier, Family, MaskedLM, tensors

MASKED_LM = MaskedLM(
    dense="lm_head.dense",
    activation="gelu",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    decoder_bias="lm_head.bias",
)

ROBERTA = Family(
    config={**CONFIG, "position_padding_id": "pad_token_id"},
    defaults={**DEFAULTS, "pad_token_id": 1},
    required=REQUIRED,
    layouts=(tensors(weights=EMBEDDINGS, modules=MODULES),),
    classifier=Classifier(dense="classifier.dense", out="classifier.out_proj"),
    token_classifier=Classifier(),
    masked_lm=MASKED_LM,
    prefixes=("roberta.",),
    ignored=(r"embeddings\.position_ids", r"pooler\..*", r"lm_head\..*"),
)
