"""Tags of tokens, and their aggregation to entities as in transformers' pipeline.

Source: `TokenClassificationPipeline` of transformers 5, whose five strategies these are. Labels of
tokens are those with the highest softmax. A label "B-X" begins an entity X. "I-X", and a label
without a prefix, continues the entity X of the token before, or begins one. The label "O" marks
tokens outside of entities.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from service.inference.call_options import CallOptions
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.scores import ACTIVATIONS, Scores
from service.inference.results.vectors import Stages, Vectors, cost_of, refuse_array
from service.inference.tokenizing.rows import Row

Aggregation = Literal["none", "simple", "first", "average", "max"]
Indices = NDArray[np.intp]

# Number of tokens per call that are aggregated in the event loop, in 1 ms.
_INLINE_TOKENS = 1000
_OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of a text with a label; or, without aggregation, one token.

    Attributes:
        label: Label without its prefix; without aggregation, the label of the token.
        score: Mean of the probabilities of the label, over the tokens or words of the entity. With
            labels of the request, the probability of the label for the span.
        start: Start of the span in the input, in characters (Unicode code points).
        end: End of the span, exclusive.
        text: The span. With some tokenizers it includes the space before a word.
        index: Index of the token in the row of token ids, without aggregation; else None.
    """

    label: str
    score: float
    start: int
    end: int
    text: str
    index: int | None = None


@dataclass(frozen=True)
class Tags:
    """The entities of each input.

    Attributes:
        entities: Entities of each input, in the order of the text.
        rows: Token ids of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    entities: Sequence[Sequence[Entity]]
    rows: Sequence[Row]
    seconds: Stages

    @property
    def size(self) -> int:
        """Cost of serialising to JSON, in numbers: an entity costs as much as ten."""
        return 10 * sum(map(len, self.entities))

    __array__ = refuse_array("take the entities of one text, result[0]")

    def __len__(self) -> int:
        return len(self.entities)

    def __getitem__(self, index: int) -> Sequence[Entity]:
        """Return the entities of an input."""
        return self.entities[index]

    def __repr__(self) -> str:
        size = f"{len(self)} inputs, {sum(map(len, self.entities))} entities"
        return f"Tags({size}, {cost_of(self.rows, self.seconds)})"


async def tag(
    model: LoadedModel,
    texts: Sequence[str],
    aggregation: Aggregation,
    options: CallOptions,
) -> Tags:
    """Return the entities of each text; see `Model.tag`."""
    tokenize = partial(model.word_rows.rows, texts, options.on_overflow)
    rows, (logits,), seconds = await model.run(texts, len(texts), tokenize, ("tags",), options)
    labels = model.artifact.manifest.labels

    def aggregate() -> list[list[Entity]]:
        return [
            entities(text, row, own, labels, aggregation)
            for text, row, own in zip(texts, rows, logits, strict=True)
        ]

    is_short = sum(len(row.ids) for row in rows) <= _INLINE_TOKENS
    return Tags(aggregate() if is_short else await asyncio.to_thread(aggregate), rows, seconds)


def entities(
    text: str, row: Row, logits: Vectors, labels: Sequence[str], aggregation: Aggregation
) -> list[Entity]:
    """Return the entities of a text.

    Args:
        text: The text.
        row: Tokens of the text, with their spans and whether they continue a word.
        logits: Logits `(L, C)` of the tokens.
        labels: Label of each logit.
        aggregation: Strategy; see `Model.tag`.
    """
    spans = row.offsets or ()
    tokens = np.array([i for i, span in enumerate(spans) if span is not None], np.intp)  # (N,)
    if not len(tokens):  # special tokens have no label
        return []
    scores = ACTIVATIONS["softmax"](logits[tokens].astype(np.float64))  # (N, C)
    firsts = np.arange(len(tokens))  # of each token, word or entity
    if aggregation in _OF_WORDS:
        continues = np.array(row.continues, bool)[tokens]  # (N,)
        continues[:1] = False
        firsts = np.flatnonzero(~continues)
        scores = _OF_WORDS[aggregation](scores, firsts)
    best = scores.argmax(1)
    highest = scores.max(1)
    names: Sequence[str] = labels
    if aggregation != "none":
        begins = _begins(best, labels)
        best, highest = best[begins], _means(highest, begins)
        firsts = firsts[begins]
        names = [label.split("-", 1)[-1] for label in labels]
    lasts = np.append(firsts[1:], len(tokens)) - 1
    results: list[Entity] = []
    for label, score, first, last in zip(
        best.tolist(),
        highest.tolist(),
        tokens[firsts].tolist(),
        tokens[lasts].tolist(),
        strict=True,
    ):
        if names[label] == _OUTSIDE:
            continue
        start, end = spans[first][0], spans[last][1]
        index = first if aggregation == "none" else None
        results.append(Entity(names[label], score, start, end, text[start:end], index))
    return results


def _begins(best: Indices, labels: Sequence[str]) -> Indices:
    """Return the index of the first token or word of each entity.

    Args:
        best: Index of the label of each token or word, `(N,)`.
        labels: All labels.
    """
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    numbers = np.array([tags.index(tag) for tag in tags])[best]  # (N,)
    is_first = np.array([label.startswith("B-") for label in labels])[best]  # (N,)
    is_first[1:] |= numbers[1:] != numbers[:-1]
    is_first[:1] = True
    return np.flatnonzero(is_first)


def _means(scores: Scores, firsts: Indices) -> Scores:
    """Return the mean of each segment, along the first axis.

    Args:
        scores: Scores `(N,)` or `(N, C)`.
        firsts: Index of the first element of each segment, in ascending order.
    """
    counts = np.diff(np.append(firsts, len(scores)))
    sums: Scores = np.add.reduceat(scores, firsts)
    means: Scores = (sums.T / counts).T
    return means


def _first(scores: Scores, firsts: Indices) -> Scores:
    return scores[firsts]


def _most_certain(scores: Scores, firsts: Indices) -> Scores:
    """Return the scores of the token with the highest score, of each word; the first of equals."""
    highest = scores.max(1)  # (N,)
    ends = np.append(firsts[1:], len(scores))
    chosen = [
        first + int(highest[first:end].argmax()) for first, end in zip(firsts, ends, strict=True)
    ]
    return scores[chosen]


# Scores `(W, C)` of words, from those of their tokens and the index of each word's first token.
_OF_WORDS: Mapping[str, Callable[[Scores, Indices], Scores]] = {
    "first": _first,
    "average": _means,
    "max": _most_certain,
}
