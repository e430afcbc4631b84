"""Texts of variants, as the model reads them: what is read of a text, and the tokens of a row."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from service.inference.call_options import CallOptions, OnOverflow
from service.inference.errors import InvalidInput
from service.inference.model.scoring import Input
from service.inference.model.zero_shot import CandidateLabels, join_rows, rows_of_pairs
from service.inference.results.loaded_model import LoadedModel
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Row, Span

# Prompts of the texts of a pair that are encoded separately.
_SIDES = ("query", "document")

T = TypeVar("T")


@dataclass(frozen=True)
class VariantTexts:
    """How a model reads texts and pairs of texts.

    Attributes:
        model: The model.
        limits: Maximum number of tokens of both texts of a pair.
        options: Options of the variants.
        candidates: Labels that texts are scored with; None: the model's.
    """

    model: LoadedModel
    limits: PairLimits
    options: CallOptions
    candidates: CandidateLabels | None = None

    @property
    def are_read_together(self) -> bool:
        """Whether the model reads both texts of a pair at once."""
        return "logits" in self.model.artifact.manifest.outputs

    def measure(self, own: Input) -> tuple[int, bool]:
        """Return the number of tokens of an input, and whether a text of it is truncated."""
        sides = (0,) if self.are_read_together else (0, 1)
        rows = [row for side in sides if (row := self._row(own, side)) is not None]
        return sum(len(row.ids) for row in rows), any(row.truncated for row in rows)

    def read(self, own: Input) -> Sequence[Span]:
        """Return the span of each text of an input that the model reads."""
        tokenizer, pair_rows = self.model.tokenizer, self.model.pair_rows
        return self._of_texts(own, tokenizer.read_span, pair_rows.read_spans)

    def unknown(self, own: Input) -> Sequence[Sequence[Span]]:
        """Return the spans of each text of an input that the model reads as the unknown token."""
        tokenizer, pair_rows = self.model.tokenizer, self.model.pair_rows
        if tokenizer.unknown_id is None:
            return [()] * (1 if isinstance(own, str) else 2)
        return self._of_texts(own, tokenizer.unknown_spans, pair_rows.unknown_spans)

    def _of_texts(
        self,
        own: Input,
        of_text: Callable[[str, str | None, OnOverflow], T],
        of_pair: Callable[..., tuple[T, T]],
    ) -> Sequence[T]:
        """Return what a function returns for each text of an input, as the model reads it.

        Args:
            own: The input.
            of_text: For a text, a prompt and `on_overflow`.
            of_pair: For both texts of a pair that are read at once, with the same and more.
        """
        overflow, prompt = self.options.on_overflow, self.options.prompt_name
        if self.candidates is not None and isinstance(own, str):
            # What the model reads with the longest hypothesis, it reads with all of them.
            longest = max(self.candidates.hypotheses, key=self.model.tokenizer.count)
            pair = own, longest
            return of_pair(pair, prompt, overflow, self.limits, keeps_second=True)[:1]
        if isinstance(own, str):
            return [of_text(own, prompt, overflow)]
        if self.are_read_together:
            return of_pair(own, prompt, overflow, self.limits, instruction=self.options.instruction)
        return [of_text(text, side, overflow) for text, side in zip(own, _SIDES, strict=True)]

    def have_same_rows(self, own: Input, other: Input) -> bool:
        """Return whether the model reads the same tokens of two inputs."""
        sides = (0,) if self.are_read_together else (0, 1)
        rows = [[self._row(each, side) for side in sides] for each in (own, other)]
        first, second = ([row and (row.ids, row.token_types) for row in each] for each in rows)
        return first == second

    def length(self, own: Input, text: int) -> int:
        """Return the number of tokens that run for a text of an input; 0: it has no tokens.

        Those of the other text count too if both are read at once.
        """
        row = self._row(own, text)
        return 0 if row is None else len(row.ids)

    def with_result(self, inputs: Iterable[Input]) -> list[Input]:
        """Return the inputs of which the model has a result: texts can have no tokens, and none."""
        if self.are_read_together:
            inputs = list(inputs)
            empty = [own for own in ("", ("", "")) if own in inputs]
            without_rows = [own for own in empty if self._row(own, 0) is None]
            return [own for own in inputs if own not in without_rows]

        @cache
        def has_row(text: str, side: int) -> bool:
            return self._row((text, text), side) is not None

        if all(has_row("", side) for side in (0, 1)):  # nearly always
            return list(inputs)
        return [own for own in inputs if all(map(has_row, own, (0, 1)))]

    def _row(self, own: Input, text: int) -> Row | None:
        """Return the row of an input, or of one of its texts if they are read separately.

        None: it has no tokens.
        """
        tokenizer, overflow = self.model.tokenizer, self.options.on_overflow
        try:
            if self.candidates is not None and isinstance(own, str):
                pairs = rows_of_pairs(self.model, [own], self.candidates, self.options)
                (row,) = join_rows(pairs, self.candidates)
            elif self.are_read_together:
                (row,) = self.model.pair_rows.rows(
                    [own],
                    prompt_name=self.options.prompt_name,
                    on_overflow=overflow,
                    limits=self.limits,
                    instruction=self.options.instruction,
                )
            else:
                (row,) = tokenizer.rows_of_texts([own[text]], _SIDES[text], overflow)
        except InvalidInput as error:
            if error.code != "no_tokens":
                raise
            return None
        return row
