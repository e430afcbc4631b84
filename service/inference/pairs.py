"""Tokenization of pairs of texts, from the tokens of each text.

A tokenizer could encode pairs by itself. But it would encode a query again for each document, and
of two texts that are too long, it keeps all combinations of the parts that it cuts off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from service.inference.text_parts import CHARS_PER_TOKEN, MARGIN, part_of

Pair = tuple[str, str]
# Maximum number of tokens of the first and of the second text of a pair; None: no limit of its own.
PairLimits = tuple[int | None, int | None]
NO_LIMITS: PairLimits = (None, None)


@dataclass(frozen=True)
class EncodedPair:
    """The tokens of a pair of texts, special tokens included.

    Attributes:
        ids: Token ids.
        token_types: Type of each token.
        truncated: Whether a text was truncated.
        is_too_long: Whether the texts, each within its own limit, exceed the limit of the pair.
        has_tokens: Whether both texts have tokens.
    """

    ids: list[int]
    token_types: list[int]
    truncated: bool
    is_too_long: bool
    has_tokens: bool


@dataclass(frozen=True)
class _Text:
    """The tokens of a text; if `is_part`, it has more, and these are those at the kept end."""

    ids: Sequence[int]
    is_part: bool


class PairTokenizer:
    """Tokenizer of pairs of texts. The text that is longer loses tokens first.

    Args:
        tokenizer: The tokenizer, without truncation.
        encode: Encodes texts without special tokens and without truncation.
        max_tokens: Maximum number of tokens of a pair, special tokens included.
        cuts_texts: Whether a part of a long text has the tokens of the whole text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[Sequence[str]], Sequence[Encoding]],
        max_tokens: int,
        *,
        cuts_texts: bool,
    ) -> None:
        self._encode = encode
        self._max_tokens = max_tokens
        self._cuts_texts = cuts_texts
        # Of each token of a pair: its id, its type, and the index of its text; None: it is special.
        encoding = tokenizer.encode("a", "a")
        self._template = list(
            zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True)
        )
        indices = [index for _, _, index in self._template]
        if not {0, 1} <= set(indices):
            raise RuntimeError("the tokenizer has no token for the letter 'a'")
        self._room = max_tokens - indices.count(None)

    def encode(
        self, pairs: Sequence[Pair], limits: PairLimits = NO_LIMITS, *, drops_left: bool
    ) -> list[EncodedPair]:
        """Return the tokens of each pair, truncated at the right or left end of its texts.

        Each text is first truncated to its own limit, and then both to the limit of the pair.
        """
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        tokens = dict(zip(texts, self._tokens_of(texts, drops_left), strict=True))
        encoded: list[EncodedPair] = []
        for pair in pairs:
            a, b = (tokens[text] for text in pair)
            lengths = len(a.ids) + a.is_part, len(b.ids) + b.is_part
            if a.is_part and b.is_part:  # the longer text may keep one token more
                lengths = self._count(pair[0]), self._count(pair[1])
            limited = _limited(lengths[0], limits[0]), _limited(lengths[1], limits[1])
            kept = self._kept(*limited)
            ids, types = self._joined(
                [
                    text.ids[max(0, len(text.ids) - count) :] if drops_left else text.ids[:count]
                    for text, count in zip((a, b), kept, strict=True)
                ]
            )
            has_tokens = bool(a.ids and b.ids)
            encoded.append(EncodedPair(ids, types, kept != lengths, kept != limited, has_tokens))
        return encoded

    def _tokens_of(self, texts: Sequence[str], drops_left: bool) -> list[_Text]:
        """Return the tokens of each text, as many as the model takes at most."""
        limit, chars = self._max_tokens, CHARS_PER_TOKEN * self._max_tokens
        tokens: dict[int, _Text] = {}
        while len(tokens) < len(texts):
            parts = {
                index: part_of(text, chars, at_end=drops_left) if self._cuts_texts else text
                for index, text in enumerate(texts)
                if index not in tokens
            }
            encodings = self._encode(list(parts.values()))
            for (index, part), encoding in zip(parts.items(), encodings, strict=True):
                ids, is_whole = encoding.ids, len(part) == len(texts[index])
                if is_whole or len(ids) >= limit + MARGIN:
                    kept = ids[-limit:] if drops_left else ids[:limit]
                    tokens[index] = _Text(kept, not is_whole or len(ids) > limit)
            chars *= 4
        return [tokens[index] for index in range(len(texts))]

    def _count(self, text: str) -> int:
        return len(self._encode([text])[0])

    def _kept(self, a: int, b: int) -> tuple[int, int]:
        """Return how many tokens two texts with `a` and `b` tokens keep.

        As by the strategy "longest_first" of tokenizers, the longer text is cut to the length of
        the shorter one, and then both are.
        """
        if a + b <= self._room:
            return a, b
        shorter = min(a, b, self._room // 2)
        longer = self._room - shorter
        return (longer, shorter) if a > b else (shorter, longer)

    def _joined(self, texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair with its special tokens, and the type of each token."""
        ids: list[int] = []
        types: list[int] = []
        previous: int | None = None
        for token, kind, index in self._template:
            if index is None or index != previous:
                part = [token] if index is None else texts[index]
                ids += part
                types += [kind] * len(part)
            previous = index
        return ids, types


def _limited(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)
