"""Readers of input files: blocks of consecutive records, by format.

A record that cannot be read is a record with an error. A file that cannot be read raises an error
of Python's, pyarrow's or the csv module.
"""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO, Protocol, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from service.bulk.options import BulkError, InputFormat

# Maximum size of a block, in records and in bytes of text; a single record may be larger.
_BLOCK_RECORDS = 256
_BLOCK_BYTES = 2**20
# A longer line is an error: the file probably has no lines.
MAX_LINE_BYTES = 2**28

# The csv module refuses cells of more than 128 KiB by default.
csv.field_size_limit(MAX_LINE_BYTES)

_LONG_NUMBER = re.compile(rb"\d{19}")

Record = TypeVar("Record")
# Values of a column: an Arrow array, or a sequence with None for a record with an error.
Values = Any


@dataclass(frozen=True)
class Block:
    """Consecutive records of one part.

    Attributes:
        first: Index of the first record in the input.
        rows: Number of records.
        columns: Values of the requested columns, by name; empty if the part is not wanted.
        errors: Error of each record that cannot be read, by its index in the block.
        share: Share of the file that has been read after the block, from 0 to 1.
    """

    first: int
    rows: int
    columns: Mapping[str, Values] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    share: float = 0.0


class Plan(Protocol):
    """The records that a job needs."""

    def rows_from(self, first: int) -> int:
        """Return the number of records of the part from `first` on; 0: the job ends there."""

    def is_wanted(self, first: int) -> bool:
        """Return whether the job needs the part of a record."""


# Reads a decompressed file, given the requested columns and the index of its first record.
Reader = Callable[[BinaryIO, Sequence[str], int, Plan], Iterator[Block]]


