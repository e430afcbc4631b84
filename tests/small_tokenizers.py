"""Small tokenizers of the three kinds of models, trained on a hundred sentences."""

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from models.artifact import Artifact, sha256
from models.manifest import TOKENIZER
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.sentences import SENTENCES


def byte_level_bpe(_artifact: Artifact) -> Tokenizer:
    tokenizer = _trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def untrimmed_bpe(_artifact: Artifact) -> Tokenizer:
    """As ModernBERT's: tokens of words have the space before them, in their spans too."""
    tokenizer = _trained_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def _trained_bpe(pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<mask>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def metaspace_unigram(_artifact: Artifact) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=2000,
        special_tokens=["<unk>"],
        unk_token="<unk>",  # noqa: S106
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


TOKENIZERS = {
    "WordPiece": lambda artifact: Tokenizer.from_buffer(artifact.read(TOKENIZER)),
    "byte-level BPE": byte_level_bpe,
    "unigram": metaspace_unigram,
}


def served_by(
    tokenizer: Tokenizer, artifact: Artifact, folder: Path, max_tokens: int
) -> TextTokenizer:
    tokenizer.save(str(folder / TOKENIZER))
    files = {TOKENIZER: sha256(folder / TOKENIZER)}
    vocab_size = max(artifact.manifest.vocab_size, tokenizer.get_vocab_size())
    manifest = replace(artifact.manifest, max_tokens=max_tokens, vocab_size=vocab_size, files=files)
    return TextTokenizer(Artifact(folder, manifest), max_chars=10**9)
