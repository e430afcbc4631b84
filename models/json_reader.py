"""JSON of unknown origin: bounded nesting, valid Unicode, no NaN. Standard library only."""

import json
import re
from itertools import accumulate
from typing import NoReturn

# Deepest nesting of arrays and objects. Parsers and writers of JSON end at 250 and more.
MAX_DEPTH = 128

# A string, whose brackets are no nesting; the last one may be unterminated. Possessive, because
# backtracking would take quadratic time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# A pair of surrogates: one character. A backslash before it might escape its own.
_PAIR = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
# The end of a key. An escaped quote in a string can match too.
_KEY = re.compile(rb'"\s*:')


class JsonError(ValueError):
    """The content is not JSON, or exceeds the limits of this module."""


def check_depth(content: bytes | bytearray) -> None:
    """Check the nesting of JSON text before a parser recurses into it.

    Text that is not JSON passes or fails; up to the first character that a parser refuses, the
    nesting is exact.

    Raises:
        JsonError: Arrays and objects are nested more than `MAX_DEPTH` deep.
    """
    # The count bounds the depth, and suffices for most texts.
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", content).translate(None, _NOT_BRACKETS)
    steps = (1 if bracket in b"[{" else -1 for bracket in brackets)
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise JsonError(f"it is nested too deeply; the limit is {MAX_DEPTH} levels")


def parse_json(content: bytes | bytearray, *, has_unique_keys: bool = False) -> object:
    """Return the value of JSON text in UTF-8; integers of any length are exact.

    Args:
        content: The text.
        has_unique_keys: Whether a duplicate key is an error; otherwise its last value counts.

    Raises:
        JsonError: The content is not JSON, is nested more than `MAX_DEPTH` deep, or has a lone
            surrogate, a NaN, an infinity or an integer of more than 4,300 digits. Or an object has
            a duplicate key that is an error.
    """
    check_depth(content)
    pairs_hook = _unique if has_unique_keys else None
    try:
        value: object = json.loads(
            content.decode(), parse_constant=_refuse, object_pairs_hook=pairs_hook
        )
        # Writing takes twice as long as reading: only if not all surrogates are seen to be paired.
        if _SURROGATE.search(content) and _SURROGATE.search(_PAIR.sub(b"", content)):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise JsonError("it has half of a surrogate pair") from None
    except ValueError as error:
        raise JsonError(str(error)) from error
    return value


def may_repeat_keys(content: bytes | bytearray, members: int) -> bool:
    """Return whether an object may have a duplicate key: its text has more keys than members.

    Keys of objects in it, and strings with `":`, count too.

    Args:
        content: JSON text of an object.
        members: Number of its members, as read.
    """
    return sum(1 for _ in _KEY.finditer(content)) > members


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise JsonError("an object has a duplicate key")
    return dict(pairs)


def _refuse(constant: str) -> NoReturn:
    raise JsonError(f"{constant} is not a JSON number")
