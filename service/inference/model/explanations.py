"""Explanations by deletion: the model scores variants of texts whose results it has returned."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput
from service.inference.explain.deletion import highlights_of
from service.inference.explain.options import Deletion, Highlights
from service.inference.model.classification import Classification
from service.inference.model.deletion_planner import DeletionPlanner, Values
from service.inference.model.pair_scores import PairScores
from service.inference.model.scoring import (
    Input,
    Pair,
    classify,
    of_variants,
    repeated,
    score,
)
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.metrics import observe_stages
from service.inference.results.scores import Scores
from service.inference.results.vectors import Stages
from service.inference.tokenizing.pairs import NO_LIMITS, PairLimits

Result = TypeVar("Result", PairScores, Classification)
# Scores variants, and returns their values.
Run = Callable[[Sequence[Input]], Awaitable[Values]]

# Values of `DeletionPlanner.aim` without `max_tokens`. Those of "auto" suffice to score each of 12
# sentences alone and left out, or all words of a sentence; those of highlights to score each
# sentence alone, and to leave out the best four of ten.
_AUTO, _HIGHLIGHTS = (16, 4000), (8, 1000)


async def explain_scores(
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
        model: The model.
        queries: One query for all documents, or one per document.
        documents: Text of each document.
        result: Scores of the pairs.
        best: Indices of the pairs to explain, the most important first.
        how: Options of the explanations.
        limits: Maximum number of tokens of each query and of each document.
        options: Options of the call.

    Raises:
        InvalidInput: The tokens do not suffice for any of the pairs; not with `Highlights`.
        VitrineError: Any error of `score`, under the same conditions.
    """
    deletion = Deletion(by="sentences") if isinstance(how, Highlights) else how
    pairs: list[Pair] = list(zip(repeated(queries, len(documents)), documents, strict=True))
    planner = DeletionPlanner(
        *(model, pairs, _values(result.scores, result.raw_scores)[:, :, None]),
        *(result.tokens, result.truncated, best),
        *(deletion, limits, deletion.call_options(options)),
        aim=_HIGHLIGHTS if isinstance(how, Highlights) else _aim_of(deletion),
    )

    async def run(variants: Sequence[Input]) -> Values:
        first, second = zip(*cast(Sequence[Pair], variants), strict=True)
        rest = limits, 0, None, planner.options, planner.count
        found = await score(model, first, second, *rest)
        return _values(found.scores, found.raw_scores)[:, :, None]

    try:
        explained = await _explain(result, planner, run)
    except InvalidInput as error:
        if error.code == "too_many_tokens" and isinstance(how, Highlights):
            return result
        raise
    if not isinstance(how, Highlights):
        return explained
    found = explained.deletions.items()
    return replace(explained, deletions={at: highlights_of(own, how.count) for at, own in found})


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
    result = await classify(model, inputs, NO_LIMITS, options)
    planner = DeletionPlanner(
        *(model, inputs, _values(result.scores, result.logits)),
        [len(row.ids) for row in result.rows],
        [row.truncated for row in result.rows],
        range(len(inputs)),
        *(deletion, NO_LIMITS, deletion.call_options(options)),
        labels=labels,
        aim=_aim_of(deletion),
    )

    async def run(variants: Sequence[Input]) -> Values:
        found = await classify(model, variants, NO_LIMITS, planner.options, planner.count)
        return _values(found.scores, found.logits)

    return await _explain(result, planner, run)


def _aim_of(deletion: Deletion) -> tuple[int, int] | None:
    return _AUTO if deletion.is_auto and deletion.max_tokens is None else None


def _values(scores: Scores, logits: Scores) -> Values:
    return np.stack([scores, logits], 1)


async def _explain(result: Result, planner: DeletionPlanner, run: Run) -> Result:
    """Return results with explanations, which are a stage of the call."""
    model, deadline = planner.model, planner.options.deadline

    async def score_variants(variants: Sequence[Input]) -> None:
        if variants:
            planner.add(variants, await run(variants))

    started = time.perf_counter()
    try:
        with of_variants():
            # A variant has a token at least.
            bounds = planner.texts, planner.max_tokens, deadline
            await score_variants(await model.run_tokenizer(planner.first, *bounds))
            await score_variants(await asyncio.to_thread(planner.second))
    except TimeoutError:
        if deadline is None:
            raise
        raise deadline.exceeded() from None
    deletions, shapley_values = await asyncio.to_thread(planner.explanations)
    seconds = {"explain": time.perf_counter() - started}
    observe_stages(model.metrics.stage_seconds, started, seconds)
    return replace(
        result,
        deletions=deletions,
        shapley_values=shapley_values,
        explanation_tokens=planner.tokens,
        seconds=result.seconds + Stages(seconds),
    )
