"""Rows of texts with labels, for models that find entities with labels of the request.

A text is divided into words by a regular expression, and each word is tokenised on its own, as are
the labels before them. So a text cannot contain the marker of a label: its signs are words.

Source: the package gliner 0.2.29. There, words without tokens are entities too, and shift the words
after them.
"""

import re
from collections.abc import Sequence
from itertools import islice

from tokenizers import Encoding, Tokenizer

from models.artifact import SpanRules
from models.packing import NO_TOKEN, first_tokens
from models.panics import panics_as_errors
from service.inference.errors import InvalidInput
from service.inference.tokenizing.encodings import slices
from service.inference.tokenizing.rows import Row, Span

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


class LabelledTexts:
    """Tokenises texts with labels. Its methods may be called from any thread.

    Args:
        tokenizer: Tokenizer that truncates to the model's maximum length.
        rules: Rules of the model.
        max_tokens: The model's maximum length, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, rules: SpanRules, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._max_tokens = max_tokens

    def rows(self, texts: Sequence[str], labels: Sequence[str]) -> list[Row]:
        """Return the row of each text, with the positions of its words and of the labels.

        Texts are truncated to the model's maximum numbers of words and tokens. The offsets of a
        row are those of words, at their first tokens.

        Raises:
            InvalidInput: The labels leave no room for a text, or a label has no tokens or contains
                the marker of labels.
        """
        prompt = [word for label in labels for word in (self._rules.label_marker, label)]
        prompt.append(self._rules.text_marker)
        at = self._check(prompt, labels)
        rows: list[Row] = []
        for part in slices(texts):
            words = [self._words(text) for text in part]
            inputs = [
                [*prompt, *(text[start:end] for start, end in own[: self._rules.max_words])]
                for text, own in zip(part, words, strict=True)
            ]
            for own, encoding in zip(words, self._encode(inputs), strict=True):
                rows.append(self._row(encoding, own, len(prompt), at))
        return rows

    def _words(self, text: str) -> list[Span]:
        """Return the spans of the words that fit, and of one more."""
        return [match.span() for match in islice(_WORD.finditer(text), self._rules.max_words + 1)]

    def _encode(self, inputs: Sequence[Sequence[str]]) -> list[Encoding]:
        with panics_as_errors("the tokenizer"):
            encodings: list[Encoding] = self._tokenizer.encode_batch(inputs, is_pretokenized=True)
            return encodings

    def _check(self, prompt: Sequence[str], labels: Sequence[str]) -> list[int]:
        """Check the labels; return the positions of their markers."""
        (encoding,) = self._encode([prompt])
        first = first_tokens(encoding.word_ids)
        # One token of a text, and the special token after it, have to fit too.
        if encoding.overflowing or len(encoding.ids) >= self._max_tokens:
            raise InvalidInput(
                f"the {len(labels)} labels leave no room for a text within the model's maximum of "
                f"{self._max_tokens} tokens; use fewer or shorter labels",
                code="too_long",
                pointer="/labels",
            )
        marker = self._tokenizer.token_to_id(self._rules.label_marker)
        for index in range(len(labels)):
            start, end = first.get(2 * index + 1), first.get(2 * index + 2)
            if start is None or marker in encoding.ids[start:end]:
                raise InvalidInput(
                    "the label has no tokens, or contains the marker of labels",
                    pointer=f"/labels/{index}",
                )
        return [first[2 * index] for index in range(len(labels))]

    def _row(
        self, encoding: Encoding, words: Sequence[Span], prompt: int, labels: Sequence[int]
    ) -> Row:
        first = first_tokens(encoding.word_ids)
        count = min(len(words), self._rules.max_words)
        positions = [(first[prompt + i], words[i]) for i in range(count) if prompt + i in first]
        offsets: list[Span | None] = [None] * len(encoding.ids)
        for position, span in positions:
            offsets[position] = span
        # The package has zero vectors in place of words without tokens, after all others. The LSTM
        # reads them, and it needs at least one word.
        missing = max(count, 1) - len(positions)
        return Row(
            encoding.ids,
            bool(encoding.overflowing) or len(words) > count,
            0,
            offsets=offsets,
            words=(*(position for position, _ in positions), *[NO_TOKEN] * missing),
            labels=tuple(labels),
        )