def read_parquet(file: BinaryIO, columns: Sequence[str], first: int, plan: Plan) -> Iterator[Block]:
    """Yield the records of a Parquet file; row groups of unwanted parts are skipped."""
    parquet = pq.ParquetFile(file)
    start, total = first, max(1, parquet.metadata.num_rows)
    for group in range(parquet.num_row_groups):
        end = first + parquet.metadata.row_group(group).num_rows
        if not _wants_any(plan, first, end):
            while first < end and (rows := min(plan.rows_from(first), end - first)):
                first += rows
                yield Block(first - rows, rows, share=(first - start) / total)
            continue
        for batch in parquet.iter_batches(_BLOCK_RECORDS, [group], list(columns)):
            if not plan.rows_from(first):
                return
            batch, offset = _plain(batch), 0
            while offset < len(batch) and (limit := plan.rows_from(first)):
                rows = batch.slice(offset, min(limit, _BLOCK_RECORDS))
                while rows.nbytes > _BLOCK_BYTES and len(rows) > 1:
                    rows = rows.slice(0, len(rows) // 2)
                offset, first = offset + len(rows), first + len(rows)
                begun = first - len(rows)
                values = dict(zip(rows.schema.names, rows.columns, strict=True))
                values = values if plan.is_wanted(begun) else {}
                yield Block(begun, len(rows), values, share=(first - start) / total)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type of values that are stored in a dictionary or as views."""
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(type_, type_)


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    # The size of a slice with a dictionary or with views would be that of the whole batch.
    schema = pa.schema([column.with_type(plain_type(column.type)) for column in batch.schema])
    return batch if schema == batch.schema else batch.cast(schema)


def _wants_any(plan: Plan, first: int, end: int) -> bool:
    while first < end and (rows := plan.rows_from(first)):
        if plan.is_wanted(first):
            return True
        first += rows
    return False


def read_text(file: BinaryIO, columns: Sequence[str], first: int, plan: Plan) -> Iterator[Block]:
    """Yield each line as a record with one column."""
    for start, lines in _blocks(_lines(file), len, first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(lines))
            continue
        values, errors = _parsed(lines, lambda line: line.removesuffix(b"\r").decode())
        yield Block(start, len(lines), dict.fromkeys(columns, values), errors)


def read_jsonl(file: BinaryIO, columns: Sequence[str], first: int, plan: Plan) -> Iterator[Block]:
    """Yield the object of each line as a record; blank lines are skipped."""
    lines = (line for line in _lines(file) if not line.isspace() and line)
    for start, block in _blocks(lines, len, first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(block))
            continue
        records, errors = _parsed(block, _json_object)
        values = {
            name: [None if record is None else record.get(name) for record in records]
            for name in columns
        }
        yield Block(start, len(block), values, errors)


def read_csv(
    file: BinaryIO, columns: Sequence[str], first: int, plan: Plan, delimiter: str = ","
) -> Iterator[Block]:
    """Yield the records of a CSV file, whose first line has the names of the columns."""
    header, records = _csv_records(file, delimiter)
    for start, block in _blocks(records, lambda cells: sum(map(len, cells)), first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(block))
            continue
        rows, errors = _parsed(block, lambda cells: _checked_cells(cells, len(header)))
        values = {
            name: [None if cells is None else cells[header.index(name)] for cells in rows]
            for name in columns
        }
        yield Block(start, len(block), values, errors)


def read_tsv(file: BinaryIO, columns: Sequence[str], first: int, plan: Plan) -> Iterator[Block]:
    """Yield the records of a file with tabs between the cells, and without quoting."""
    return read_csv(file, columns, first, plan, "\t")


def csv_header(file: BinaryIO, delimiter: str = ",") -> list[str]:
    """Return the names of the columns of a CSV file."""
    return _csv_records(file, delimiter)[0]


READERS: Mapping[InputFormat, Reader] = {
    "parquet": read_parquet,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": read_tsv,
    "text": read_text,
}


def _blocks(
    records: Iterator[Record], size: Callable[[Record], int], first: int, plan: Plan
) -> Iterator[tuple[int, list[Record]]]:
    """Yield consecutive records, and the index of the first of them."""
    while limit := min(plan.rows_from(first), _BLOCK_RECORDS):
        block: list[Record] = []
        total = 0
        for record in records:
            block.append(record)
            total += size(record)
            if len(block) == limit or total >= _BLOCK_BYTES:
                break
        if not block:
            return
        yield first, block
        first += len(block)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield each line without its end."""
    line = _strip_bom(file.readline(MAX_LINE_BYTES))
    while line:
        if len(line) == MAX_LINE_BYTES:
            raise BulkError(f"the input has a line of more than {MAX_LINE_BYTES} bytes")
        yield line.removesuffix(b"\n")
        line = file.readline(MAX_LINE_BYTES)


def _strip_bom(line: bytes) -> bytes:
    return line.removeprefix(codecs.BOM_UTF8)


def _parsed(
    records: Sequence[Record], parse: Callable[[Record], Any]
) -> tuple[list[Any], dict[int, str]]:
    """Return each parsed record, None if it is invalid, and the errors of invalid records."""
    parsed: list[Any] = []
    errors: dict[int, str] = {}
    for index, record in enumerate(records):
        try:
            parsed.append(parse(record))
        except UnicodeError:
            errors[index] = "the record is not valid UTF-8"
        except ValueError as error:
            errors[index] = str(error)
        if index in errors:
            parsed.append(None)
    return parsed, errors


def _json_object(line: bytes) -> dict[str, object]:
    try:
        # orjson reads integers beyond 64 bits as floats.
        record = json.loads(line) if _LONG_NUMBER.search(line) else orjson.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON: {error.msg}, at character {error.pos}") from None
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    return record


def _csv_records(file: BinaryIO, delimiter: str) -> tuple[list[str], Iterator[list[str]]]:
    raw = chain([_strip_bom(file.readline())], file)
    # A carriage return alone ends a line too, as in pyarrow, pandas and the csv module. Bytes that
    # are not UTF-8 become surrogates, which `_checked_cells` reports.
    lines = (
        line.decode("utf-8", "surrogateescape")
        for lines in raw
        for line in lines.splitlines(keepends=True)
    )
    # Strict, because an unclosed quote would otherwise join all following records into one.
    if delimiter == "\t":
        records = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    else:
        records = csv.reader(lines, delimiter=delimiter, strict=True)
    return next(records, []), filter(None, records)  # without blank lines


def _checked_cells(cells: Sequence[str], expected: int) -> Sequence[str]:
    if len(cells) != expected:
        raise ValueError(f"the record has {len(cells)} cells, and the header {expected}")
    for cell in cells:
        cell.encode()  # fails on surrogates
    return cells
