"""Rows of texts with labels, for models that find entities with labels of the request.

A text is divided into words by a regular expression, and each word is tokenised on its own, as are
the labels before them. So a text cannot contain the marker of a label: its signs are words. And the
tokens of the labels are the same before each text, so that they are tokenised once.

Source: the package gliner 0.2.29. There, words without tokens are entities too, and shift the words
after them.
"""

import re
from collections.abc import Sequence
from itertools import islice

from tokenizers import Encoding, Tokenizer

from models.manifest import SpanRules
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
        before, after, at = self._prompt(labels)
        rows: list[Row] = []
        for part in slices(texts):
            words = [self._words(text) for text in part]
            inputs = [
                [text[start:end] for start, end in own[: self._rules.max_words]]
                for text, own in zip(part, words, strict=True)
            ]
            for own, encoding in zip(words, self._encode(inputs), strict=True):
                rows.append(self._row(encoding, own, before, after, at))
        return rows

    def _words(self, text: str) -> list[Span]:
        """Return the spans of the words that fit, and of one more."""
        return [match.span() for match in islice(_WORD.finditer(text), self._rules.max_words + 1)]

    def _encode(
        self, inputs: Sequence[Sequence[str]], *, with_special: bool = False
    ) -> list[Encoding]:
        with panics_as_errors("the tokenizer"):
            encodings: list[Encoding] = self._tokenizer.encode_batch(
                inputs, is_pretokenized=True, add_special_tokens=with_special
            )
            return encodings

    def _prompt(self, labels: Sequence[str]) -> tuple[list[int], list[int], tuple[int, ...]]:
        """Return the ids before and after each text, and the positions of the labels' markers.

        Raises:
            InvalidInput: See `rows`.
        """
        names = [*dict.fromkeys(labels)]
        prompt = [word for name in names for word in (self._rules.label_marker, name)]
        prompt.append(self._rules.text_marker)
        (encoding,) = self._encode([prompt], with_special=True)
        first = first_tokens(encoding.word_ids)
        # One token of a text, and the special token after it, have to fit too.
        if encoding.overflowing or len(encoding.ids) >= self._max_tokens:
            raise InvalidInput(
                f"the {len(names)} labels leave no room for a text within the model's maximum of "
                f"{self._max_tokens} tokens; use fewer or shorter labels",
                code="too_long",
                pointer="/labels",
            )
        marker = self._tokenizer.token_to_id(self._rules.label_marker)
        for index, name in enumerate(names):
            start, end = first.get(2 * index + 1), first.get(2 * index + 2)
            if start is None or marker in encoding.ids[start:end]:
                raise InvalidInput(
                    "the label has no tokens, or contains the marker of labels",
                    pointer=f"/labels/{labels.index(name)}",
                )
        # The text's tokens come between the last token of the prompt and special tokens after it.
        end = max(i for i, word in enumerate(encoding.word_ids) if word is not None) + 1
        positions = tuple(first[2 * index] for index in range(len(names)))
        return encoding.ids[:end], encoding.ids[end:], positions

    def _row(
        self,
        encoding: Encoding,
        words: Sequence[Span],
        before: list[int],
        after: list[int],
        labels: tuple[int, ...],
    ) -> Row:
        """Return the row of a text.

        Args:
            encoding: Encoding of the words that fit, without labels and special tokens.
            words: Spans of the words.
            before: Ids before the text.
            after: Ids after the text.
            labels: Positions of the labels' markers.
        """
        own = encoding.ids[: self._max_tokens - len(before) - len(after)]
        first = first_tokens(encoding.word_ids[: len(own)])
        count = min(len(words), self._rules.max_words)
        positions = [(len(before) + first[i], words[i]) for i in range(count) if i in first]
        ids = [*before, *own, *after]
        offsets: list[Span | None] = [None] * len(ids)
        for position, span in positions:
            offsets[position] = span
        # The package has zero vectors in place of words without tokens, after all others. The LSTM
        # reads them, and it needs at least one word.
        missing = max(count, 1) - len(positions)
        return Row(
            ids,
            len(own) < len(encoding.ids) or bool(encoding.overflowing) or len(words) > count,
            0,
            offsets=offsets,
            words=(*(position for position, _ in positions), *[NO_TOKEN] * missing),
            labels=labels,
        )
