"""Words of a text: groups of the tokens that the model reads.

A word is a maximal run of tokens without white space between them in the text. Punctuation is a
word of its own, except for an apostrophe between letters ("don't") and a point or comma between
digits ("3.14"). In scripts without spaces between words, such as Chinese and Thai, a word is a
token. A token that spans the boundary of two words joins them.

Boundaries come from the characters of the text, not from `Encoding.word_ids`. Those number the
parts that a tokenizer's pre-tokenizer makes, and each tokenizer makes others. "don't" is three
parts for WordPiece and two for byte-level BPE, which also makes parts of line breaks. "(loudly):"
is one part for Unigram, as is a sentence in Chinese, and a whole text is one part for a BPE without
a pre-tokenizer, such as Gemma's. So the same text would have other words in every model.
"""

from collections.abc import Sequence
from unicodedata import category, name

from service.debug.pipeline.response import TextWord
from service.inference.tokenizing.rows import Span, TokenizedText

_APOSTROPHES = "'\u2019"
_DECIMAL_MARKS = ".,"
# First word of the Unicode names of letters in scripts without spaces between words.
_UNSPACED = {
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    *("THAI", "LAO", "KHMER", "MYANMAR"),
}


def words_of(tokenized: TokenizedText) -> list[TextWord]:
    """Return the words of a text or of a pair of texts, in order.

    Every token with a span belongs to exactly one word, and the others to none. Tokens of white
    space belong to the next word, whose tokens start with it in Unigram and BPE vocabularies; at
    the end of a text, to the last word.
    """
    words: list[TextWord] = []
    for number, text in enumerate(tokenized.texts):
        spans = {
            index: span
            for index, span in enumerate(tokenized.spans)
            if span is not None and tokenized.sequence_ids[index] == number
        }
        units = _units(text)
        spans_of_units = _spans_of_units(units)
        for tokens in _groups(units, spans):
            own = [
                spans_of_units[unit]
                for token in tokens
                for unit in set(units[slice(*spans[token])])
                if unit is not None
            ]
            # White space is not part of a word, unless the text has nothing else.
            own = own or [spans[token] for token in tokens]
            words.append(TextWord(min(own)[0], max(own)[1], tokens, number))
    return words


def _groups(units: Sequence[int | None], spans: dict[int, Span]) -> list[list[int]]:
    """Return the indices of the tokens of each word.

    Args:
        units: Unit of each character, see `_units`.
        spans: Span of each token of the text, by index of the token.
    """
    groups: list[list[int]] = []
    spaces: list[int] = []  # tokens of white space before the next word
    last = -1
    for token, (start, end) in spans.items():
        # The span of a token can be empty: it belongs to the character before it.
        characters = units[start:end] if start < end else units[max(0, start - 1) : start]
        own = [unit for unit in characters if unit is not None]
        if not own:
            spaces.append(token)
            continue
        if groups and min(own) <= last:
            groups[-1] += [*spaces, token]
        else:
            groups.append([*spaces, token])
        spaces, last = [], max(last, *own)
    if spaces and groups:
        groups[-1] += spaces
    elif spaces:
        groups.append(spaces)
    return groups


def _units(text: str) -> list[int | None]:
    """Return the number of each character's unit, ascending; None for white space.

    A unit is a word of letters and digits, a run of punctuation and symbols, or a single letter of
    a script without spaces. Its combining marks belong to a letter.
    """
    units: list[int | None] = []
    number, previous = 0, "space"
    for at in range(len(text)):
        kind = _kind(text, at)
        if kind is None and previous == "space":
            kind = "symbols"  # there is no letter that it could belong to
        if kind is not None:
            number += kind != previous or kind == "unspaced"
            previous = kind
        units.append(None if previous == "space" else number)
    return units


def _spans_of_units(units: Sequence[int | None]) -> dict[int, Span]:
    spans: dict[int, Span] = {}
    for at, unit in enumerate(units):
        if unit is not None:
            spans[unit] = spans.get(unit, (at, at))[0], at + 1
    return spans


def _kind(text: str, at: int) -> str | None:
    """Return the kind of a character; None for a character that continues the one before it."""
    character, around = text[at], text[max(0, at - 1) : at + 2]
    if character.isspace():
        return "space"
    major = category(character)[0]
    if major in "MC":  # marks, joiners and variation selectors
        return None
    if major == "L":
        is_unspaced = name(character, "").partition(" ")[0] in _UNSPACED
        return "unspaced" if is_unspaced else "letters"
    joins = len(around) == 3 and (
        (character in _APOSTROPHES and around[0].isalpha() and around[2].isalpha())
        or (character in _DECIMAL_MARKS and around[0].isdigit() and around[2].isdigit())
    )
    return "letters" if major == "N" or joins else "symbols"
