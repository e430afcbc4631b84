"""Readers of input files: blocks of consecutive records, by format.

A record that cannot be read is a record with an error, which has its line. A file that cannot be
read raises an error of Python's, pyarrow's or the csv module.
"""

import codecs
import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO, TypeVar, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from models.json_reader import check_depth, may_repeat_keys, parse_json
from service.bulk.options import InputFormat

# Maximum size of a block, in records and in bytes of text; a single record may be larger.
_BLOCK_RECORDS = 256
_BLOCK_BYTES = 2**20
# Maximum size of a record. The parsers and the text take several times as much memory.
MAX_RECORD_BYTES = 2**24
_TOO_LONG = f"the record has more than {MAX_RECORD_BYTES} bytes"
# Bytes that are read at once, of files of lines.
_CHUNK_BYTES = 2**18
# Approximate maximum size of the values that are read at once, of Parquet.
_BATCH_BYTES = 2**24

# The csv module refuses cells of more than 128 KiB by default.
csv.field_size_limit(MAX_RECORD_BYTES)

_LONG_NUMBER = re.compile(rb"\d{19}")

Record = TypeVar("Record")
# Values of a column: an Arrow array, or a sequence with None for a record with an error.
Values = Any
# The cells of a record of CSV, or why it cannot be read.
_Cells = list[str] | csv.Error


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


@dataclass
class ReadPlan:
    """The records that a job needs, by default all.

    Attributes:
        part_rows: Number of records per part.
        start: Index of the first record; those before it are skipped.
        limit: Index after the last record; None: all.
        last: Number of the last part, which may be set meanwhile; None: all.
        wants: Returns whether the job needs a part, by its number; other parts are skipped.
    """

    part_rows: int = 2**62
    start: int = 0
    limit: int | None = None
    last: int | None = None
    wants: Callable[[int], bool] = lambda _: True

    def part_of(self, first: int) -> int:
        """Return the number of the part of a record."""
        return first // self.part_rows

    def rows_from(self, first: int) -> int:
        """Return the number of records from `first` to the end of its part; 0: the job ends there.

        Before `start`, it is the number of records to skip.
        """
        part = self.part_of(first)
        if self.last is not None and part > self.last:
            return 0
        end = self.start if first < self.start else (part + 1) * self.part_rows
        return max(0, (end if self.limit is None else min(end, self.limit)) - first)

    def is_wanted(self, first: int) -> bool:
        """Return whether the job needs the part of a record."""
        return first >= self.start and self.wants(self.part_of(first))


# Reads a decompressed file, given the requested columns and the index of its first record.
Reader = Callable[[BinaryIO, Sequence[str], int, ReadPlan], Iterator[Block]]


