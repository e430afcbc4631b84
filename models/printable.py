"""Text of unknown origin in messages: escapes in place of what is not printable. Standard library.

Paths and names can have line breaks, escape sequences of terminals, characters that change the
direction of text, and bytes that are not UTF-8. In a log they could forge lines, and in a response
they could not be written.
"""

import re
from unicodedata import bidirectional

_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
# Longest part of a library's error that a message repeats, in characters.
_MAX_REASON = 500


def printable(text: str) -> str:
    r"""Return the text with escapes, such as `\n` and `\x1b`, for all unprintable characters."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error for a message of ours: on one line, and not long."""
    text = printable(str(error).strip() or type(error).__name__)
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def embedded(text: str) -> str:
    r"""Return a text within a sentence, so that it reorders nothing of the rest of the sentence.

    Words of right-to-left scripts are isolated. Controls of the direction are escapes, such as
    `\u202e`; joiners, which such scripts need, are kept.
    """
    plain = _DIRECTION.sub(lambda found: printable(found[0]), text)
    is_reversed = any(bidirectional(char) in ("R", "AL") for char in plain)
    return f"\u2068{plain}\u2069" if is_reversed else plain
