"""Comparison of random rows of the output with the same records, each encoded alone."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from service.bulk.journal import Journal
from service.bulk.opening import OpenJob
from service.bulk.options import HIGHLIGHTS, ROW, BulkError
from service.bulk.parts import native_file
from service.bulk.readers import ReadPlan
from service.bulk.texts import records_of

# Largest difference between a row of the output and the same record alone: 1 - cosine of vectors or
# the relative difference of their lengths, or the difference of a score, relative to it if it is
# above 1. Dot products and distances can be hundreds. Batches change float32 vectors by 1e-7; other
# types round.
_TOLERANCE = 1e-5
_ROUNDED_TOLERANCE = 2e-2
# The same for bits: values near 0 can have either sign.
_BITS_TOLERANCE = 0.2


async def verify_rows(job: OpenJob, journal: Journal) -> tuple[int, float]:
    """Encode random records again, one at a time, and compare them with the rows of the output.

    Returns:
        The number of rows, and the largest difference.

    Raises:
        BulkError: A row differs from the record's own result.
    """
    options, total = job.options, journal.rows or 0
    rows = frozenset(random.sample(range(total), min(options.verify, total)))
    stored = _read_rows(options.output, journal, rows)
    tolerance = _ROUNDED_TOLERANCE
    if options.dtype in ("binary", "ubinary"):
        tolerance = _BITS_TOLERANCE
    elif (options.dtype, options.precision) == ("float32", "float32"):
        tolerance = _TOLERANCE
    largest = 0.0
    parts = {row // options.part_rows for row in rows}
    plan = ReadPlan(options.part_rows, limit=total, wants=parts.__contains__)
    for block in job.source.read(plan):
        if not block.columns:
            continue
        items, _, errors = records_of(block, options, job.kind, job.source.copied)
        for row in sorted(rows.intersection(range(block.first, block.first + block.rows))):
            index = row - block.first
            item = items[index]
            if item is None or index in errors:
                again = job.encoder.error_rows([errors[index]])
            else:
                again = await job.encoder.encode([item])
            difference = _difference(stored[row], again.to_pylist()[0], options.dtype)
            if difference > tolerance:
                raise BulkError(
                    f"row {row} of {options.output} differs from its record encoded alone by "
                    f"{difference:.1e}, more than {tolerance:g}"
                )
            largest = max(largest, difference)
    return len(rows), largest


def _read_rows(folder: Path, journal: Journal, rows: Iterable[int]) -> dict[int, dict[str, object]]:
    names = journal.joined or [name for p in journal.finished.values() for name in p.files]
    chosen = pa.array(sorted(rows), pa.int64())
    stored: dict[int, dict[str, object]] = {}
    for name in names:
        file = pq.ParquetFile(native_file(folder / name))
        for group in range(file.num_row_groups):
            is_chosen = pc.is_in(file.read_row_group(group, [ROW])[ROW], chosen)
            if pc.any(is_chosen).as_py():
                table = file.read_row_group(group).filter(is_chosen)
                stored.update((row[ROW], row) for row in table.to_pylist())
    return stored


def _difference(stored: Mapping[str, object], again: Mapping[str, object], dtype: str) -> float:
    """Return the largest difference of two results; infinity if they differ in kind."""
    if "ids" in again and again["ids"] is not None and stored["ids"] is not None:
        # A weight near 0 may be in one of them alone.
        return _distance(*_dense(stored, again), is_vector=True)
    largest = 0.0
    for name, value in again.items():
        if name == HIGHLIGHTS:  # nearly equal sentences can change their places
            continue
        numbers, expected = _numbers(value, dtype), _numbers(stored[name], dtype)
        if numbers is None or expected is None:
            if value != stored[name]:
                return np.inf
        elif numbers.shape != expected.shape:
            return np.inf
        else:
            is_vector = numbers.size > 1 and name != "scores"
            largest = max(largest, _distance(numbers, expected, is_vector=is_vector))
    return largest


def _distance(a: NDArray[np.float64], b: NDArray[np.float64], *, is_vector: bool) -> float:
    """Return the difference of vectors or of scores; infinity if one alone is not finite.

    Vectors differ by 1 - cosine, or by the relative difference of their lengths if it is larger;
    scores by their largest difference, relative to scores above 1.
    """
    if not np.isfinite([a, b]).all():
        return 0.0 if np.array_equal(a, b, equal_nan=True) else np.inf
    if not is_vector:
        return float((abs(a - b) / np.maximum(1, abs(b))).max())
    lengths = [float(np.linalg.norm(each)) for each in (a, b)]
    if min(lengths) == 0:
        return 0.0 if max(lengths) == 0 else np.inf
    cosine = float(np.vdot(a, b)) / (lengths[0] * lengths[1])
    return max(1 - cosine, 1 - min(lengths) / max(lengths))


def _dense(*rows: Mapping[str, object]) -> list[NDArray[np.float64]]:
    """Return sparse vectors as dense ones."""
    pairs = [(np.array(row["ids"], int), np.array(row["weights"], float)) for row in rows]
    width = 1 + max((int(ids.max()) for ids, _ in pairs if len(ids)), default=0)
    vectors = [np.zeros(width) for _ in pairs]
    for vector, (ids, weights) in zip(vectors, pairs, strict=True):
        vector[ids] = weights
    return vectors


def _numbers(value: object, dtype: str) -> NDArray[np.float64] | None:
    """Return numbers as an array, bits as 1 and -1; None for other values, such as chunks."""
    if not isinstance(value, float | list) or value == []:
        return None
    try:
        numbers = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError):
        return None
    if dtype in ("binary", "ubinary") and numbers.size > 1:
        codes = numbers.astype(np.int16) + (128 if dtype == "binary" else 0)
        return np.where(np.unpackbits(codes.astype(np.uint8)) == 1, 1.0, -1.0)
    return numbers
