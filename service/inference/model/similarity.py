"""Similarities of queries and documents, as the model declares them, and their explanations."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from models.engines import Output
from models.manifest import Manifest, SimilarityName
from service.inference.call_options import Deadline
from service.inference.errors import InvalidInput
from service.inference.explain.terms import (
    Explanation,
    WeightedTokens,
    explain_maxsim,
    explain_pooled,
    explain_sparse,
    weigh,
)
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.scores import (
    Scores,
    best_first,
    max_similarities,
    nearest,
    similarities,
    similarity_matrix,
    sparse_similarities,
)
from service.inference.results.vectors import (
    Embeddings,
    MultiEmbeddings,
    SparseEmbeddings,
    Vectors,
    select_tokens,
    unit_vectors,
)
from service.inference.tokenizing.rows import Row

# Maximum number of tokens of the multi-vectors that one call compares, in multiples of the model's
# limit for results per token. Multi-vectors are narrower, and are no part of the response.
_MULTI_VECTORS = 8
# Indices of query and document of each pair, among the queries and then the documents.
Pairs = Sequence[tuple[int, int]]
# Explains the similarity of the query and the document with two indices.
ExplainPair = Callable[[int, int], Explanation]
# Results of `encode`, `encode_sparse` or `encode_multi`, or vectors `(N, W)`.
VectorsOfTexts = Embeddings | SparseEmbeddings | MultiEmbeddings | ArrayLike
Compare = Callable[
    [LoadedModel, SimilarityName, "EncodedTexts", Pairs, Deadline | None],
    tuple[Scores, ExplainPair],
]


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
        kind: Similarity that the model declares.
        compare: Returns the similarity of each pair, and a function that explains a pair.
        explained_by: Outputs besides the vectors that an explanation needs.
    """

    kind: SimilarityName
    compare: Compare
    explained_by: tuple[Output, ...]


def compare(
    similarity: Similarity,
    model: LoadedModel,
    texts: EncodedTexts,
    pairs: Pairs,
    explained: int,
    deadline: Deadline | None,
) -> tuple[Scores, dict[int, Explanation]]:
    """Return the similarity of each pair, and explanations of the best pairs, by index.

    Args:
        similarity: How the vectors are compared.
        model: Model of the texts' vectors.
        texts: Queries and documents.
        pairs: Pairs to compare.
        explained: Number of best pairs to explain.
        deadline: Time after which no pooling and no explanation begins; None: no limit.

    Raises:
        InvalidInput: A text has too many vectors to pool; `index` is that of its row.
        DeadlineExceeded: Pooling and explanations take longer.
    """
    scores, explain_pair = similarity.compare(model, similarity.kind, texts, pairs, deadline)
    explanations: dict[int, Explanation] = {}
    for index in best_first(scores, explained) if explained else ():
        if deadline is not None:
            deadline.check()
        explanations[index] = explain_pair(*pairs[index])
    return scores, explanations


def _compare_pooled(
    model: LoadedModel,
    kind: SimilarityName,
    texts: EncodedTexts,
    pairs: Pairs,
    _deadline: Deadline | None,
) -> tuple[Scores, ExplainPair]:
    manifest, count = model.artifact.manifest, texts.queries
    rows, vectors, tokens = texts.rows, np.array(texts.results[0]), texts.results[-1]
    if manifest.normalize and kind != "cosine":  # cosines are those of vectors of any length
        vectors = unit_vectors(vectors)

    @cache
    def weighted_tokens(index: int) -> WeightedTokens:
        length = 1.0 if kind == "cosine" else float(np.linalg.norm(vectors[index]))
        return weigh(manifest, rows[index], tokens[index], length)

    def explain(query: int, document: int) -> Explanation:
        return explain_pooled(weighted_tokens(query), weighted_tokens(document))

    query_rows, document_rows = map(list, zip(*pairs, strict=True))
    queries = vectors[:1] if count == 1 else vectors[query_rows]
    return similarities(kind, queries, vectors[document_rows]), explain


