"""The files of a part, by output format: written under temporary names, synced, then renamed."""

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from models.artifact import sha256, sync
from service.bulk.options import OutputFormat
from service.bulk.readers import with_fields

METADATA = b"vitrine"
# Size in bytes above which rows are written before the part is complete. Writing takes five times
# as much: copies, the levels of lists, and encoded pages.
_BUFFER_BYTES = 4 * 2**20
_VECTORS = "embedding"


def native_file(path: Path, mode: Literal["rb", "wb"] = "rb") -> pa.OSFile:
    """Open a file for pyarrow.

    It would take the name `run:2` for a URI, and `~` for the home directory, and fail at names that
    are not UTF-8.
    """
    return pa.OSFile(os.fsencode(path), mode)


class Writer(Protocol):
    """Writes rows to the files of a part."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Write rows."""

    def close(self) -> None:
        """Write what is left, and close the files."""


class _ParquetWriter:
    """Writes each batch of rows as a row group of a Parquet file."""

    def __init__(self, files: Sequence[Path], schema: pa.Schema) -> None:
        self._file = native_file(files[0], "wb")
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            compression_level=1,
            # Equal numbers are rare in vectors, and nobody filters by them.
            use_dictionary=[column.name for column in schema if column.type == pa.string()],
            write_statistics=[column.name for column in schema if column.name != _VECTORS],
        )

    def add(self, rows: pa.RecordBatch) -> None:
        self._writer.write_batch(rows, row_group_size=len(rows))

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class _JsonWriter:
    """Writes each row as a line of JSON."""

    def __init__(self, files: Sequence[Path], _schema: pa.Schema) -> None:
        self._file = files[0].open("wb")

    def add(self, rows: pa.RecordBatch) -> None:
        columns = {name: _values(name, rows.column(name)) for name in rows.schema.names}
        for values in zip(*columns.values(), strict=True):
            self._file.write(json_line(dict(zip(columns, values, strict=True))))

    def close(self) -> None:
        self._file.close()


# orjson rounds offsets of time zones to minutes, and those of before 1937 have seconds.
_JSON_OPTIONS = (
    orjson.OPT_SERIALIZE_NUMPY
    | orjson.OPT_APPEND_NEWLINE
    | orjson.OPT_NON_STR_KEYS
    | orjson.OPT_PASSTHROUGH_DATETIME
)


def json_line(row: Mapping[str, object]) -> bytes:
    """Return a row as a line of JSON; bytes are in base64.

    Raises:
        TypeError: JSON cannot be written of a value.
    """
    return orjson.dumps(row, default=_as_text, option=_JSON_OPTIONS)


class _NumpyWriter:
    """Writes vectors as one array, and the other columns as lines of JSON.

    A row with an error is NaN in an array of floats, and 0 in one of integers.
    """

    def __init__(self, files: Sequence[Path], schema: pa.Schema) -> None:
        array, others = files
        type_ = schema.field(_VECTORS).type
        self._width = type_.list_size
        self._dtype = np.dtype(type_.value_type.to_pandas_dtype())
        self._rows = 0
        self._json = _JsonWriter([others], schema)
        self._file = array.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        # Of the same length for each number of rows: NumPy leaves room for it.
        _write_header(self._file, self._dtype, (self._rows, self._width))

    def add(self, rows: pa.RecordBatch) -> None:
        vectors = rows.column(_VECTORS)
        values = vectors.flatten().to_numpy().reshape(-1, self._width)
        is_float = np.issubdtype(self._dtype, np.floating)
        filled = np.full((len(rows), self._width), np.nan if is_float else 0, self._dtype)
        filled[vectors.is_valid().to_numpy(zero_copy_only=False)] = values
        self._file.write(filled.data)
        self._rows += len(rows)
        self._json.add(rows.drop_columns([_VECTORS]))

    def close(self) -> None:
        self._json.close()
        self._file.seek(0)
        self._write_header()
        self._file.close()


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, int]) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _values(name: str, column: pa.Array) -> list[Any]:
    return _vectors(column) if name == _VECTORS and _has_vectors(column) else to_python(column)


def to_python(values: pa.Array) -> list[Any]:
    """Return the values of a column; times with nanoseconds, which Python lacks, are texts.

    Raises:
        ArrowInvalid: A duration has nanoseconds.
    """
    type_ = _python_type(values.type)
    if type_ == values.type:
        return list(values.to_pylist())
    texts = values.cast(type_)
    if pa.types.is_string(type_):
        texts = pc.replace_substring_regex(texts, r"(\.0{9}|000)$", "")  # as Python writes them
    return list(texts.to_pylist())


# Durations would be those of pandas where it is installed, which have other texts.
_PYTHON_TYPES = {pa.time64("ns"): pa.string(), pa.duration("ns"): pa.duration("us")}


def _python_type(type_: pa.DataType) -> pa.DataType:
    return _PYTHON_TYPES.get(type_) or with_fields(type_, _python_type)


def _has_vectors(column: pa.Array) -> bool:
    """Return whether a column has vectors or lists of them: a copied one can lack them."""
    vectors = column.flatten() if pa.types.is_list(column.type) else column
    if not pa.types.is_fixed_size_list(vectors.type):
        return False
    values = vectors.flatten()
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    return is_number and not values.null_count


