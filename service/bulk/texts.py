"""The texts of records: a column or a template, and pairs of query and text."""

import json
from collections.abc import Mapping, Sequence

import pyarrow as pa

from service.bulk.options import BulkOptions, Kind
from service.bulk.readers import Block, Values

# A text, or a query and a text.
Item = str | tuple[str, str]


def records_of(
    block: Block, options: BulkOptions, kind: Kind, copied: pa.Schema
) -> tuple[list[Item | None], list[pa.Array], dict[int, str]]:
    """Return the item and the copied columns of each record, and the errors by index."""
    items, errors = items_of(block, options, kind)
    columns = [
        copied_array(column.name, column.type, block.columns[column.name], errors)
        for column in copied
    ]
    return items, columns, errors


def items_of(
    block: Block, options: BulkOptions, kind: Kind
) -> tuple[list[Item | None], dict[int, str]]:
    """Return the item of each record, None with an error, and the errors by index in the block."""
    errors = dict(block.errors)
    if options.template is None:
        texts = _texts(options.text_column, block.columns, errors)
    else:
        texts = _filled(options.template, options.template_columns, block, errors)
    if kind != "scores":
        return list(texts), errors
    queries = _texts(options.query_column, block.columns, errors)
    pairs = zip(queries, texts, strict=True)
    return [None if None in pair else pair for pair in pairs], errors  # type: ignore[misc]


def _texts(name: str, columns: Mapping[str, Values], errors: dict[int, str]) -> list[str | None]:
    """Return the texts in a column, None with an error."""
    texts: list[str | None] = []
    for index, value in enumerate(_python_values(columns[name], errors)):
        text = value if isinstance(value, str) else None
        if text is None and index not in errors:
            problem = "is null or missing" if value is None else "is not a text"
            errors[index] = f"the column {name!r} {problem}"
        texts.append(text)
    return texts


def _filled(
    template: str, names: Sequence[str], block: Block, errors: dict[int, str]
) -> list[str | None]:
    """Return the template with the values of each record; nulls are empty."""
    columns = [_python_values(block.columns[name], errors) for name in names]
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


def _python_values(values: Values, errors: dict[int, str]) -> list[object]:
    if not isinstance(values, pa.Array):
        return list(values)
    try:
        return list(values.to_pylist())
    except UnicodeDecodeError:  # Arrow does not check the strings of a file
        contents = values.cast(pa.large_binary()).to_pylist()
        return [_decoded(index, content, errors) for index, content in enumerate(contents)]


def _decoded(index: int, value: bytes | None, errors: dict[int, str]) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        errors.setdefault(index, "the record is not valid UTF-8")
        return None


def copied_array(name: str, type_: pa.DataType, values: Values, errors: dict[int, str]) -> pa.Array:
    """Return a copied column; a value of another type is null, and an error of its record.

    In a column of texts, other values of JSON are stored as JSON.
    """
    if isinstance(values, pa.Array):
        try:
            values.validate(full=True)
        except pa.ArrowInvalid:  # strings that are not UTF-8
            return pa.array(_python_values(values, errors), type_)
        return values
    if type_ == pa.string():
        values = [
            value if value is None or isinstance(value, str) else _json(value) for value in values
        ]
    try:
        return pa.array(values, type_)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array(
            [_converted(index, name, type_, value, errors) for index, value in enumerate(values)],
            type_,
        )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _converted(
    index: int, name: str, type_: pa.DataType, value: object, errors: dict[int, str]
) -> object:
    try:
        pa.array([value], type_)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        errors.setdefault(index, f"the value of {name!r} is not of the type {type_}")
        return None
    return value
