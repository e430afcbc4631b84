"""Encodings of texts by the tokenizers library: of long texts in part, of many texts in slices."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from models.panics import panics_as_errors
from service.inference.errors import TooLarge
from service.inference.tokenizing.rows import Span
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer
from service.inference.tokenizing.text_parts import CHARS_PER_TOKEN, encode_parts, tokens_span_words

# Maximum number of characters per call of the tokenizers library; a longer text gets its own call.
_SLICE_CHARS = 200_000
# Texts of up to this many characters in total are tokenised by their words, or else a single one
# without releasing the GIL. The batch call releases the GIL. Reacquiring it while engines keep all
# cores busy takes longer than tokenising such a text.
_SHORT_CHARS = 500


class WordsEncoding(NamedTuple):
    """The encoding of a plain text by its words, which is not truncated."""

    ids: Sequence[int]
    overflowing: Sequence[Encoding] = ()


class TextEncodings:
    """Encodes texts. Its methods may be called from any thread.

    All of them raise `TooLarge` for a text that must be tokenised at once and is too long.

    Args:
        shared: The tokenizer.
        max_whole_chars: Maximum number of characters that are tokenised at once.
        encodes_special: Whether texts that spell special tokens have the tokens of their
            characters.

    Attributes:
        max_whole_chars: See the arguments.
        cuts_texts: Whether only a part of a long text is tokenised if the rest would be truncated.
    """

    def __init__(
        self, shared: SharedTokenizer, max_whole_chars: int, *, encodes_special: bool = False
    ) -> None:
        self._shared = shared
        self._encodes_special = encodes_special
        self.max_whole_chars = max_whole_chars
        self.cuts_texts = not tokens_span_words(shared.variant(None))

    def encode_truncated(
        self,
        texts: Sequence[str],
        limit: int,
        *,
        is_left: bool = False,
        with_offsets: bool = False,
        with_special: bool = True,
    ) -> list[Encoding]:
        """Encode texts and truncate them.

        Args:
            texts: The texts.
            limit: Maximum number of tokens, special tokens included.
            is_left: Whether a text that is too long loses its first tokens, not its last.
            with_offsets: Whether encodings have the offsets of their tokens in characters.
            with_special: Whether to add special tokens.
        """
        encode = partial(self._encode, limit, is_left, with_offsets, with_special)
        # Offsets count from the start of the text, which is missing in a part from its end.
        is_cut = self.cuts_texts and not (is_left and with_offsets)
        if not is_cut or max(map(len, texts), default=0) <= 2 * CHARS_PER_TOKEN * limit:
            return encode(texts)
        special = self._shared.special_tokens if with_special else 0

        def overflow(encoding: Encoding) -> int:
            return sum(len(each) - special for each in encoding.overflowing)

        encoded = encode_parts(texts, limit, encode, overflow, at_end=is_left)
        return [encoding for encoding, _ in encoded]

    def of_words(self, texts: Sequence[str], limit: int) -> list[WordsEncoding] | None:
        """Encode short texts by their words, with special tokens.

        None: they are not short, or one is not plain, has too many new words, or exceeds `limit`
        tokens.
        """
        plain = self._shared.plain_texts
        if plain is None or sum(map(len, texts)) > min(_SHORT_CHARS, self.max_whole_chars):
            return None
        encodings: list[WordsEncoding] = []
        for text in texts:
            ids = plain.ids(text)
            if ids is None or len(ids) > limit:
                return None
            encodings.append(WordsEncoding(ids))
        return encodings

    def without_special(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode texts without special tokens and truncation; the encodings lack offsets."""
        encode = partial(self._encode, None, False, False, False)
        return [encoding for part in slices(texts) for encoding in encode(part)]

    def encode_whole(self, texts: Sequence[str], *, with_special: bool) -> list[Encoding]:
        """Encode texts without truncation, with the offsets of their tokens in characters."""
        self._check(texts)
        with panics_as_errors("the tokenizer"):
            encodings: list[Encoding] = self._whole_texts.encode_batch(
                texts, add_special_tokens=with_special
            )
        return encodings

    def of_pair(self, first: str, second: str) -> Encoding:
        """Encode two texts as one input, without truncation, with special tokens and offsets."""
        self._check((first, second))
        with panics_as_errors("the tokenizer"):
            return self._whole_texts.encode(first, second)

    @property
    def _whole_texts(self) -> Tokenizer:
        """The tokenizer without truncation."""
        return self._shared.variant(None, encodes_special=self._encodes_special)

    def _encode(
        self,
        limit: int | None,
        is_left: bool,
        with_offsets: bool,
        with_special: bool,
        texts: Sequence[str],
    ) -> list[Encoding]:
        """Encode texts whole; see `encode_truncated`. `limit` None: without truncation."""
        self._check(texts)

        def encode(group: Sequence[str], *, is_plain: bool) -> list[Encoding]:
            tokenizer = self._shared.variant(
                limit,
                is_left=is_left,
                is_plain=is_plain,
                encodes_special=self._encodes_special and not is_plain,
            )
            return _encode_all(tokenizer, group, with_offsets, with_special)

        plain_texts = self._shared.plain_texts
        if plain_texts is None:
            return encode(texts, is_plain=False)
        plain = [plain_texts.normalize(text) for text in texts]
        normalized = [own for own in plain if own is not None]
        if not normalized:
            return encode(texts, is_plain=False)
        if len(normalized) == len(texts):
            return encode(normalized, is_plain=True)
        others = [text for text, own in zip(texts, plain, strict=True) if own is None]
        groups = {
            True: iter(encode(normalized, is_plain=True)),
            False: iter(encode(others, is_plain=False)),
        }
        return [next(groups[own is not None]) for own in plain]

    def _check(self, texts: Sequence[str]) -> None:
        # The library takes up to 620 bytes per character, and aborts the process without memory.
        longest = max(map(len, texts), default=0)
        if longest > self.max_whole_chars:
            raise TooLarge(
                f"a part of {longest} characters of the text must be tokenised at once; the limit "
                f"is {self.max_whole_chars}",
                code="text_too_large",
            )


