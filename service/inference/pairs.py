"""Rows of pairs of texts, from the token ids of each text.

A tokenizer could encode pairs by itself. But it would encode a query again for each document, and
of two texts that are too long, it keeps all combinations of the parts that it cuts off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text, without special tokens.

    Attributes:
        ids: Token ids; if the text is long, those at the end that is kept.
        is_part: Whether the text has more tokens.
    """

    ids: Sequence[int]
    is_part: bool = False


class PairTemplate:
    """The special tokens around and between two texts, as the tokenizer adds them.

    Args:
        tokenizer: Tokenizer without truncation.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode("a", "a")
        # Token id, type, and index of the text that stands for the token; None: a special token.
        self._tokens = list(
            zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True)
        )
        indices = [index for _, _, index in self._tokens]
        if not {0, 1} <= set(indices):
            raise RuntimeError("the tokenizer has no token for the letter 'a'")
        self._special = indices.count(None)

    def lengths(self, a: int, b: int, limit: int) -> tuple[int, int]:
        """Return the numbers of tokens to keep of two texts.

        The longer text is cut to the length of the shorter one, and then both are, as by the
        strategy "longest_first" of tokenizers.

        Args:
            a: Number of tokens of the first text.
            b: Number of tokens of the second text.
            limit: Maximum number of tokens, special tokens included.
        """
        room = limit - self._special
        if a + b <= room:
            return a, b
        shorter = min(a, b, room // 2)
        longer = room - shorter
        return (longer, shorter) if a > b else (shorter, longer)

    def row(self, a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair, special tokens included, and the type of each."""
        ids: list[int] = []
        types: list[int] = []
        previous: int | None = None
        for token, kind, index in self._tokens:
            if index is None or index != previous:
                part = [token] if index is None else (a, b)[index]
                ids += part
                types += [kind] * len(part)
            previous = index
        return ids, types
