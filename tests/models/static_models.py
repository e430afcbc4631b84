"""Static models with random vectors, in the layouts of Model2Vec and sentence-transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from model2vec import StaticModel
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.sentences import SENTENCES

_UNKNOWN = "[UNK]"


def word_pieces() -> Tokenizer:
    """A tokenizer as of BERT. Its vocabulary lacks most scripts, so they are unknown tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[PAD]", _UNKNOWN, "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([text for text in SENTENCES if text.isascii()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def unigrams() -> Tokenizer:
    """A tokenizer as of XLM-RoBERTa, whose unknown token has an id."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500,
        special_tokens=["<unk>"],
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in SENTENCES if text.isascii()], trainer)
    return tokenizer


def bytes_bpe() -> Tokenizer:
    """A tokenizer of bytes, without unknown tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def random_vectors(rows: int, width: int = 16) -> NDArray[np.float32]:
    """Return random vectors `(rows, width)`."""
    return np.random.default_rng(0).standard_normal((rows, width), np.float32)


def save_model2vec(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    vectors: NDArray[Any] | None = None,
    **settings: Any,  # noqa: ANN401
) -> StaticModel:
    """Save a model of Model2Vec, and return it as the package loads it."""
    if vectors is None:
        vectors = random_vectors(tokenizer.get_vocab_size())
    StaticModel(vectors, tokenizer, **settings).save_pretrained(folder)
    return StaticModel.from_pretrained(folder)


def save_static_embedding(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    normalize: bool = False,
    prompts: Mapping[str, str] | None = None,
) -> SentenceTransformer:
    """Save a model of sentence-transformers, and return it as the package loads it."""
    vectors = random_vectors(tokenizer.get_vocab_size())
    modules = [StaticEmbedding(tokenizer, embedding_weights=vectors)]
    modules += [Normalize()] if normalize else []
    SentenceTransformer(modules=modules, device="cpu", prompts=dict(prompts or {})).save(
        str(folder), create_model_card=False
    )
    return SentenceTransformer(str(folder), device="cpu")