def _encode_all(
    tokenizer: Tokenizer, texts: Sequence[str], with_offsets: bool, with_special: bool
) -> list[Encoding]:
    with panics_as_errors("the tokenizer"):
        if len(texts) == 1 and len(texts[0]) <= _SHORT_CHARS:
            return [tokenizer.encode(texts[0], add_special_tokens=with_special)]
        encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
        encodings: list[Encoding] = encode(texts, add_special_tokens=with_special)
        return encodings


def slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield slices of texts, each for one call of the tokenizers library.

    Smaller calls take less memory: truncated tokens stay in memory until the call returns.
    """
    start, chars = 0, 0
    for end, text in enumerate(texts):
        chars += len(text)
        if chars > _SLICE_CHARS and end > start:
            yield texts[start:end]
            start, chars = end, len(text)
    yield texts[start:]


def spans_of(encoding: Encoding, start: int) -> list[Span | None]:
    """Return the span of each token in the text; None for special tokens and prompt tokens.

    Args:
        encoding: Encoding of the prompt and the text.
        start: Length of the prompt, in characters.
    """
    return [
        None if special or end <= start else (max(begin, start) - start, end - start)
        for (begin, end), special in zip(
            encoding.offsets, encoding.special_tokens_mask, strict=True
        )
    ]


def outer_span(spans: Sequence[Span | None], text: str, *, drops_left: bool) -> Span:
    """Return the part of a text to the last of the spans, or from the first if `drops_left`."""
    own = [span for span in spans if span is not None]
    if not own:
        return 0, 0
    return (min(own)[0], len(text)) if drops_left else (0, max(end for _, end in own))
