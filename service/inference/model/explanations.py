"""Explanations of scores by deletion: the model scores the variants of the texts."""

from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class _Plan:
    """Variants of one text of a pair.

    Attributes:
        index: Index of the pair.
        side: The text.
        read: Span of the text that the model reads.
        units: Units of that part, relative to its start.
        whole: The pair, of the parts of its texts that the model reads.
        variants: The pair with each variant of the text; see `variants_of`.
    """

    index: int
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
        deletion: What is left out.
        limits: Maximum number of tokens of each query and of each document.
        options: Options of the call.

    Raises:
        InvalidInput: The variants have more tokens than `deletion.max_tokens`.
        VitrineError: Any error of `score`, under the same conditions.
    """
    texts = [text for index in indices for text in pairs[index]]
    try:
        plans, variants = await model.run_tokenizer(
            lambda: _plans(model, pairs, result, indices, deletion, limits, options),
            texts,
            len(texts),
            options.deadline,
        )
        scored = await _scores_of(model, variants, limits, options) if variants else None
    except TimeoutError:
        assert options.deadline is not None  # noqa: S101 - nothing else times out
        raise options.deadline.exceeded() from None
    except VitrineError as error:
        if error.index is not None:  # that of a variant
            error.index, error.pointer = None, "/explain"
        raise
    known = [pairs[index] for index in indices]
    results = dict(zip(known, result.scores[indices].tolist(), strict=True))
    raw_results = dict(zip(known, result.raw_scores[indices].tolist(), strict=True))
    tokens, seconds = 0, result.seconds
    if scored is not None:
        results |= zip(variants, scored.scores.tolist(), strict=True)
        raw_results |= zip(variants, scored.raw_scores.tolist(), strict=True)
        tokens, seconds = scored.ran_tokens, seconds + scored.seconds
    deletions = {
        index: Deletions(
            deletion.by,
            _effects(plans, index, results),
            _effects(plans, index, raw_results),
            tokens,
        )
        for index in indices
    }
    return replace(result, deletions=deletions, seconds=seconds)


async def _scores_of(
    model: LoadedModel, variants: Sequence[Pair], limits: PairLimits, options: CallOptions
) -> PairScores:
    queries, documents = (list(side) for side in zip(*variants, strict=True))
    own = replace(options, priority="bulk", on_overflow="truncate")
    one_query = queries[:1] if len(set(queries)) == 1 else queries
    return await score(model, one_query, documents, limits, 0, None, own)


def _effects(
    plans: Sequence[_Plan], index: int, results: Mapping[Pair, float]
) -> list[TextEffects]:
    return [
        effects_of(
            plan.side,
            plan.read,
            plan.units,
            results[plan.whole],
            [results.get(pair) for pair in plan.variants],
        )
        for plan in plans
        if plan.index == index
    ]


def _plans(
    model: LoadedModel,
    pairs: Sequence[Pair],
    result: PairScores,
    indices: Sequence[int],
    deletion: Deletion,
    limits: PairLimits,
    options: CallOptions,
) -> tuple[list[_Plan], list[Pair]]:
    """Return the variants of each pair, and all that have a score not known yet, each once."""
    plans: list[_Plan] = []
    tokens = 0
    for index in indices:
        read = _read(model, pairs[index], limits, options) if result.truncated[index] else None
        query, document = pairs[index]
        spans = read or ((0, len(query)), (0, len(document)))
        whole = (query[slice(*spans[0])], document[slice(*spans[1])])
        for side in deletion.sides:
            at = _SIDES.index(side)
            units = unit_spans(whole[at], deletion.by)
            tokens += len(units) * result.tokens[index]
            if tokens > deletion.max_tokens:
                raise InvalidInput(
                    f"leaving out each of the {deletion.by} takes more than {deletion.max_tokens} "
                    "tokens; explain fewer or shorter texts, or by sentences",
                    code="too_many_tokens",
                    pointer="/explain",
                )
            variants = [
                (text, whole[1]) if side == "query" else (whole[0], text)
                for text in variants_of(whole[at], units)
            ]
            plans.append(_Plan(index, side, spans[at], units, whole, variants))
    every = dict.fromkeys(pair for plan in plans for pair in (plan.whole, *plan.variants))
    known = {pairs[index] for index in indices}
    return plans, _with_result(model, (pair for pair in every if pair not in known))


def _with_result(model: LoadedModel, pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs of which the model has a score: a text can have no tokens, and no vector."""
    if "logits" in model.artifact.manifest.outputs:
        return list(pairs)
    has_row = cache(model.tokenizer.has_row)
    if all(has_row("", side) for side in _SIDES):  # nearly always
        return list(pairs)
    return [pair for pair in pairs if all(map(has_row, pair, _SIDES))]


def _read(
    model: LoadedModel, pair: Pair, limits: PairLimits, options: CallOptions
) -> tuple[Span, Span]:
    """Return the spans of a pair's texts that the model reads."""
    tokenizer, overflow = model.tokenizer, options.on_overflow
    if "logits" in model.artifact.manifest.outputs:
        return tokenizer.read_spans(pair, options.prompt_name, overflow, limits)
    query, document = (
        tokenizer.read_span(text, side, overflow) for text, side in zip(pair, _SIDES, strict=True)
    )
    return query, document
