"""The model families: what config.json and the tensors of each `model_type` mean. Data, by family.

To add a family, write a module like those here and add its `model_type` to the table.
"""

from collections.abc import Mapping

from models.export.families.albert import ALBERT
from models.export.families.bert import BERT
from models.export.families.distilbert import DISTILBERT
from models.export.families.electra import ELECTRA
from models.export.families.eurobert import EUROBERT
from models.export.families.family import Family, Names, Part, Tensors
from models.export.families.gemma3 import GEMMA3
from models.export.families.gte import GTE
from models.export.families.jina_v3 import JINA_V3
from models.export.families.modernbert import MODERNBERT
from models.export.families.mpnet import MPNET
from models.export.families.nomic_bert import NOMIC_BERT
from models.export.families.qwen3 import QWEN3
from models.export.families.roberta import ROBERTA

__all__ = ["FAMILIES", "Family", "Names", "Part", "Tensors"]

FAMILIES: Mapping[str, Family] = {
    "albert": ALBERT,
    "bert": BERT,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "eurobert": EUROBERT,
    "gemma3_text": GEMMA3,
    "gte": GTE,
    "jina_embeddings_v3": JINA_V3,
    "modernbert": MODERNBERT,
    "mpnet": MPNET,
    "new": GTE,
    "nomic_bert": NOMIC_BERT,
    "qwen3": QWEN3,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
}
