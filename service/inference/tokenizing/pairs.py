"""Tokenization of pairs of texts: each text is encoded once, and pairs combine the tokens.

The tokenizers library can encode pairs too. But it would encode a query again for each document.
And if both texts are too long, it keeps every combination of their truncated parts in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from service.inference.tokenizing.encodings import TextEncodings
from service.inference.tokenizing.text_parts import encode_parts

Pair = tuple[str, str]
# Maximum number of tokens of the first and of the second text of a pair; None: no limit of its own.
PairLimits = tuple[int | None, int | None]
NO_LIMITS: PairLimits = (None, None)


@dataclass(frozen=True)
class EncodedPair:
    """The tokens of a pair of texts, special tokens included.

    Attributes:
        ids: Token ids.
        token_types: Token type id of each token, as the tokenizer assigns it to pairs.
        truncated: Whether a text was truncated.
        is_too_long: Whether the texts, each within its own limit, exceed the limit of the pair.
        kept: Number of tokens of each text.
    """

    ids: list[int]
    token_types: list[int]
    truncated: bool
    is_too_long: bool
    kept: tuple[int, int]


@dataclass(frozen=True)
class _Text:
    """The tokens of a text; if the text is too long, only those at the end to keep.

    Attributes:
        ids: Token ids without special tokens, at most `max_tokens`.
        is_part: Whether the text has more tokens than `ids`.
    """

    ids: Sequence[int]
    is_part: bool


class PairTokenizer:
    """Tokenizes pairs of texts; in a pair that is too long, the longer text loses tokens first.

    Args:
        tokenizer: The tokenizer, without truncation. It determines the special tokens and the token
            types of pairs.
        encodings: Encodings of texts.
        max_tokens: Maximum number of tokens of a pair, special tokens included.

    Attributes:
        room: Maximum number of tokens of both texts together.
    """

    def __init__(self, tokenizer: Tokenizer, encodings: TextEncodings, max_tokens: int) -> None:
        self._encode = encodings.without_special
        self._cuts_texts = encodings.cuts_texts
        self._max_tokens = max_tokens
        # Id, type and text index of each token of a pair; special tokens have the index None. The
        # tokenizer itself may have no token for a letter.
        letters = Tokenizer(WordLevel({"a": 0}, "a"))
        letters.post_processor = tokenizer.post_processor
        encoding = letters.encode("a", "a")
        self._template = list(
            zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True)
        )
        indices = [index for _, _, index in self._template]
        if not {0, 1} <= set(indices):
            raise RuntimeError("cannot tokenise pairs: the post_processor leaves out a text")
        self.room = max_tokens - indices.count(None)

    def encode(
        self,
        pairs: Sequence[Pair],
        limits: PairLimits = NO_LIMITS,
        *,
        drops_left: bool,
        keeps_second: bool = False,
    ) -> list[EncodedPair]:
        """Return the tokens of each pair, truncated to the maximum length.

        Args:
            pairs: Pairs of texts.
            limits: Maximum number of tokens of the first and of the second text of each pair, to
                which they are truncated beforehand.
            drops_left: Whether texts lose tokens at their left end; False: at their right end.
            keeps_second: Whether only the first text loses tokens. The second leaves it one.
        """
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        tokens = dict(zip(texts, self._tokens_of(texts, drops_left), strict=True))
        counts: dict[str, int] = {}
        encoded: list[EncodedPair] = []
        for pair in pairs:
            a, b = (tokens[text] for text in pair)
            lengths = len(a.ids) + a.is_part, len(b.ids) + b.is_part
            if a.is_part and b.is_part:  # the longer text is needed: it may keep one token more
                for text in pair:
                    if text not in counts:  # a query can be part of thousands of pairs
                        counts[text] = len(self._encode([text])[0])
                lengths = counts[pair[0]], counts[pair[1]]
            limited = _limit(lengths[0], limits[0]), _limit(lengths[1], limits[1])
            kept = self._lengths_to_keep(*limited)
            if keeps_second:
                kept = min(limited[0], self.room - limited[1]), limited[1]
            ids, types = self._join(
                [
                    text.ids[max(0, len(text.ids) - count) :] if drops_left else text.ids[:count]
                    for text, count in zip((a, b), kept, strict=True)
                ]
            )
            encoded.append(EncodedPair(ids, types, kept != lengths, kept != limited, kept))
        return encoded

    def _tokens_of(self, texts: Sequence[str], drops_left: bool) -> list[_Text]:
        """Return the first `max_tokens` tokens of each text, or the last if `drops_left`."""
        limit = self._max_tokens
        if self._cuts_texts:
            encoded = encode_parts(
                texts, limit, self._encode, lambda own: len(own) - limit, at_end=drops_left
            )
        else:
            encoded = [(encoding, True) for encoding in self._encode(texts)]
        kept = slice(-limit, None) if drops_left else slice(limit)
        return [
            _Text(encoding.ids[kept], not is_whole or len(encoding) > limit)
            for encoding, is_whole in encoded
        ]

    def _lengths_to_keep(self, a: int, b: int) -> tuple[int, int]:
        """Return the number of tokens to keep of two texts with `a` and `b` tokens.

        As in the strategy "longest_first" of the tokenizers library, the longer text loses tokens
        until the pair fits or both texts have the same length. Then both lose tokens alike.
        """
        if a + b <= self.room:
            return a, b
        shorter = min(a, b, self.room // 2)
        longer = self.room - shorter
        return (longer, shorter) if a > b else (shorter, longer)

    def _join(self, texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair, special tokens included, and the type of each token.

        Args:
            texts: Token ids of the two texts.
        """
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


def _limit(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)
