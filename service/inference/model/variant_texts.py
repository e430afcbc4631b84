"""Texts of variants, as the model reads them: what is read of a text, and the tokens of a row."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from service.inference.call_options import CallOptions, OnOverflow
from service.inference.errors import InvalidInput
from service.inference.model.scoring import Input
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Span

# Prompts of the texts of a pair that are encoded separately.
_SIDES = ("query", "document")


@dataclass(frozen=True)
class VariantTexts:
    """How a model reads texts and pairs of texts.

    Attributes:
        model: The model.
        limits: Maximum number of tokens of both texts of a pair.
        options: Options of the call.
    """

    model: LoadedModel
    limits: PairLimits
    options: CallOptions

    @property
    def overflow(self) -> OnOverflow:
        """Handling of variants that are too long.

        A variant of a text that just fits can have more tokens, and "error" would refuse it.
        """
        overflow = self.options.on_overflow
        return "truncate" if overflow == "error" else overflow

    @property
    def are_read_together(self) -> bool:
        """Whether the model reads both texts of a pair at once."""
        return "logits" in self.model.artifact.manifest.outputs

    def read(self, whole: Input) -> Sequence[Span]:
        """Return the span of each text of an input that the model reads."""
        tokenizer, overflow = self.model.tokenizer, self.options.on_overflow
        prompt = self.options.prompt_name
        if isinstance(whole, str):
            return [tokenizer.read_span(whole, prompt, overflow)]
        if self.are_read_together:
            return tokenizer.read_spans(whole, prompt, overflow, self.limits)
        sides = zip(whole, _SIDES, strict=True)
        return [tokenizer.read_span(text, side, overflow) for text, side in sides]

    def tokens(self, inputs: Iterable[Input]) -> int:
        """Return the number of tokens of inputs, with those of equal rows once."""
        tokenizer, distinct = self.model.tokenizer, [*dict.fromkeys(inputs)]
        if self.are_read_together:
            prompted = self.options.prompt_name, self.overflow
            rows = tokenizer.rows_of_pairs(distinct, *prompted, self.limits)
            return sum(len(row.ids) for row in rows)
        return sum(
            len(row.ids)
            for side, texts in zip(_SIDES, zip(*distinct, strict=True), strict=True)
            for row in tokenizer.rows_of_texts([*dict.fromkeys(texts)], side, self.overflow)
        )

    def length(self, own: Input, text: int) -> int:
        """Return the number of tokens that run for a text of an input; 0: it has no tokens.

        Those of the other text count too if both are read at once.
        """
        tokenizer, prompt = self.model.tokenizer, self.options.prompt_name
        if self.are_read_together:
            rows = partial(tokenizer.rows_of_pairs, [own], prompt, "truncate", self.limits)
        else:
            rows = partial(tokenizer.rows_of_texts, [own[text]], _SIDES[text], "truncate")
        try:
            (row,) = rows()
        except InvalidInput as error:
            if error.code != "no_tokens":
                raise
            return 0
        return len(row.ids)

    def with_result(self, inputs: Iterable[Input]) -> list[Input]:
        """Return the inputs of which the model has a result: texts can have no tokens, and none."""
        tokenizer, prompt = self.model.tokenizer, self.options.prompt_name
        if self.are_read_together:
            empty: Sequence[Input] = ("", ("", ""))
            rows = partial(tokenizer.rows_of_pairs, prompt_name=prompt, on_overflow="truncate")
            without_rows = [own for own in empty if not _has_tokens(partial(rows, [own]))]
            return [own for own in inputs if own not in without_rows]

        @cache
        def has_row(text: str, side: str) -> bool:
            return _has_tokens(partial(tokenizer.rows_of_texts, [text], side, "truncate"))

        if all(has_row("", side) for side in _SIDES):  # nearly always
            return list(inputs)
        return [own for own in inputs if all(map(has_row, own, _SIDES))]


def _has_tokens(tokenize: Callable[[], object]) -> bool:
    try:
        tokenize()
    except InvalidInput as error:
        if error.code != "no_tokens":
            raise
        return False
    return True
