"""Texts of made-up words, in which known words decide the result.

Relevance: a query has the word of one concept among distractors, and a document is relevant if it
has a word of the same concept. Words of a concept differ, so a model must learn them. Each document
also has words of two other concepts, and half of them have a distractor of the query.

Sentiment: words of one class decide the label, and a negator anywhere in the text flips it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_CONCEPTS = 20
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_NAMES = [a + b for a in _SYLLABLES for b in _SYLLABLES if a != b]
_WORDS = [str(word) for word in np.random.default_rng(0).permutation(_NAMES)[:300]]
_TOPICS, _WORDS = np.reshape(_WORDS[: 3 * _CONCEPTS], (_CONCEPTS, 3)).tolist(), _WORDS[60:]
_CLASSES, _WORDS = np.reshape(_WORDS[:24], (2, 12)).tolist(), _WORDS[24:]
_NEGATORS, DISTRACTORS = _WORDS[:4], _WORDS[4:]

LABELS = ("negative", "positive")
PAD, CLS, SEP, UNKNOWN, MASK = SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
_OWN = [word for group in (*_TOPICS, *_CLASSES) for word in group]
# Token id of each token; a word is a token.
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *_OWN, *_NEGATORS, *DISTRACTORS])}

# Lengths of a document, in words.
_MIN_WORDS, _MAX_WORDS = 8, 24


@dataclass(frozen=True)
class EvidenceCase:
    """A text, or a query and a document, with known evidence.

    Attributes:
        query: Words of the query; empty for sentiment.
        text: Words of the text or document.
        planted: Indices of the words of the text that decide the result.
        label: Whether the document is relevant, or the index of the label.
        concept: Concept of the query.
        concepts: Concepts of the document.
    """

    query: Sequence[str]
    text: Sequence[str]
    planted: frozenset[int]
    label: int
    concept: int = -1
    concepts: frozenset[int] = frozenset()


def relevance_case(generator: np.random.Generator, relevant: bool, copies: int) -> EvidenceCase:
    """Return a query with a document that has `copies` words, 1 or 2, of a concept."""
    concept, *others, own = generator.permutation(_CONCEPTS)[:4].tolist()
    own = concept if relevant else own
    query = [str(word) for word in generator.choice(DISTRACTORS, generator.integers(3, 7))]
    shared = [query[0]] if generator.random() < 0.5 else []
    query[generator.integers(len(query) - 1) + 1] = _TOPICS[concept][0]
    decisive = generator.permutation(_TOPICS[own][1:])[:copies].tolist()
    distracting = [str(generator.choice(_TOPICS[other][1:])) for other in others]
    text, places = _mixed(generator, [*decisive, *distracting, *shared])
    concepts = frozenset([own, *others])
    return EvidenceCase(query, text, frozenset(places[:copies]), int(relevant), concept, concepts)


def sentiment_case(generator: np.random.Generator, copies: int, negated: bool) -> EvidenceCase:
    """Return a text with `copies` words of a class, and perhaps a negator.

    The planted word is the negator if there is one: the words of the class speak for the label that
    it flips.
    """
    polarity = int(generator.integers(2))
    decisive = [str(word) for word in generator.choice(_CLASSES[polarity], copies, replace=False)]
    negators = [str(generator.choice(_NEGATORS))] if negated else []
    text, places = _mixed(generator, [*negators, *decisive])
    return EvidenceCase((), text, frozenset(places[: 1 if negated else copies]), polarity ^ negated)


def training_cases(kind: str, generator: np.random.Generator, number: int) -> list[EvidenceCase]:
    """Return cases of all variants; those of relevance in pairs, the relevant document first."""
    copies = generator.integers(1, 3, number).tolist()
    if kind == "classifier":
        return [sentiment_case(generator, n, bool(generator.random() < 0.4)) for n in copies]
    return [relevance_case(generator, i % 2 == 0, n) for i, n in enumerate(copies)]


# Variants of the held-out cases: number of deciding words, and whether there is a negator.
_VARIANTS: Mapping[str, tuple[int, bool]] = {
    "one word": (1, False),
    "two words": (2, False),
    "negated": (1, True),
}


def variants_of_kind(kind: str) -> Sequence[str]:
    """Return the names of the variants of a kind of model."""
    return tuple(_VARIANTS)[: 3 if kind == "classifier" else 2]


def held_out_cases(kind: str, variant: str, number: int) -> list[EvidenceCase]:
    """Return cases whose result is explained: relevant documents, or texts with a label."""
    generator = np.random.default_rng([1, list(_VARIANTS).index(variant)])
    copies, negated = _VARIANTS[variant]
    if kind == "classifier":
        return [sentiment_case(generator, copies, negated) for _ in range(number)]
    return [relevance_case(generator, True, copies) for _ in range(number)]


def _mixed(generator: np.random.Generator, decisive: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return a text of distractors with other words at random places, and these places."""
    length = int(generator.integers(_MIN_WORDS, _MAX_WORDS + 1))
    words = [str(word) for word in generator.choice(DISTRACTORS, length)]
    places = generator.permutation(length)[: len(decisive)].tolist()
    for place, word in zip(places, decisive, strict=True):
        words[place] = word
    return words, places
