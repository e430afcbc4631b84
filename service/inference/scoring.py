"""Scoring with a loaded model: labels of texts, and the relevance of documents to queries."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from models.engines import Output
from service.inference.errors import DeadlineExceeded, InvalidInput, VitrineError
from service.inference.explanations import (
    Explanation,
    check_explainable,
    explain_cosine,
    explain_dot,
    explain_maxsim,
)
from service.inference.loaded_model import LoadedModel
from service.inference.pairs import PairLimits
from service.inference.results import select_tokens
from service.inference.scores import (
    ACTIVATIONS,
    Classification,
    PairScores,
    Scores,
    cosines,
    dot_products,
    max_similarities,
)
from service.inference.tokenizer import OnOverflow, Row

Item = TypeVar("Item")
# Indices of query and document of each pair, among the queries and then the documents.
Pairs = Sequence[tuple[int, int]]
# Explains the similarity of the query and the document with two indices.
ExplainPair = Callable[[int, int], Explanation]

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
    own = model.artifact.manifest.outputs
    output: Output = next((name for name in _SIMILARITIES if name in own), "pooled")
    similarity = _SIMILARITIES[output]
    outputs = (output, *(similarity.explained_by if explain else ()))

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
    rows, results, seconds = await model.run(
        *(texts, len(texts), tokenize, outputs, timeout_s),
        limits_tokens=output != "multi",  # which are no part of the response
    )
    pairs = [(0 if count == 1 else index, count + index) for index in range(len(documents))]
    work = partial(_compare, similarity, model, _Encoded(rows, results, count), pairs, explain)
    started = time.perf_counter()
    is_long = explain or output == "multi"
    scores, explanations = await asyncio.to_thread(work) if is_long else work()
    if explain:
        seconds = {**seconds, "explain": time.perf_counter() - started}
    sides = [(rows[query], rows[document]) for query, document in pairs]
    return PairScores(
        scores,
        scores,
        similarity.kind,
        [len(query.ids) + len(document.ids) for query, document in sides],
        [query.truncated or document.truncated for query, document in sides],
        seconds,
        explanations,
    )


def _compare(
    similarity: "_Similarity",
    model: LoadedModel,
    texts: "_Encoded",
    pairs: Pairs,
    explain: bool,
) -> tuple[Scores, dict[int, Explanation]]:
    """Return the similarity of each pair, and its explanation if `explain`."""
    scores, explain_pair = similarity.compare(model, texts, pairs)
    explanations = {index: explain_pair(*pair) for index, pair in enumerate(pairs) if explain}
    return scores, explanations


class _Encoded(NamedTuple):
    """Texts and their results: those of the queries, then those of the documents.

    Attributes:
        rows: Row of each text.
        results: Result of each text, for each requested output.
        queries: Number of queries.
    """

    rows: Sequence[Row]
    results: Sequence[Sequence[Any]]
    queries: int


def _compare_pooled(
    model: LoadedModel, texts: _Encoded, _pairs: Pairs
) -> tuple[Scores, ExplainPair]:
    rows, vectors, tokens = texts.rows, texts.results[0], texts.results[-1]

    def explain(query: int, document: int) -> Explanation:
        sides = ((rows[index], tokens[index]) for index in (query, document))
        return explain_cosine(model.artifact.manifest, *sides)

    count = texts.queries
    return cosines(np.array(vectors[:count]), np.array(vectors[count:])), explain


def _compare_sparse(
    model: LoadedModel, texts: _Encoded, pairs: Pairs
) -> tuple[Scores, ExplainPair]:
    (vectors,) = texts.results
    queries, documents = ([vectors[i] for i in side] for side in zip(*pairs, strict=True))

    def explain(query: int, document: int) -> Explanation:
        return explain_dot(vectors[query], vectors[document])

    return dot_products(queries, documents, model.width), explain


def _compare_multi(model: LoadedModel, texts: _Encoded, pairs: Pairs) -> tuple[Scores, ExplainPair]:
    rules = [model.tokenizer.rules(name) for name in ("query", "document")]
    normalize = model.artifact.manifest.normalize
    selected = [
        select_tokens(row, vectors, rules[index >= texts.queries], normalize=normalize)
        for index, (row, vectors) in enumerate(zip(texts.rows, texts.results[0], strict=True))
    ]
    queries, documents = ([selected[i][0] for i in side] for side in zip(*pairs, strict=True))

    def explain(query: int, document: int) -> Explanation:
        sides = ((texts.rows[index], *selected[index]) for index in (query, document))
        return explain_maxsim(*sides)

    return max_similarities(queries, documents), explain


class _Similarity(NamedTuple):
    """How the vectors of queries and documents are compared.

    Attributes:
        kind: Kind of the scores.
        compare: Returns the similarity of each pair, and a function that explains a pair.
        explained_by: Outputs besides the vectors that an explanation needs.
    """

    kind: Literal["cosine", "dot", "maxsim"]
    compare: Callable[[LoadedModel, _Encoded, Pairs], tuple[Scores, ExplainPair]]
    explained_by: tuple[Output, ...] = ()


# By output of the model.
_SIMILARITIES: Mapping[Output, _Similarity] = {
    "sparse": _Similarity("dot", _compare_sparse),
    "multi": _Similarity("maxsim", _compare_multi),
    "pooled": _Similarity("cosine", _compare_pooled, ("tokens",)),
}


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
