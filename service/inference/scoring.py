"""Scoring with a loaded model: labels of texts, and the relevance of documents to queries."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from models.engines import Output
from service.inference.errors import InvalidInput, VitrineError
from service.inference.loaded_model import LoadedModel
from service.inference.pairs import NO_LIMITS, PairLimits
from service.inference.results import Vectors, select_tokens
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
# Kind of the scores of vectors, by output of the model.
_KINDS: Mapping[Output, Literal["cosine", "dot", "maxsim"]] = {
    "sparse": "dot",
    "multi": "maxsim",
    "pooled": "cosine",
}


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
    rows, results, seconds = await model.run(list(texts), len(items), tokenize, "logits", timeout_s)
    manifest = model.artifact.manifest
    logits = np.array(results, np.float64)  # (N, C)
    scores = ACTIVATIONS[manifest.activation](logits)
    return Classification(logits, scores, manifest.labels, rows, seconds)


async def score_pairs(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return the scores of a reranker; errors have the index among queries and documents."""
    check_labels(model)
    for index, query in enumerate(queries):
        model.tokenizer.check_text(query, index)
    pairs = list(zip(_repeated(queries, len(documents)), documents, strict=True))
    result = await classify_documents(model, queries, pairs, NO_LIMITS, on_overflow, timeout_s)
    return PairScores(
        result.scores[:, 0],
        result.logits[:, 0],
        "cross_encoder",
        [len(row.ids) for row in result.rows],
        [row.truncated for row in result.rows],
        result.seconds,
    )


async def score_vectors(
    model: LoadedModel,
    queries: Sequence[str],
    documents: Sequence[str],
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> PairScores:
    """Return similarities of vectors; errors have the index among queries and documents."""
    outputs = model.artifact.manifest.outputs
    output: Output = next((o for o in _KINDS if o in outputs), "pooled")

    def tokenize() -> list[Row]:
        rows = model.tokenizer.rows_of_texts(queries, "query", on_overflow)
        try:
            rows += model.tokenizer.rows_of_texts(documents, "document", on_overflow)
        except VitrineError as error:
            if error.index is not None:
                error.index += len(queries)
            raise
        return rows

    texts, count = [*queries, *documents], len(queries)
    rows, vectors, seconds = await model.run(
        texts, len(texts), tokenize, output, timeout_s, limits_tokens=False
    )
    if output == "sparse":
        ours = _repeated(vectors[:count], len(documents))
        scores = dot_products(ours, vectors[count:], model.width)
    elif output == "multi":
        scores = await asyncio.to_thread(_max_similarities, model, rows, vectors, count)
    else:
        scores = cosines(np.array(vectors[:count]), np.array(vectors[count:]))
    pairs = list(zip(_repeated(rows[:count], len(documents)), rows[count:], strict=True))
    return PairScores(
        scores,
        scores,
        _KINDS[output],
        [len(query.ids) + len(document.ids) for query, document in pairs],
        [query.truncated or document.truncated for query, document in pairs],
        seconds,
    )


def _max_similarities(
    model: LoadedModel, rows: Sequence[Row], vectors: Sequence[Vectors], queries: int
) -> Scores:
    """Return MaxSim of queries and documents, given the vectors of all tokens of both.

    Args:
        model: Multi-vector model.
        rows: Rows of the queries, then of the documents.
        vectors: Vectors of all tokens of each row, `(L, W)`.
        queries: Number of queries.
    """
    rules = [model.tokenizer.rules(name) for name in ("query", "document")]
    normalize = model.artifact.manifest.normalize
    selected = [
        select_tokens(row, part, rules[index >= queries], normalize=normalize)[0]
        for index, (row, part) in enumerate(zip(rows, vectors, strict=True))
    ]
    documents = selected[queries:]
    return max_similarities(_repeated(selected[:queries], len(documents)), documents)


async def classify_documents(
    model: LoadedModel,
    queries: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    limits: PairLimits,
    on_overflow: OnOverflow,
    timeout_s: float | None,
) -> Classification:
    """Classify pairs of a query and a document; errors have the index among both."""
    try:
        return await classify(model, pairs, limits, on_overflow, timeout_s)
    except VitrineError as error:
        if error.index is not None:
            query = 0 if len(queries) == 1 else error.index
            is_of_query = error.code == "no_tokens" and not model.tokenizer.has_tokens(
                queries[query]
            )
            error.index = query if is_of_query else len(queries) + error.index
        raise


def check_labels(model: LoadedModel) -> None:
    """Raise `InvalidInput` if the model has more than one label."""
    if len(labels := model.artifact.manifest.labels) > 1:
        raise InvalidInput(
            f"the model {model.name} has {len(labels)} labels; scores of pairs need a model "
            "with one label",
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
        raise