def _compare_sparse(
    model: LoadedModel,
    kind: SimilarityName,
    texts: EncodedTexts,
    pairs: Pairs,
    _deadline: Deadline | None,
) -> tuple[Scores, ExplainPair]:
    (vectors,) = texts.results
    queries, documents = ([vectors[i] for i in side] for side in zip(*pairs, strict=True))

    def explain(query: int, document: int) -> Explanation:
        return explain_sparse(vectors[query], vectors[document], unit_length=kind == "cosine")

    return sparse_similarities(kind, queries, documents, model.width), explain


def _compare_multi(
    model: LoadedModel,
    _kind: SimilarityName,
    texts: EncodedTexts,
    pairs: Pairs,
    deadline: Deadline | None,
) -> tuple[Scores, ExplainPair]:
    rules = [model.tokenizer.rules(name) for name in ("query", "document")]
    normalize = model.artifact.manifest.normalize
    vectors, positions, _ = zip(
        *(
            select_tokens(
                *(index, row, tokens, rules[index >= texts.queries], deadline),
                is_normalized=normalize,
            )
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


# Function that compares, and outputs that an explanation needs, by output of the model.
_COMPARISONS: Mapping[Output, tuple[Compare, tuple[Output, ...]]] = {
    "sparse": (_compare_sparse, ()),
    "multi": (_compare_multi, ()),
    "pooled": (_compare_pooled, ("tokens",)),
}


def similarity_of(model: LoadedModel) -> tuple[Output, Similarity]:
    """Return the first output of a model, which is compared, and how; for others, "pooled"."""
    manifest = model.artifact.manifest
    if manifest.similarity is None:  # no vectors, so that "pooled" is an error
        return "pooled", Similarity("cosine", *_COMPARISONS["pooled"])
    output = manifest.outputs[0]
    return output, Similarity(manifest.similarity, *_COMPARISONS[output])


def compare_all(kind: SimilarityName, a: VectorsOfTexts, b: VectorsOfTexts) -> Scores:
    """Return the similarity of each text of `a` with each of `b`, `(N, M)`.

    Raises:
        InvalidInput: They are not vectors, or of different kinds or widths; `pointer` names one.
    """
    match a, b:
        case SparseEmbeddings(), SparseEmbeddings():
            _check_widths(a.width, b.width)
            return np.array(
                [sparse_similarities(kind, [own] * len(b), b.vectors, b.width) for own in a.vectors]
            )
        case MultiEmbeddings(), MultiEmbeddings():
            _check_widths(a.vectors[0].shape[1], b.vectors[0].shape[1])
            return np.array([max_similarities([own] * len(b), b.vectors) for own in a.vectors])
    first, second = _matrix(a, "a"), _matrix(b, "b")
    _check_widths(first.shape[1], second.shape[1])
    if kind == "cosine":  # squares of float32 end at 1e-45 and 3e38
        first, second = _scaled(first), _scaled(second)
    return similarity_matrix(kind, first, second)


def _scaled(vectors: Vectors) -> Vectors:
    """Return vectors `(N, W)` times powers of 2, so that the largest element is from 0.5 to 1."""
    _, exponents = np.frexp(abs(vectors).max(1, keepdims=True, initial=0))
    scaled: Vectors = np.ldexp(vectors, -exponents)
    return scaled


def _check_widths(a: int, b: int) -> None:
    if a != b:
        raise InvalidInput(f"a and b have vectors of {a} and {b} dimensions", pointer="/b")


def _matrix(vectors: VectorsOfTexts, name: str) -> Vectors:
    """Return vectors, or one vector, as a matrix `(N, W)`."""
    try:
        matrix = np.atleast_2d(np.asarray(vectors))
    except (TypeError, ValueError):  # of no array, or rows of several lengths
        matrix = np.empty((0, 0, 0))
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise InvalidInput(
            f"{name} must be vectors: both results of encode, encode_sparse or encode_multi, or "
            "arrays (N, W); score compares texts",
            pointer=f"/{name}",
        )
    return matrix.astype(np.float32)


def keeps_similarity_at_unit_length(manifest: Manifest) -> bool:
    """Return whether vectors of unit length have the similarities of the model's own vectors."""
    return manifest.normalize or manifest.similarity == "cosine"


def token_limit(model: LoadedModel, output: Output) -> int:
    """Return the maximum number of tokens of a call that compares outputs."""
    return model.max_token_vectors * (_MULTI_VECTORS if output == "multi" else 1)
