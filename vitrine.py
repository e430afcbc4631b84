"""The Python API of Vitrine: encode, classify and tag texts in this process, without HTTP.

>>> import vitrine
>>> async with await vitrine.open_model("artifacts/all-MiniLM-L6-v2") as model:  # doctest: +SKIP
...     result = await model.encode(["The cat sat on the mat."])
...     print(result.vectors.shape)
(1, 384)
"""

from models.engines import EngineError
from models.manifest import ArtifactError
from models.quantization import Calibration
from service.inference.batching.cache import ResultCache
from service.inference.batching.devices import Devices
from service.inference.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
    UnknownModel,
    VitrineError,
)
from service.inference.explain.deletion import (
    Deletions,
    PairEffect,
    ShapleyValues,
    TextEffects,
    TextValues,
    UnitEffect,
    UnitValue,
)
from service.inference.explain.options import Deletion, Highlights, Terms
from service.inference.explain.terms import Explanation, Term, TextToken
from service.inference.model.chunk_embeddings import ChunkEmbeddings
from service.inference.model.classification import Classification
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.model.pair_scores import PairScores
from service.inference.model.sync_model import SyncModel
from service.inference.model.zero_shot import CandidateLabels
from service.inference.registry.model_version import Lease
from service.inference.registry.registry import ModelRegistry
from service.inference.registry.served_models import ModelSpec
from service.inference.results.quantization import Quantizer
from service.inference.results.tags import Entity, Tags
from service.inference.results.vectors import (
    Embeddings,
    Encoded,
    MultiEmbeddings,
    SparseEmbeddings,
    SparseVector,
    TokenEmbeddings,
)
from service.inference.tokenizing.chunking import Chunk, Chunking
from service.inference.tokenizing.rows import Row

__all__ = [
    "ArtifactError",
    "Calibration",
    "CandidateLabels",
    "Chunk",
    "ChunkEmbeddings",
    "Chunking",
    "Classification",
    "DeadlineExceeded",
    "Deletion",
    "Deletions",
    "Devices",
    "Embeddings",
    "Encoded",
    "EngineError",
    "Entity",
    "Explanation",
    "Highlights",
    "InferenceFailed",
    "InvalidInput",
    "Lease",
    "Model",
    "ModelOptions",
    "ModelRegistry",
    "ModelSpec",
    "MultiEmbeddings",
    "NotReady",
    "Overloaded",
    "PairEffect",
    "PairScores",
    "Quantizer",
    "ResultCache",
    "Row",
    "ShapleyValues",
    "SparseEmbeddings",
    "SparseVector",
    "SyncModel",
    "Tags",
    "Term",
    "Terms",
    "TextEffects",
    "TextToken",
    "TextValues",
    "TokenEmbeddings",
    "TooLarge",
    "UnitEffect",
    "UnitValue",
    "UnknownModel",
    "VitrineError",
    "open_model",
]
