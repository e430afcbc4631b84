"""Entities with labels of the request, decoded from scores of spans of words.

Source: the package gliner 0.2.29. Spans are kept in the order of their scores, unless they clash
with one that was kept before.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.tags import Entity, Tags
from service.inference.results.vectors import Vectors
from service.inference.tokenizing.rows import Row

# Number of scores per call that are decoded in the event loop, in 1 to 2 ms.
_INLINE_SCORES = 10_000


@dataclass(frozen=True, kw_only=True)
class EntityLabels:
    """Labels of a request, and which spans with them are entities.

    Attributes:
        labels: The labels; the scores of duplicates are those of the first.
        threshold: Score from 0 to 1 that an entity exceeds.
        nested: Whether an entity can contain others. They never overlap in part.
        multi_label: Whether the same span can have several labels.
    """

    labels: Sequence[str]
    threshold: float = 0.5
    nested: bool = False
    multi_label: bool = False

    @property
    def names(self) -> list[str]:
        """The labels, each once."""
        return [*dict.fromkeys(self.labels)]


async def find_entities(
    model: LoadedModel, texts: Sequence[str], labels: EntityLabels, options: CallOptions
) -> Tags:
    """Return the entities of each text; see `Model.tag`.

    Raises:
        InvalidInput: There are more entities than `max_token_vectors`. Entities that neither
            overlap nor share a span are fewer than tokens, which have this limit too.
        VitrineError: Any error of `LoadedModel.run`, under the same conditions.
    """
    tokenize = partial(model.word_rows.rows_with_labels, texts, labels.labels, options.on_overflow)
    parts = [*texts, *labels.names]
    rows, (results,), seconds = await model.run(parts, len(texts), tokenize, ("spans",), options)

    def decode_all() -> list[list[Entity]]:
        entities: list[list[Entity]] = []
        room = model.max_token_vectors
        for text, row, logits in zip(texts, rows, results, strict=True):
            if options.deadline is not None:
                options.deadline.check()
            entities.append(decode(text, row, logits, labels, room))
            room -= len(entities[-1])
            if room < 0:
                raise InvalidInput(
                    f"the inputs have more than {model.max_token_vectors} entities, the limit per "
                    "request; raise the threshold or send fewer texts",
                    code="too_many_entities",
                    pointer="/inputs",
                )
        return entities

    is_short = sum(logits.size for logits in results) <= _INLINE_SCORES
    return Tags(decode_all() if is_short else await asyncio.to_thread(decode_all), rows, seconds)


def decode(text: str, row: Row, logits: Vectors, labels: EntityLabels, limit: int) -> list[Entity]:
    """Return the entities of a text, in its order.

    Of more than `limit` entities, those with the `limit + 1` highest scores are returned.

    Args:
        text: The text.
        row: Tokens of the text, with the positions of words and the spans of words with tokens.
        logits: Logits `(words * labels, W)` of the spans of up to W words that begin at each word.
        labels: Labels, and which spans are entities.
        limit: Number of entities beyond which the search ends.
    """
    words = [span for span in row.offsets or () if span is not None]  # those with tokens, n
    width = logits.shape[1]
    by_word = logits.reshape(len(row.words), -1, width)[: len(words)].swapaxes(1, 2)  # (n, W, C)
    # In float32 and by these steps, as in torch: high scores have the same ties there.
    with np.errstate(over="ignore"):
        scores = 1 / (1 + np.exp(-by_word.astype(np.float32)))
    starts, extra, columns = np.nonzero(scores > np.float32(labels.threshold))
    is_inside = starts + extra < len(words)
    starts, extra, columns = starts[is_inside], extra[is_inside], columns[is_inside]
    span_scores = scores[starts, extra, columns]
    order = np.argsort(-span_scores, kind="stable")
    kept: list[tuple[int, int, int, float]] = []
    decided: dict[tuple[int, int], bool] = {}  # whether a span of words is an entity
    ends_at: list[list[int]] = [[] for _ in words]  # last words of entities, by their first word
    for start, last, column, score in zip(
        *(each[order].tolist() for each in (starts, starts + extra, columns, span_scores)),
        strict=True,
    ):
        if len(kept) > limit:
            break
        if (start, last) in decided:
            is_entity = decided[start, last] and labels.multi_label
        else:
            is_entity = not any(
                _clash(start, last, first, end, nested=labels.nested)
                for first in range(max(0, start - width + 1), last + 1)
                for end in ends_at[first]
            )
            decided[start, last] = is_entity
            if is_entity:
                ends_at[start].append(last)
        if is_entity:
            kept.append((start, last, column, score))
    entities: list[Entity] = []
    names = labels.names
    for start, last, column, score in sorted(kept, key=lambda entity: entity[0]):
        begin, end = words[start][0], words[last][1]
        entities.append(Entity(names[column], score, begin, end, text[begin:end]))
    return entities


def _clash(start: int, last: int, first: int, end: int, *, nested: bool) -> bool:
    """Return whether spans of words exclude each other; all four words belong to the spans."""
    if start > end or first > last:
        return False
    contains = (start <= first and end <= last) or (first <= start and last <= end)
    return not (nested and contains)
