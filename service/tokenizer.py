"""Text to rows of token ids, each checked and cut to the model's length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeVar

from tokenizers import Encoding, Tokenizer

from models.artifact import TOKENIZER, Artifact
from service.errors import InvalidInput, ServiceError, TooLarge

# Characters that are tokenised in one call.
_SLICE_CHARS = 200_000
# Characters of a text that is tokenised with the interpreter's lock held. The call for batches
# gives it up, and where engines want it too, to get it back takes longer than such a text.
_SHORT_CHARS = 500

Input = TypeVar("Input")
Span = tuple[int, int]
OnOverflow = Literal["truncate", "truncate_left", "error"]


@dataclass(frozen=True, slots=True)
class Row:
    """One input as the model sees it.

    Attributes:
        ids: Token ids, special tokens included.
        truncated: Whether the input had more.
        unpooled: Leading tokens that pooling leaves out, those of a prompt.
    """

    ids: Sequence[int]
    truncated: bool
    unpooled: int


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens, for people to look at.

    Attributes:
        row: What the model sees of it.
        tokens: As the vocabulary spells them.
        spans: Start and end of each token in the text, in characters; None for tokens that are not
            of it: special ones and those of a prompt.
        baseline: Ids of the same length in which a padding, or mask, token stands for each token
            of the text; by the name of what stands there.
    """

    row: Row
    tokens: Sequence[str]
    spans: Sequence[Span | None]
    baseline: Mapping[str, Sequence[int]]


# How the families spell the tokens that can stand for nothing.
_NOTHING = {"pad": ("[PAD]", "<pad>"), "mask": ("[MASK]", "<mask>")}


