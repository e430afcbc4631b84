"""Scoring with a loaded model: labels of texts, and the relevance of documents to queries."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from models.engines import Output
from service.inference.errors import DeadlineExceeded, InvalidInput, VitrineError
from service.inference.explanations import (
    Explanation,
    check_explainable,
    explain_cosine,
    explain_dot,
)
from service.inference.loaded_model import LoadedModel
from service.inference.pairs import PairLimits
from service.inference.scores import (
    ACTIVATIONS,
    Classification,
    PairScores,
    cosines,
    dot_products,
)
from service.inference.tokenizer import OnOverflow, Row

Item = TypeVar("Item")

# Names of the arguments with the limits of a query and of a document.
LIMITS = ("max_tokens_per_query", "max_tokens_per_doc")


async def classify(
    model: LoadedModel,
    items: Sequence[str | tuple[str, str]],
    limits: PairLimits,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> Classification:
    """Return the score of each label for each text or pair of texts; see `Model.classify`.

    Args:
        model: Sequence classification model.
        items: Texts and pairs of texts.
        limits: Maximum number of tokens of the first and of the second text of each pair.
        on_overflow: See `Model.encode`.
        timeout_s: See `Model.encode`.
    """
    tokenize = partial(model.tokenizer.rows_of_pairs, items, on_overflow, limits)
    # A set, because a query shared by many documents is tokenised once.
    texts = {text for item in items for text in ([item] if isinstance(item, str) else item)}
    rows, (results,), seconds = await model.run(
        list(texts), len(items), tokenize, ("logits",), timeout_s
    )
    manifest = model.artifact.manifest
    logits = np.array(results, np.float64)  # (N, C)
    scores = ACTIVATIONS[manifest.activation](logits)
    return Classification(logits, scores, manifest.labels, rows, seconds)


async def score(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    limits: PairLimits,
    explain: bool,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return the relevance of each document to the query, or to the query of the same index.

    Errors have the index among queries and documents, queries first.

    Args:
        model: A model of any kind.
        queries: One query for all documents, or one per document.
        documents: Text of each document.
        limits: Maximum number of tokens of each query and of each document. They apply to models
            that read query and document at once.
        explain: Whether to explain each score.
        on_overflow: See `Model.encode`.
        timeout_s: See `Model.encode`.
    """
    manifest = model.artifact.manifest
    if explain:
        check_explainable(manifest, model.name)
    if "logits" in manifest.outputs:
        return await _score_pairs(model, queries, documents, limits, on_overflow, timeout_s)
    for name, maximum in zip(LIMITS, limits, strict=True):
        if maximum is not None and maximum < manifest.max_tokens:
            raise InvalidInput(
                f"{name} applies to rerankers, which read query and document at once",
                pointer=f"/{name}",
            )
    return await _score_vectors(model, queries, documents, explain, on_overflow, timeout_s)


