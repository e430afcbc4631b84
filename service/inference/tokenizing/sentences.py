"""Boundaries of sentences and paragraphs in texts of any language.

A sentence ends at a terminator, with the quotes and brackets after it, before white space or at the
end of the text. Chinese and Japanese terminators need no white space. A full stop before a lower
case letter ends no sentence, also with quotes and brackets between the two. A blank line ends a
paragraph and its last sentence.

These are the main rules of Unicode's UAX #29, except that a line break within a paragraph ends no
sentence, because texts are often wrapped. There are no dictionaries of abbreviations. Libraries
with all of the rules are large, as ICU, or loop over the characters in Python.
"""

import re

_BLANK_LINE = re.compile(r"\n\s*\n|\r\s*\r|\u2029")
_CJK_ENDS = "。｡．！？"
# As ranges of a regular expression: the full stop, the ellipsis, and the characters of the Basic
# Multilingual Plane with Sentence_Break=STerm in Unicode 17.
_ENDS = (
    ".!?…"
    r"\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965"
    r"\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945"
    r"\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d-\u1b7f\u1c3b\u1c3c\u1c7e\u1c7f"
    r"\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\u2e60\u2e61\ua4ff"
    r"\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f"
    r"\uaaf0\uaaf1\uabeb\ufe12\ufe15\ufe16\ufe56\ufe57" + _CJK_ENDS
)
_CLOSERS = r"[\"'”’»›)\]}）］｝」』】〉》〕]"
# Some languages open quotes with the marks with which others close them.
_OPENERS = re.compile(r"[\"'“”„‘’‚«»‹›(\[{（［｛「『【〈《〔]*")
# The look-behind and the possessive quantifiers keep the search linear in runs of terminators.
_SENTENCE_END = re.compile(
    rf"(?<![{_ENDS}])(?P<ends>[{_ENDS}]++)"
    rf"(?:(?<=[{_CJK_ENDS}]){_CLOSERS}*+\s*+|{_CLOSERS}*+(?:\s++|$))"
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
    following = text[end : end + 1]
    if match[0].endswith("．"):  # of Japanese numbers and web addresses
        return following.isdigit() or following.islower()
    if not match["ends"].endswith("."):
        return False
    openers = _OPENERS.match(text, end)
    return openers is not None and text[openers.end() : openers.end() + 1].islower()
