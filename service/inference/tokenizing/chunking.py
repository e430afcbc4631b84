"""Division of texts into chunks of limited size, on the spans of a text's tokens.

A chunk ends at the last paragraph, sentence or token that fits, by the strategy: "paragraphs" falls
back to sentences within a paragraph that is too long, and to tokens within such a sentence.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from service.inference.errors import InvalidInput
from service.inference.tokenizing.rows import Span
from service.inference.tokenizing.sentences import paragraph_starts, sentence_starts

Strategy = Literal["tokens", "sentences", "paragraphs"]
# Returns the number of tokens of a chunk, and how many of them exceed its limits. The arguments are
# the chunk's text and its number of tokens in the whole text.
Measure = Callable[[str, int], tuple[int, int]]


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of Python or of NumPy; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How texts are divided into chunks. Sizes are in tokens of the model's tokenizer.

    Attributes:
        strategy: "tokens": each chunk has as many tokens as fit; "sentences": as many whole
            sentences; "paragraphs": as many whole paragraphs, which blank lines separate. A
            paragraph that is too long is divided into sentences, and such a sentence into tokens.
        size: Maximum number of tokens of a chunk, without special tokens and prompt; None: as many
            as fit into the model's maximum length with these.
        overlap: Number of a chunk's last tokens that the next chunk repeats. A chunk that ends with
            a sentence or a paragraph repeats as many whole ones as have at most this many tokens.
        late: Whether the text is encoded as a whole, and the vector of a chunk is the mean of its
            tokens' vectors; see `late_chunking`.

    Raises:
        InvalidInput: An attribute is invalid; `pointer` names it.
    """

    strategy: Strategy = "tokens"
    size: int | None = None
    overlap: int = 0
    late: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in get_args(Strategy):
            raise InvalidInput(
                f"strategy must be one of {', '.join(get_args(Strategy))}",
                pointer="/chunking/strategy",
            )
        if self.size is not None and not (is_integer(self.size) and self.size >= 1):
            raise InvalidInput("size must be at least 1 token", pointer="/chunking/size")
        if not (is_integer(self.overlap) and self.overlap >= 0):
            raise InvalidInput("overlap must be at least 0 tokens", pointer="/chunking/overlap")
        if not isinstance(self.late, bool):
            raise InvalidInput("late must be a bool", pointer="/chunking/late")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a text, without white space at its ends, unless the text has nothing else.

    Attributes:
        start: Start of the chunk in the text, in characters (Unicode code points).
        end: End of the chunk, exclusive.
        tokens: Number of tokens of the chunk, without special tokens and prompt.
    """

    start: int
    end: int
    tokens: int


class Piece(NamedTuple):
    """A chunk, and the range of its tokens among those of the whole text."""

    chunk: Chunk
    first: int
    last: int


class _Cuts(NamedTuple):
    """Places where a text can be divided: the starts of tokens, and the end of the text.

    Attributes:
        tokens: Number of tokens before each of K cuts, in ascending order.
        chars: Number of characters before each cut.
        ranks: Number of characters other than white space before each cut, `(K,)`. In a text of
            white space alone, all characters count.
        low_ranks: The same for the end of the token before each cut, `(K,)`. Characters between
            the two have no token.
        rank_of: The same for each of the N characters of the text and for its end, `(N + 1,)`.
    """

    tokens: list[int]
    chars: list[int]
    ranks: NDArray[np.intp]
    low_ranks: NDArray[np.intp]
    rank_of: NDArray[np.intp]


def split(
    text: str,
    spans: Sequence[Span],
    strategy: Strategy,
    size: int,
    overlap: int,
    measure: Measure,
) -> Iterator[Piece]:
    """Yield the chunks of a text, in order. Together they have all characters but white space.

    A text without tokens is one chunk. In a text of white space alone, it is as other characters.

    Args:
        text: Text to divide.
        spans: Span of each token in the text, in characters.
        strategy: See `Chunking`.
        size: Maximum number of tokens of a chunk.
        overlap: See `Chunking`; less than `size`.
        measure: Returns the number of tokens of a chunk, and how many of them are too many.

    Raises:
        InvalidInput: A token, or the tokens of a character, are more than `size` on their own.
    """
    is_blank = text.isspace()
    cuts = _cuts(text, spans, is_blank)
    # Indices of cuts at the starts of paragraphs, sentences and tokens; the coarsest first.
    levels = [divide(text, cuts) for divide in _LEVELS[strategy]]

    def longest(level: Sequence[int], start: int, after: int) -> tuple[int, Piece] | None:
        """Return the longest chunk from `start` that ends at a cut of a level beyond `after`."""
        limit = cuts.tokens[start] + size
        while True:
            # White space at the end, which can have tokens, is not in the chunk.
            last_fitting = max(bisect_right(cuts.tokens, limit) - 1, start + 1)
            index = bisect_right(level, last_fitting) - 1
            if index < 0 or level[index] <= after:
                return None
            end = level[index]
            count = cuts.tokens[end] - cuts.tokens[start]
            begin, part = cuts.chars[start], text[cuts.chars[start] : cuts.chars[end]]
            if not is_blank:
                begin += len(part) - len(part.lstrip())
                part = part.strip()
            tokens, excess = measure(part, count)
            if excess <= 0:
                chunk = Chunk(begin, begin + len(part), tokens)
                return end, Piece(chunk, cuts.tokens[start], cuts.tokens[end])
            if end <= start + 1:
                return None
            limit = cuts.tokens[end] - excess

    end, starts = 0, [0]
    while end < len(cuts.tokens) - 1:
        # A coarse end is worth more than overlap, of which the first start has the most.
        chosen = next(
            (
                (level, start, *longest_chunk)
                for level in levels
                for start in starts
                if (longest_chunk := longest(level, start, end)) is not None
            ),
            None,
        )
        if chosen is None:
            raise InvalidInput(
                f"size is too small: an indivisible part of the text has more than {size} tokens",
                pointer="/chunking/size",
            )
        level, start, end, piece = chosen
        yield piece
        repeated = bisect_left(cuts.tokens, cuts.tokens[end] - overlap)
        starts = level[bisect_left(level, max(repeated, start + 1)) : bisect_right(level, end)]


def _cuts(text: str, spans: Sequence[Span], is_blank: bool) -> _Cuts:
    starts, ends = np.array(spans, np.intp).reshape(-1, 2).T
    rank_of = np.zeros(len(text) + 1, np.intp)
    np.cumsum([is_blank or not char.isspace() for char in text], out=rank_of[1:])
    # A character can have several tokens, such as the bytes of an emoji. Tokens of white space
    # alone belong to the token after them.
    reached = np.concatenate(([0], np.maximum.accumulate(ends)))
    is_free = (starts >= reached[:-1]) & (rank_of[starts] < rank_of[-1])
    free = np.flatnonzero(is_free)
    _, firsts = np.unique(rank_of[starts[free]], return_index=True)
    # The first chunk has the characters before the first token too, which the tokenizer drops.
    inner = free[firsts[1:]]
    return _Cuts(
        [0, *inner.tolist(), len(spans)],
        [0, *starts[inner].tolist(), len(text)],
        rank_of[[0, *starts[inner], len(text)]],
        rank_of[[0, *reached[inner], reached[-1]]],
        rank_of,
    )


def _at(cuts: _Cuts, positions: Sequence[int]) -> list[int]:
    """Return the indices of the cuts at positions in the text, and of the last cut.

    White space and characters without a token make no difference. A position within a token is
    left out.
    """
    ranks = cuts.rank_of[positions]
    indices = np.searchsorted(cuts.ranks, ranks)
    is_between = cuts.low_ranks[indices] <= ranks
    return sorted({*indices[is_between].tolist(), len(cuts.tokens) - 1})


def _paragraphs(text: str, cuts: _Cuts) -> list[int]:
    return _at(cuts, paragraph_starts(text))


def _sentences(text: str, cuts: _Cuts) -> list[int]:
    return _at(cuts, sentence_starts(text))


def _tokens(_text: str, cuts: _Cuts) -> list[int]:
    return list(range(len(cuts.tokens)))


_LEVELS: Mapping[Strategy, Sequence[Callable[[str, _Cuts], list[int]]]] = {
    "tokens": (_tokens,),
    "sentences": (_sentences, _tokens),
    "paragraphs": (_paragraphs, _sentences, _tokens),
}
