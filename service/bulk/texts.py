"""The texts of records: a column or a template, and pairs of query and text."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from service.bulk.columns import holds
from service.bulk.options import BulkOptions, Kind
from service.bulk.parts import json_line, to_python
from service.bulk.readers import Block, Values

# A text, or a query and a text.
Item = str | tuple[str, str]

# Types that every Python and JSON library can hold all values of.
_SIMPLE_TYPES = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_null,
)


def records_of(
    block: Block, options: BulkOptions, kind: Kind, copied: pa.Schema
) -> tuple[list[Item | None], list[pa.Array], dict[int, str]]:
    """Return the item and the copied columns of each record, and the errors by index."""
    items, errors = items_of(block, options, kind)
    columns = []
    for column in copied:
        array = copied_array(column.name, column.type, block.columns[column.name], errors)
        if options.format != "parquet":
            array = _written_as_json(column.name, array, errors)
        columns.append(array)
    return items, columns, errors


def items_of(
    block: Block, options: BulkOptions, kind: Kind
) -> tuple[list[Item | None], dict[int, str]]:
    """Return the item of each record, None with an error, and the errors by index in the block."""
    errors = dict(block.errors)
    if options.template is None:
        texts = column_texts(options.text_column, block.columns, errors)
    else:
        texts = _fill(options.template, options.template_columns, block, errors)
    if kind != "scores":
        return list(texts), errors
    queries = column_texts(options.query_column, block.columns, errors)
    pairs = zip(queries, texts, strict=True)
    return [None if None in pair else pair for pair in pairs], errors  # type: ignore[misc]


def column_texts(
    name: str, columns: Mapping[str, Values], errors: dict[int, str]
) -> list[str | None]:
    """Return the texts in a column, None with an error, which is added to the errors."""
    texts: list[str | None] = []
    for index, value in enumerate(python_values(name, columns[name], errors)):
        text = value if isinstance(value, str) else None
        if text is None and index not in errors:
            problem = "is null or missing" if value is None else "is not a text"
            errors[index] = f"the column {name!r} {problem}"
        texts.append(text)
    return texts


def _fill(
    template: str, names: Sequence[str], block: Block, errors: dict[int, str]
) -> list[str | None]:
    """Return the template with the values of each record; nulls are empty."""
    columns = [python_values(name, block.columns[name], errors) for name in names]
    texts: list[str | None] = []
    for index, values in enumerate(zip(*columns, strict=True)):
        if index not in errors and all(value is None for value in values):
            errors[index] = f"the columns of the template are null: {', '.join(names)}"
        texts.append(
            None
            if index in errors
            else template.format_map(
                {name: "" if v is None else v for name, v in zip(names, values, strict=True)}
            )
        )
    return texts


def python_values(name: str, values: Values, errors: dict[int, str]) -> list[object]:
    """Return the values of a column; one that Python cannot hold is None, and an error.

    Bytes are read as UTF-8: some tools write texts as binary columns.
    """
    if not isinstance(values, pa.Array):
        return list(values)
    if pa.types.is_binary(values.type) or pa.types.is_fixed_size_binary(values.type):
        values = values.cast(pa.binary()).view(pa.string())
    return _all_or_each(values, to_python, name, errors)


def copied_array(name: str, type_: pa.DataType, values: Values, errors: dict[int, str]) -> pa.Array:
    """Return a copied column; a value of another type is null, and an error of its record.

    In a column of texts, other values of JSON are stored as JSON.
    """
    if isinstance(values, pa.Array):

        def cast(array: pa.Array) -> list[pa.Array]:
            array = array if array.type == type_ else array.cast(type_)
            array.validate(full=True)  # Arrow does not check the strings of a file
            return [array]

        parts = _all_or_each(values, cast, name, errors)
        return pa.concat_arrays([pa.nulls(1, type_) if p is None else p for p in parts])
    if type_ == pa.string():
        values = [
            value if value is None or isinstance(value, str) else _json(value) for value in values
        ]
    try:
        return _json_array(values, type_)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array(
            [_convert(index, name, type_, value, errors) for index, value in enumerate(values)],
            type_,
        )


def _written_as_json(name: str, array: pa.Array, errors: dict[int, str]) -> pa.Array:
    """Return a copied column; a value that cannot be written as JSON is null, and an error."""
    if any(is_one(array.type) for is_one in _SIMPLE_TYPES):
        return array

    def write(part: pa.Array) -> list[bytes]:
        return [json_line({name: value}) for value in to_python(part)]

    lines = _all_or_each(array, write, name, errors)
    indices = [None if line is None else index for index, line in enumerate(lines)]
    return array.take(pa.array(indices, pa.int64()))


def _all_or_each(
    values: pa.Array, convert: Callable[[pa.Array], list[Any]], name: str, errors: dict[int, str]
) -> list[Any]:
    """Return the converted values; if that fails, of each: None and an error where it fails."""
    try:
        return convert(values)
    except Exception:  # noqa: BLE001 - of a value, which the loop finds
        converted = []
    for index in range(len(values)):
        try:
            # Copied: Arrow checks nested values beyond a slice too.
            converted += convert(pa.concat_arrays([values.slice(index, 1)]))
        except UnicodeError:
            problem = "the record is not valid UTF-8"
        except Exception as error:  # noqa: BLE001 - Arrow and the libraries of time zones have many
            problem = f"the value of {name!r}, of the type {values.type}, cannot be read: {error}"
        else:
            continue
        errors.setdefault(index, problem)
        converted.append(None)
    return converted


def _json_array(values: Sequence[object], type_: pa.DataType) -> pa.Array:
    if not holds(type_, values):
        raise ValueError
    return pa.array(values, type_)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _convert(
    index: int, name: str, type_: pa.DataType, value: object, errors: dict[int, str]
) -> object:
    try:
        _json_array([value], type_)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        errors.setdefault(index, f"the value of {name!r} is not of the type {type_}")
        return None
    return value