async def rerank(
    model: LoadedModel,
    query: str,
    documents: Sequence[str],
    top_n: int | None,
    limits: PairLimits,
    explain: bool,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return the score of each document, with explanations of the `top_n` best; see `score`."""
    explains_all = explain and (top_n is None or top_n >= len(documents))
    options = limits, explains_all, on_overflow, timeout_s
    if explain == explains_all:
        return await score(model, [query], documents, *options)
    check_explainable(model.artifact.manifest, model.name)
    try:
        async with asyncio.timeout(timeout_s):
            result = await score(model, [query], documents, *options)
            # Token vectors of the best documents alone: those of all could take gigabytes.
            best = result.ranking(top_n)
            kept = [documents[index] for index in best]
            explained = await score(model, [query], kept, limits, True, on_overflow, None)
    except TimeoutError:
        raise DeadlineExceeded(f"deadline of {timeout_s:g} s exceeded") from None
    seconds = {stage: s + result.seconds.get(stage, 0) for stage, s in explained.seconds.items()}
    explanations = {best[i]: explanation for i, explanation in explained.explanations.items()}
    return replace(result, seconds=seconds, explanations=explanations)


async def _score_pairs(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    limits: PairLimits,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return the scores of a reranker."""
    _check_labels(model)
    for index, query in enumerate(queries):
        model.tokenizer.check_text(query, index)
    pairs = list(zip(_repeated(queries, len(documents)), documents, strict=True))
    try:
        result = await classify(model, pairs, limits, on_overflow, timeout_s)
    except VitrineError as error:
        if error.index is not None:
            own = 0 if len(queries) == 1 else error.index
            is_of_query = error.code == "no_tokens" and not model.tokenizer.has_tokens(queries[own])
            error.index = own if is_of_query else len(queries) + error.index
        raise
    return PairScores(
        result.scores[:, 0],
        result.logits[:, 0],
        "cross_encoder",
        [len(row.ids) for row in result.rows],
        [row.truncated for row in result.rows],
        result.seconds,
    )


async def _score_vectors(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    explain: bool,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return similarities of vectors."""
    is_sparse = "sparse" in model.artifact.manifest.outputs
    outputs: tuple[Output, ...] = ("sparse",) if is_sparse else ("pooled",)
    if explain and not is_sparse:
        outputs = "pooled", "tokens"

    def tokenize() -> list[Row]:
        rows = model.tokenizer.rows_of_texts(queries, "query", on_overflow, explain)
        try:
            rows += model.tokenizer.rows_of_texts(documents, "document", on_overflow, explain)
        except VitrineError as error:
            if error.index is not None:
                error.index += len(queries)
            raise
        return rows

    texts, count = [*queries, *documents], len(queries)
    rows, results, seconds = await model.run(texts, len(texts), tokenize, outputs, timeout_s)
    vectors, parts = results[0], results[-1]
    if is_sparse:
        ours = _repeated(vectors[:count], len(documents))
        scores = dot_products(ours, vectors[count:], model.width)
    else:
        scores = cosines(np.array(vectors[:count]), np.array(vectors[count:]))

    def explain_pair(query: int, document: int) -> Explanation:
        if is_sparse:
            return explain_dot(vectors[query], vectors[document])
        sides = ((rows[index], parts[index]) for index in (query, document))
        return explain_cosine(model.artifact.manifest, *sides)

    indices = [(0 if count == 1 else index, count + index) for index in range(len(documents))]
    explanations: dict[int, Explanation] = {}
    if explain:
        started = time.perf_counter()
        explained = await asyncio.to_thread(lambda: [explain_pair(*pair) for pair in indices])
        explanations = dict(enumerate(explained))
        seconds = {**seconds, "explain": time.perf_counter() - started}
    pairs = [(rows[query], rows[document]) for query, document in indices]
    return PairScores(
        scores,
        scores,
        "dot" if is_sparse else "cosine",
        [len(query.ids) + len(document.ids) for query, document in pairs],
        [query.truncated or document.truncated for query, document in pairs],
        seconds,
        explanations,
    )


def _check_labels(model: LoadedModel) -> None:
    if len(labels := model.artifact.manifest.labels) > 1:
        raise InvalidInput(
            f"the model {model.name} has {len(labels)} labels; scores of pairs need a model with "
            "one label",
            code="wrong_model",
        )


def _repeated(items: Sequence[Item], count: int) -> Sequence[Item]:
    return list(items) * count if len(items) == 1 else items


@contextmanager
def locating(queries: int, query_path: str, document_path: str) -> Iterator[None]:
    """Convert an error's index among queries and documents to a pointer and a document's index.

    Args:
        queries: Number of queries, which come before the documents.
        query_path: Pointer to a query, with a placeholder for its index if there is a list.
        document_path: The same for a document.
    """
    try:
        yield
    except VitrineError as error:
        if (index := error.index) is not None:
            is_query = index < queries
            error.index = None if is_query else index - queries
            path = query_path if is_query else document_path
            error.pointer = path.format(index if is_query else index - queries)
        elif error.pointer == "/inputs":  # all texts together
            error.pointer = "/documents"
        raise
