"""Which variants of texts are scored for explanations by deletion, and what their results say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput
from service.inference.explain.deletion import (
    Deletion,
    Deletions,
    ShapleyValues,
    TextEffects,
    TextValues,
    UnitEffect,
    UnitKind,
    effects_of,
    unit_spans,
    values_of,
    with_units,
    without,
)
from service.inference.explain.shapley import Subsets, subsets_of
from service.inference.model.scoring import FurtherInputs, Input
from service.inference.model.variant_texts import VariantTexts
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Span

# Scores and logits of an input, `(2, C)`.
Values = NDArray[np.float64]

# Maximum number of characters of all variants, per token of the limit: a word of thousands of
# characters can be one token.
_CHARS_PER_TOKEN = 16
# With `by="auto"`: maximum number of sentences whose words are left out.
_BEST_SENTENCES = 2


@dataclass(frozen=True)
class Part:
    """The part of a text that the model reads.

    Attributes:
        index: Index of the input.
        text: Index of the text in the input.
        read: Span of the part in the text.
        whole: The input, of the parts of its texts that the model reads.
        by: Kind of its units.
        units: Span of each unit in the part.
        subsets: Units that the texts for Shapley values keep.
    """

    index: int
    text: int
    read: Span
    whole: Input
    by: UnitKind
    units: Sequence[Span]
    subsets: Subsets

    @property
    def content(self) -> str:
        """The part."""
        return self.whole if isinstance(self.whole, str) else self.whole[self.text]

    def with_text(self, variant: str) -> Input:
        """Return the input with a variant in place of the part."""
        if isinstance(self.whole, str):
            return variant
        return (variant, self.whole[1]) if self.text == 0 else (self.whole[0], variant)

    def without(self, unit: Span) -> Input:
        """Return the input without a unit of the part."""
        return self.with_text(without(self.content, unit))

    def alone(self, unit: Span) -> Input:
        """Return the input with a unit in place of the part."""
        return self.with_text(self.content[slice(*unit)])

    @cached_property
    def with_subsets(self) -> list[Input]:
        """The input with each of the subsets of the units."""
        kept = self.subsets.tolist()
        return [self.with_text(with_units(self.content, self.units, own)) for own in kept]


@dataclass
class DeletionPlanner:
    """Chooses the variants of inputs, and computes the explanations from their values.

    Attributes:
        model: The model.
        inputs: The inputs.
        deletion: Options of the explanations.
        limits: Maximum number of tokens of both texts of a pair.
        options: Options of the call.
        labels: Labels of a classifier; empty for scores of pairs.
        known: Values of the inputs that are known, which the explanations have too.
        tokens: Number of tokens of all rows that have run.
    """

    model: LoadedModel
    inputs: Sequence[Input]
    deletion: Deletion
    limits: PairLimits
    options: CallOptions
    labels: Sequence[str] = ()
    known: Mapping[Input, Values] = field(default_factory=dict)
    tokens: int = 0
    _chars: int = 0
    _parts: list[Part] = field(default_factory=list)
    _of: list[range] = field(default_factory=list)  # indices of the parts of each input
    _chosen: list[Input] = field(default_factory=list)
    _values: dict[Input, Values] = field(default_factory=dict)
    # With `by="auto"`: number of tokens of each input, and without the part; remaining tokens.
    _lengths: list[tuple[int, int]] = field(default_factory=list)
    _remaining: list[int] = field(default_factory=list)
    _words: dict[int, list[Span]] = field(default_factory=dict)

    @cached_property
    def _texts(self) -> VariantTexts:
        return VariantTexts(self.model, self.limits, self.options)

    def further(self, choose: Callable[[Sequence[bool]], Sequence[Input]]) -> FurtherInputs:
        """Return inputs that run together with others, within the limit of tokens."""
        return FurtherInputs(choose, self._count, self._texts.overflow)

    def add(self, values: Values, inputs: Sequence[Input] | None = None) -> None:
        """Keep the values of inputs; None: of those of the call, and of the first variants."""
        own = [*self.inputs, *self._chosen] if inputs is None else inputs
        self._values |= zip(own, values, strict=True)
        self._values |= self.known

    def first(self, truncated: Sequence[bool]) -> Sequence[Input]:
        """Return the variants that run together with the inputs."""
        for index, is_truncated in enumerate(truncated):
            self._check_deadline()
            own = self._parts_of(index, is_truncated)
            self._of.append(range(len(self._parts), len(self._parts) + len(own)))
            self._parts += own
        wanted = self._auto() if self.deletion.by == "auto" else self._every()
        wholes = (part.whole for part in self._parts)
        known = {*self.inputs}
        variants = dict.fromkeys((*wholes, *wanted))
        distinct = [variant for variant in variants if variant not in known]
        self._chosen = self._texts.with_result(distinct)
        if self._is_shapley and len(self._chosen) < len(distinct):
            raise InvalidInput(
                f"the model {self.model.name} has no result for texts without tokens, which "
                "Shapley values need",
                pointer="/explain/method",
            )
        return self._chosen

    def second(self) -> Sequence[Input]:
        """Return the variants that depend on the results of the first: those of "auto"."""
        if self.deletion.by != "auto":
            return []
        again = (
            0
            if self._texts.are_read_together
            else self._texts.tokens([p.whole for p in self._parts])
        )
        left = int(0.95 * self.deletion.max_tokens) - self.tokens - again
        scale = min(1.0, max(0, left) / max(1, sum(self._remaining)))
        self._remaining = [int(scale * remaining) for remaining in self._remaining]
        wanted: list[Input] = []
        for at, part in enumerate(self._parts):
            wanted += self._refined(at, part)
        new = (variant for variant in dict.fromkeys(wanted) if variant not in self._values)
        return self._texts.with_result(new)

    def deletions(self) -> list[Deletions]:
        """Return the explanation of each input by deletion; none with `method="shapley"`."""
        if self._is_shapley:
            return []
        return [
            Deletions(
                [self._effects(at, raw=False) for at in self._of[index]],
                [self._effects(at, raw=True) for at in self._of[index]],
                self._label_of(index),
            )
            for index in range(len(self.inputs))
        ]

    def shapley_values(self) -> list[ShapleyValues]:
        """Return the Shapley values of each input; none with another method."""
        if not self._is_shapley:
            return []
        return [
            ShapleyValues(
                [self._shapley(at, raw=False) for at in self._of[index]],
                [self._shapley(at, raw=True) for at in self._of[index]],
                self._label_of(index),
            )
            for index in range(len(self.inputs))
        ]

    @property
    def _is_shapley(self) -> bool:
        return self.deletion.method == "shapley"

    def _parts_of(self, index: int, is_truncated: bool) -> list[Part]:
        whole = self.inputs[index]
        texts = (whole,) if isinstance(whole, str) else whole
        spans: Sequence[Span] = [(0, len(text)) for text in texts]
        if is_truncated:
            spans = self._texts.read(whole)
            read = [text[slice(*span)] for text, span in zip(texts, spans, strict=True)]
            whole = read[0] if isinstance(whole, str) else (read[0], read[1])
        chosen = range(len(texts)) if self.labels else self.deletion.texts
        parts: list[Part] = []
        for text in chosen:
            content = whole if isinstance(whole, str) else whole[text]
            by: UnitKind = "sentences" if self.deletion.by == "auto" else self.deletion.by
            units = unit_spans(content, by)
            if self.deletion.by == "auto" and len(units) < 2:
                by, units = "words", unit_spans(content, "words")
            parts.append(Part(index, text, spans[text], whole, by, units, self._subsets(units)))
        return parts

    def _subsets(self, units: Sequence[Span]) -> Subsets:
        if not (self._is_shapley and units):
            return np.empty((0, len(units)), bool)
        return subsets_of(len(units), self.deletion.samples_of(len(units)), self.deletion.seed)

    def _every(self) -> Iterable[Input]:
        # Refused before they take memory: each variant has at least the tokens of the empty one.
        distinct = {
            part.whole if self._texts.are_read_together else part.content: part
            for part in self._parts
        }
        shortest: dict[Input, int] = {}
        tokens = 0
        for part in distinct.values():
            self._check_deadline()
            empty = part.with_text("") if self._texts.are_read_together else ""
            if empty not in shortest:
                shortest[empty] = self._texts.length(part.with_text(""), part.text)
            variants = 2 * len(part.units) or 1
            if self._is_shapley:
                variants = len(np.unique(part.subsets, axis=0))
            tokens += variants * shortest[empty]
            self._check(tokens <= self.deletion.max_tokens)
        for part in self._parts:
            count = len(part.subsets) // 2 if self._is_shapley else len(part.units)
            self._count_chars((count + 1) * len(part.content))
        for part in self._parts:
            yield part.with_text("")
            if self._is_shapley:
                yield from part.with_subsets
            else:
                yield from map(part.without, part.units)
                yield from map(part.alone, part.units)

    def _auto(self) -> Iterable[Input]:
        """Return each unit alone and, if the tokens suffice, the texts without each unit."""
        empties = [part.with_text("") for part in self._parts]
        wholes = [part.whole for part in self._parts]
        self._lengths = [
            (self._texts.length(part.whole, part.text), self._texts.length(empty, part.text))
            for part, empty in zip(self._parts, empties, strict=True)
        ]
        # Estimates are a bit low, because a variant can split otherwise. The inputs run too, and of
        # texts that are encoded separately, the other text again with the second variants.
        base = self._texts.tokens([*self.inputs, *wholes])
        available = int(0.95 * self.deletion.max_tokens) - base * (
            1 if self._texts.are_read_together else 2
        )
        alone = [
            rest + len(part.units) * (rest + 1) + length - rest
            for part, (length, rest) in zip(self._parts, self._lengths, strict=True)
        ]
        available -= sum(alone)
        self._check(available >= 0)
        wanted: list[Input] = []
        for part, empty in zip(self._parts, empties, strict=True):
            self._count_chars(2 * len(part.content))
            wanted += [empty, *map(part.alone, part.units)]
        left_out = [
            len(part.units) * (length + 1)
            for part, (length, _) in zip(self._parts, self._lengths, strict=True)
        ]
        self._remaining = [0] * len(self._parts)
        # What short texts do not need is for the longer ones, and then for words.
        with_words: list[int] = []
        for count, at in enumerate(sorted(range(len(left_out)), key=left_out.__getitem__)):
            part, own = self._parts[at], min(left_out[at], available // (len(left_out) - count))
            available -= own
            if own < left_out[at]:
                self._remaining[at] = own
                continue
            self._count_chars(len(part.units) * len(part.content))
            wanted += map(part.without, part.units)
            with_words += [at] if part.by == "sentences" else []
        for at in with_words:
            self._remaining[at] = available // len(with_words)
        return wanted

    def _refined(self, at: int, part: Part) -> Iterable[Input]:
        """Return further variants of a text, by what its units alone and left out have shown."""
        length, rest = self._lengths[at]
        remaining = self._remaining[at]
        effects = self._effects(at, raw=True).units
        is_measured = any(effect.left_out is not None for effect in effects)
        if part.units and not is_measured:
            fit = remaining // (length + 1)
            largest = np.argsort([-abs(effect.alone or 0.0) for effect in effects], kind="stable")
            chosen = [part.units[index] for index in largest[:fit].tolist()]
            self._count_chars(len(chosen) * len(part.content))
            return [*map(part.without, chosen)]
        if part.by == "words":
            return []
        by_rank = sorted(range(len(effects)), key=lambda index: effects[index].rank)
        wanted: list[Input] = []
        for index in by_rank[:_BEST_SENTENCES]:
            start, end = part.units[index]
            words = [
                (start + a, start + b) for a, b in unit_spans(part.content[start:end], "words")
            ]
            remaining -= len(words) * (length + rest + 2) + length
            if remaining < 0:
                break
            self._count_chars(len(words) * len(part.content))
            self._words.setdefault(at, []).extend(words)
            wanted += [*map(part.without, words), *map(part.alone, words)]
        return wanted

    def _shapley(self, at: int, *, raw: bool) -> TextValues:
        part = self._parts[at]
        value = self._value_of(part, raw)
        whole, empty, *results = (
            float(cast(float, value(own)))
            for own in (part.whole, part.with_text(""), *part.with_subsets)
        )
        values = values_of(part.read[0], part.units, whole, empty, part.subsets, results)
        return TextValues(part.text, part.read, whole, empty, part.by, values)

    def _value_of(self, part: Part, raw: bool) -> Callable[[Input], float | None]:
        label = self._label_of(part.index)
        column = 0 if label is None else self.labels.index(label)

        def value(variant: Input) -> float | None:
            values = self._values.get(variant)
            return None if values is None else float(values[int(raw), column])

        return value

    def _effects(self, at: int, *, raw: bool) -> TextEffects:
        part = self._parts[at]
        value = self._value_of(part, raw)
        whole, empty = value(part.whole), value(part.with_text(""))
        assert whole is not None  # noqa: S101 - it has run

        def effects(units: Sequence[Span]) -> list[UnitEffect]:
            return effects_of(
                *(part.read[0], units, whole, empty),
                [value(part.without(unit)) for unit in units],
                [value(part.alone(unit)) for unit in units],
            )

        words = sorted(self._words.get(at, ()))
        return TextEffects(
            part.text, part.read, whole, empty, part.by, effects(part.units), effects(words)
        )

    def _label_of(self, index: int) -> str | None:
        """Return the label of an input whose score is explained; None: scores of pairs."""
        if not self.labels:
            return None
        if self.deletion.label is not None:
            return self.deletion.label
        return self.labels[int(self._values[self.inputs[index]][1].argmax())]

    def _count(self, tokens: int) -> None:
        """Count the tokens of all rows of a run, and refuse too many."""
        self.tokens += tokens
        self._check(self.tokens <= self.deletion.max_tokens)

    def _count_chars(self, count: int) -> None:
        """Count characters of variants before these take memory, and refuse too many."""
        self._chars += count
        self._check(self._chars <= self.deletion.max_tokens * _CHARS_PER_TOKEN)

    def _check(self, fits: bool) -> None:
        if not fits:
            coarser = "" if self.deletion.by == "auto" else ', or by "auto"'
            raise InvalidInput(
                f"leaving out the units of the texts takes more than {self.deletion.max_tokens} "
                f"tokens; explain fewer or shorter texts{coarser}",
                code="too_many_tokens",
                pointer="/explain",
            )

    def _check_deadline(self) -> None:
        deadline = self.options.deadline
        if deadline is not None and not deadline.remaining_s:
            raise TimeoutError
