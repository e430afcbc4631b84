"""Words of a text, found by its characters: the same for every model.

A word is a run of letters and digits. Punctuation and symbols are words of their own, except for
an apostrophe between letters ("don't") and a point or comma between digits ("3.14"). In scripts
without spaces between words, such as Chinese and Thai, a word is a letter.

Boundaries come from the characters of the text, not from `Encoding.word_ids`. Those number the
parts that a tokenizer's pre-tokenizer makes, and each tokenizer makes others. "don't" is three
parts for WordPiece and two for byte-level BPE, which also makes parts of line breaks. "(loudly):"
is one part for Unigram, as is a sentence in Chinese, and a whole text is one part for a BPE without
a pre-tokenizer, such as Gemma's. So the same text would have other words in every model.
"""

from collections.abc import Sequence
from unicodedata import category, name

from service.inference.tokenizing.rows import Span

_APOSTROPHES = "'\u2019"
_DECIMAL_MARKS = ".,\u066b\u066c"  # the last two are Arabic
# First word of the Unicode names of letters in scripts without spaces between words.
_UNSPACED = {
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH"),
    *("THAI", "LAO", "KHMER", "MYANMAR"),
}


def word_spans(text: str) -> list[Span]:
    """Return the span of each word, in characters and in order."""
    return list(spans_of_units(units_of_characters(text)).values())


def units_of_characters(text: str) -> list[int | None]:
    """Return the number of each character's unit, ascending; None for white space.

    A unit is a word of letters and digits, a run of punctuation and symbols, or a single letter of
    a script without spaces. Its combining marks belong to a letter.
    """
    units: list[int | None] = []
    number, previous, before = 0, "space", ""
    for at, character in enumerate(text):
        kind = _kind(before, character, text[at + 1 : at + 2])
        if kind is None and previous == "space":
            kind = "symbols"  # there is no letter that it could belong to
        if kind is not None:
            number += kind != previous or kind == "unspaced"
            previous, before = kind, character
        units.append(None if previous == "space" else number)
    return units


def spans_of_units(units: Sequence[int | None]) -> dict[int, Span]:
    """Return the span of each unit, by its number."""
    spans: dict[int, Span] = {}
    for at, unit in enumerate(units):
        if unit is not None:
            spans[unit] = spans.get(unit, (at, at))[0], at + 1
    return spans


def _kind(before: str, character: str, after: str) -> str | None:
    """Return the kind of a character; None for a character that continues the one before it.

    Args:
        before: The last character before it that has a kind. A mark between both belongs to it.
        character: The character.
        after: The character after it.
    """
    if character.isspace():
        return "space"
    major = category(character)[0]
    if major in "MC":  # marks, joiners and variation selectors
        return None
    if major == "L":
        is_unspaced = name(character, "").partition(" ")[0] in _UNSPACED
        return "unspaced" if is_unspaced else "letters"
    joins = (character in _APOSTROPHES and before.isalpha() and after.isalpha()) or (
        character in _DECIMAL_MARKS and before.isdigit() and after.isdigit()
    )
    return "letters" if major == "N" or joins else "symbols"
