"""The columns of input files: their names, and the types of those that are copied.

Columns of Parquet have types. Those of CSV and text are texts. Those of JSON Lines are inferred
from the start of each file, with the reader that reads the records later.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from service.bulk.options import BulkError, InputFormat, OptionError
from service.bulk.readers import MAX_RECORD_BYTES, csv_header, json_objects, plain_type

# Size in bytes of the start of a file, from which columns are inferred. It goes on to the end of a
# line, because a first record may be larger, and to the first object, because records before it may
# be damaged.
SAMPLE_BYTES = 2**20
_MAX_SAMPLE_BYTES = 2**26

_DECIMAL_OR_FLOAT = (pa.types.is_decimal, pa.types.is_floating)


def read_columns(
    file: BinaryIO, format_: InputFormat, copied: Sequence[str], name: str
) -> pa.Schema | None:
    """Return the columns of an input file, from its start; see `columns_in`.

    None: the file has no content, and no records.
    """
    if format_ == "parquet":
        return pq.read_schema(file)
    start = read_start(file, format_)
    return columns_in(start, format_, copied, name) if start else None


def read_start(file: BinaryIO, format_: InputFormat) -> bytes:
    """Read and return the start of a file, from which its columns are inferred."""
    start = b""
    while part := file.read(SAMPLE_BYTES):
        part += b"" if part.endswith(b"\n") else file.readline(MAX_RECORD_BYTES)
        start += part
        if format_ != "jsonl" or len(start) >= _MAX_SAMPLE_BYTES or json_objects(part):
            break
    return start


def columns_in(start: bytes, format_: InputFormat, copied: Sequence[str], name: str) -> pa.Schema:
    """Return the columns in the start of a file, and the types of those that are copied.

    Args:
        start: Start of the file; see `read_start`.
        format_: Format of the file.
        copied: Columns that are copied to the output.
        name: Name of the file, for errors.

    Raises:
        OptionError: The file is a JSON array.
    """
    if format_ == "text":
        return pa.schema([pa.field("text", pa.string())])
    if format_ in ("csv", "tsv"):
        header = csv_header(io.BytesIO(start), "\t" if format_ == "tsv" else ",")
        return pa.schema([pa.field(column, pa.string()) for column in header])
    records = json_objects(start)
    # Lines of an array can be objects: its last element has no comma.
    if start.lstrip().startswith(b"[") and (not records or start.rstrip().endswith(b"]")):
        raise OptionError(
            f"{name} is a JSON array; write each of its elements on a line of its own, such as "
            "with: jq -c '.[]'"
        )
    columns = dict.fromkeys(key for record in records for key in record)
    return pa.schema(
        [
            pa.field(
                column,
                _inferred_type([record.get(column) for record in records])
                if column in copied
                else pa.string(),
            )
            for column in columns
        ]
    )


def _inferred_type(values: Sequence[object]) -> pa.DataType:
    """Return the type of values of JSON; null without any."""
    try:
        type_ = pa.array(values).type
    except (pa.ArrowException, OverflowError):  # values of several types, or of more than 64 bits
        return pa.string()
    # Later records may have other fields, which Arrow would drop: nested values are stored as JSON.
    return type_ if not pa.types.is_nested(type_) and holds(type_, values) else pa.string()


def holds(type_: pa.DataType, values: Sequence[object]) -> bool:
    """Return whether a type has values of JSON as they are, which Arrow does not check.

    It makes the integer 2 of 2.5, and the float 1.0 of true.
    """
    if pa.types.is_integer(type_):
        return all(value.is_integer() for value in values if isinstance(value, float))
    return not pa.types.is_floating(type_) or bool not in set(map(type, values))


def json_columns(schemas: Mapping[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Return the columns of JSON Lines files: each has those of all, which may be null in it.

    Raises:
        BulkError: No file has an object in its start.
    """
    types: dict[str, list[pa.DataType]] = {}
    for schema in schemas.values():
        for column in schema:
            types.setdefault(column.name, []).append(column.type)
    if schemas and not types:
        names = ", ".join(list(schemas)[:3])
        raise BulkError(
            f"no line at the start of {names} is a JSON object; write each object on a line of its "
            "own, such as with: jq -c ."
        )
    joint = pa.schema([pa.field(name, reduce(_json_type, own)) for name, own in types.items()])
    texts = [column.with_type(pa.string()) if _is_null(column.type) else column for column in joint]
    return dict.fromkeys(schemas, pa.schema(texts))


def _json_type(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """Return the type of a column with values of both types, as if they were in one file."""
    if a == b or _is_null(b):
        return a
    if _is_null(a):
        return b
    return pa.float64() if {a, b} == {pa.int64(), pa.float64()} else pa.string()


_is_null: Callable[[pa.DataType], bool] = pa.types.is_null


def copied_columns(
    schemas: Mapping[str, pa.Schema], texts: Sequence[str], copied: Sequence[str]
) -> pa.Schema:
    """Return the copied columns; check that all files have all columns.

    Args:
        schemas: Columns of each file, by its name.
        texts: Columns from which texts are made.
        copied: Columns that are copied to the output.

    Raises:
        OptionError: A file lacks a column, or no type has the values of a copied column in all.
    """
    fields: dict[str, pa.Field] = {}
    for file, schema in schemas.items():
        for name in dict.fromkeys((*texts, *copied)):
            if schema.names.count(name) > 1:
                raise OptionError(f"{file} has several columns {name!r}")
            if name not in schema.names:
                names = ", ".join(schema.names)
                raise OptionError(f"{file} has no column {name!r}; its columns are: {names}")
        for name in copied:
            field = schema.field(name)
            known = fields.setdefault(name, field.with_type(plain_type(field.type)))
            common = _common_type(known.type, plain_type(field.type))
            if common is None:
                raise OptionError(
                    f"the column {name!r} has the type {field.type} in {file}, but {known.type} in "
                    "the files before it"
                )
            fields[name] = known.with_type(common)
    return pa.schema([fields[name].with_nullable(True) for name in copied])


def _common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type to which values of both types are converted without loss; None: none.

    Tools write one column with several types: null without values, wider integers, finer times, and
    floats for integers beside nulls.
    """
    if a == b:
        return a
    if {a, b} == {pa.string(), pa.binary()}:
        return pa.string()
    if all(is_one(a) or is_one(b) for is_one in _DECIMAL_OR_FLOAT):
        return None
    try:
        schemas = [pa.schema([pa.field("", type_)]) for type_ in (a, b)]
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        for type_ in (a, b):
            pa.nulls(1, type_).cast(common)  # fails for integers beside decimals of few digits
    except pa.ArrowException:
        return None
    return common
