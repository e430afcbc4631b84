"""Tests of `models.json_reader`: JSON of unknown origin."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.json_reader import MAX_DEPTH, JsonError, check_depth, parse_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Texts full of the characters that a scan for brackets could stumble over.
    | st.text(st.sampled_from('[]{}"\\ \n\u00e9\U0001f600')),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(st.sampled_from('[{"\\')), parts),
)


@given(VALUES, st.booleans())
def test_values_are_those_of_the_standard_library(value: object, is_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@given(st.text(st.sampled_from('[]{}"\\a')), st.integers(MAX_DEPTH - 2, MAX_DEPTH + 2))
def test_depth_is_exact_whatever_strings_contain(text: str, depth: int) -> None:
    inner = json.dumps([text] * (MAX_DEPTH + 1))[1:-1]  # brackets enough for the exact scan
    content = ("[" * depth + inner + "]" * depth).encode()
    if depth <= MAX_DEPTH:
        check_depth(content)
        return
    with pytest.raises(JsonError, match="nested too deeply; the limit is 128"):
        check_depth(content)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("after", ["", '"', '"]]]]', "x", '"\\'])
def test_nesting_without_end_is_refused_before_it_is_parsed(opening: str, after: str) -> None:
    with pytest.raises(JsonError, match="nested too deeply"):
        parse_json((opening * 100_000 + after).encode())


def test_brackets_in_strings_are_no_nesting() -> None:
    assert parse_json(json.dumps(["[" * 1000, "{" * 1000]).encode()) == ["[" * 1000, "{" * 1000]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"[1", "Expecting"),
        (b'"\xff"', "utf-8"),
        (rb'"\ud83d"', "half of a surrogate pair"),
        (rb'{"\udc00": 1}', "half of a surrogate pair"),
        (rb'"\ud83d\ud83d\ude00"', "half of a surrogate pair"),
        (rb'"\\ud83d\ude00"', "half of a surrogate pair"),  # the first has an escaped backslash
        (b"[NaN]", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"1" * 5000, "4300"),
        (b'["' + rb"[\"" * 1_000_000, "Unterminated string"),  # in linear time
    ],
)
def test_invalid_content_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(JsonError, match=message):
        parse_json(content)


def test_surrogate_pair_is_one_character() -> None:
    assert parse_json(rb'["\ud83d\ude00"]') == ["\U0001f600"]


def test_long_integers_are_exact() -> None:
    assert parse_json(b"[12345678901234567890123]") == [12345678901234567890123]
