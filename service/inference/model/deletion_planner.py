"""Which variants of texts are scored for explanations by deletion, and what their results say."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import cast

import numpy as np
from numpy.typing import NDArray

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput
from service.inference.explain.deletion import (
    Deletions,
    PairEffect,
    ShapleyValues,
    TextEffects,
    TextValues,
    UnitEffect,
    effects_of,
    unit_spans,
    values_of,
    with_units,
    without,
)
from service.inference.explain.options import CHUNK_TOKENS, MAX_TOKENS, Deletion, UnitKind
from service.inference.explain.shapley import Subsets, subsets_of
from service.inference.model.scoring import Input
from service.inference.model.variant_texts import VariantTexts
from service.inference.model.zero_shot import CandidateLabels
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.chunking import split
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Span

# Scores and logits of an input, `(2, C)`.
Values = NDArray[np.float64]

# Number of characters of variants that count as a token at least: a word of thousands of characters
# can be one token, and variants take memory.
_CHARS_PER_TOKEN = 16
# Number of units of an input whose tokens others leave for it, so that these can be left out beside
# all units alone.
_RESERVED = 3
# With `by="auto"`: maximum number of sentences whose words are left out.
_BEST_SENTENCES = 2


@dataclass
class Part:
    """The part of a text that the model reads, and what is left out of it.

    Attributes:
        index: Index of the input.
        text: Index of the text in the input.
        read: Span of the part in the text.
        other: Span that the model reads of the other text of a pair; None: a single text.
        whole: The input, of the parts of its texts that the model reads.
        by: Kind of its units.
        units: Span of each unit in the part.
        samples: Maximum number of texts for Shapley values.
        length: Number of tokens that run for the text, in the input.
        rest: The same for the empty text in its place.
        remaining: Number of tokens for variants that depend on the first results.
        words: With `by="auto"`, span of each word of the best sentences.
        variants: The inputs without each unit or word that is left out.
        subsets: Units that the texts for Shapley values keep.
    """

    index: int
    text: int
    read: Span
    other: Span | None
    whole: Input
    by: UnitKind
    units: Sequence[Span]
    samples: int
    length: int = 0
    rest: int = 0
    remaining: int = 0
    words: list[Span] = field(default_factory=list)
    variants: dict[Span, Input] = field(default_factory=dict)
    subsets: Subsets = field(default_factory=lambda: np.empty((0, 0), bool))

    @property
    def content(self) -> str:
        """The part."""
        return _texts_of(self.whole)[self.text]

    def with_text(self, variant: str) -> Input:
        """Return the input with a variant in place of the part."""
        if isinstance(self.whole, str):
            return variant
        return (variant, self.whole[1]) if self.text == 0 else (self.whole[0], variant)

    def without(self, units: Iterable[Span], limit: float = math.inf) -> list[Input]:
        """Return the inputs without each of some units or words, and remember them.

        Args:
            units: The units or words.
            limit: Maximum number of inputs. Those without one of adjacent equal units are equal.
        """
        inputs: dict[Input, None] = {}
        for unit in units:
            variant = self.with_text(without(self.content, unit))
            if variant not in inputs and len(inputs) == limit:
                break
            inputs[variant] = None
            self.variants[unit] = variant
        return list(inputs)

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
        inputs: The inputs of the call.
        order: Indices of the inputs to explain, the most important first.
        deletion: Options of the explanations.
        limits: Maximum number of tokens of both texts of a pair.
        options: Options of the variants.
        labels: Labels of a classifier; empty for scores of pairs.
        candidates: The labels, if the call has chosen them.
        aim: Number of tokens per token of the inputs, and a minimum. Units alone and a few left out
            may take more than both. None: the limit of the options alone counts.
        is_for_best: Whether, of too many units, the best are left out, and not those with the
            largest effects.
        tokens: Number of tokens of all rows of variants.
    """

    model: LoadedModel
    inputs: Sequence[Input]
    order: Sequence[int]
    deletion: Deletion
    limits: PairLimits
    options: CallOptions
    labels: Sequence[str] = ()
    candidates: CandidateLabels | None = None
    aim: tuple[int, int] | None = None
    is_for_best: bool = False
    tokens: int = 0
    # Parts of the inputs for which the tokens suffice, and tokens of these inputs, by index.
    _of: dict[int, list[Part]] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    _values: dict[Input, Values] = field(default_factory=dict)
    # Indices of inputs, by the parts of their texts that the model reads.
    _wholes: dict[Input, int] = field(default_factory=dict)
    # Number of tokens of each text, by side, that variants of the other text of its pair need.
    _others: dict[tuple[int, str], int] = field(default_factory=dict)
    # Number of tokens for pairs of units, and the inputs without each, by index.
    _pair_tokens: int = 0
    _pairs: dict[int, dict[tuple[int, int], Input]] = field(default_factory=dict)

    @cached_property
    def _texts(self) -> VariantTexts:
        return VariantTexts(self.model, self.limits, self.options, self.candidates)

    @cached_property
    def _known(self) -> set[Input]:
        """Texts whose values are those of the inputs, or have been asked for."""
        return set(self.inputs)

    @property
    def texts(self) -> list[str]:
        """The texts of all inputs to explain, once each, or once per candidate label."""
        inputs = [self.inputs[index] for index in self.order]
        texts = [*dict.fromkeys(text for own in inputs for text in _texts_of(own))]
        if self.candidates is None:
            return texts
        hypotheses = self.candidates.hypotheses
        return texts * len(hypotheses) + hypotheses

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of all variants."""
        return self.deletion.max_tokens or MAX_TOKENS

    def count(self, tokens: int) -> None:
        """Count the tokens of all rows of a run, and refuse too many."""
        self.tokens += tokens
        self._check(self.tokens <= self.max_tokens)

    def add(self, variants: Sequence[Input], values: Values) -> None:
        """Keep the values of variants, `(M, 2, C)`."""
        self._values.update(zip(variants, values, strict=True))

    def add_results(self, results: Values) -> None:
        """Keep the values of the inputs, `(N, 2, C)`; after `first`."""
        self.add(self.inputs, results)
        for whole, index in self._wholes.items():
            self._values.setdefault(whole, results[index])

    def first(self) -> Sequence[Input]:
        """Return the variants that depend on no results."""
        available = self._keep()
        inputs = self._subsets() if self._is_shapley else self._left_out(available)
        # The part of a text that the model reads can have other tokens than the text.
        new = self._new([*(part.whole for part in self._parts), *inputs])
        variants = self._texts.with_result(new)
        if self._is_shapley and len(variants) < len(new):
            raise InvalidInput(
                f"the model {self.model.name} has no result for texts without tokens, which "
                "Shapley values need",
                pointer="/explain/method",
            )
        return variants

    def second(self) -> Sequence[Input]:
        """Return the variants that depend on the results of the first."""
        parts = self._parts
        remaining = sum(part.remaining for part in parts)
        if not remaining and not self._pair_tokens:
            return []
        left = self._limit - self.tokens - sum(self._others.values())
        inputs: list[Input] = []
        if 0 < self._pair_tokens <= left:
            left -= self._pair_tokens
            inputs += self._without_pairs()
        for part in parts:
            part.remaining = int(min(1.0, max(0, left) / max(1, remaining)) * part.remaining)
            inputs += self._refine(part)
        return self._texts.with_result(self._new(inputs))

    def explanations(self) -> tuple[dict[int, Deletions], dict[int, ShapleyValues]]:
        """Return the explanations by deletion or the Shapley values, by index."""
        if self._is_shapley:
            return {}, {
                index: ShapleyValues(
                    [self._shapley(part, raw=False) for part in parts],
                    [self._shapley(part, raw=True) for part in parts],
                    self._label_of(index),
                    _other_of(parts),
                    self._unknown(parts),
                )
                for index, parts in self._of.items()
            }
        return {
            index: Deletions(
                [self._effects(part, raw=False) for part in parts],
                [self._effects(part, raw=True) for part in parts],
                self._label_of(index),
                (self._pair_effects(index, raw=False), self._pair_effects(index, raw=True))
                if self.deletion.pairs
                else None,
                _other_of(parts),
                self._unknown(parts),
            )
            for index, parts in self._of.items()
        }, {}

    @property
    def _parts(self) -> list[Part]:
        return [part for own in self._of.values() for part in own]

    @property
    def _is_shapley(self) -> bool:
        return self.deletion.method == "shapley"

    @property
    def _limit(self) -> int:
        # Estimates are a bit low, because a variant can split otherwise.
        return int(0.95 * self.max_tokens)

    def _new(self, inputs: Iterable[Input]) -> list[Input]:
        new = [variant for variant in dict.fromkeys(inputs) if variant not in self._known]
        self._known.update(new)
        return new

    def _keep(self) -> int:
        """Keep the inputs for whose units the tokens suffice, the most important ones first.

        Returns the number of tokens that remain.
        """
        spent = reserved = 0
        for index in self.order:
            self._check_deadline()
            length, is_truncated = self._texts.measure(self.inputs[index])
            # The units alone have as many tokens as the input.
            if reserved + length > self._limit:
                continue
            parts = self._parts_of(index, is_truncated)
            others = self._others_of(parts)
            cost = sum(map(self._cost_of_units, parts)) + sum(others.values())
            reserve = cost + _reserved(length)
            if not self.deletion.is_auto:  # which needs the rest for words
                reserve = min(reserve, cost + sum(map(self._cost_of_left_out, parts)))
            if reserved + (reserve if self._of else cost) <= self._limit:
                spent += cost
                reserved += reserve
                self._of[index], self._lengths[index] = parts, length
                self._others |= others
        self._check(bool(self._of))
        return self._limit - spent

    def _parts_of(self, index: int, is_truncated: bool) -> list[Part]:
        own = self.inputs[index]
        texts = _texts_of(own)
        spans: Sequence[Span] = [(0, len(text)) for text in texts]
        whole = own
        if is_truncated:
            spans = self._texts.read(own)
            read = [text[slice(*span)] for text, span in zip(texts, spans, strict=True)]
            whole = read[0] if isinstance(own, str) else (read[0], read[1])
            self._wholes[whole] = index
            if self._texts.have_same_rows(own, whole):
                self._known.add(whole)
        chosen = range(len(texts)) if self.labels else self.deletion.texts
        return [self._part_of(index, text, spans, whole) for text in chosen]

    def _part_of(self, index: int, text: int, spans: Sequence[Span], whole: Input) -> Part:
        content = _texts_of(whole)[text]
        by = self.deletion.units
        units = self._units(content, by)
        if self.deletion.is_auto and len(units) < 2:
            by, units = "words", unit_spans(content, "words")
        samples = 0
        if self._is_shapley and units:
            samples = min(self.deletion.samples_of(len(units)), (1 << len(units)) - 2)
        other = spans[1 - text] if len(spans) > 1 else None
        part = Part(index, text, spans[text], other, whole, by, units, samples)
        part.length, part.rest = (self._length(part, variant) for variant in (content, ""))
        return part

    def _units(self, text: str, by: UnitKind) -> list[Span]:
        if by != "chunks":
            return unit_spans(text, by)
        (encoding,) = self.model.tokenizer.encodings.encode_whole([text], with_special=False)
        pieces = split(
            text, encoding.offsets, "sentences", CHUNK_TOKENS, 0, lambda _, count: (count, 0)
        )
        spans = [(piece.chunk.start, piece.chunk.end) for piece in pieces]
        return [span for span in spans if text[slice(*span)].strip()]

    def _others_of(self, parts: Sequence[Part]) -> dict[tuple[int, str], int]:
        """Return the tokens of the other texts of parts, unless other parts need them too."""
        if self._texts.are_read_together:
            return {}
        others = [(part, (1 - part.text, part.whole[1 - part.text])) for part in parts]
        return {
            other: self._texts.length(part.whole, other[0])
            for part, other in others
            if other not in self._others
        }

    def _cost_of_units(self, part: Part) -> int:
        """Return the number of tokens of the units alone, or of the texts for Shapley values."""
        whole = 0 if part.whole in self._known else part.length
        if self._is_shapley:  # a subset and its complement have all units
            return whole + part.rest + part.samples // 2 * (part.length + part.rest + 2)
        if all(part.alone(unit) in self._known for unit in part.units):
            return whole + part.rest
        return whole + part.length + len(part.units) * (part.rest + 1)

    def _cost_of_left_out(self, part: Part) -> int:
        """Return the number of tokens of the texts without each unit; 0: they are units alone."""
        alone = {"", *(part.content[slice(*unit)] for unit in part.units)}
        if len(part.units) < 3 and {without(part.content, unit) for unit in part.units} <= alone:
            return 0
        return len(part.units) * (part.length + 1)

    def _subsets(self) -> Iterable[Input]:
        """Return the texts with each subset of the units, for Shapley values."""
        for part in self._parts:
            self._check_deadline()
            yield part.with_text("")
            if part.units:
                samples = self.deletion.samples_of(len(part.units))
                part.subsets = subsets_of(len(part.units), samples, self.deletion.seed)
                yield from part.with_subsets

    def _left_out(self, available: int) -> Iterable[Input]:
        """Return each unit alone and, if the tokens suffice, the texts without each unit."""
        if self.aim is not None:
            per_token, least = self.aim
            lengths = self._lengths.values()
            rest = max(least, per_token * sum(lengths)) - (self._limit - available)
            available = min(available, max(rest, sum(map(_reserved, lengths))))
        # The other texts run again with second variants.
        available -= min(available, sum(self._others.values()))
        cost = sum(map(self._cost_of_pairs, self._of.values()))
        if cost <= available:
            self._pair_tokens = cost
            available -= cost
        inputs: list[Input] = []
        for part in self._parts:
            self._check_deadline()
            inputs += [part.with_text(""), *map(part.alone, part.units)]
        # What short texts do not need is for the longer ones, and then for words.
        by_cost = sorted(self._parts, key=self._cost_of_left_out)
        with_words: list[Part] = []
        for index, part in enumerate(by_cost):
            cost = self._cost_of_left_out(part)
            own = min(cost, available // (len(by_cost) - index))
            available -= own
            if own < cost:
                part.remaining = own
                continue
            inputs += part.without(part.units)
            if part.by == "sentences" and self.deletion.is_auto:
                with_words.append(part)
        for part in with_words:
            part.remaining = available // len(with_words)
        return inputs

    def _length(self, part: Part, variant: str) -> int:
        """Return the number of tokens of the input with a variant, or more if these are long."""
        tokens = self._texts.length(part.with_text(variant), part.text)
        return max(tokens, len(variant) // _CHARS_PER_TOKEN)

    def _cost_of_pairs(self, parts: Sequence[Part]) -> int:
        """Return the number of tokens of an input without pairs of its units."""
        counts = [min(self.deletion.pairs, len(part.units)) for part in parts]
        if self._texts.are_read_together:
            return math.prod(counts) * parts[0].length
        return sum(count * part.length for count, part in zip(counts, parts, strict=True))

    def _without_pairs(self) -> Iterable[Input]:
        """Return the inputs without pairs of the best units of their texts."""
        for index, parts in self._of.items():
            if not all(set(part.units) <= part.variants.keys() for part in parts):
                continue
            first, second = (
                {
                    at: part.variants[part.units[at]][part.text]
                    for at, effect in enumerate(self._effects(part, raw=True).units)
                    if effect.rank <= self.deletion.pairs
                }
                for part in parts
            )
            self._pairs[index] = {
                (a, b): (query, document)
                for (a, query), (b, document) in product(first.items(), second.items())
            }
            yield from self._pairs[index].values()

    def _refine(self, part: Part) -> Iterable[Input]:
        """Return further variants of a text, by what its units alone and left out have shown."""
        remaining = part.remaining
        # As pictures show them: scores of labels, but logits of rerankers.
        effects = self._effects(part, raw=not self.labels).units
        if not part.variants:
            fit = remaining // (part.length + 1)
            sizes = [effect.alone or 0.0 for effect in effects]
            first = np.argsort(
                [-(size if self.is_for_best else abs(size)) for size in sizes], kind="stable"
            )
            return part.without([part.units[index] for index in first.tolist()], fit)
        inputs: list[Input] = []
        for effect in sorted(effects, key=lambda effect: effect.rank)[:_BEST_SENTENCES]:
            start, end = effect.start - part.read[0], effect.end - part.read[0]
            words = [
                (start + a, start + b) for a, b in unit_spans(part.content[start:end], "words")
            ]
            remaining -= len(words) * (part.length + part.rest + 2) + part.length
            if remaining < 0:
                break
            part.words += words
            inputs += [*part.without(words), *map(part.alone, words)]
        return inputs

    def _shapley(self, part: Part, *, raw: bool) -> TextValues:
        value = self._value_of(part, raw)
        whole, empty, *results = (
            float(cast(float, value(own)))
            for own in (part.whole, part.with_text(""), *part.with_subsets)
        )
        values = values_of(part.read[0], part.units, whole, empty, part.subsets, results)
        content = self._content(part)
        return TextValues(part.text, content, part.read, whole, empty, part.by, values)

    def _content(self, part: Part) -> str:
        """Return the text of a part."""
        return _texts_of(self.inputs[part.index])[part.text]

    def _value_of(self, part: Part, raw: bool) -> Callable[[Input], float | None]:
        column = self._column_of(part.index) if self.labels else 0

        def value(variant: Input) -> float | None:
            values = self._values.get(variant)
            return None if values is None else float(values[int(raw), column])

        return value

    def _effects(self, part: Part, *, raw: bool) -> TextEffects:
        value = self._value_of(part, raw)
        whole, empty = value(part.whole), value(part.with_text(""))
        assert whole is not None  # noqa: S101 - it has run

        def effects(units: Sequence[Span]) -> list[UnitEffect]:
            variants = map(part.variants.get, units)
            return effects_of(
                *(part.read[0], units, whole, empty),
                [None if variant is None else value(variant) for variant in variants],
                [value(part.alone(unit)) for unit in units],
            )

        return TextEffects(
            *(part.text, self._content(part), part.read, whole, empty, part.by),
            effects(part.units),
            effects(sorted(part.words)),
        )

    def _pair_effects(self, index: int, *, raw: bool) -> list[PairEffect]:
        """Return the effects of pairs of units, the largest first."""
        effects = []
        for (a, b), without_both in self._pairs.get(index, {}).items():
            first, second = self._of[index]
            value = self._value_of(first, raw)
            results = [
                value(variant)
                for variant in (
                    first.whole,
                    first.variants[first.units[a]],
                    second.variants[second.units[b]],
                    without_both,
                )
            ]
            if None not in results:  # a text without tokens has no result
                whole, without_a, without_b, both = cast(list[float], results)
                effects.append(PairEffect(a, b, whole - without_a - without_b + both))
        return sorted(effects, key=lambda effect: -effect.value)

    def _label_of(self, index: int) -> str | None:
        """Return the label of an input whose score is explained; None: scores of pairs."""
        return self.labels[self._column_of(index)] if self.labels else None

    def _unknown(self, parts: Sequence[Part]) -> list[list[Span]]:
        """Return the spans of each text of an input that the model reads as the unknown token."""
        first = parts[0]
        reads = [part.read for part in parts]
        if first.other is not None:
            reads = [first.other, first.read] if first.text else [first.read, first.other]
        return [
            [(read + start, read + end) for start, end in spans]
            for (read, _), spans in zip(reads, self._texts.unknown(first.whole), strict=True)
        ]

    def _column_of(self, index: int) -> int:
        """Return the index of the label of an input: the best, or the best of the given name."""
        logits = self._values[self.inputs[index]][1]
        if self.deletion.label is not None:
            is_own = [name == self.deletion.label for name in self.labels]
            logits = np.where(is_own, logits, -np.inf)
        return int(logits.argmax())

    def _check(self, fits: bool) -> None:
        if not fits:
            coarser = ', or by "sentences"' if self.deletion.units == "words" else ""
            can_rise = self.max_tokens < MAX_TOKENS
            larger = f", or with max_tokens up to {MAX_TOKENS}" if can_rise else ""
            raise InvalidInput(
                f"leaving out the units of the texts takes more than {self.max_tokens} "
                f"tokens; explain fewer or shorter texts{coarser}{larger}",
                code="too_many_tokens",
                pointer="/explain",
            )

    def _check_deadline(self) -> None:
        deadline = self.options.deadline
        if deadline is not None and not deadline.remaining_s:
            raise TimeoutError


def _reserved(length: int) -> int:
    """Return the number of tokens that are left for an input of a length, beside units alone."""
    return _RESERVED * (length + 1)


def _other_of(parts: Sequence[Part]) -> Span | None:
    """Return the span that the model reads of the text of a pair that is no part; None: none."""
    return parts[0].other if len(parts) == 1 else None


def _texts_of(own: Input) -> Sequence[str]:
    return (own,) if isinstance(own, str) else own
