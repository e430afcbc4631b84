"""Tokenizers of the tokenizers library; models with equal tokenizer files share one.

A tokenizer with a vocabulary of 30,000 tokens takes 7 MB and 60 ms to load. The versions of a model
usually have equal files, and so have many models with the vocabulary of the same base model.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from models.manifest import TOKENIZER, ArtifactError
from models.panics import panics_as_errors
from models.printable import reason_of
from service.inference.tokenizing.plain_texts import plain_texts, plain_variant


class SharedTokenizer:
    """The tokenizer of a file, which nobody may change, in a variant per kind of truncation.

    Its methods may be called from any thread.

    Args:
        content: Content of the file `tokenizer.json`.

    Attributes:
        special_tokens: Number of special tokens that are added to a text.
        special_tokens_of_pair: Number of special tokens that are added to a pair of texts.
        largest_id: Largest token id that the tokenizer can return.
        plain_texts: The plain texts of the tokenizer; None: it has none.

    Raises:
        ArtifactError: The file pads or repeats texts: one of three letters could get millions of
            tokens. Or the normalizer makes two added tokens equal.
        Exception: The tokenizers library cannot read the file, or panics.
    """

    def __init__(self, content: bytes) -> None:
        self._first: Tokenizer = Tokenizer.from_buffer(content)
        if isinstance(self._first.model, Unigram):
            self._first.model = _exact_unigram(content)
        for name in ("padding", "truncation"):
            if getattr(self._first, name) is not None:
                raise ArtifactError(f"{TOKENIZER} has {name}, which the service sets itself")
        self._check_added_tokens()
        texts, pairs = self._template_ids("a"), self._template_ids("a", "a")
        self.special_tokens, self.special_tokens_of_pair = (
            self._first.num_special_tokens_to_add(is_pair=is_pair) for is_pair in (False, True)
        )
        vocabulary: dict[str, int] = self._first.get_vocab(with_added_tokens=True)
        self.largest_id = max([*texts, *pairs, *vocabulary.values()], default=-1)
        self.plain_texts = plain_texts(self._first)
        self._variants: dict[tuple[int | None, bool, bool, bool], Tokenizer] = {}
        self._lock = threading.Lock()

    def _check_added_tokens(self) -> None:
        """Check that the library finds the same added tokens at each load.

        Of those that the normalizer makes equal, it finds a random one.

        Raises:
            ArtifactError: The normalizer makes two added tokens equal.
        """
        normalizer, first = self._first.normalizer, dict[str, str]()
        for token in self._first.get_added_tokens_decoder().values():
            if token.normalized and normalizer is not None:
                other = first.setdefault(normalizer.normalize_str(token.content), token.content)
                if other != token.content:
                    raise ArtifactError(
                        f"{TOKENIZER} is invalid: its normalizer makes the added tokens {other!r} "
                        f"and {token.content!r} equal; export the model without one of them"
                    )

    def _template_ids(self, text: str, pair: str | None = None) -> list[int]:
        """Return the ids of a text or a pair with special tokens, which the vocabulary may lack.

        Raises:
            ArtifactError: The template of the post-processor repeats a text.
        """
        ids: list[int] = self._first.encode(text, pair).ids
        template, self._first.post_processor = self._first.post_processor, None
        plain = self._first.encode(text, pair).ids
        self._first.post_processor = template
        added = self._first.num_special_tokens_to_add(is_pair=pair is not None)
        if len(ids) > len(plain) + added:
            raise ArtifactError(f"{TOKENIZER} is invalid: its post_processor repeats a text")
        return ids

    def variant(
        self,
        limit: int | None,
        *,
        is_left: bool = False,
        is_plain: bool = False,
        encodes_special: bool = False,
    ) -> Tokenizer:
        """Return the tokenizer that truncates texts to `limit` tokens; None: no truncation.

        Args:
            limit: Maximum number of tokens, special tokens included.
            is_left: Whether a text that is too long loses its first tokens, not its last.
            is_plain: Whether it is for normalised plain texts, which it neither normalises nor
                searches for added tokens.
            encodes_special: Whether a text that spells a special token has the tokens of its
                characters.
        """
        key = limit, is_left, is_plain, encodes_special
        # Without the lock, because the event loop must not wait while a thread makes a variant.
        if (made := self._variants.get(key)) is not None:
            return made
        with self._lock:
            if key not in self._variants:
                self._variants[key] = self._make(*key)
            return self._variants[key]

    def _make(
        self, limit: int | None, is_left: bool, is_plain: bool, encodes_special: bool
    ) -> Tokenizer:
        if is_plain:
            tokenizer = plain_variant(self._first)
        elif any(not own for _, _, own, _ in self._variants):
            tokenizer = Tokenizer.from_str(self._first.to_str())
            tokenizer.model = self._first.model  # see `_exact_unigram`
        else:  # the first variant is the loaded tokenizer itself: most models need no other
            tokenizer = self._first
        if limit is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(limit, direction="left" if is_left else "right")
        tokenizer.encode_special_tokens = encodes_special
        return tokenizer


def _exact_unigram(content: bytes) -> Unigram:
    """Return the model of a file with the scores as they are written.

    The library's reader rounds one score in 25 to a neighbour of the nearest float64. Two divisions
    of a text into the same pieces, such as those of a line of dashes, differ by such errors alone.

    Args:
        content: Content of a file `tokenizer.json` that the library can read.
    """
    model = json.loads(content)["model"]
    vocabulary = [(token, score) for token, score in model["vocab"]]
    return Unigram(vocabulary, model.get("unk_id"), model.get("byte_fallback", False))


# By SHA-256 of the file; a tokenizer is freed with the last model that uses it.
_shared: WeakValueDictionary[bytes, SharedTokenizer] = WeakValueDictionary()
_lock = threading.Lock()


def shared_tokenizer(content: bytes) -> SharedTokenizer:
    """Return the tokenizer of a file; callers with equal content get the same one.

    Args:
        content: Content of the file `tokenizer.json`.

    Raises:
        ArtifactError: The tokenizers library cannot read the file, or the file pads texts.
    """
    key = hashlib.sha256(content).digest()
    with _lock:
        if (shared := _shared.get(key)) is None:
            with invalid_tokenizer_errors():
                shared = _shared[key] = SharedTokenizer(content)
        return shared


@contextmanager
def invalid_tokenizer_errors() -> Iterator[None]:
    """Raise errors and panics of the tokenizers library as `ArtifactError`, when it opens a file.

    Raises:
        ArtifactError: The block raised an exception.
    """
    try:
        with panics_as_errors("the tokenizers library"):
            yield
    except ArtifactError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ArtifactError(f"{TOKENIZER} is invalid: {reason_of(error)}") from error
