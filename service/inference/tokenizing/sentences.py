"""Boundaries of sentences and paragraphs in texts of any language.

A sentence ends at a terminator, with the quotes and brackets after it, before white space or at the
end of the text. Chinese and Japanese terminators need no white space. A full stop before a lower
case letter ends no sentence. A blank line ends a paragraph and its last sentence.

These are the main rules of Unicode's UAX #29, except that a line break within a paragraph ends no
sentence, because texts are often wrapped. There are no dictionaries of abbreviations. Libraries
with all of the rules are large, as ICU, or loop over the characters in Python.
"""

import re

_BLANK_LINE = re.compile(r"\n\s*\n|\r\s*\r|\u2029")
_CJK_ENDS = "。｡．！？"
_ENDS = ".!?…؟۔।॥" + _CJK_ENDS
_CLOSERS = r"[\"'”’»›)\]}）］｝」』】〉》〕]"
# The look-behind and the possessive quantifiers keep the search linear in runs of terminators.
_SENTENCE_END = re.compile(
    rf"(?<![{_ENDS}])[{_ENDS}]++(?:(?<=[{_CJK_ENDS}]){_CLOSERS}*+\s*+|{_CLOSERS}*+(?:\s++|$))"
)


def paragraph_starts(text: str) -> list[int]:
    """Return the start of each paragraph but the first, in characters."""
    return [match.end() for match in _BLANK_LINE.finditer(text)]


def sentence_starts(text: str) -> list[int]:
    """Return the start of each sentence but the first, in characters.

    A start can be repeated, and the last can be the end of the text.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text) if not _goes_on(text, match)]
    return sorted([*ends, *paragraph_starts(text)])


def _goes_on(text: str, match: re.Match[str]) -> bool:
    end = match.end()
    return match[0].rstrip().endswith(".") and text[end : end + 1].islower()