def read_parquet(
    file: BinaryIO, columns: Sequence[str], first: int, plan: ReadPlan
) -> Iterator[Block]:
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
        for batch in _batches(parquet, group, columns, first):
            if not plan.rows_from(first):
                return
            offset = 0
            while offset < len(batch) and (limit := plan.rows_from(first)):
                rows = batch.slice(offset, min(limit, _BLOCK_RECORDS))
                # Copied: the size of a slice with lists of views would be that of the whole batch.
                while (rows := pa.concat_batches([rows])).nbytes > _BLOCK_BYTES and len(rows) > 1:
                    rows = rows.slice(0, len(rows) // 2)
                errors = {}
                if rows.nbytes > MAX_RECORD_BYTES:
                    errors = {0: _TOO_LONG}
                    rows = pa.record_batch([pa.nulls(1, c.type) for c in rows], rows.schema)
                offset, first = offset + len(rows), first + len(rows)
                begun = first - len(rows)
                values = dict(zip(rows.schema.names, rows.columns, strict=True))
                values = values if plan.is_wanted(begun) else {}
                yield Block(begun, len(rows), values, errors, (first - start) / total)


def _batches(
    parquet: pq.ParquetFile, group: int, columns: Sequence[str], first: int
) -> Iterator[pa.RecordBatch]:
    """Yield the records of a row group, few at once if they are large."""
    metadata = parquet.metadata.row_group(group)
    mean_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
    records = max(1, min(_BLOCK_RECORDS, _BATCH_BYTES // mean_bytes))
    try:
        yield from map(_plain, parquet.iter_batches(records, [group], list(columns)))
    except (OSError, pa.ArrowException) as error:
        rows = f"rows {first} to {first + metadata.num_rows - 1}"
        raise pa.ArrowInvalid(f"its row group {group}, {rows}: {error}") from error


_PLAIN_TYPES = {
    pa.string_view(): pa.string(),
    pa.large_string(): pa.string(),
    pa.binary_view(): pa.binary(),
    pa.large_binary(): pa.binary(),
}


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type of values that are stored in a dictionary, as views or with long offsets.

    Those in lists, structs and maps too: Arrow cannot take rows of nested views.
    """
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    return _PLAIN_TYPES.get(type_) or with_fields(type_, plain_type)


def with_fields(type_: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return the type with converted types of its fields; lists of views stay as they are.

    Arrow drops values of lists of views when it casts them.
    """
    fields = [
        type_.field(index).with_type(convert(type_.field(index).type))
        for index in range(type_.num_fields)
    ]
    if all(field.type == type_.field(index).type for index, field in enumerate(fields)):
        return type_
    if pa.types.is_struct(type_):
        return pa.struct(fields)
    if pa.types.is_map(type_):
        return pa.map_(*fields[0].type, keys_sorted=type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(*fields, type_.list_size)
    if pa.types.is_list(type_):
        return pa.list_(*fields)
    return pa.large_list(*fields) if pa.types.is_large_list(type_) else type_


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    # The size of a slice with a dictionary or with views would be that of the whole batch.
    schema = pa.schema([column.with_type(plain_type(column.type)) for column in batch.schema])
    return batch if schema == batch.schema else batch.cast(schema)


def _wants_any(plan: ReadPlan, first: int, end: int) -> bool:
    while first < end and (rows := plan.rows_from(first)):
        if plan.is_wanted(first):
            return True
        first += rows
    return False


def read_text(
    file: BinaryIO, columns: Sequence[str], first: int, plan: ReadPlan
) -> Iterator[Block]:
    """Yield each line as a record with one column."""
    lines = enumerate(_lines(file, _split_at_line_feeds), 1)
    for start, block in _blocks(lines, len, first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(block))
            continue
        values, errors = _parse(block, lambda line: _check(line).removesuffix(b"\r").decode())
        yield Block(start, len(block), dict.fromkeys(columns, values), errors)


def read_jsonl(
    file: BinaryIO, columns: Sequence[str], first: int, plan: ReadPlan
) -> Iterator[Block]:
    """Yield the object of each line as a record; blank lines are skipped."""
    for start, block in _blocks(_json_lines(file), len, first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(block))
            continue
        records, errors = _parse(block, _json_object)
        values = {
            name: [None if record is None else record.get(name) for record in records]
            for name in columns
        }
        yield Block(start, len(block), values, errors)


def json_objects(content: bytes) -> list[dict[str, object]]:
    """Return the records in lines of JSON, as `read_jsonl` reads them; those with errors lack."""
    lines = list(_json_lines(io.BytesIO(content)))
    return [record for record in _parse(lines, _json_object)[0] if record is not None]


def read_csv(
    file: BinaryIO, columns: Sequence[str], first: int, plan: ReadPlan, delimiter: str = ","
) -> Iterator[Block]:
    """Yield the records of a CSV file, whose first line has the names of the columns.

    A record that is badly quoted is an error of its first line. Its further lines are read as
    records of their own: an unclosed quote would otherwise take all that follow with it.
    """
    records = _csv_records(file, delimiter)
    header = _header(records)
    for start, block in _blocks(records, _cells_size, first, plan):
        if not plan.is_wanted(start):
            yield Block(start, len(block))
            continue
        rows, errors = _parse(block, lambda cells: _checked_cells(cells, len(header)))
        values = {
            name: [None if cells is None else cells[header.index(name)] for cells in rows]
            for name in columns
        }
        yield Block(start, len(block), values, errors)


def read_tsv(file: BinaryIO, columns: Sequence[str], first: int, plan: ReadPlan) -> Iterator[Block]:
    """Yield the records of a file with tabs between the cells, and without quoting."""
    return read_csv(file, columns, first, plan, "\t")


def csv_header(file: BinaryIO, delimiter: str = ",") -> list[str]:
    """Return the names of the columns of a CSV file."""
    return _header(_csv_records(file, delimiter))


READERS: Mapping[InputFormat, Reader] = {
    "parquet": read_parquet,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": read_tsv,
    "text": read_text,
}


def _blocks(
    records: Iterator[tuple[int, Record]], size: Callable[[Record], int], first: int, plan: ReadPlan
) -> Iterator[tuple[int, list[tuple[int, Record]]]]:
    """Yield consecutive records with their lines, and the index of the first of them."""
    while limit := min(plan.rows_from(first), _BLOCK_RECORDS):
        block: list[tuple[int, Record]] = []
        total = 0
        for record in records:
            block.append(record)
            total += size(record[1])
            if len(block) == limit or total >= _BLOCK_BYTES:
                break
        if not block:
            return
        yield first, block
        first += len(block)


def _lines(file: BinaryIO, split: Callable[[bytes], list[bytes]]) -> Iterator[bytes]:
    """Yield each line; of one that exceeds `MAX_RECORD_BYTES`, at least one byte more than that.

    Args:
        file: The file.
        split: Returns the lines in some bytes, and last the start of the next line.
    """
    lines = _unmarked_lines(file, split)
    yield from (line.removeprefix(codecs.BOM_UTF8) for line in islice(lines, 1))
    yield from lines


def _unmarked_lines(file: BinaryIO, split: Callable[[bytes], list[bytes]]) -> Iterator[bytes]:
    read = cast(io.BufferedReader, file).read1  # does not wait for a whole chunk of a pipe
    begun: list[bytes] = []  # the start of the line
    size = 0
    ahead = b""
    while content := ahead + read(_CHUNK_BYTES):
        ahead = read(1) if content.endswith(b"\r") else b""
        if ahead == b"\n":  # of the same line end
            content, ahead = content + ahead, b""
        *lines, rest = split(content)
        for line in lines:
            yield b"".join((*begun, line)) if begun else line
            begun.clear()
            size = 0
        if rest and size <= MAX_RECORD_BYTES:
            begun.append(rest)
            size += len(rest)
    if begun:
        yield b"".join(begun)


def _split_at_line_feeds(content: bytes) -> list[bytes]:
    return content.split(b"\n")


def _split_csv(content: bytes) -> list[bytes]:
    # A carriage return alone ends a line too, as in pyarrow, pandas and the csv module.
    lines = content.splitlines(keepends=True)
    return [*lines, b""] if content.endswith((b"\n", b"\r")) else lines


def _parse(
    records: Sequence[tuple[int, Record]], parse: Callable[[Record], Any]
) -> tuple[list[Any], dict[int, str]]:
    """Return each parsed record, None if it is invalid, and the errors of invalid records."""
    parsed: list[Any] = []
    errors: dict[int, str] = {}
    for index, (line, record) in enumerate(records):
        try:
            parsed.append(parse(record))
        except UnicodeError:
            errors[index] = f"line {line}: the record is not valid UTF-8"
        except ValueError as error:
            errors[index] = f"line {line}: {error}"
        if index in errors:
            parsed.append(None)
    return parsed, errors


def _check(line: bytes) -> bytes:
    if len(line) > MAX_RECORD_BYTES:
        raise ValueError(_TOO_LONG)
    return line


def _json_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(_lines(file, _split_at_line_feeds), 1):
        if line and not line.isspace():
            yield number, line


def _json_object(line: bytes) -> dict[str, object]:
    check_depth(_check(line))
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the record is not JSON: {error.msg}, at character {error.pos}") from None
    if not isinstance(record, dict):
        raise ValueError("the record is not a JSON object")
    # orjson keeps the last of duplicate keys, and reads integers beyond 64 bits as floats.
    if may_repeat_keys(line, len(record)) or _LONG_NUMBER.search(line):
        return cast(dict[str, object], parse_json(line, has_unique_keys=True))
    return record


class _CsvLines:
    """The lines of a file for the csv module, which keeps those of the current record.

    Attributes:
        number: Number of the current record's first line, from 1.
    """

    def __init__(self, lines: Iterator[bytes]) -> None:
        self.number = 1
        self._lines = lines
        self._given_back: deque[bytes] = deque()
        self._record: list[bytes] = []
        self._size = 0

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        line = self._given_back.popleft() if self._given_back else next(self._lines)
        self._record.append(line)
        self._size += len(line)
        if self._size > MAX_RECORD_BYTES:
            raise csv.Error(_TOO_LONG)
        # Bytes that are not UTF-8 become surrogates, which `_checked_cells` reports.
        return line.decode("utf-8", "surrogateescape")

    def begin(self) -> None:
        """Begin a record."""
        self.number += len(self._record)
        self._record.clear()
        self._size = 0

    def give_back(self) -> None:
        """Give all lines of the record but the first one again."""
        self._given_back.extendleft(reversed(self._record[1:]))
        del self._record[1:]


def _csv_records(file: BinaryIO, delimiter: str) -> Iterator[tuple[int, _Cells]]:
    """Yield the cells of each record, or why it cannot be read, and its first line."""
    lines = _CsvLines(_lines(file, _split_csv))
    # Strict, because an unclosed quote would otherwise join all following records into one.
    if delimiter == "\t":
        records = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    else:
        records = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin()
        cells: _Cells
        try:
            cells = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            lines.give_back()
            cells = error
        if cells:  # a blank line has none
            yield lines.number, cells


def _header(records: Iterator[tuple[int, _Cells]]) -> list[str]:
    number, cells = next(records, (1, []))
    if not isinstance(cells, csv.Error):
        try:
            "".join(cells).encode()  # fails on surrogates
        except UnicodeEncodeError:
            cells = csv.Error("it is not valid UTF-8")
        else:
            return cells
    raise csv.Error(f"line {number}, which has the names of the columns: {cells}")


def _cells_size(cells: _Cells) -> int:
    return 0 if isinstance(cells, csv.Error) else sum(map(len, cells))


def _checked_cells(cells: _Cells, expected: int) -> Sequence[str]:
    if isinstance(cells, csv.Error):
        raise ValueError(f"the record cannot be read: {cells}")
    if len(cells) != expected:
        raise ValueError(f"the record has {len(cells)} cells, and the header {expected}")
    for cell in cells:
        cell.encode()  # fails on surrogates
    return cells
