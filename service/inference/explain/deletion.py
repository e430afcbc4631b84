"""Explanation by deletion: units of a text, variants of the text without them, and their effects.

A unit is a word, a sentence, or a chunk: as many whole sentences as have at most `CHUNK_TOKENS`
tokens, or a part of a longer sentence. Two measurements of the served model give its effect:

- Left out: the result of the text less the result of the text without the unit.
- Alone: the result of the unit as the whole text less the result of the empty text.

Both are differences of results that anybody can ask for, because the rule of deletion is exact:

- The characters of the unit are removed.
- If white space or an end of the text is on both sides of it, the white space on one side goes too:
  that after it, or at the end of the text that before it.
- If nothing but white space is left, the text is empty.
- Several units are removed one after the other, the last first.

The effect of a pair of units, one of each text, is the result of both texts less the results
without one of them, plus the result without both: what they have together beyond what each has.

Units are ranked by the sum of both numbers: the first of them says what a text that has the rest
needs, the second what the unit brings by itself. `make bench-explain` compares this with others.

The maximum number of tokens decides how many numbers are measured: alone first, which costs little,
then left out, if necessary only units with the largest effects alone. With `by="auto"` the units
are the sentences of a text, or the words of a text of one sentence, and then the words of the best
sentences.

With `method="shapley"` a unit has its Shapley value instead, estimated from texts that keep some of
the units; see `service.inference.explain.shapley`. The values sum to the result of the text less
that of the empty text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import ClassVar

import numpy as np

from service.inference.explain.notebook_html import Chip, format_number, format_signed
from service.inference.explain.options import TextUnit, UnitKind
from service.inference.explain.pictures import heading_of, picture, summary_of, text_summary_of
from service.inference.explain.shapley import Subsets, shapley_values
from service.inference.tokenizing.rows import Span, strip_span
from service.inference.tokenizing.sentences import sentence_starts
from service.inference.tokenizing.words import word_spans


@dataclass(frozen=True, slots=True)
class UnitEffect:
    """Effect of a unit of a text on a result.

    Attributes:
        start: Index of its first character in the text.
        end: Index after its last character.
        left_out: Result of the text less that without the unit. None: not measured, or without it
            the text has no tokens, and no result.
        alone: Result of the unit alone less that of the empty text; None: one of them has none.
        rank: Place of the unit among those of the list, from 1; see the module docstring. A number
            that is None counts as 0.
    """

    start: int
    end: int
    left_out: float | None
    alone: float | None
    rank: int

    @property
    def chip(self) -> Chip:
        """The unit in the picture of its text."""
        left_out, alone = format_signed(self.left_out), format_signed(self.alone)
        numbers = f"left out {left_out}, alone {alone}, rank {self.rank}"
        return Chip(self.start, self.end, self.left_out, numbers)


@dataclass(frozen=True)
class TextEffects:
    """Effects of the units of one text on a result.

    Attributes:
        text: Index of the text in its pair, 0 or 1; 0 for a single text.
        content: The text.
        read: Span of the text that the model reads, of which the units and all variants are parts.
        whole: Result of that part.
        empty: Result of the empty text in its place; None: it has no tokens and no result.
        by: Kind of the units.
        units: The units, in the order of the text.
        words: With `by="auto"`, the words of the best of the sentences; empty otherwise.
    """

    text: int
    content: str
    read: Span
    whole: float
    empty: float | None
    by: UnitKind
    units: Sequence[UnitEffect]
    words: Sequence[UnitEffect] = ()

    def __repr__(self) -> str:
        return f"TextEffects({text_summary_of(self)})"

    @property
    def rows(self) -> dict[str, list[Chip]]:
        """The units in the picture of the text, and words of sentences in another one."""
        rows: dict[str, Sequence[UnitEffect]] = {self.by: self.units}
        if self.words:
            rows["words of the sentences that rank first"] = self.words
        return {name: [unit.chip for unit in units] for name, units in rows.items()}


@dataclass(frozen=True, slots=True)
class UnitValue:
    """Shapley value of a unit of a text.

    Attributes:
        start: Index of its first character in the text.
        end: Index after its last character.
        value: Its part of the difference between the results of the text and of the empty text.
        standard_error: Standard error of the value; 0 if it is exact.
        rank: Place of the unit by its value, from 1.
    """

    start: int
    end: int
    value: float
    standard_error: float
    rank: int

    @property
    def chip(self) -> Chip:
        """The unit in the picture of its text."""
        value, error = format_signed(self.value), format_number(self.standard_error)
        numbers = f"value {value}, standard error {error}, rank {self.rank}"
        return Chip(self.start, self.end, self.value, numbers)


@dataclass(frozen=True)
class TextValues:
    """Shapley values of the units of one text.

    Attributes:
        text: See `TextEffects`.
        content: See `TextEffects`.
        read: See `TextEffects`.
        whole: See `TextEffects`.
        empty: Result of the empty text in its place.
        by: Kind of the units.
        units: The units, in the order of the text. Their values sum to `whole - empty`.
    """

    text: int
    content: str
    read: Span
    whole: float
    empty: float
    by: UnitKind
    units: Sequence[UnitValue]

    def __repr__(self) -> str:
        return f"TextValues({text_summary_of(self)})"

    @property
    def rows(self) -> dict[str, list[Chip]]:
        """The units in the picture of the text."""
        return {self.by: [unit.chip for unit in self.units]}


@dataclass(frozen=True, slots=True)
class PairEffect:
    """Effect of a unit of the query and a unit of the document on a result, together.

    Attributes:
        query: Index of the unit of the query.
        document: Index of the unit of the document.
        value: Its effect; see the module docstring.
    """

    query: int
    document: int
    value: float


@dataclass(frozen=True)
class Deletions:
    """An explanation by deletion.

    Attributes:
        texts: Effects on the score, of each text whose units were left out.
        raw_texts: The same of a logit, of rerankers and classifiers; for other models the same as
            `texts`.
        label: Label of the score, for classifiers; None: for scores of pairs.
        pairs: Effects of pairs of units on the score, and on the logit, the largest first. They are
            empty if the tokens did not suffice; None: not requested.
        other: Span that the model reads of the other text of a pair, whose units were not left out;
            all variants have this part. None: there is no such text.
        unknown: Spans of each text that the model reads as the unknown token, so that for it they
            are alike.
    """

    texts: Sequence[TextEffects]
    raw_texts: Sequence[TextEffects]
    label: str | None = None
    pairs: tuple[Sequence[PairEffect], Sequence[PairEffect]] | None = None
    other: Span | None = None
    unknown: Sequence[Sequence[Span]] = ()
    meaning: ClassVar[str] = "lost by the {} without it"

    @property
    def units(self) -> int:
        """Number of units of all texts, and of pairs of them."""
        pairs = 0 if self.pairs is None else len(self.pairs[0])
        return pairs + sum(len(text.units) + len(text.words) for text in self.texts)

    def __repr__(self) -> str:
        return summary_of(self)

    def _repr_html_(self) -> str:
        return picture(heading_of(self), [("", self)])


@dataclass(frozen=True)
class ShapleyValues:
    """An explanation by Shapley values; attributes as of `Deletions`."""

    texts: Sequence[TextValues]
    raw_texts: Sequence[TextValues]
    label: str | None = None
    other: Span | None = None
    unknown: Sequence[Sequence[Span]] = ()
    meaning: ClassVar[str] = "part of the {} (Shapley value)"

    @property
    def units(self) -> int:
        """Number of units of all texts."""
        return sum(len(text.units) for text in self.texts)

    def __repr__(self) -> str:
        return summary_of(self)

    def _repr_html_(self) -> str:
        return picture(heading_of(self), [("", self)])


def highlights_of(deletions: Deletions, count: int) -> Deletions:
    """Return an explanation with the best units of each text alone, best first."""
    texts, raw_texts = (
        [replace(text, units=sorted(text.units, key=attrgetter("rank"))[:count]) for text in own]
        for own in (deletions.texts, deletions.raw_texts)
    )
    return replace(deletions, texts=texts, raw_texts=raw_texts)


def unit_spans(text: str, by: TextUnit) -> list[Span]:
    """Return the span of each unit of a text, without the white space around it, in order."""
    if by == "words":
        return word_spans(text)
    starts = sorted({0, *sentence_starts(text), len(text)})
    spans = (strip_span(text, *span) for span in pairwise(starts))
    return [span for span in spans if span[0] < span[1]]


def without(text: str, unit: Span) -> str:
    """Return the text without a unit; see the rule in the module docstring."""
    before, after = text[: unit[0]], text[unit[1] :]
    if not before[-1:].strip() and not after[:1].strip():
        before, after = (before, after.lstrip()) if after else (before.rstrip(), after)
    return before + after if (before + after).strip() else ""


def with_units(text: str, units: Sequence[Span], kept: Sequence[bool]) -> str:
    """Return the text without the units that are not kept; see the rule in the module docstring."""
    for unit, is_kept in zip(reversed(units), reversed(kept), strict=True):
        if not is_kept:
            text = without(text, unit)
    return text


def values_of(
    offset: int,
    units: Sequence[Span],
    whole: float,
    empty: float,
    subsets: Subsets,
    results: Sequence[float],
) -> list[UnitValue]:
    """Return the Shapley values of units of a text.

    Args:
        offset: See `effects_of`.
        units: See `effects_of`.
        whole: See `effects_of`.
        empty: Result of the empty text.
        subsets: Subsets of the units, as of `subsets_of`.
        results: Result of the text with each of the subsets.
    """
    if not units:
        return []
    values, errors = shapley_values(subsets, np.array(results), whole, empty)
    ranks = _ranks(values.tolist())
    return [
        UnitValue(offset + start, offset + end, value, error, rank)
        for (start, end), value, error, rank in zip(
            units, values.tolist(), errors.tolist(), ranks, strict=True
        )
    ]


def effects_of(
    offset: int,
    units: Sequence[Span],
    whole: float,
    empty: float | None,
    without: Sequence[float | None],
    alone: Sequence[float | None],
) -> list[UnitEffect]:
    """Return the effects of units of a text.

    Args:
        offset: Index of the first character that the model reads.
        units: Units of the part that it reads, relative to its start.
        whole: Result of the part.
        empty: Result of the empty text; None: it has none.
        without: Result of the part without each unit; None: not measured, or it has none.
        alone: Result of each unit as the whole text; None: it has none.
    """
    left_out = [_difference(whole, result) for result in without]
    by_itself = [_difference(result, empty) for result in alone]
    ranks = _ranks(
        [(one or 0.0) + (other or 0.0) for one, other in zip(left_out, by_itself, strict=True)]
    )
    return [
        UnitEffect(offset + start, offset + end, change, own, rank)
        for (start, end), change, own, rank in zip(units, left_out, by_itself, ranks, strict=True)
    ]


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _ranks(values: Sequence[float]) -> list[int]:
    """Return the rank of each unit by its value, from 1; of equal units the first is first."""
    ranks = np.empty(len(values), int)
    ranks[np.argsort([-value for value in values], kind="stable")] = range(1, len(values) + 1)
    return list(map(int, ranks))
