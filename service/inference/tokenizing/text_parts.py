"""Encoding of the part of a long text that fills a model's maximum length.

A megabyte of text has hundreds of times as many tokens as a model takes. So only the first or last
part of a long text is tokenised. The text is cut at a boundary between two words, unless tokens can
span it.
"""

import re
from collections.abc import Callable, Sequence

from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordPiece

# Characters per token of the first part that is tried; a part with too few tokens is enlarged.
# English text has four to five, code and other scripts fewer.
CHARS_PER_TOKEN = 8
# Number of tokens that a part must have beyond the maximum length, so that truncation drops the
# tokens next to the cut.
MARGIN = 16

# Not \s: normalisers remove some of the characters that it matches, which joins the words around
# them.
_BOUNDARY = re.compile(r"(?<=[^\W_])[ \t\n\r](?=[^\W_])")
# White space between the words of a token, also as byte-level BPE and SentencePiece spell it.
_SPANNING = re.compile(r"[^\W_][ \t\n\r▁ĠĉĊč][^\W_]")
# Number of characters that are searched for a boundary, from the intended cut into the part.
_SEARCHED = 500


def encode_parts(
    texts: Sequence[str],
    limit: int,
    encode: Callable[[Sequence[str]], Sequence[Encoding]],
    overflow: Callable[[Encoding], int],
    *,
    at_end: bool,
) -> list[tuple[Encoding, bool]]:
    """Return the encoding of a part of each text that fills `limit`, and whether it is all of it.

    Args:
        texts: The texts.
        limit: Maximum number of tokens.
        encode: Encodes parts of texts.
        overflow: Returns the number of tokens of an encoding beyond the limit.
        at_end: Whether parts are from the ends of the texts.
    """
    chars = CHARS_PER_TOKEN * limit
    encoded: dict[int, tuple[Encoding, bool]] = {}
    while len(encoded) < len(texts):
        parts = {
            index: part_of(text, chars, at_end=at_end)
            for index, text in enumerate(texts)
            if index not in encoded
        }
        encodings = encode(list(parts.values()))
        for (index, part), encoding in zip(parts.items(), encodings, strict=True):
            is_whole = len(part) == len(texts[index])
            if is_whole or overflow(encoding) >= MARGIN:
                encoded[index] = encoding, is_whole
        chars *= 4
    return [encoded[index] for index in range(len(texts))]


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


def tokens_span_words(tokenizer: Tokenizer) -> bool:
    """Return whether a token can span two words, or depend on one that is far from it.

    An added token can contain white space. A normalizer can remove white space, and a pre-tokenizer
    can leave words together: WordPiece takes them for one that is too long, and others join them to
    a token. Parts of a fixed length depend on the number of characters before them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if any(re.search(r"\s", token.content) for token in added):
        return True
    pre_tokenizer, text = tokenizer.pre_tokenizer, "a b\tc\nd\re"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if re.search("[a-e]{2}", text) or "FixedLength" in str(pre_tokenizer):
        return True
    parts = [part for part, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]
    if all(len(re.findall("[a-e]", part)) <= 1 for part in parts):
        return False
    is_word_piece = isinstance(tokenizer.model, WordPiece)
    return is_word_piece or any(map(_SPANNING.search, tokenizer.get_vocab()))
