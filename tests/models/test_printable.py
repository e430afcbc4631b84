"""Tests of `models.printable`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.printable import embedded, printable, reason_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b/c.onnx", "a b/c.onnx"),
        ("naïve 東京 \U0001f600", "naïve 東京 \U0001f600"),
        ("a\nCRITICAL b", r"a\nCRITICAL b"),
        ("\x1b[31m\x9b", r"\x1b[31m\x9b"),
        ("\u202e\u2028", r"\u202e\u2028"),
        ("\udcff", r"\udcff"),
    ],
)
def test_unprintable_characters_are_escaped_and_others_kept(text: str, expected: str) -> None:
    assert printable(text) == expected


@given(st.text(st.characters()))
def test_result_is_printable_and_can_be_encoded(text: str) -> None:
    assert printable(text).isprintable()
    printable(text).encode()


@pytest.mark.parametrize(
    ("message", "expected"),
    [("a\nb", r"a\nb"), ("", "ValueError"), ("x" * 9999, "x" * 500 + "...")],
)
def test_reason_is_one_short_line(message: str, expected: str) -> None:
    assert reason_of(ValueError(message)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a cat", "a cat"),
        ("\u05d7\u05ea\u05d5\u05dc", "\u2068\u05d7\u05ea\u05d5\u05dc\u2069"),
        ("\u0645\u06cc\u200c\u062e", "\u2068\u0645\u06cc\u200c\u062e\u2069"),
        ("\u202ecat\u2069", r"\u202ecat\u2069"),
        ("\U0001f469\u200d\U0001f680", "\U0001f469\u200d\U0001f680"),
    ],
)
def test_text_within_a_sentence_reorders_nothing_of_it(text: str, expected: str) -> None:
    assert embedded(text) == expected
