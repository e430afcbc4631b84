"""Explanations by deletion: the model scores the variants of texts, together with the texts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar, cast

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput
from service.inference.explain.deletion import Deletions, ShapleyValues, highlights_of
from service.inference.explain.options import MAX_TOKENS, Deletion, Highlights
from service.inference.model.classification import Classification
from service.inference.model.deletion_planner import DeletionPlanner, Values
from service.inference.model.pair_scores import PairScores
from service.inference.model.scoring import (
    FurtherInputs,
    Input,
    Pair,
    classify,
    name_explanation,
    of_variants,
    score,
)
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pairs import NO_LIMITS, PairLimits

Result = TypeVar("Result", PairScores, Classification)
# Scores inputs, and further ones together with them; returns the values of all, `(N, 2, C)`, too.
Run = Callable[[Sequence[Input], FurtherInputs | None], Awaitable[tuple[Result, Values]]]

# Approximate number of tokens per token of a text that the text and its units alone take.
_ALONE_TOKENS = 4
# The same of highlights, and the least for a document: four of ten sentences are left out too.
_HIGHLIGHT_TOKENS, _LEAST_HIGHLIGHT_TOKENS = 8, 1000


async def explain_best(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    result: PairScores,
    count: int | None,
    how: Deletion | Highlights,
    limits: PairLimits,
    options: CallOptions,
) -> PairScores:
    """Return scores with explanations of the best ones, as far as the tokens suffice.

    Args:
        model: See `explain_scores`.
        queries: See `explain_scores`.
        documents: See `explain_scores`.
        result: Scores of the pairs.
        count: Maximum number of best pairs to explain; None: all.
        how: Options of the explanations.
        limits: See `explain_scores`.
        options: See `explain_scores`.

    Raises:
        VitrineError: Any error of `explain_scores`; with `Highlights` not that of too many tokens.
    """
    best = result.ranking(count)
    if isinstance(how, Highlights):
        best = _fitting(best, result.tokens, MAX_TOKENS)
        tokens = sum(
            max(_LEAST_HIGHLIGHT_TOKENS, _HIGHLIGHT_TOKENS * result.tokens[at]) for at in best
        )
        deletion = Deletion(by="sentences", max_tokens=max(1, min(tokens, MAX_TOKENS)))
    else:
        deletion = how
        if how.is_auto:
            best = _fitting(best, result.tokens, how.max_tokens or MAX_TOKENS) or best[:1]
    own = [documents[index] for index in best]
    their = queries if len(queries) == 1 else [queries[index] for index in best]
    if not best:
        return result
    try:
        with of_variants():
            explained = await explain_scores(
                *(model, their, own, deletion, limits, options), known=result.of(best)
            )
    except InvalidInput as error:
        if error.code == "too_many_tokens" and isinstance(how, Highlights):
            return result
        raise
    deletions = {best[at]: found for at, found in explained.deletions.items()}
    if isinstance(how, Highlights):
        deletions = {at: highlights_of(found, how.count) for at, found in deletions.items()}
    return replace(
        result,
        deletions=deletions,
        shapley_values={best[at]: found for at, found in explained.shapley_values.items()},
        explanation_tokens=explained.explanation_tokens,
        seconds=result.seconds + explained.seconds,
    )


def _fitting(best: Sequence[int], tokens: Sequence[int], limit: int) -> list[int]:
    """Return the first indices whose texts, with their units alone, likely have few enough tokens.

    Args:
        best: Indices of pairs.
        tokens: Number of tokens of each pair.
        limit: Maximum number of tokens.
    """
    needed = accumulate(_ALONE_TOKENS * tokens[index] for index in best)
    return [index for index, sum_ in zip(best, needed, strict=True) if sum_ <= limit]


async def explain_scores(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    deletion: Deletion,
    limits: PairLimits,
    options: CallOptions,
    known: PairScores | None = None,
) -> PairScores:
    """Return the scores of pairs, and how the units of their texts change them; see `score`.

    All texts run with the priority of the explanations.

    Args:
        model: The model.
        queries: One query for all documents, or one per document.
        documents: Text of each document.
        deletion: Options of the explanations.
        limits: Maximum number of tokens of each query and of each document.
        options: Options of the call.
        known: Scores of these pairs, if they are known.

    Raises:
        InvalidInput: The texts have more than `deletion.max_tokens`.
        VitrineError: Any error of `score`, under the same conditions.
    """
    own = queries if len(queries) > 1 else [*queries] * len(documents)
    pairs = list(zip(own, documents, strict=True))
    own_options = deletion.call_options(options)

    async def run(
        inputs: Sequence[Input], further: FurtherInputs | None
    ) -> tuple[PairScores, Values]:
        sides = queries, documents
        if inputs is not pairs:
            sides = cast(tuple[Sequence[str], Sequence[str]], tuple(zip(*inputs, strict=True)))
        result = await score(model, *sides, limits, 0, None, own_options, further)
        return result, np.stack([result.scores, result.raw_scores], 1)[:, :, None]

    planner = DeletionPlanner(
        model, pairs, deletion, limits, options, known=_values_of(pairs, known)
    )
    result, deletions, values = await _explained(run, planner)
    count = len(pairs)
    return replace(
        result,
        scores=result.scores[:count],
        raw_scores=result.raw_scores[:count],
        tokens=result.tokens[:count],
        truncated=result.truncated[:count],
        deletions=deletions,
        shapley_values=values,
        explanation_tokens=planner.tokens,
    )


async def explain_labels(
    model: LoadedModel, inputs: Sequence[Input], deletion: Deletion, options: CallOptions
) -> Classification:
    """Return the labels of inputs, and how the units of their texts change the score of one.

    See `explain_scores`.

    Raises:
        InvalidInput: The model does not have the label.
        VitrineError: Any error of `explain_scores`, and of `classify`.
    """
    labels = model.artifact.manifest.labels
    if deletion.label is not None and labels and deletion.label not in labels:
        raise InvalidInput(
            f"the model {model.name} has no label {deletion.label!r}", pointer="/explain/label"
        )
    if deletion.of != "document" or deletion.top_n is not None:
        name = "top_n" if deletion.top_n is not None else "of"
        raise InvalidInput(f"{name} is for scores of documents", pointer=f"/explain/{name}")
    own_options = deletion.call_options(options)

    async def run(
        inputs: Sequence[Input], further: FurtherInputs | None
    ) -> tuple[Classification, Values]:
        result = await classify(model, inputs, NO_LIMITS, own_options, further)
        return result, np.stack([result.scores, result.logits], 1)

    planner = DeletionPlanner(model, inputs, deletion, NO_LIMITS, options, labels=labels)
    result, deletions, values = await _explained(run, planner)
    count = len(inputs)
    return replace(
        result,
        logits=result.logits[:count],
        scores=result.scores[:count],
        rows=result.rows[:count],
        deletions=deletions,
        shapley_values=values,
        explanation_tokens=planner.tokens,
    )


async def _explained(
    run: Run[Result], planner: DeletionPlanner
) -> tuple[Result, dict[int, Deletions], dict[int, ShapleyValues]]:
    """Run inputs with their variants, and return the results of all and the explanations."""
    try:
        result, values = await run(planner.inputs, planner.further(planner.first))
    except InvalidInput as error:
        if error.code == "too_many_tokens":  # of results per token, all texts together
            name_explanation(error)
        raise
    planner.add(values)
    more = await asyncio.to_thread(planner.second)
    if more:
        with of_variants():
            second, values = await run(more, planner.further(lambda _: ()))
        planner.add(values, more)
        result = replace(result, seconds=result.seconds + second.seconds)
    deletions = await asyncio.to_thread(planner.deletions)
    return result, deletions, await asyncio.to_thread(planner.shapley_values)


def _values_of(pairs: Sequence[Pair], known: PairScores | None) -> dict[Input, Values]:
    if known is None:
        return {}
    values = np.stack([known.scores, known.raw_scores], 1)[:, :, None]
    return dict(zip(pairs, values, strict=True))
