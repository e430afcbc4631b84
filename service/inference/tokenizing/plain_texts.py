"""Plain texts: ASCII texts that the normalizer of BERT lowercases, if anything.

Most English texts are plain. For them the tokenizers library need not normalise, which takes 40 %
of its time, nor look for added tokens. And the tokens of a plain text are those of its words,
wherever these stand: with the tokens of many words at hand, a text of ten words takes 2 us, not 17.
"""

import re
from itertools import chain

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from models.panics import panics_as_errors

# Maximum number of words whose token ids are kept, and of characters of each. Beyond the first, all
# are forgotten. English words take 8 MB; without a limit of their length they could take 112.
_MAX_WORDS = 32_768
_MAX_WORD_CHARS = 24
# Maximum number of words that are looked up in the library for one text, each in 8 us.
_MAX_NEW_WORDS = 4

# What the pre-tokenizer of BERT makes of a plain text: words, and single punctuation marks.
_WORDS = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z ]")


class PlainTexts:
    """The plain texts of a tokenizer, and the token ids of their words.

    Its methods may be called from any thread.

    Args:
        pattern: Pattern of plain texts.
        lowercases: Whether the normalizer lowercases them.
        words: The tokenizer of plain texts, without truncation; None: the tokens of a text are not
            those of its words.
    """

    def __init__(
        self, pattern: re.Pattern[str], *, lowercases: bool, words: Tokenizer | None
    ) -> None:
        self._pattern = pattern
        self._lowercases = lowercases
        self._tokenizer = words
        self._ids: dict[str, list[int]] = {}  # of words
        self._before: list[int] = []
        self._after: list[int] = []
        if words is not None:
            encoding = words.encode("a")
            first, end = encoding.word_to_tokens(0) or (0, 0)
            self._before, self._after = encoding.ids[:first], encoding.ids[end:]

    def normalize(self, text: str) -> str | None:
        """Return a text as it is after normalisation; None: it is not plain."""
        if not self._pattern.fullmatch(text):
            return None
        return text.lower() if self._lowercases else text

    def ids(self, text: str) -> list[int] | None:
        """Return the token ids of a text, with special tokens and without truncation.

        None: it is not plain, its tokens are not those of its words, or too many words are new.
        """
        if self._tokenizer is None or (plain := self.normalize(text)) is None:
            return None
        words = _WORDS.findall(plain)
        known = self._ids
        try:
            return [*self._before, *chain.from_iterable([known[w] for w in words]), *self._after]
        except KeyError:
            new = list(dict.fromkeys(word for word in words if word not in known))
        if max(map(len, new), default=0) > _MAX_WORD_CHARS:  # another thread may have added them
            return None
        if len(known) + len(new) > _MAX_WORDS:
            known = self._ids = {}
        with panics_as_errors("the tokenizer"):
            for word in new[:_MAX_NEW_WORDS]:
                known[word] = self._tokenizer.encode(word, add_special_tokens=False).ids
        return self.ids(text) if len(new) <= _MAX_NEW_WORDS else None


def plain_texts(tokenizer: Tokenizer) -> PlainTexts | None:
    """Return the plain texts of a tokenizer; None: it has none.

    They lack the first character that an added token has before or after normalisation.
    """
    normalizer = tokenizer.normalizer
    if not isinstance(normalizer, BertNormalizer) or tokenizer.pre_tokenizer is None:
        return None
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    contents = [*added, *map(normalizer.normalize_str, added)]
    if not all(contents):
        return None
    first = {case for text in contents for case in (text[0].lower(), text[0].upper(), text[0])}
    characters = [char for char in map(chr, range(ord(" "), ord("~") + 1)) if char not in first]
    pattern = re.compile(f"[{re.escape(''.join(characters))}]*")
    words = None
    if isinstance(tokenizer.pre_tokenizer, BertPreTokenizer) and isinstance(
        tokenizer.model, WordPiece
    ):
        words = plain_variant(tokenizer)
    return PlainTexts(pattern, lowercases=normalizer.lowercase, words=words)


def plain_variant(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer of normalised plain texts, which shares the vocabulary of another one."""
    plain = Tokenizer(tokenizer.model)
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.post_processor = tokenizer.post_processor
    return plain
