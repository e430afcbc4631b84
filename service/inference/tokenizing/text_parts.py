"""Selection of the part of a long text that fills a model's maximum length.

A megabyte of text has hundreds of times as many tokens as a model takes. So only the first or last
part of a long text is tokenised. The text is cut at a boundary between two words, which no token
spans unless an added token contains white space.
"""

import re
from collections.abc import Sequence

# Characters per token of the first part that is tried; a part with too few tokens is enlarged.
# English text has four to five, code and other scripts fewer.
CHARS_PER_TOKEN = 8
# Number of tokens that a part must have beyond the maximum length, so that truncation drops the
# tokens next to the cut.
MARGIN = 16

# Not \s: normalisers remove some of the characters that it matches, which joins the words around
# them.
_BOUNDARY = re.compile(r"(?<=[^\W_])[ \t\n\r](?=[^\W_])")
# Number of characters that are searched for a boundary, from the intended cut into the part.
_SEARCHED = 500


def part_of(text: str, chars: int, *, at_end: bool = False) -> str:
    """Return about the first `chars` characters of a text, or the last if `at_end`.

    The text is cut between two words. It is returned whole if it has at most `2 * chars`
    characters, or no boundary between two words near the intended cut.
    """
    if len(text) <= 2 * chars:
        return text
    if at_end:
        match = _BOUNDARY.search(text, len(text) - chars, len(text) - chars + _SEARCHED)
        return text if match is None else text[match.start() :]
    matches = list(_BOUNDARY.finditer(text, max(0, chars - _SEARCHED), chars))
    return text[: matches[-1].start()] if matches else text


def tokens_span_words(added_tokens: Sequence[str]) -> bool:
    """Return whether an added token contains white space, so that it can span two words."""
    return any(re.search(r"\s", token) for token in added_tokens)
