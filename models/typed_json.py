"""Dataclasses from JSON of unknown origin, by the types and bounds of their fields.

A field is declared once, and its annotation is what is checked:

    width: Annotated[int, within(1, 2**24)]

Supported are str, bool, int, float, Literal, unions with None, tuples and lists of one type,
mappings from texts, and dataclasses of these. Standard library only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")

# Longest part of an unknown text that a message shows, in characters.
_SHOWN = 40
# Types of JSON values that a scalar type accepts, and its name in messages. A bool is an int too.
_SCALARS: Mapping[object, tuple[frozenset[type], str]] = {
    str: (frozenset({str}), "a text"),
    bool: (frozenset({bool}), "true or false"),
    int: (frozenset({int}), "an integer"),
    float: (frozenset({int, float}), "a number"),
}


class FieldError(ValueError):
    """A value has another type than its field, or is out of bounds; the message names the field."""


class Bound(NamedTuple):
    """A condition on a value: how messages describe it, and whether a value meets it."""

    description: str
    admits: Callable[[Any], bool]


def within(low: float, high: float) -> Bound:
    """Return bounds of a number; both are included."""
    return Bound(f"from {low:,} to {high:,}", lambda value: low <= value <= high)


def length(low: int, high: int) -> Bound:
    """Return bounds of the number of characters or elements; both are included."""
    return Bound(f"of length {low:,} to {high:,}", lambda value: low <= len(value) <= high)


def form(pattern: str, description: str) -> Bound:
    """Return the condition that all of a text matches a regular expression."""
    return Bound(description, lambda value: re.fullmatch(pattern, value) is not None)


# JSON has no infinity, but 1e999 is read as one.
Number = Annotated[float, within(-1e300, 1e300)]
Float32 = Annotated[float, within(-3.4e38, 3.4e38)]


def read_dataclass(kind: type[T], value: object) -> T:
    """Return the dataclass of a JSON object, in which fields with a default value may be missing.

    Raises:
        FieldError: A field is missing, unknown, of another type, or out of bounds.
    """
    result: T = _dataclass(kind, value, "")
    return result


def describe(value: object) -> str:
    """Return a short description of a JSON value, on one line."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of length {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a long integer"  # Python refuses to write very long ones
    text = repr(value)  # with escapes for unprintable characters
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _dataclass(kind: Any, value: object, path: str) -> Any:  # noqa: ANN401
    if not isinstance(value, dict):
        raise FieldError(f"{path or 'it'} must be an object: {describe(value)}")
    prefix = f"{path}." if path else ""
    hints, known = _hints(kind), {field.name: field for field in fields(kind)}
    for name in value.keys() - known.keys():
        raise FieldError(f"unknown field {prefix}{describe(name)}; fields: {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is field.default_factory is MISSING:
            raise FieldError(f"the field {prefix}{name} is missing; fields: {', '.join(known)}")
    return kind(**{name: _read(hints[name], own, f"{prefix}{name}") for name, own in value.items()})


def _read(annotated: object, value: object, path: str) -> object:
    """Return a JSON value as an annotated type; `path` is its field, for messages."""
    kind, bounds = _parts(annotated)
    if NoneType in get_args(kind):
        (other,) = (own for own in get_args(kind) if own is not NoneType)
        return None if value is None else _read(other, value, path)
    result = _convert(kind, value, path)
    for bound in bounds:
        if not bound.admits(result):
            raise FieldError(f"{path} must be {_name(kind)} {bound.description}: {describe(value)}")
    return result


def _parts(annotated: object) -> tuple[object, Sequence[Bound]]:
    """Return a type without its bounds, and the bounds."""
    if get_origin(annotated) is not Annotated:
        return annotated, ()
    kind, *bounds = get_args(annotated)
    return kind, bounds


def _convert(kind: Any, value: object, path: str) -> object:  # noqa: ANN401
    """Return a JSON value as a type without bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        return origin(_elements(arguments[0], value, path))
    if origin in (Mapping, dict):
        return _members(arguments, value, path)
    if is_dataclass(kind):
        return _dataclass(kind, value, path)
    # By type too: True equals 1.
    is_allowed = (
        any(type(value) is type(own) and value == own for own in arguments)
        if origin is Literal
        else type(value) in _SCALARS[kind][0]
    )
    if not is_allowed:
        raise FieldError(f"{path} must be {_name(kind)}: {describe(value)}")
    return value


def _name(kind: object) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return _SCALARS[kind][1] if kind in _SCALARS else "a list or an object"


def _elements(annotated: object, value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise FieldError(f"{path} must be a list: {describe(value)}")
    if _are_numbers(annotated, value):
        return value
    return [_read(annotated, own, f"{path}[{index}]") for index, own in enumerate(value)]


def _are_numbers(annotated: object, values: list[Any]) -> bool:
    """Return whether all elements are numbers within bounds: fast, for the vectors of a check."""
    kind, bounds = _parts(annotated)
    if kind not in (int, float) or not values or not {*map(type, values)} <= _SCALARS[kind][0]:
        return False
    return all(bound.admits(end) for bound in bounds for end in (min(values), max(values)))


def _members(kinds: Sequence[object], value: object, path: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise FieldError(f"{path} must be an object: {describe(value)}")
    of_name, of_value = kinds
    return {
        _read(of_name, name, f"a name in {path}"): _read(of_value, own, f"{path}[{describe(name)}]")
        for name, own in value.items()
    }
