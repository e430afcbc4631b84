"""Calibration texts from the vocabulary of a model, for an export without `--calibrate`."""

import numpy as np
from tokenizers import Tokenizer

# Numbers of texts, and of words per text. Half of the texts calibrate.
_TEXTS = 2000
_MIN_WORDS, _MAX_WORDS = 4, 40
_TRIES = 20_000


def vocabulary_texts(tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Return texts of random words of the vocabulary, the same at every call.

    Frequent words come first in most vocabularies, so their ids are drawn with probabilities of
    Zipf's law.

    Args:
        tokenizer: Tokenizer of the model.
        max_tokens: Maximum number of tokens of a text.
    """
    rng = np.random.default_rng(0)
    words = [
        word
        for index in range(min(tokenizer.get_vocab_size(), _TRIES))
        if (word := tokenizer.decode([index]).strip()).isalpha()
    ]
    chances = 1 / np.arange(10, len(words) + 10)
    chances /= chances.sum()
    lengths = rng.integers(
        _MIN_WORDS, min(_MAX_WORDS, max(_MIN_WORDS + 1, max_tokens // 2)), _TEXTS
    )
    drawn = rng.choice(len(words), lengths.sum(), p=chances).tolist()
    ends = np.cumsum(lengths).tolist()
    return [
        " ".join(words[index] for index in drawn[end - length : end])
        for length, end in zip(lengths.tolist(), ends, strict=True)
    ]