class TextTokenizer:
    """The tokenizer of an artifact. Its methods may be called from any thread.

    Args:
        artifact: Brings tokenizer, prompts and limits.
        max_chars: A longer text is refused before it is tokenised, which would take long.
    """

    def __init__(self, artifact: Artifact, max_chars: int) -> None:
        manifest = artifact.manifest
        self._tokenizer = Tokenizer.from_buffer(artifact.read(TOKENIZER))
        self._tokenizer.enable_truncation(manifest.max_tokens)
        self._manifest = manifest
        self._max_chars = max_chars
        self._special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._unpooled = {
            name: 0 if manifest.include_prompt or not text else self._prompt_tokens(text)
            for name, text in manifest.prompts.items()
        }

    def rows(
        self,
        inputs: Sequence[str | Sequence[int]],
        prompt_name: str | None,
        on_overflow: OnOverflow,
    ) -> list[Row]:
        """Return the row of each text and of each list of token ids.

        Raises:
            InvalidInput: As `rows_of_texts` and `rows_of_ids`; or a prompt is to go before ids.
            TooLarge: A text has too many characters.
        """
        texts = {place: text for place, text in enumerate(inputs) if isinstance(text, str)}
        ids = {place: row for place, row in enumerate(inputs) if not isinstance(row, str)}
        if ids and prompt_name is not None:
            raise InvalidInput(
                "a prompt goes with texts, not with token ids", pointer="/prompt_name"
            )
        rows = _placed(texts, lambda texts: self.rows_of_texts(texts, prompt_name, on_overflow))
        rows |= _placed(ids, lambda ids: self.rows_of_ids(ids, on_overflow))
        return [rows[place] for place in range(len(inputs))]

    def rows_of_texts(
        self, texts: Sequence[str], prompt_name: str | None, on_overflow: OnOverflow
    ) -> list[Row]:
        """Return the row of each text, with the prompt, or else the default prompt, before it.

        Raises:
            InvalidInput: A text is empty, holds a NUL or no token at all, is too long where that
                is an error, or the prompt is not known.
            TooLarge: A text has too many characters.
        """
        for index, text in enumerate(texts):
            self._check_text(text, index)
        prompt, unpooled = self._prompt(prompt_name)
        rows = [
            Row(ids, truncated, unpooled)
            for part in _slices(texts)
            for ids, truncated in self._encode([prompt + text for text in part], on_overflow)
        ]
        for index, row in enumerate(rows):
            # A prompt's last token can merge with the text's first, so a short row is looked at
            # again without its prompt.
            if len(row.ids) <= self._special + unpooled and not self._has_tokens(texts[index]):
                raise InvalidInput(
                    "the text has no token that the model knows", code="no_tokens", index=index
                )
            if row.truncated and unpooled and on_overflow == "truncate_left":
                raise InvalidInput(
                    "pooling leaves the prompt out, so it cannot be cut off with the left end",
                    code="too_long",
                    index=index,
                )
            if row.truncated and len(row.ids) <= unpooled:
                raise InvalidInput(
                    "the prompt alone fills the model's length", code="too_long", index=index
                )
        self._check_overflow(rows, on_overflow)
        return rows

    def tokenized_text(self, text: str, prompt_name: str | None) -> TokenizedText:
        """Return the tokens of one text, and where they are in it.

        Raises:
            InvalidInput: As `rows_of_texts`; it is longer than the model takes, in any case.
            TooLarge: The text has too many characters.
        """
        (row,) = self.rows_of_texts([text], prompt_name, "error")
        ((tokens, spans),) = self.tokens_and_spans([text], prompt_name)
        baseline = {
            name: [
                token if span is None else stand_in
                for token, span in zip(row.ids, spans, strict=True)
            ]
            for name, spellings in _NOTHING.items()
            for stand_in in [self._first_id(spellings)]
            if stand_in is not None
        }
        return TokenizedText(row, tokens, spans, baseline)

    def tokens_and_spans(
        self, texts: Sequence[str], prompt_name: str | None
    ) -> list[tuple[Sequence[str], Sequence[Span | None]]]:
        """Return the tokens of texts that have a row, and where they are; see `TokenizedText`."""
        prompt, _ = self._prompt(prompt_name)
        found: list[tuple[Sequence[str], Sequence[Span | None]]] = []
        for part in _slices(texts):
            with _panics_are_errors():
                # The batch call, also for one text: it alone releases the interpreter lock.
                encodings = self._tokenizer.encode_batch([prompt + text for text in part])
            found += [(encoding.tokens, _spans(encoding, len(prompt))) for encoding in encodings]
        return found

    def spans(
        self, inputs: Sequence[str | Sequence[int]], prompt_name: str | None
    ) -> list[Sequence[Span | None] | None]:
        """Return where the tokens of each input are in it; None for ids, which are in no text."""
        texts = [given for given in inputs if isinstance(given, str)]
        found = iter(self.tokens_and_spans(texts, prompt_name) if texts else ())
        return [next(found)[1] if isinstance(given, str) else None for given in inputs]

    def _first_id(self, spellings: Sequence[str]) -> int | None:
        ids = map(self._tokenizer.token_to_id, spellings)
        return next((token for token in ids if token is not None), None)

    def rows_of_ids(self, inputs: Sequence[Sequence[int]], on_overflow: OnOverflow) -> list[Row]:
        """Return the row of each list of token ids, taken as it is, special tokens and all.

        Raises:
            InvalidInput: A list is empty, an id is not in the vocabulary, or a list is too long
                where that is an error.
        """
        self._check_ids(inputs)
        limit = self._manifest.max_tokens
        kept = slice(-limit, None) if on_overflow == "truncate_left" else slice(limit)
        rows = [Row(ids[kept], len(ids) > limit, 0) for ids in inputs]
        self._check_overflow(rows, on_overflow)
        return rows

    def pieces(
        self, texts: Sequence[str], prompt_name: str | None, add_special_tokens: bool, most: int
    ) -> list[list[tuple[int, str, Span | None]]]:
        """Return id, text and place in bytes of each token of texts, the prompt before them.

        Nothing is cut. Special tokens have no place, and are spelt as the vocabulary does.

        Raises:
            InvalidInput: A text is empty or holds a NUL, the prompt is not known, or there are more
                than `most` tokens.
            TooLarge: A text has too many characters.
        """
        for index, text in enumerate(texts):
            self._check_text(text, index)
        prompt, _ = self._prompt(prompt_name)
        found: list[list[tuple[int, str, Span | None]]] = []
        for part in _slices(texts):
            prompted = [prompt + text for text in part]
            with _panics_are_errors():
                encodings = self._uncut.encode_batch(
                    prompted, add_special_tokens=add_special_tokens
                )
            most -= sum(map(len, encodings))
            if most < 0:
                raise InvalidInput(
                    "the texts have more tokens than are listed in one answer",
                    code="too_many_tokens",
                    pointer="/inputs",
                )
            found += [_pieces(*pair) for pair in zip(prompted, encodings, strict=True)]
        return found

    def decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of token ids.

        Raises:
            InvalidInput: A list is empty, or an id is not in the vocabulary.
        """
        self._check_ids(rows)
        with _panics_are_errors():
            texts: list[str] = self._tokenizer.decode_batch(rows, skip_special_tokens)
        return texts

    @cached_property
    def _uncut(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _cutting_left(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.enable_truncation(self._manifest.max_tokens, direction="left")
        return tokenizer

    def _encode(
        self, texts: Sequence[str], on_overflow: OnOverflow = "truncate"
    ) -> list[tuple[list[int], bool]]:
        """Return the ids of each text, and whether there were more."""
        tokenizer = self._cutting_left if on_overflow == "truncate_left" else self._tokenizer
        with _panics_are_errors():
            if len(texts) == 1 and len(texts[0]) <= _SHORT_CHARS:
                encodings = [tokenizer.encode(texts[0])]
            else:
                encodings = tokenizer.encode_batch_fast(texts)
        return [(encoding.ids, bool(encoding.overflowing)) for encoding in encodings]

    def _check_text(self, text: str, index: int) -> None:
        if not text or text.isspace():
            raise InvalidInput("the text is empty or only white space", code="empty", index=index)
        if len(text) > self._max_chars:
            raise TooLarge(
                f"the text has {len(text)} characters; {self._max_chars} are taken",
                code="text_too_large",
                index=index,
            )
        if "\0" in text:
            raise InvalidInput("the text holds a NUL character", code="nul", index=index)

    def _check_ids(self, inputs: Sequence[Sequence[int]]) -> None:
        for index, ids in enumerate(inputs):
            if not ids:
                raise InvalidInput("the list of ids is empty", code="empty", index=index)
            if min(ids) < 0 or max(ids) >= self._manifest.vocab_size:
                raise InvalidInput(
                    f"ids must be from 0 to {self._manifest.vocab_size - 1}",
                    code="id_out_of_range",
                    index=index,
                )

    def _check_overflow(self, rows: Sequence[Row], on_overflow: OnOverflow) -> None:
        if on_overflow != "error":
            return
        for index, row in enumerate(rows):
            if row.truncated:
                raise InvalidInput(
                    f"the input has more than {self._manifest.max_tokens} tokens",
                    code="too_long",
                    index=index,
                )

    def _prompt(self, name: str | None) -> tuple[str, int]:
        """Return the prompt, or else the default prompt, and its unpooled tokens."""
        if name is None:
            name = self._manifest.default_prompt
        if name is None:
            return "", 0
        if name not in self._manifest.prompts:
            names = ", ".join(sorted(self._manifest.prompts)) or "none"
            raise InvalidInput(
                f"the prompt is not known; the model has: {names}",
                code="unknown_prompt",
                pointer="/prompt_name",
            )
        return self._manifest.prompts[name], self._unpooled[name]

    def _prompt_tokens(self, prompt: str) -> int:
        """Tokens of a prompt before a text, the leading special ones included."""
        encoding = self._tokenizer.encode(prompt)
        return len(encoding.ids) - encoding.special_tokens_mask[-1]

    def _has_tokens(self, text: str) -> bool:
        return len(self._encode([text])[0][0]) > self._special


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except BaseException as panic:  # a panic of the tokenizer's library is no Exception
        raise RuntimeError("the tokenizer panicked") from panic


def _placed(
    inputs: Mapping[int, Input], rows_of: Callable[[Sequence[Input]], list[Row]]
) -> dict[int, Row]:
    """Return the row of each input by its place in the request, which an error names too."""
    places = list(inputs)
    try:
        return dict(zip(places, rows_of(list(inputs.values())), strict=True))
    except ServiceError as error:
        if error.index is not None:
            error.at(places[error.index])
        raise


def _spans(encoding: Encoding, start: int) -> list[Span | None]:
    """Where the tokens are in the text, which begins at `start` of what was encoded."""
    return [
        None if special or end <= start else (max(begin, start) - start, end - start)
        for (begin, end), special in zip(
            encoding.offsets, encoding.special_tokens_mask, strict=True
        )
    ]


def _pieces(text: str, encoding: Encoding) -> list[tuple[int, str, Span | None]]:
    # Where each character begins, in bytes.
    starts = list(accumulate((len(char.encode()) for char in text), initial=0))
    return [
        (token_id, token, None)
        if special
        else (token_id, text[begin:end], (starts[begin], starts[end]))
        for token_id, token, special, (begin, end) in zip(
            encoding.ids,
            encoding.tokens,
            encoding.special_tokens_mask,
            encoding.offsets,
            strict=True,
        )
    ]


def _slices(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut the texts into parts: what lies behind a cut of a long text takes memory until then."""
    start, chars = 0, 0
    for end, text in enumerate(texts):
        chars += len(text)
        if chars > _SLICE_CHARS and end > start:
            yield texts[start:end]
            start, chars = end, len(text)
    yield texts[start:]
