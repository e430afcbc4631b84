"""Rows of texts whose words are tagged: with the limits of the words, or with labels."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from tokenizers import Encoding

from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput, point_to
from service.inference.tokenizing.labelled_texts import LabelledTexts
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import TextTokenizer


class WordRows:
    """Rows of texts whose words are tagged. Its methods may be called from any thread.

    Args:
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def rows(self, texts: Sequence[str], on_overflow: OnOverflow) -> list[Row]:
        """Tokenize each text into a row with the spans of its tokens and the limits of its words.

        The words are those of transformers' token classification pipeline. A vocabulary that marks
        tokens within words ("##") gives them exactly. Otherwise they are separated by spaces alone,
        and punctuation belongs to the word beside it.

        Raises:
            VitrineError: Any error of `TextTokenizer.rows_of_texts`, under the same conditions.
        """
        encoded = self._tokenizer.rows_with_offsets(texts, None, on_overflow)
        return [
            replace(
                row,
                # Unlike `spans_of`, with the empty span of a token that stands for no character.
                offsets=[
                    None if special else span
                    for span, special in zip(
                        encoding.offsets, encoding.special_tokens_mask, strict=True
                    )
                ],
                continues=self._continues(text, encoding),
            )
            for text, (row, encoding) in zip(texts, encoded, strict=True)
        ]

    def rows_with_labels(
        self, texts: Sequence[str], labels: Sequence[str], on_overflow: OnOverflow
    ) -> list[Row]:
        """Tokenize each text, with labels before it, into a row with the positions of both.

        Raises:
            InvalidInput: A text or a label cannot be encoded in UTF-8, or a label is invalid (see
                `LabelledTexts.rows`). A text is too long, and `on_overflow` is "error". Or
                `on_overflow` is "truncate_left".
            TooLarge: A text or a label has too many characters.
        """
        if on_overflow == "truncate_left":
            raise InvalidInput(
                "the start of a text with labels cannot be truncated", pointer="/on_overflow"
            )
        for index, text in enumerate(texts):
            self._tokenizer.check_text(text, index)
        for index, label in enumerate(labels):
            with point_to(f"/labels/{index}"):
                self._tokenizer.check_text(label, index)
        rows = self._labelled_texts.rows(texts, labels)
        for index, row in enumerate(rows):
            if row.truncated and on_overflow == "error":
                raise InvalidInput(
                    "the input has more words or tokens than the model's maximum",
                    code="too_long",
                    index=index,
                )
        return rows

    @cached_property
    def _labelled_texts(self) -> LabelledTexts:
        rules, limit = self._tokenizer.manifest.spans, self._tokenizer.manifest.max_tokens
        if rules is None:
            raise RuntimeError("the model reads no labels")
        return LabelledTexts(self._tokenizer.shared.variant(limit), rules, limit)

    def _continues(self, text: str, encoding: Encoding) -> list[bool]:
        """Return whether each token continues the word of the token before it."""
        own = self._tokenizer.manifest.unknown_id
        unknown = self._tokenizer.unknown_id if own is None else own
        if self._marks_subwords:  # a marked token is longer than its span
            return [
                token_id != unknown and len(token) != end - start
                for token_id, token, (start, end) in zip(
                    encoding.ids, encoding.tokens, encoding.offsets, strict=True
                )
            ]
        return [
            token_id != unknown and start > 0 and " " not in text[start - 1 : start + 1]
            for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    @cached_property
    def _marks_subwords(self) -> bool:
        return bool(
            getattr(self._tokenizer.shared.variant(None).model, "continuing_subword_prefix", None)
        )
