"""A batch on the engine: rows of token ids in, the results of each row out."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.engines import OUTPUTS, Engine, Output
from models.packing import pack
from service.inference.results.metrics import ModelMetrics
from service.inference.results.vectors import RowResult, RowResults, SparseVector, Vectors
from service.inference.tokenizing.rows import Row
from service.request_trace import RequestTrace

# Size of a cached result besides its key and its arrays, in bytes: Python's objects.
_ENTRY_BYTES = 800


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One item of a batch: a row of token ids, the requested outputs, and the request's trace."""

    row: Row
    outputs: tuple[Output, ...]
    trace: RequestTrace | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the row."""
        return len(self.row.ids)

    @property
    def key(self) -> bytes:
        """Everything that the item's results depend on."""
        row = self.row
        numbers = (len(row.ids), row.prompt_tokens, row.adapter, row.unattended)
        ids = array("i", [*numbers, *row.ids, *row.token_types, *row.words, *row.labels])
        return ids.tobytes() + ",".join(self.outputs).encode()


class NotFinite(Exception):
    """The engine computed an infinity or a NaN."""


def run_batch(
    engine: Engine, metrics: ModelMetrics, direction: Vectors | None, batch: Sequence[BatchItem]
) -> list[RowResults]:
    """Return the results of each item, from one forward pass of the engine.

    Args:
        engine: Engine that runs the batch.
        metrics: Metrics in which the batch is recorded.
        direction: See `ModelMetrics.observe_vectors`.
        batch: The items.
    """
    rows = [item.row for item in batch]
    _link_traces(batch)
    # A set would have no order. A pass computes all outputs of a graph, whatever is requested.
    outputs = tuple(dict.fromkeys(output for item in batch for output in item.outputs))
    results = _run_rows(engine, metrics, rows, outputs)
    if "pooled" in outputs:
        metrics.observe_vectors(results[outputs.index("pooled")], direction)
    columns = {
        output: _by_row(rows, output, result)
        for output, result in zip(outputs, results, strict=True)
    }
    return [
        tuple(columns[output][index] for output in item.outputs) for index, item in enumerate(batch)
    ]


def _link_traces(batch: Sequence[BatchItem]) -> None:
    """Tell the traces of a batch's requests of each other."""
    traces = {item.trace.ids["span_id"]: item.trace for item in batch if item.trace is not None}
    if not traces:
        return
    ids = {span_id: trace.ids for span_id, trace in traces.items()}
    for trace in traces.values():
        trace.batched.update(ids)


def _run_rows(
    engine: Engine, metrics: ModelMetrics, rows: Sequence[Row], outputs: Sequence[Output]
) -> list[Vectors]:
    """Return each of the outputs of all rows: `(B, W)`, `(T, W)` or `(P, W)`."""
    has_types = any(row.token_types for row in rows)
    batch = pack(
        [row.ids for row in rows],
        [row.prompt_tokens for row in rows],
        [row.adapter for row in rows],
        [row.token_types or [0] * len(row.ids) for row in rows] if has_types else None,
        [row.unattended for row in rows],
        [row.words for row in rows] if rows[0].words else None,
        [row.labels for row in rows] if rows[0].words else None,
    )
    with metrics.batch_seconds.time():
        results = engine.run_outputs(batch, outputs)
    if not all(np.isfinite(result).all() for result in results):
        raise NotFinite
    metrics.batch_rows.observe(batch.rows)
    metrics.batch_tokens.observe(len(batch.input_ids))
    metrics.padded_tokens.inc(batch.padded_index.size)
    return results


def _by_row(
    rows: Sequence[Row], output: Output, result: NDArray[np.float32]
) -> Sequence[RowResult]:
    if output == "sparse":  # most weights are zero
        indices = [np.flatnonzero(vector) for vector in result]
        return [SparseVector(i, v[i]) for i, v in zip(indices, result, strict=True)]
    if OUTPUTS[output].per_pair:
        sizes = [len(row.words) * len(row.labels) for row in rows]
        return np.split(result, np.cumsum(sizes)[:-1])
    if not OUTPUTS[output].per_token:
        return list(result)
    return np.split(result, np.cumsum([len(row.ids) for row in rows])[:-1])


def copy_read_only(results: RowResults) -> tuple[RowResults, int]:
    """Return a copy of a row's results that nobody can change, and its size in bytes.

    The engine's results are views of those of a whole batch.
    """
    copies: list[RowResult] = []
    size = _ENTRY_BYTES
    for result in results:
        if isinstance(result, SparseVector):
            sparse = SparseVector(_copy_read_only(result.ids), _copy_read_only(result.weights))
            size += sparse.ids.nbytes + sparse.weights.nbytes
            copies.append(sparse)
        else:
            copies.append(_copy_read_only(result))
            size += result.nbytes
    return tuple(copies), size


def _copy_read_only(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy()
    copy.setflags(write=False)
    return copy
