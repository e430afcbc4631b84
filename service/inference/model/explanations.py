"""Explanations by deletion: the model scores texts, and variants of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput, Overloaded
from service.inference.explain.deletion import highlights_of
from service.inference.explain.options import Deletion, Highlights
from service.inference.model.classification import Classification
from service.inference.model.deletion_planner import DeletionPlanner, Values
from service.inference.model.pair_scores import PairScores
from service.inference.model.pair_texts import pairs_of
from service.inference.model.scoring import (
    CountTokens,
    Input,
    Pair,
    classify,
    of_variants,
    score,
)
from service.inference.model.zero_shot import (
    CandidateLabels,
    check_candidates,
    classify_by_candidates,
)
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.metrics import observe_stages
from service.inference.results.vectors import Stages
from service.inference.tokenizing.pairs import NO_LIMITS, PairLimits

Result = TypeVar("Result", PairScores, Classification)

# Values of `DeletionPlanner.aim` without `max_tokens`. Those of "auto" suffice to score each of 12
# sentences alone and left out, or all words of a sentence; those of highlights to score each
# sentence alone, and to leave out the best four of ten.
_AUTO, _HIGHLIGHTS = (16, 4000), (8, 1000)
# Maximum number of characters of texts beside which variants run. More texts keep all cores busy.
_BESIDE_CHARS = 4000


async def explain_scores(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    best: int | None,
    how: Deletion | Highlights,
    limits: PairLimits,
    options: CallOptions,
) -> PairScores:
    """Return the scores of pairs, with explanations as far as the tokens suffice.

    Args:
        model: The model.
        queries: One query for all documents, or one per document.
        documents: Text of each document.
        best: Number of best scores to explain, best first; None: all, in the order of the pairs.
        how: Options of the explanations.
        limits: Maximum number of tokens of each query and of each document.
        options: Options of the call.

    Raises:
        InvalidInput: The tokens do not suffice for any of the pairs; not with `Highlights`.
        VitrineError: Any error of `score`, under the same conditions.
    """
    deletion = Deletion(by="sentences") if isinstance(how, Highlights) else how
    pairs = pairs_of(queries, documents)
    planner = DeletionPlanner(
        model,
        pairs,
        order=range(len(pairs)),
        deletion=deletion,
        limits=limits,
        options=deletion.options_of_variants(options),
        aim=_HIGHLIGHTS if isinstance(how, Highlights) else _aim_of(deletion),
        is_for_best=isinstance(how, Highlights),
    )

    async def run(variants: Sequence[Input]) -> PairScores:
        first, second = zip(*cast(Sequence[Pair], variants), strict=True)
        return await score(
            model, first, second, limits, planner.options, count_tokens=planner.count
        )

    order = None if best is None else partial(PairScores.ranking, limit=best)
    own = _options_of_texts(options, planner, order)
    texts = asyncio.create_task(score(model, queries, documents, limits, own))
    try:
        explained = await _explain(texts, order, planner, run)
    except InvalidInput as error:
        if error.code == "too_many_tokens" and isinstance(how, Highlights):
            return await texts
        raise
    if not isinstance(how, Highlights):
        return explained
    highlights = {
        index: highlights_of(deletions, how.count)
        for index, deletions in explained.deletions.items()
    }
    return replace(explained, deletions=highlights)


async def explain_labels(
    model: LoadedModel,
    inputs: Sequence[Input],
    candidates: CandidateLabels | None,
    deletion: Deletion,
    options: CallOptions,
) -> Classification:
    """Return the labels of inputs, and how the units of their texts change the score of one.

    Args:
        model: The model.
        inputs: Texts and pairs of texts; texts alone with candidate labels.
        candidates: Labels that the call has chosen; None: those of the model.
        deletion: Options of the explanations.
        options: Options of the call.

    Raises:
        InvalidInput: The model does not have the label.
        VitrineError: Any error of `explain_scores`, and of `classify`.
    """
    labels = model.artifact.manifest.labels if candidates is None else candidates.labels
    if deletion.label is not None and labels and deletion.label not in labels:
        owner = f"the model {model.name} has" if candidates is None else "candidate_labels have"
        raise InvalidInput(f"{owner} no such label", pointer="/explain/label")
    if deletion.of != "document" or deletion.top_n is not None:
        name = "top_n" if deletion.top_n is not None else "of"
        raise InvalidInput(f"{name} is for scores of documents", pointer=f"/explain/{name}")
    if candidates is not None:
        check_candidates(model, len(inputs), candidates)
    planner = DeletionPlanner(
        model,
        inputs,
        order=range(len(inputs)),
        deletion=deletion,
        limits=NO_LIMITS,
        options=deletion.options_of_variants(options),
        labels=labels,
        candidates=candidates,
        aim=_aim_of(deletion),
    )

    def classify_inputs(
        inputs: Sequence[Input], options: CallOptions, count: CountTokens | None = None
    ) -> Coroutine[Any, Any, Classification]:
        if candidates is None:
            return classify(model, inputs, NO_LIMITS, options, count)
        texts = cast(Sequence[str], inputs)
        return classify_by_candidates(model, texts, candidates, options, count)

    run = partial(classify_inputs, options=planner.options, count=planner.count)
    texts = asyncio.create_task(classify_inputs(inputs, _options_of_texts(options, planner, None)))
    return await _explain(texts, None, planner, run)


def _options_of_texts(
    options: CallOptions, planner: DeletionPlanner, order: Callable[..., Sequence[int]] | None
) -> CallOptions:
    """Return the options of texts; those beside which variants run have the variants' priority."""
    if not _are_beside(planner, order):
        return options
    return replace(options, priority=planner.options.priority)