def _vectors(column: pa.Array) -> list[Any]:
    """Return vectors, or lists of vectors, as arrays that orjson writes."""
    if not pa.types.is_fixed_size_list(column.type):
        return [None if part.values is None else _vectors(part.values) for part in column]
    values = column.flatten().to_numpy()
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    rows = iter(values.reshape(-1, column.type.list_size))
    return [next(rows) if is_valid else None for is_valid in column.is_valid().to_pylist()]


def _as_text(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _join_parquet(parts: Sequence[Sequence[Path]], files: Sequence[Path]) -> None:
    schema = pq.read_schema(native_file(parts[0][0]))
    writer = _ParquetWriter(files, schema)
    for (part,) in parts:
        file = pq.ParquetFile(native_file(part))
        for group in range(file.num_row_groups):
            for rows in file.read_row_group(group).to_batches():
                writer.add(rows)
    writer.close()


def _join_lines(parts: Sequence[Sequence[Path]], files: Sequence[Path]) -> None:
    with files[0].open("wb") as joined:
        for (part,) in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)


def _join_numpy(parts: Sequence[Sequence[Path]], files: Sequence[Path]) -> None:
    def opened() -> Iterator[NDArray[Any]]:
        """Yield the array of each part; together they could be more files than may be open."""
        return (np.load(array, mmap_mode="r") for array, _ in parts)

    first = next(opened())
    with files[0].open("wb") as joined:  # through a memory map, a full disk would be SIGBUS
        _write_header(joined, first.dtype, (sum(map(len, opened())), first.shape[1]))
        for array in opened():
            joined.write(array.data)
    _join_lines([[others] for _, others in parts], files[1:])


@dataclass(frozen=True)
class Format:
    """An output format.

    Attributes:
        suffixes: Suffix of each file of a part.
        writer: Opens the files of a part for its rows.
        join: Joins the files of parts.
    """

    suffixes: Sequence[str]
    writer: Callable[[Sequence[Path], pa.Schema], Writer]
    join: Callable[[Sequence[Sequence[Path]], Sequence[Path]], None]


FORMATS: Mapping[OutputFormat, Format] = {
    "parquet": Format((".parquet",), _ParquetWriter, _join_parquet),
    "jsonl": Format((".jsonl",), _JsonWriter, _join_lines),
    "npy": Format((".npy", ".jsonl"), _NumpyWriter, _join_numpy),
}


def with_metadata(schema: pa.Schema, metadata: Mapping[str, object]) -> pa.Schema:
    """Return the schema with the description of the job, as JSON under the key "vitrine"."""
    return schema.with_metadata({METADATA: json.dumps(metadata)})


class PartFiles:
    """The files of a part, which get their names when they are complete.

    Args:
        folder: Output folder.
        stem: Name of the files without suffix.
        format_: Output format.
        schema: Columns and metadata.
    """

    def __init__(self, folder: Path, stem: str, format_: OutputFormat, schema: pa.Schema) -> None:
        self._files = _Unfinished(folder, stem, FORMATS[format_])
        self._writer = FORMATS[format_].writer(self._files.temporary, schema)
        self._rows: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows."""
        self._rows.append(rows)
        if sum(batch.nbytes for batch in self._rows) > _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.add(pa.concat_batches(self._rows))
            self._rows.clear()

    def finish(self) -> dict[str, str]:
        """Write the rest, rename the files, and return the SHA-256 of each."""
        self._flush()
        self._writer.close()
        return self._files.publish()

    def discard(self) -> None:
        """Remove the files."""
        self._rows.clear()
        # Such as a full disk, or a file that is closed.
        with suppress(OSError, ValueError, pa.ArrowException):
            self._writer.close()
        self._files.remove()


def join(
    folder: Path, stem: str, format_: OutputFormat, parts: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Join the files of parts, and return the SHA-256 of each joined file, by name.

    Args:
        folder: Output folder.
        stem: Name of the joined files without suffix.
        format_: Output format.
        parts: Names of the files of each part.
    """
    files = _Unfinished(folder, stem, FORMATS[format_])
    try:
        FORMATS[format_].join(
            [[folder / name for name in names] for names in parts], files.temporary
        )
        return files.publish()
    finally:
        files.remove()


class _Unfinished:
    """Files with temporary names.

    Attributes:
        temporary: Path of each file.
    """

    def __init__(self, folder: Path, stem: str, format_: Format) -> None:
        self._folder = folder
        self._names = [stem + suffix for suffix in format_.suffixes]
        self.temporary = [folder / f".{name}.partial" for name in self._names]
        self.remove()  # a killed job's, or a link, whose file would be written

    def publish(self) -> dict[str, str]:
        """Sync and rename the files, and return the SHA-256 of each, by name."""
        hashes = {}
        for path, name in zip(self.temporary, self._names, strict=True):
            sync(path)
            hashes[name] = sha256(path)
            path.rename(self._folder / name)
        sync(self._folder)
        return hashes

    def remove(self) -> None:
        """Remove files that still have temporary names."""
        for path in self.temporary:
            path.unlink(missing_ok=True)
