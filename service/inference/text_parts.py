"""The part of a long text that fills a model's maximum length.

A megabyte of text has hundreds of times the tokens that a model takes. Only its first or last part
is tokenised, cut at a boundary between two words, which no token spans.
"""

import re
from collections.abc import Sequence

# Characters per token to begin with. English text has four to five, code and other scripts fewer.
CHARS_PER_TOKEN = 8
# Number of tokens beyond the maximum that a part must have: those next to its cut are dropped.
MARGIN = 16

# Normalisers remove some of the characters that \s matches, and join the words around them.
_BOUNDARY = re.compile(r"(?<=[^\W_])[ \t\n\r](?=[^\W_])")
# Number of characters before the wanted end that are searched for a boundary.
_SEARCHED = 500


def part_of(text: str, chars: int, *, at_end: bool = False) -> str:
    """Return about `chars` characters of a text: its first ones, or its last ones if `at_end`.

    A text that is not much longer, or has no boundary at that place, is returned whole.
    """
    if len(text) <= 2 * chars:
        return text
    if at_end:
        match = _BOUNDARY.search(text, len(text) - chars, len(text) - chars + _SEARCHED)
        return text if match is None else text[match.start() :]
    matches = list(_BOUNDARY.finditer(text, max(0, chars - _SEARCHED), chars))
    return text[: matches[-1].start()] if matches else text


def tokens_span_words(added_tokens: Sequence[str]) -> bool:
    """Return whether an added token contains white space, and so can reach across a boundary."""
    return any(re.search(r"\s", token) for token in added_tokens)
