"""Similarities of queries and documents, by the kind of their vectors, and their explanations."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np

from models.engines import Output
from service.inference.explanations import (
    Explanation,
    explain_cosine,
    explain_dot,
    explain_maxsim,
    weigh,
)
from service.inference.loaded_model import LoadedModel
from service.inference.results import select_tokens
from service.inference.rows import Row
from service.inference.scores import (
    Scores,
    best_first,
    cosines,
    dot_products,
    max_similarities,
    nearest,
)

# Maximum number of tokens of the multi-vectors that one call compares, in multiples of the model's
# limit for results per token. Multi-vectors are narrower, and are no part of the response.
_MULTI_VECTORS = 8
# Indices of query and document of each pair, among the queries and then the documents.
Pairs = Sequence[tuple[int, int]]
# Explains the similarity of the query and the document with two indices.
ExplainPair = Callable[[int, int], Explanation]


class EncodedTexts(NamedTuple):
    """Texts and their results: those of the queries, then those of the documents.

    Attributes:
        rows: Row of each text.
        results: Result of each text, for each requested output.
        queries: Number of queries.
    """

    rows: Sequence[Row]
    results: Sequence[Sequence[Any]]
    queries: int


class Similarity(NamedTuple):
    """How the vectors of queries and documents are compared.

    Attributes:
        kind: Kind of the scores.
        compare: Returns the similarity of each pair, and a function that explains a pair.
        explained_by: Outputs besides the vectors that an explanation needs.
    """

    kind: Literal["cosine", "dot", "maxsim"]
    compare: Callable[[LoadedModel, EncodedTexts, Pairs], tuple[Scores, ExplainPair]]
    explained_by: tuple[Output, ...] = ()


def compare(
    similarity: Similarity,
    model: LoadedModel,
    texts: EncodedTexts,
    pairs: Pairs,
    explained: int,
    timeout_s: float | None,
) -> tuple[Scores, dict[int, Explanation]]:
    """Return the similarity of each pair, and explanations of the best pairs, by index.

    Args:
        similarity: How the vectors are compared.
        model: Model of the texts' vectors.
        texts: Queries and documents.
        pairs: Pairs to compare.
        explained: Number of best pairs to explain.
        timeout_s: Seconds after which explanations stop; None: no limit.

    Raises:
        TimeoutError: The explanations take longer than `timeout_s`.
    """
    started = monotonic()
    scores, explain_pair = similarity.compare(model, texts, pairs)
    explanations: dict[int, Explanation] = {}
    for index in best_first(scores, explained) if explained else ():
        if timeout_s is not None and monotonic() - started > timeout_s:
            raise TimeoutError
        explanations[index] = explain_pair(*pairs[index])
    return scores, explanations


def _compare_pooled(
    model: LoadedModel, texts: EncodedTexts, pairs: Pairs
) -> tuple[Scores, ExplainPair]:
    rows, vectors, tokens = texts.rows, texts.results[0], texts.results[-1]
    weighted = cache(lambda index: weigh(model.artifact.manifest, rows[index], tokens[index]))

    def explain(query: int, document: int) -> Explanation:
        return explain_cosine(weighted(query), weighted(document))

    count = texts.queries
    queries = np.array(vectors[:count])
    if count not in (1, len(pairs)):  # chunks of documents
        queries = queries[[query for query, _ in pairs]]
    return cosines(queries, np.array(vectors[count:])), explain


def _compare_sparse(
    model: LoadedModel, texts: EncodedTexts, pairs: Pairs
) -> tuple[Scores, ExplainPair]:
    (vectors,) = texts.results
    queries, documents = ([vectors[i] for i in side] for side in zip(*pairs, strict=True))

    def explain(query: int, document: int) -> Explanation:
        return explain_dot(vectors[query], vectors[document])

    return dot_products(queries, documents, model.width), explain


def _compare_multi(
    model: LoadedModel, texts: EncodedTexts, pairs: Pairs
) -> tuple[Scores, ExplainPair]:
    rules = [model.tokenizer.rules(name) for name in ("query", "document")]
    normalize = model.artifact.manifest.normalize
    vectors, positions = zip(
        *(
            select_tokens(row, tokens, rules[index >= texts.queries], normalize=normalize)
            for index, (row, tokens) in enumerate(zip(texts.rows, texts.results[0], strict=True))
        ),
        strict=True,
    )
    queries, documents = ([vectors[i] for i in side] for side in zip(*pairs, strict=True))

    def explain(query: int, document: int) -> Explanation:
        if not len(vectors[document]):
            return Explanation([], 0.0)
        a, b = ((texts.rows[index], positions[index]) for index in (query, document))
        return explain_maxsim(a, b, *nearest(vectors[query], vectors[document]))

    return max_similarities(queries, documents), explain


# By output of the model.
SIMILARITIES: Mapping[Output, Similarity] = {
    "sparse": Similarity("dot", _compare_sparse),
    "multi": Similarity("maxsim", _compare_multi),
    "pooled": Similarity("cosine", _compare_pooled, ("tokens",)),
}


def similarity_of(model: LoadedModel) -> tuple[Output, Similarity]:
    """Return the first output of a model, which is compared, and how; for others, "pooled"."""
    first = model.artifact.manifest.outputs[0]
    output: Output = first if first in SIMILARITIES else "pooled"
    return output, SIMILARITIES[output]


def token_limit(model: LoadedModel, output: Output) -> int:
    """Return the maximum number of tokens of a call that compares outputs."""
    return model.max_token_vectors * (_MULTI_VECTORS if output == "multi" else 1)
