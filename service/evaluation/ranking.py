"""Exact search: the best documents of each query, by the vectors that bulk jobs have written."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from models.manifest import SimilarityName
from models.quantization import DTYPES
from service.bulk.options import ERROR, ROW, Kind
from service.bulk.parts import native_file
from service.inference.results.quantization import Quantizer
from service.inference.results.scores import (
    Scores,
    max_similarities,
    similarity_matrix,
    sparse_similarities,
)
from service.inference.results.vectors import SparseVector

# Score of each ranked document, best first, by the id of the query and of the document.
Rankings = Mapping[str, Mapping[str, float]]

# Maximum number of documents, and of queries, whose vectors are in memory; and of documents with
# several vectors each.
_DOCUMENTS, _QUERIES, _DIVIDED = 1024, 1024, 128


@dataclass(frozen=True)
class VectorFiles:
    """The vectors of documents or queries: the output of a bulk job.

    Attributes:
        folder: Folder of the output, in Parquet.
        ids: Id of each row.
        kind: Kind of the vectors: "dense", "chunks", "sparse" or "multi".
        quantizer: Restores vectors from their codes; None: they are floats.
    """

    folder: Path
    ids: Sequence[str]
    kind: Kind
    quantizer: Quantizer | None = None

    def blocks(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows without an error, at most as many as `rows` at once."""
        for path in sorted(self.folder.glob("part-*.parquet")):
            for batch in pq.ParquetFile(native_file(path)).iter_batches(rows, use_threads=False):
                errors = batch.column(ERROR)
                if errors.null_count < len(batch):
                    batch = batch.filter(pc.is_null(errors))
                if len(batch):
                    yield batch


class VectorSpace(NamedTuple):
    """How a model's vectors are compared.

    Attributes:
        kind: Similarity that the model declares.
        width: Number of entries of a sparse vector.
    """

    kind: SimilarityName
    width: int


def rank(
    queries: VectorFiles,
    documents: VectorFiles,
    similarity: VectorSpace,
    depth: int,
    report: Callable[[float], None] = lambda _: None,
) -> Rankings:
    """Return the best documents of each query that has a vector.

    A document has the score of its best chunk. Codes stand for the vectors that `dequantize`
    returns, and bits are compared by the dot product with them as 1 and -1.

    Args:
        queries: Vectors of the queries, which are not divided into chunks.
        documents: Vectors of the documents.
        similarity: How the vectors are compared.
        depth: Maximum number of documents of a query.
        report: Called with the share of the pairs that have been compared, from 0 to 1.
    """
    # Among equal scores the greater id is first, as in trec_eval.
    order = np.empty(len(documents.ids), np.int64)
    order[sorted(range(len(order)), key=documents.ids.__getitem__)] = range(len(order))
    rankings: dict[str, dict[str, float]] = {}
    for some in queries.blocks(_QUERIES):
        first, last = (some.column(ROW)[index].as_py() for index in (0, -1))
        best = [_Best(depth, order) for _ in range(len(some))]
        for block in documents.blocks(
            _DIVIDED if documents.kind in ("chunks", "multi") else _DOCUMENTS
        ):
            numbers = block.column(ROW).to_numpy()
            # trec_eval compares scores in float32
            scores = _scores(some, block, documents, similarity).astype(np.float32)
            for own, row in zip(best, scores, strict=True):
                own.add(numbers, row)
            compared = first + (last + 1 - first) * (numbers[-1] + 1) / len(order)
            report(float(compared) / len(queries.ids))
        for own, number in zip(best, some.column(ROW).to_pylist(), strict=True):
            rankings[queries.ids[number]] = {documents.ids[row]: s for row, s in own.ranking()}
    return rankings


class _Best:
    """The best documents of a query.

    Args:
        depth: Maximum number of documents.
        order: Place of each document among all ids in ascending order, by its row.
    """

    def __init__(self, depth: int, order: NDArray[np.int64]) -> None:
        self._depth = depth
        self._order = order
        self._rows = np.empty(0, np.int64)
        self._scores = np.empty(0, np.float32)

    def add(self, rows: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Add documents, `(N,)`."""
        if len(self._scores) == self._depth:
            chosen = scores >= self._scores[-1]
            rows, scores = rows[chosen], scores[chosen]
        elif len(scores) > self._depth:
            chosen = scores >= np.partition(scores, -self._depth)[-self._depth]
            rows, scores = rows[chosen], scores[chosen]
        rows, scores = np.append(self._rows, rows), np.append(self._scores, scores)
        best = np.lexsort((self._order[rows], scores))[::-1][: self._depth]
        self._rows, self._scores = rows[best], scores[best]

    def ranking(self) -> Iterator[tuple[int, float]]:
        """Yield the row and the score of each document, best first."""
        return zip(self._rows.tolist(), self._scores.tolist(), strict=True)


def _scores(
    queries: pa.RecordBatch, documents: pa.RecordBatch, of: VectorFiles, similarity: VectorSpace
) -> Scores:
    """Return the similarity of each query with each document, `(N, M)`."""
    if of.kind == "sparse":
        sparse = _sparse_vectors(documents)
        return np.array(
            [
                sparse_similarities(
                    similarity.kind, [query] * len(sparse), sparse, similarity.width
                )
                for query in _sparse_vectors(queries)
            ]
        )
    column, own = documents.column("embedding"), queries.column("embedding")
    if of.kind == "multi":
        multi = _split(column, matrix_of(column.flatten()))
        return np.array(
            [
                max_similarities([query] * len(multi), multi)
                for query in _split(own, matrix_of(own.flatten()))
            ]
        )
    chunks = column.flatten() if of.kind == "chunks" else column
    is_bits = of.quantizer is not None and DTYPES[of.quantizer.dtype].packs_bits
    kind = "dot" if is_bits else similarity.kind
    scores = similarity_matrix(kind, matrix_of(own), matrix_of(chunks, of.quantizer))
    return np.maximum.reduceat(scores, _starts(column), axis=1) if of.kind == "chunks" else scores


def matrix_of(vectors: pa.Array, quantizer: Quantizer | None = None) -> NDArray[np.float32]:
    """Return a column of vectors, or of their codes, as a matrix `(N, W)`."""
    shape = len(vectors), vectors.type.list_size
    codes = vectors.flatten().to_numpy(zero_copy_only=False).reshape(shape)
    return codes.astype(np.float32) if quantizer is None else quantizer.dequantize(codes)


def _starts(lists: pa.ListArray) -> NDArray[np.int64]:
    """Return the index of the first value of each list among the values of all."""
    lengths = pc.list_value_length(lists).to_numpy()
    return np.cumsum([0, *lengths[:-1]])


def _split(lists: pa.ListArray, values: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the values of each list, `values` being those of all."""
    return np.split(values, _starts(lists)[1:])


def _sparse_vectors(rows: pa.RecordBatch) -> list[SparseVector]:
    ids, weights = (
        _split(column, column.flatten().to_numpy())
        for column in (rows.column("ids"), rows.column("weights"))
    )
    return [SparseVector(*own) for own in zip(ids, weights, strict=True)]
