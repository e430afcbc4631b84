"""Explanations by deletion: the model scores the variants of texts, together with the texts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
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
Run = Callable[[Sequence[Input], FurtherInputs, CallOptions], Awaitable[tuple[Result, Values]]]

# Approximate number of tokens per token of a text that the text and its units alone take.
_ALONE_TOKENS = 4
# Values of `DeletionPlanner.aim` without `max_tokens`. Those of "auto" suffice to score each of 12
# sentences alone and left out, or all words of a sentence; those of highlights to score each
# sentence alone, and to leave out the best four of ten.
_AUTO, _HIGHLIGHTS = (16, 4000), (8, 1000)


async def explain_best(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    result: PairScores,
    best: Sequence[int],
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
        best: Indices of the pairs to explain, the most important first.
        how: Options of the explanations.
        limits: See `explain_scores`.
        options: See `explain_scores`.

    Raises:
        VitrineError: Any error of `explain_scores`; with `Highlights` not that of too many tokens.
    """
    is_highlighting = isinstance(how, Highlights)
    deletion = Deletion(by="sentences") if isinstance(how, Highlights) else how
    kept = best
    if deletion.method == "deletion":
        costs = [_ALONE_TOKENS * tokens for tokens in result.tokens]
        kept = _fitting(best, costs, deletion.max_tokens or MAX_TOKENS)
    if not kept:
        if is_highlighting:
            return result
        kept = best[:1]  # the explanation refuses it, or it has fewer tokens than expected
    own = [documents[index] for index in kept]
    their = queries if len(queries) == 1 else [queries[index] for index in kept]
    aim = _HIGHLIGHTS if is_highlighting else None
    try:
        with of_variants():
            explained = await explain_scores(
                *(model, their, own, deletion, limits, options), known=result.of(kept), aim=aim
            )
    except InvalidInput as error:
        if error.code == "too_many_tokens" and is_highlighting:
            return result
        raise
    deletions = {kept[at]: found for at, found in explained.deletions.items()}
    if isinstance(how, Highlights):
        deletions = {at: highlights_of(found, how.count) for at, found in deletions.items()}
    return replace(
        result,
        deletions=deletions,
        shapley_values={kept[at]: found for at, found in explained.shapley_values.items()},
        explanation_tokens=explained.explanation_tokens,
        seconds=result.seconds + explained.seconds,
    )


def _fitting(indices: Sequence[int], costs: Sequence[int], limit: int) -> list[int]:
    """Return the indices whose costs fit into a limit, the first before others."""
    kept: list[int] = []
    for index in indices:
        if costs[index] <= limit:
            kept.append(index)
            limit -= costs[index]
    return kept


async def explain_scores(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    deletion: Deletion,
    limits: PairLimits,
    options: CallOptions,
    known: PairScores | None = None,
    aim: tuple[int, int] | None = None,
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
        aim: See `DeletionPlanner`; None: that of the options.

    Raises:
        InvalidInput: The tokens do not suffice for any of the texts.
        VitrineError: Any error of `score`, under the same conditions.
    """
    own = queries if len(queries) > 1 else [*queries] * len(documents)
    pairs = list(zip(own, documents, strict=True))

    async def run(
        inputs: Sequence[Input], further: FurtherInputs, options: CallOptions
    ) -> tuple[PairScores, Values]:
        sides = queries, documents
        if inputs is not pairs:
            sides = cast(tuple[Sequence[str], Sequence[str]], tuple(zip(*inputs, strict=True)))
        result = await score(model, *sides, limits, 0, None, options, further)
        return result, np.stack([result.scores, result.raw_scores], 1)[:, :, None]

    planner = DeletionPlanner(
        *(model, pairs, deletion, limits, deletion.call_options(options)),
        aim=aim or _aim_of(deletion),
        known=_values_of(pairs, known),
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
    if are_few(inputs, deletion):
        return await _explain_labels(model, inputs, deletion, options)
    result = await classify(model, inputs, NO_LIMITS, options)
    costs = [_ALONE_TOKENS * len(row.ids) for row in result.rows]
    kept = _fitting(range(len(inputs)), costs, deletion.max_tokens or MAX_TOKENS) or [0]
    with of_variants():
        explained = await _explain_labels(
            model, [inputs[index] for index in kept], deletion, options
        )
    return replace(
        result,
        deletions={kept[at]: found for at, found in explained.deletions.items()},
        shapley_values={kept[at]: found for at, found in explained.shapley_values.items()},
        explanation_tokens=explained.explanation_tokens,
        seconds=result.seconds + explained.seconds,
    )


async def _explain_labels(
    model: LoadedModel, inputs: Sequence[Input], deletion: Deletion, options: CallOptions
) -> Classification:
    async def run(
        inputs: Sequence[Input], further: FurtherInputs, options: CallOptions
    ) -> tuple[Classification, Values]:
        result = await classify(model, inputs, NO_LIMITS, options, further)
        return result, np.stack([result.scores, result.logits], 1)

    planner = DeletionPlanner(
        *(model, inputs, deletion, NO_LIMITS, deletion.call_options(options)),
        labels=model.artifact.manifest.labels,
        aim=_aim_of(deletion),
    )
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


def _aim_of(deletion: Deletion) -> tuple[int, int] | None:
    return _AUTO if deletion.is_auto and deletion.max_tokens is None else None


def are_few(inputs: Sequence[Input], deletion: Deletion) -> bool:
    """Return whether inputs and variants can run together: one input, or surely few tokens."""
    chars = sum(len(own) if isinstance(own, str) else sum(map(len, own)) for own in inputs)
    # A token has at least a character.
    return len(inputs) == 1 or _ALONE_TOKENS * chars <= (deletion.max_tokens or MAX_TOKENS)


async def _explained(
    run: Run[Result], planner: DeletionPlanner
) -> tuple[Result, dict[int, Deletions], dict[int, ShapleyValues]]:
    """Run inputs with their variants, and return the results of all and the explanations."""
    try:
        first = planner.further(planner.first)
        result, values = await run(planner.inputs, first, planner.options)
    except InvalidInput as error:
        if error.code == "too_many_tokens":  # of results per token, all texts together
            name_explanation(error)
        raise
    planner.add(values)
    more = await asyncio.to_thread(planner.second)
    if more:
        with of_variants():
            further = planner.further(lambda _: ())
            second, values = await run(more, further, planner.second_options)
        planner.add(values, more)
        result = replace(result, seconds=result.seconds + second.seconds)
    deletions = await asyncio.to_thread(planner.deletions)
    return result, deletions, await asyncio.to_thread(planner.shapley_values)


def _values_of(pairs: Sequence[Pair], known: PairScores | None) -> dict[Input, Values]:
    if known is None:
        return {}
    values = np.stack([known.scores, known.raw_scores], 1)[:, :, None]
    return dict(zip(pairs, values, strict=True))
