"""Supported model families: the config fields and tensor names of each `model_type`.

To add a family, write a module like the others in this package and add its `model_type` to
`FAMILIES`.
"""

from collections.abc import Mapping

from models.export.families import jina_v3
from models.export.families.albert import ALBERT
from models.export.families.bert import BERT
from models.export.families.deberta import DEBERTA
from models.export.families.distilbert import DISTILBERT
from models.export.families.electra import ELECTRA
from models.export.families.eurobert import EUROBERT
from models.export.families.family import (
    MAX_HEADS,
    MAX_SIZE,
    Classifier,
    Family,
    MaskedLM,
    TensorPart,
    Tensors,
)
from models.export.families.gemma3 import GEMMA3
from models.export.families.gte import GTE
from models.export.families.jina_bert import JINA_BERT, JINA_BERT_CODE
from models.export.families.jina_v3 import JINA_V3
from models.export.families.llama import LLAMA, LLAMA_BIDIRECTIONAL
from models.export.families.mistral import MINISTRAL3, MISTRAL
from models.export.families.modernbert import MODERNBERT
from models.export.families.mpnet import MPNET
from models.export.families.nomic_bert import NOMIC_BERT
from models.export.families.qwen2 import QWEN2
from models.export.families.qwen3 import PPLX, QWEN3, VOYAGE
from models.export.families.roberta import ROBERTA
from models.export.families.roformer import ROFORMER
from models.export.families.t5 import T5

__all__ = [
    "FAMILIES",
    "FAMILIES_OF_CODE",
    "MAX_HEADS",
    "MAX_SIZE",
    "Classifier",
    "Family",
    "MaskedLM",
    "TensorPart",
    "Tensors",
]

FAMILIES: Mapping[str, Family] = {
    "albert": ALBERT,
    "bert": BERT,
    "bidirectional_pplx_qwen3": PPLX,
    "camembert": ROBERTA,
    "deberta-v2": DEBERTA,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "eurobert": EUROBERT,
    "gemma3_text": GEMMA3,
    "gte": GTE,
    "jina_embeddings_v3": JINA_V3,
    "llama": LLAMA,
    "llama_bidirec": LLAMA_BIDIRECTIONAL,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "modernbert": MODERNBERT,
    "mpnet": MPNET,
    "new": GTE,
    "nomic_bert": NOMIC_BERT,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "roberta": ROBERTA,
    "roformer": ROFORMER,
    "t5": T5,
    "xlm-roberta": ROBERTA,
}

# Families of checkpoints whose `model_type` is absent or that of another family, by a prefix of
# their class paths, or of their class names, in `auto_map`.
FAMILIES_OF_CODE: Mapping[str, Family] = {
    "jinaai/jina-bert-implementation--": JINA_BERT,
    "jinaai/jina-bert-v2-qk-post-norm--": JINA_BERT_CODE,
    jina_v3.CODE: JINA_V3,
    VOYAGE.code[0]: VOYAGE,
}
