"""The input of a job: its files, their fingerprints, and the types of their columns."""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from service.bulk.options import BulkError, BulkOptions, InputFormat, Kind, OptionError
from service.bulk.readers import MAX_LINE_BYTES, READERS, Block, Plan, csv_header, plain_type

STDIN = "-"
_STDIN_NAME = "standard input"
# Size in bytes of the start of a file, from which the types of columns are inferred. It goes on to
# the end of a line, because a first record may be larger.
_SAMPLE_BYTES = 2**20

_SUFFIXES: Mapping[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Attributes:
        path: Path of the file in its file system.
        size: Size in bytes.
        sha256: SHA-256 of the content, in hexadecimal.
        modified: Time of the last modification when the file was hashed, in ns.
    """

    path: str
    size: int
    sha256: str
    modified: int

    def check_unchanged(self, size: int, modified: int) -> None:
        """Compare the size in bytes and the time of modification in ns with those that were hashed.

        Raises:
            BulkError: They differ.
        """
        if (size, modified) != (self.size, self.modified):
            raise BulkError(f"{self.path} was changed while it was read; start again")


@dataclass(frozen=True)
class Source:
    """The input of a job.

    Attributes:
        format: Format of all files.
        files: The files in their order; empty for standard input.
        text_columns: Columns from which texts are made.
        copied: Names and types of the columns that are copied to the output.
        stream: Standard input, if it is the input.
    """

    format: InputFormat
    files: tuple[InputFile, ...]
    text_columns: tuple[str, ...]
    copied: pa.Schema
    stream: BinaryIO | None = None

    @property
    def columns(self) -> Sequence[str]:
        """Columns that are read."""
        return tuple(dict.fromkeys((*self.text_columns, *self.copied.names)))

    def read(self, plan: Plan) -> Iterator[Block]:
        """Yield blocks of records; `Block.share` is the share of the whole input.

        Raises:
            BulkError: A file cannot be read, or was changed.
        """
        read = READERS[self.format]
        if self.stream is not None:
            with reading(_STDIN_NAME):
                yield from read(self.stream, self.columns, 0, plan)
            return
        first, done, total = 0, 0, max(1, sum(file.size for file in self.files))
        for file in self.files:
            with reading(file.path), Path(file.path).open("rb") as raw:
                for block in read(_decompressed(raw, file.path), self.columns, first, plan):
                    first = block.first + block.rows
                    share = block.share or min(1.0, raw.tell() / max(1, file.size))
                    yield replace(block, share=(done + share * file.size) / total)
                status = Path(file.path).stat()
                file.check_unchanged(status.st_size, status.st_mtime_ns)
            done += file.size


def open_source(options: BulkOptions, kind: Kind) -> Source:
    """Find and hash the input files, and check their columns.

    Raises:
        OptionError: There is no such file or column, or its format is unknown.
        BulkError: A file cannot be read.
    """
    texts = tuple(options.text_columns(kind))
    if STDIN in options.inputs:
        return _open_stdin(options, texts)
    paths = _find(options)
    format_ = _format_of(paths, options.input_format)
    _check_lines(format_, texts)
    schemas = {str(path): _schema(path, format_, texts) for path in paths if path.stat().st_size}
    if format_ == "jsonl":
        schemas = _with_missing(schemas)
    copied = copied_columns(schemas, texts, options.copied_columns)
    return Source(format_, tuple(map(_fingerprint, paths)), texts, copied)


def _open_stdin(options: BulkOptions, texts: tuple[str, ...]) -> Source:
    if options.inputs != (STDIN,):
        raise OptionError("- (standard input) must be the only input")
    format_ = options.input_format or "text"
    if format_ == "parquet":
        raise OptionError("Parquet cannot be read from standard input; write it to a file")
    _check_lines(format_, texts)
    stdin = cast(io.BufferedReader, sys.stdin.buffer)
    with reading(_STDIN_NAME):
        sample = _whole_lines(stdin.read(_SAMPLE_BYTES), stdin)
        schema = _inferred(sample, format_, texts, _STDIN_NAME)
    copied = copied_columns(_with_missing({_STDIN_NAME: schema}), texts, options.copied_columns)
    stream = io.BufferedReader(_Replayed(sample, stdin), _SAMPLE_BYTES)
    return Source(format_, (), texts, copied, cast(BinaryIO, stream))


class _Replayed(io.RawIOBase):
    """The start of a stream, which was read before, and then the rest of the stream."""

    def __init__(self, start: bytes, rest: io.BufferedIOBase) -> None:
        self._start = io.BytesIO(start)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._start.readinto(buffer) or self._rest.readinto1(buffer)


def _check_lines(format_: InputFormat, texts: Sequence[str]) -> None:
    if format_ == "text" and len(texts) > 1:
        raise OptionError("text lines have one column; scores and templates need another format")


def _find(options: BulkOptions) -> list[Path]:
    paths: list[Path] = []
    for name in options.inputs:
        path = Path(name)
        if path.is_dir():
            matches = [file for file in sorted(path.rglob("*")) if _is_input(file, path, options)]
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
            matches = [match for match in matches if not match.is_dir()]
        if not matches:
            raise OptionError(f"there is no input file at {name}")
        paths += matches
    for path in paths:
        if not path.is_file():
            raise OptionError(f"{path} is not a regular file; pipe it to standard input, as -")
    return paths


def _is_input(file: Path, folder: Path, options: BulkOptions) -> bool:
    hidden = any(part[0] in "._" for part in file.relative_to(folder).parts)
    is_output = file.resolve().is_relative_to(options.output.resolve())
    is_known = options.input_format is not None or _suffix_format(file) is not None
    return file.is_file() and is_known and not hidden and not is_output


def _suffix_format(path: Path) -> InputFormat | None:
    name = path.name.lower()
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    return _SUFFIXES.get(Path(name).suffix)


def _format_of(paths: Sequence[Path], format_: InputFormat | None) -> InputFormat:
    formats = {format_ or _suffix_format(path): path for path in paths}
    if None in formats:
        raise OptionError(
            f"the format of {formats[None]} is unknown; known suffixes are "
            f"{', '.join(_SUFFIXES)}, also with {' or '.join(_COMPRESSIONS)}; set --input-format"
        )
    if len(formats) > 1:
        raise OptionError(f"the input files have several formats: {', '.join(map(str, formats))}")
    return cast(InputFormat, next(iter(formats)))


def _fingerprint(path: Path) -> InputFile:
    with reading(str(path)), path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return InputFile(str(path), status.st_size, digest, status.st_mtime_ns)


def copied_columns(
    schemas: Mapping[str, pa.Schema], texts: Sequence[str], copied: Sequence[str]
) -> pa.Schema:
    """Return the copied columns; check that all files have all columns.

    Args:
        schemas: Columns of each file, by its name.
        texts: Columns from which texts are made.
        copied: Columns that are copied to the output.

    Raises:
        OptionError: A file lacks a column, or a copied column has another type than in the first.
    """
    if not schemas:
        raise BulkError("the input has no records")
    first = next(iter(schemas.values()))
    for file, schema in schemas.items():
        for name in (*texts, *copied):
            if schema.names.count(name) > 1:
                raise OptionError(f"{file} has several columns {name!r}")
            if name not in schema.names:
                names = ", ".join(schema.names)
                raise OptionError(f"{file} has no column {name!r}; its columns are: {names}")
            types = schema.field(name).type, first.field(name).type
            if name in copied and types[0] != types[1]:
                raise OptionError(
                    f"the column {name!r} has the type {types[0]} in {file}, but {types[1]} in "
                    "the first file"
                )
    return pa.schema([first.field(name).with_nullable(True) for name in copied])


def _schema(path: Path, format_: InputFormat, texts: Sequence[str]) -> pa.Schema:
    """Return the columns of a file and their types."""
    with reading(str(path)), path.open("rb") as raw:
        if format_ == "parquet":
            columns: pa.Schema = pq.read_schema(raw)
            return pa.schema([c.with_type(plain_type(c.type)) for c in columns])
        file = _decompressed(raw, path.name)
        sample = _whole_lines(file.read(_SAMPLE_BYTES), file)
    return _inferred(sample, format_, texts, str(path))


def _whole_lines(start: bytes, file: BinaryIO | io.BufferedIOBase) -> bytes:
    """Return the start of a file, and what it lacks to the end of its last line."""
    return start if start.endswith(b"\n") else start + file.readline(MAX_LINE_BYTES)


def _inferred(sample: bytes, format_: InputFormat, texts: Sequence[str], name: str) -> pa.Schema:
    """Return the columns in the start of a file, and their types.

    A column without values has the type null.
    """
    if format_ == "text":
        return pa.schema([pa.field(column, pa.string()) for column in texts])
    if format_ in ("csv", "tsv"):
        header = csv_header(io.BytesIO(sample), "\t" if format_ == "tsv" else ",")
        return pa.schema([pa.field(column, pa.string()) for column in header])
    records = []
    for line in sample.removeprefix(codecs.BOM_UTF8).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # an error of this record, when it is read
        if isinstance(record, dict):
            records.append(record)
    columns = dict.fromkeys(key for record in records for key in record)
    if not columns:
        raise BulkError(f"{name} has no JSON object in its first {len(sample)} bytes")
    return pa.schema([_inferred_field(column, records) for column in columns])


def _inferred_field(name: str, records: Sequence[Mapping[str, object]]) -> pa.Field:
    try:
        type_ = pa.array([record.get(name) for record in records]).type
    except (pa.ArrowException, OverflowError):  # values of several types, or of more than 64 bits
        type_ = pa.string()
    # Later records may have other fields, which Arrow would drop: nested values are stored as JSON.
    return pa.field(name, pa.string() if pa.types.is_nested(type_) else type_)


def _with_missing(schemas: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Return the columns of JSON Lines files; a column without values has the type of the others.

    A column that only some files have is null in the others.
    """
    types: dict[str, pa.DataType] = {}
    for schema in schemas.values():
        for column in schema:
            if types.get(column.name, pa.null()) == pa.null():
                types[column.name] = column.type
    fields = [
        pa.field(name, pa.string() if type_ == pa.null() else type_)
        for name, type_ in types.items()
    ]
    return {
        file: pa.schema(
            [
                field
                if field.name not in schema.names or schema.field(field.name).type == pa.null()
                else schema.field(field.name)
                for field in fields
            ]
        )
        for file, schema in schemas.items()
    }


def _decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    name = name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(cast(io.RawIOBase, stream))
    return raw


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn the errors of reading a file into a `BulkError`."""
    try:
        yield
    except (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BulkError(f"{name} cannot be read: {reason}") from error
