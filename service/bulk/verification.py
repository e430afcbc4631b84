"""Comparison of random rows of the output with the same records, each encoded alone."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
from numpy.typing import NDArray

from service.bulk.encoder import Encoder
from service.bulk.journal import Journal
from service.bulk.options import ERROR, ROW, BulkError, BulkOptions, Kind, OptionError
from service.bulk.sources import Source
from service.bulk.texts import items_of

# Largest difference between a row of the output and the same record alone: 1 - cosine of vectors,
# or the difference of a score. Batches change float32 vectors by 1e-7; other types round.
_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 2e-2
# Columns that must be equal.
_EXACT = ("chunks", "best_chunk")


@dataclass(frozen=True)
class _Sample:
    """A plan that reads the parts of some rows; see `readers.Plan`."""

    rows: frozenset[int]
    part_rows: int
    limit: int

    def rows_from(self, first: int) -> int:
        end = min((first // self.part_rows + 1) * self.part_rows, self.limit)
        return max(0, end - first)

    def is_wanted(self, first: int) -> bool:
        part = first // self.part_rows
        return any(row // self.part_rows == part for row in self.rows)


async def verify_rows(
    source: Source, encoder: Encoder, options: BulkOptions, kind: Kind, journal: Journal
) -> tuple[int, float]:
    """Encode random records again, one at a time, and compare them with the rows of the output.

    Returns:
        The number of rows, and the largest difference.

    Raises:
        OptionError: The input is standard input, which cannot be read again.
        BulkError: A row differs from the record's own result.
    """
    if source.stream is not None:
        raise OptionError("--verify reads the input again, which standard input does not allow")
    total = journal.rows or 0
    rows = frozenset(random.sample(range(total), min(options.verify, total)))
    stored = _stored(options.output, journal, rows)
    is_exact = options.dtype == "float32" and options.precision == "float32"
    tolerance = _TOLERANCE if is_exact else _ROUNDED_TOLERANCE
    largest = 0.0
    for block in source.read(_Sample(rows, options.part_rows, total)):
        if not block.columns:
            continue
        items, errors = items_of(block, options, kind)
        for row in sorted(rows & set(range(block.first, block.first + block.rows))):
            item = items[row - block.first]
            if item is None:
                again = encoder.failed([errors[row - block.first]])
            else:
                again = await encoder.encode([item])
            difference = _difference(stored[row], again.to_pylist()[0], options.dtype)
            if difference > tolerance:
                raise BulkError(
                    f"row {row} of {options.output} differs from its record encoded alone by "
                    f"{difference:.1e}, more than {tolerance:g}"
                )
            largest = max(largest, difference)
    return len(rows), largest


def _stored(folder: Path, journal: Journal, rows: Iterable[int]) -> dict[int, dict[str, object]]:
    names = journal.joined or [name for p in journal.finished.values() for name in p.files]
    dataset = pyarrow.dataset.dataset([str(folder / name) for name in names], format="parquet")
    chosen = pyarrow.dataset.field(ROW).isin(pa.array(sorted(rows), pa.int64()))
    return {row[ROW]: row for row in dataset.to_table(filter=chosen).to_pylist()}


def _difference(stored: dict[str, object], again: dict[str, object], dtype: str) -> float:
    """Return the largest difference of two results; infinity if they differ in kind."""
    largest = 0.0
    for name, value in again.items():
        if name in (ERROR, *_EXACT) or value is None or isinstance(value, str | bool):
            largest = max(largest, 0.0 if stored[name] == value else np.inf)
            continue
        pair = _numbers(stored[name], dtype), _numbers(value, dtype)
        if pair[0].shape != pair[1].shape:
            return np.inf
        is_vector = pair[0].size > 1
        distance = 1 - _cosine(*pair) if is_vector else float(np.abs(pair[0] - pair[1]).max())
        largest = max(largest, distance)
    return largest


def _numbers(value: object, dtype: str) -> NDArray[np.float64]:
    numbers = np.atleast_1d(np.asarray(value, np.float64))
    if dtype in ("binary", "ubinary") and len(numbers) > 1:
        bits = np.unpackbits(numbers.astype(np.int16).astype(np.uint8))
        return np.where(bits == 1, 1.0, -1.0)
    return numbers


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.vdot(a, b) / norms) if norms else float(np.array_equal(a, b))
