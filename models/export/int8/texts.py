"""Texts of any length for an int8 graph: from given texts, or from the vocabulary of a model."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from models.export.model_folder import CheckpointError
from models.manifest import TextSource

# Share of numbers, punctuation and symbols in a text of the vocabulary.
_MARKS = 0.1
# A script with fewer entries in the vocabulary has no texts of its own: they count as symbols.
_MIN_ENTRIES = 20
# Number of times that words are added to a text of the vocabulary whose tokens are too few.
_TRIES = 8
# Number of given texts of a length with which none are joined. 500 texts, half of the fewest that
# `--calibrate` takes, have as many of one of the seven classes of lengths.
_ENOUGH = 70


class Corpus(Protocol):
    """A source of different texts of any length."""

    def texts(self, lengths: range, count: int) -> tuple[TextSource, list[str]]:
        """Return texts whose numbers of tokens are in a range; longer ones are to be truncated.

        At most `count` texts are returned, with their source.

        Args:
            lengths: Numbers of tokens, special tokens not included.
            count: Number of texts.
        """


class OwnTexts:
    """Given texts: those of the right length or, if these are too few, several joined.

    Args:
        tokenizer: Tokenizer of the model, without truncation.
        texts: Different texts.
        longest: Number of tokens of the longest rows. Longer texts count as of this length.

    Raises:
        CheckpointError: No text has tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], longest: int) -> None:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        sizes = [
            (text, min(len(own.ids), longest)) for text, own in zip(texts, encodings, strict=True)
        ]
        self._texts = [(text, size) for text, size in sizes if size]
        if not self._texts:
            raise CheckpointError("the model's tokenizer finds no tokens in the calibration texts")
        self._rng = np.random.default_rng(0)
        self._shuffled = self._in_random_order()

    def texts(self, lengths: range, count: int) -> tuple[TextSource, list[str]]:
        """See `Corpus`."""
        own = [text for text, size in self._texts if size in lengths]
        if len(own) >= min(count, _ENOUGH):
            # Evenly from all texts, which may be sorted.
            return "own", own[:: max(1, len(own) // count)][:count]
        drawn = _draw(self._rng, lengths, count)
        return "joined", [_join(self._shuffled, length) for length in drawn]

    def _in_random_order(self) -> Iterator[tuple[str, int]]:
        while True:
            for index in self._rng.permutation(len(self._texts)).tolist():
                yield self._texts[index]


class VocabularyTexts:
    """Texts of random entries of the vocabulary.

    Every second text is in the script with the most entries, and the others are in all other
    scripts by turns. Most vocabularies have frequent words first, so the entries of a script are
    drawn with the probabilities of Zipf's law.

    Args:
        tokenizer: Tokenizer of the model, without truncation.
        seed: Corpora with one seed have equal texts.

    Raises:
        CheckpointError: The vocabulary has no words.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng(seed)
        by_script, self._symbols = entries_by_script(tokenizer)
        if not by_script:
            raise CheckpointError("the vocabulary has no words for calibration texts")
        self._main, *self._others = sorted(by_script.values(), key=len, reverse=True)
        self._count = 0

    def texts(self, lengths: range, count: int) -> tuple[TextSource, list[str]]:
        """See `Corpus`."""
        return "generated", [self._text(length) for length in _draw(self._rng, lengths, count)]

    def _text(self, length: int) -> str:
        turn, is_other = divmod(self._count, 2)
        self._count += 1
        entries = self._main
        if is_other and self._others:
            entries = self._others[turn % len(self._others)]
        return _join((self._words(entries, length) for _ in range(_TRIES)), length)

    def _words(self, entries: Sequence[int], count: int) -> tuple[str, int]:
        """Return a text of a number of entries, and its number of tokens."""
        chances = 1 / np.arange(10, len(entries) + 10)
        ids = self._rng.choice(entries, count, p=chances / chances.sum())
        if self._symbols:
            is_symbol = self._rng.random(count) < _MARKS
            ids[is_symbol] = self._rng.choice(self._symbols, is_symbol.sum())
        text = self._tokenizer.decode(ids.tolist())
        return text, len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def entries_by_script(tokenizer: Tokenizer) -> tuple[dict[str, list[int]], list[int]]:
    """Return the ids of the vocabulary's words by script, and those of entries without letters.

    A script is the first word of a letter's name in Unicode, for example "CYRILLIC". Words are
    whole ones or parts. Entries with letters and punctuation, such as "[unused1]", are left out.
    """
    by_script: dict[str, list[int]] = defaultdict(list)
    symbols: list[int] = []
    added = tokenizer.get_added_tokens_decoder()
    for index in range(tokenizer.get_vocab_size()):
        text = "" if index in added else tokenizer.decode([index]).strip().removeprefix("##")
        if not text or "\ufffd" in text:  # a part of a character's bytes
            continue
        letter = next(filter(str.isalpha, text), None)
        if letter is None:
            symbols.append(index)
        # Vowel signs are marks.
        elif all(c.isalnum() or unicodedata.category(c).startswith("M") for c in text):
            by_script[unicodedata.name(letter, "").partition(" ")[0]].append(index)
    for script in sorted(by_script, key=lambda name: len(by_script[name]))[:-1]:
        if len(by_script[script]) < _MIN_ENTRIES:
            symbols += by_script.pop(script)
    return dict(by_script), symbols


def _draw(rng: np.random.Generator, lengths: range, count: int) -> list[int]:
    """Return random lengths, of which the first is the longest."""
    drawn: list[int] = rng.integers(lengths.start, lengths.stop, count).tolist()
    return [lengths[-1], *drawn[1:]] if drawn else []


def _join(texts: Iterable[tuple[str, int]], length: int) -> str:
    """Return as many of the texts, given with their sizes, as have a length together."""
    joined: list[str] = []
    total = 0
    for text, size in texts:
        joined.append(text)
        total += size
        if total >= length:
            break
    return " ".join(joined)