def _are_beside(planner: DeletionPlanner, order: Callable[..., Sequence[int]] | None) -> bool:
    """Return whether variants run beside the texts: few short texts leave cores idle."""
    return order is None and sum(map(len, planner.texts)) <= _BESIDE_CHARS


def _aim_of(deletion: Deletion) -> tuple[int, int] | None:
    return _AUTO if deletion.is_auto and deletion.max_tokens is None else None


def _values_of(result: PairScores | Classification) -> Values:
    """Return the scores and the logits of inputs, `(N, 2, C)`."""
    if isinstance(result, PairScores):
        return np.stack([result.scores, result.raw_scores], 1)[:, :, None]
    return np.stack([result.scores, result.logits], 1)


async def _explain(
    texts: asyncio.Task[Result],
    order: Callable[[Result], Sequence[int]] | None,
    planner: DeletionPlanner,
    run: Callable[[Sequence[Input]], Awaitable[Result]],
) -> Result:
    """Return the results of texts with explanations, which are a stage of the call.

    Args:
        texts: Returns the results. Its errors come first.
        order: Returns the indices of the inputs to explain; None: all.
        planner: Chooses the variants.
        run: Scores variants.
    """
    model, deadline = planner.model, planner.options.deadline
    variants: Sequence[Input] | None = None

    async def score_variants(variants: Sequence[Input]) -> None:
        if variants:
            planner.add(variants, _values_of(await run(variants)))

    async def score_first() -> None:
        nonlocal variants
        if variants is None:
            # A variant has a token at least.
            count = max(planner.max_tokens, len(planner.texts))
            variants = await model.run_tokenizer(planner.first, planner.texts, count, deadline)
        await score_variants(variants)

    try:
        result, started = await _results_with_first(texts, order, planner, score_first)
        planner.add_results(_values_of(result))
        with of_variants():
            await score_variants(await asyncio.to_thread(planner.second))
    except TimeoutError:
        if deadline is None:
            raise
        raise deadline.error() from None
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


async def _results_with_first(
    texts: asyncio.Task[Result],
    order: Callable[[Result], Sequence[int]] | None,
    planner: DeletionPlanner,
    score_first: Callable[[], Coroutine[Any, Any, None]],
) -> tuple[Result, float]:
    """Return the results of texts, after the first variants have run too, and when they came."""
    first = None
    try:
        await asyncio.sleep(0)  # texts that are refused at once are not explained
        if _are_beside(planner, order) and not texts.done():
            first = asyncio.create_task(score_first())
        result = await texts
        came = time.perf_counter()
        if order is not None:
            planner.order = order(result)
        with of_variants():
            try:
                await (first or score_first())
            except Overloaded:
                if first is None:
                    raise
                planner.tokens = 0  # the texts took the room of the variants
                await score_first()
        return result, came
    finally:
        texts.cancel()  # of a caller that was cancelled
        if first is not None:
            first.cancel()
            await asyncio.wait([first])
