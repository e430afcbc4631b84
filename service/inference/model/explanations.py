"""Explanations of scores by deletion: the model scores the variants of the texts."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput, VitrineError
from service.inference.explain.deletion import (
    Deletion,
    Deletions,
    Side,
    TextEffects,
    effects_of,
    unit_spans,
    variants_of,
)
from service.inference.model.pair_scores import PairScores
from service.inference.model.scoring import score
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Span

Pair = tuple[str, str]

_SIDES: Sequence[Side] = ("query", "document")
# Maximum number of characters of all variants, per token of the limit: a word of thousands of
# characters can be one token.
_CHARS_PER_TOKEN = 16
# More than the number of inputs that are tokenised in the event loop.
_IN_THREAD = 1000


@dataclass(frozen=True)
class _Plan:
    """Variants of one text of a pair.

    Attributes:
        side: The text.
        read: Span of the text that the model reads.
        units: Units of that part, relative to its start.
        whole: The pair, of the parts of its texts that the model reads.
        variants: The pair with each variant of the text; see `variants_of`.
    """

    side: Side
    read: Span
    units: Sequence[Span]
    whole: Pair
    variants: Sequence[Pair]


async def with_deletions(
    model: LoadedModel,
    pairs: Sequence[Pair],
    result: PairScores,
    indices: Sequence[int],
    deletion: Deletion,
    limits: PairLimits,
    options: CallOptions,
) -> PairScores:
    """Return the scores with explanations by deletion of some of them.

    The variants run with the priority of bulk requests.

    Args:
        model: The model.
        pairs: Query and document of each score.
        result: The scores.
        indices: Indices of the scores to explain.
        deletion: Options of the explanations.
        limits: Maximum number of tokens of each query and of each document.
        options: Options of the call.

    Raises:
        InvalidInput: The variants have more tokens than `deletion.max_tokens`.
        VitrineError: Any error of `score`, under the same conditions.
    """
    # A variant of a text that just fits can have more tokens, and "error" would refuse it.
    overflow = "truncate" if options.on_overflow == "error" else options.on_overflow
    own = replace(options, priority="bulk", on_overflow=overflow)
    planner = _Planner(model, deletion, limits, own)
    inputs = list({text for index in indices for text in pairs[index]})
    try:
        plans, variants, tokens = await model.run_tokenizer(
            lambda: planner.plan(pairs, result, indices), inputs, _IN_THREAD, own.deadline
        )
        scored = await _scores_of(model, variants, limits, own) if variants else None
    except TimeoutError:
        assert own.deadline is not None  # noqa: S101 - nothing else times out
        raise own.deadline.exceeded() from None
    except VitrineError as error:
        if error.index is not None or error.pointer == "/inputs":  # those of a variant
            error.index, error.pointer = None, "/explain"
        raise

    def deletions() -> dict[int, Deletions]:
        known = {pairs[index]: index for index in indices}
        results = {pair: float(result.scores[index]) for pair, index in known.items()}
        raw = {pair: float(result.raw_scores[index]) for pair, index in known.items()}
        if scored is not None:
            results |= zip(variants, scored.scores.tolist(), strict=True)
            raw |= zip(variants, scored.raw_scores.tolist(), strict=True)
        return {
            index: Deletions(deletion.by, _effects(texts, results), _effects(texts, raw))
            for index, texts in plans.items()
        }

    seconds = result.seconds if scored is None else result.seconds + scored.seconds
    return replace(
        result,
        deletions=await asyncio.to_thread(deletions),
        explanation_tokens=tokens,
        seconds=seconds,
    )


async def _scores_of(
    model: LoadedModel, variants: Sequence[Pair], limits: PairLimits, options: CallOptions
) -> PairScores:
    queries, documents = (list(side) for side in zip(*variants, strict=True))
    one_query = queries[:1] if len(set(queries)) == 1 else queries
    return await score(model, one_query, documents, limits, 0, None, options)


def _effects(plans: Sequence[_Plan], results: Mapping[Pair, float]) -> list[TextEffects]:
    return [
        effects_of(
            plan.side,
            plan.read,
            plan.units,
            results[plan.whole],
            [results.get(pair) for pair in plan.variants],
        )
        for plan in plans
    ]


@dataclass(frozen=True)
class _Planner:
    """Chooses the variants of pairs; arguments as of `with_deletions`."""

    model: LoadedModel
    deletion: Deletion
    limits: PairLimits
    options: CallOptions

    def plan(
        self, pairs: Sequence[Pair], result: PairScores, indices: Sequence[int]
    ) -> tuple[dict[int, list[_Plan]], list[Pair], int]:
        """Return the variants of each pair, by its index, and all that are to be scored, each once.

        The third value is the number of tokens of the latter.
        """
        plans: dict[int, list[_Plan]] = {}
        # Refused before they take memory.
        chars, max_chars = 0, self.deletion.max_tokens * _CHARS_PER_TOKEN
        for index in indices:
            if self.options.deadline is not None and not self.options.deadline.remaining_s:
                raise TimeoutError
            query, document = pair = pairs[index]
            spans = (0, len(query)), (0, len(document))
            if result.truncated[index]:
                chars += len(query) + len(document)
                self._check(chars <= max_chars)
                spans = self._read(pair)
            whole = (query[slice(*spans[0])], document[slice(*spans[1])])
            plans[index] = []
            for side in self.deletion.sides:
                at = _SIDES.index(side)
                units = unit_spans(whole[at], self.deletion.by)
                chars += (len(units) + 1) * len(whole[at])
                self._check(chars <= max_chars)
                variants = [
                    (text, whole[1]) if side == "query" else (whole[0], text)
                    for text in variants_of(whole[at], units)
                ]
                plans[index].append(_Plan(side, spans[at], units, whole, variants))
        known = {pairs[index] for index in indices}
        own = (plan for each in plans.values() for plan in each)
        every = dict.fromkeys(pair for plan in own for pair in (plan.whole, *plan.variants))
        scorable = self._with_result(pair for pair in every if pair not in known)
        tokens = self._tokens(scorable)
        self._check(tokens <= self.deletion.max_tokens)
        return plans, scorable, tokens

    def _check(self, fits: bool) -> None:
        if not fits:
            raise InvalidInput(
                f"leaving out each of the {self.deletion.by} takes more than "
                f"{self.deletion.max_tokens} tokens; explain fewer or shorter texts, or by "
                "sentences",
                code="too_many_tokens",
                pointer="/explain",
            )

    @property
    def _reads_pairs(self) -> bool:
        return "logits" in self.model.artifact.manifest.outputs

    def _read(self, pair: Pair) -> tuple[Span, Span]:
        """Return the spans of a pair's texts that the model reads."""
        tokenizer, options = self.model.tokenizer, self.options
        if self._reads_pairs:
            overflow = options.on_overflow
            return tokenizer.read_spans(pair, options.prompt_name, overflow, self.limits)
        query, document = (
            tokenizer.read_span(text, side, options.on_overflow)
            for text, side in zip(pair, _SIDES, strict=True)
        )
        return query, document

    def _tokens(self, pairs: Sequence[Pair]) -> int:
        """Return the number of tokens of the rows of pairs, or of their texts, each once."""
        tokenizer, options = self.model.tokenizer, self.options
        if self._reads_pairs:
            prompted = options.prompt_name, options.on_overflow
            rows = tokenizer.rows_of_pairs(pairs, *prompted, self.limits)
            return sum(len(row.ids) for row in rows)
        return sum(
            len(row.ids)
            for side, texts in zip(_SIDES, zip(*pairs, strict=True), strict=False)
            for row in tokenizer.rows_of_texts([*{*texts}], side, options.on_overflow)
        )

    def _with_result(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return the pairs of which the model has a score: texts can have no tokens, and none."""
        tokenizer, prompt = self.model.tokenizer, self.options.prompt_name
        if self._reads_pairs:
            is_empty = not _has_tokens(
                lambda: tokenizer.rows_of_pairs([("", "")], prompt, "truncate")
            )
            return [pair for pair in pairs if not (is_empty and pair == ("", ""))]

        @cache
        def has_row(text: str, side: Side) -> bool:
            return _has_tokens(lambda: tokenizer.rows_of_texts([text], side, "truncate"))

        if all(has_row("", side) for side in _SIDES):  # nearly always
            return list(pairs)
        return [pair for pair in pairs if all(map(has_row, pair, _SIDES))]


def _has_tokens(tokenize: Callable[[], object]) -> bool:
    try:
        tokenize()
    except InvalidInput as error:
        if error.code != "no_tokens":
            raise
        return False
    return True
