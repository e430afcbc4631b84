"""Rows of pairs of texts: in the template of the model, or joined by its special tokens."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput
from service.inference.tokenizing.encodings import outer_span, spans_of
from service.inference.tokenizing.pairs import NO_LIMITS, PairLimits, PairTokenizer
from service.inference.tokenizing.rows import Row, Span, TokenizedText
from service.inference.tokenizing.shared_tokenizers import invalid_tokenizer_errors
from service.inference.tokenizing.templated_pairs import TemplatedPairs
from service.inference.tokenizing.tokenizer import (
    TextTokenizer,
    by_index,
    check_overflow,
    not_a_pair,
    without_tokens,
)


class _KeptTokens(NamedTuple):
    """The tokens of a text that are left after truncation, without those of the prompt alone.

    Attributes:
        text: The text.
        spans: Span of each token in the text; None: a token of the prompt.
        ids: Token ids.
        is_whole: Whether no token is lost.
    """

    text: str
    spans: Sequence[Span | None]
    ids: Sequence[int]
    is_whole: bool


class PairRows:
    """Tokenizes pairs of texts. Its methods may be called from any thread.

    Args:
        tokenizer: Tokenizer of single texts.

    Attributes:
        tokenizer: Tokenizer of single texts.

    Raises:
        ArtifactError: The tokenizer is invalid, or its template of pairs leaves no room for a pair.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        template = tokenizer.manifest.pair_template
        self.tokenizer = tokenizer
        self._max_tokens = tokenizer.manifest.max_tokens
        with invalid_tokenizer_errors():
            self._templated = template and TemplatedPairs(
                *(template, tokenizer.shared, self._max_tokens),
                tokenizer.encodings.max_whole_chars,
            )

    @property
    def has_template(self) -> bool:
        """Whether pairs are read in a template, in which tokens of a text depend on the others."""
        return self._templated is not None

    def rows(
        self,
        inputs: Sequence[str | tuple[str, str]],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        limits: PairLimits = NO_LIMITS,
        *,
        keeps_second: bool = False,
        instruction: str | None = None,
    ) -> list[Row]:
        """Tokenize each text, or each pair of texts as one input, into a row.

        If the model has a template of pairs, `instruction`, or else the prompt, is its instruction,
        and a pair that is too long loses the end of the document, or of the query too.

        Otherwise, the named or the default prompt is prepended to each text and to the first text
        of each pair. Its tokens do not count towards the limit of that text. In a pair that is too
        long, the longer text loses tokens until the pair fits or both texts have the same length.
        Then both lose tokens alike, as in transformers. With `keeps_second`, only the first text
        loses tokens; the second must leave it one.

        Raises:
            InvalidInput: A text cannot be encoded in UTF-8; or an input has no tokens, or is too
                long, and `on_overflow` is "error". Or the prompt is unknown. Or the model has a
                template of pairs, and an input is a text, `on_overflow` is "truncate_left", or the
                instruction leaves no room for a query.
            TooLarge: A text has too many characters.
        """
        prompt = self.tokenizer.prompt(prompt_name).text
        if self._templated:
            own = instruction or prompt
            if own and not self._templated.has_room(own):
                raise InvalidInput(
                    "the instruction leaves no room for a query within the model's maximum length",
                    code="too_long",
                    pointer="/instruction" if instruction else "/prompt_name",
                )
            return self._templated_rows(
                self._templated, inputs, instruction=own, on_overflow=on_overflow, limits=limits
            )
        texts = {index: text for index, text in enumerate(inputs) if isinstance(text, str)}
        pairs = {index: pair for index, pair in enumerate(inputs) if not isinstance(pair, str)}
        rows = by_index(
            texts, lambda texts: self.tokenizer.rows_of_texts(texts, prompt_name, on_overflow)
        )
        rows |= by_index(
            pairs,
            lambda pairs: self._joined_rows(pairs, prompt, on_overflow, limits, keeps_second),
        )
        return [rows[index] for index in range(len(inputs))]

    def _templated_rows(
        self,
        templated: TemplatedPairs,
        inputs: Sequence[str | tuple[str, str]],
        *,
        instruction: str,
        on_overflow: OnOverflow,
        limits: PairLimits,
    ) -> list[Row]:
        if on_overflow == "truncate_left":
            raise InvalidInput(
                "the model truncates pairs at the end only, after the instruction and the query",
                pointer="/on_overflow",
            )
        pairs: list[tuple[str, str]] = []
        for index, own in enumerate(inputs):
            if isinstance(own, str):
                raise not_a_pair(index)
            for text in own:
                self.tokenizer.check_text(text, index)
            pairs.append(own)
        rows, are_too_long = templated.rows(pairs, instruction, limits)
        check_overflow(are_too_long, on_overflow, self._max_tokens)
        return rows

    def _joined_rows(
        self,
        pairs: Sequence[tuple[str, str]],
        prompt: str,
        on_overflow: OnOverflow,
        limits: PairLimits,
        keeps_second: bool,
    ) -> list[Row]:
        for index, pair in enumerate(pairs):
            for text in pair:
                self.tokenizer.check_text(text, index)
        if prompt:
            # One copy of a query that many documents share.
            prompted = {first: prompt + first for first in {first for first, _ in pairs}}
            pairs = [(prompted[first], second) for first, second in pairs]
        limits = self._with_prompt(limits, prompt)
        drops_left = self.tokenizer.drops_left(on_overflow)
        encoded = self._pairs.encode(
            pairs, limits, drops_left=drops_left, keeps_second=keeps_second
        )
        for index, tokens in enumerate(encoded):
            if not tokens.ids:
                raise without_tokens(index)
        are_too_long = [tokens.is_too_long for tokens in encoded]
        check_overflow(are_too_long, on_overflow, self._max_tokens)
        return [Row(e.ids, e.truncated, 0, token_types=e.token_types) for e in encoded]

    def read_spans(
        self,
        pair: tuple[str, str],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        limits: PairLimits,
        *,
        keeps_second: bool = False,
        instruction: str | None = None,
    ) -> tuple[Span, Span]:
        """Return the span of each text of a pair that is left after truncation, in characters.

        Raises:
            VitrineError: Any error of `rows`, under the same conditions.
        """
        if self._templated:
            own = instruction or self.tokenizer.prompt(prompt_name).text
            return self._templated.read_spans(pair, own, limits)
        drops_left = self.tokenizer.drops_left(on_overflow)
        first, second = (
            (0, len(own.text))
            if own.is_whole
            else outer_span(own.spans, own.text, drops_left=drops_left)
            for own in self._kept_tokens(pair, prompt_name, drops_left, limits, keeps_second)
        )
        return first, second

    def unknown_spans(
        self,
        pair: tuple[str, str],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        limits: PairLimits,
        *,
        keeps_second: bool = False,
        instruction: str | None = None,
    ) -> tuple[list[Span], list[Span]]:
        """Return the spans of the parts of each text that the model reads as the unknown token.

        Raises:
            VitrineError: Any error of `rows`, under the same conditions.
        """
        texts: list[tuple[str, Sequence[Span | None], Sequence[int | None]]]
        if self._templated:
            own = instruction or self.tokenizer.prompt(prompt_name).text
            spellings, spans, indices = self._templated.tokens(pair, own)
            ids = [self.tokenizer.token_id(spelling) for spelling in spellings]
            of_texts = [
                [span if at == index else None for span, at in zip(spans, indices, strict=True)]
                for index in (0, 1)
            ]
            texts = [(*each, ids) for each in zip(pair, of_texts, strict=True)]
        else:
            drops_left = self.tokenizer.drops_left(on_overflow)
            kept = self._kept_tokens(pair, prompt_name, drops_left, limits, keeps_second)
            texts = [(each.text, each.spans, each.ids) for each in kept]
        first, second = (self.tokenizer.spans_of_unknown(*each) for each in texts)
        return first, second

    def _kept_tokens(
        self,
        pair: tuple[str, str],
        prompt_name: str | None,
        drops_left: bool,
        limits: PairLimits,
        keeps_second: bool,
    ) -> Iterator[_KeptTokens]:
        """Yield the tokens of each text of a pair that are left after truncation."""
        prompt = self.tokenizer.prompt(prompt_name).text
        prompted, limits = (prompt + pair[0], pair[1]), self._with_prompt(limits, prompt)
        (encoded,) = self._pairs.encode(
            [prompted], limits, drops_left=drops_left, keeps_second=keeps_second
        )
        starts = len(prompt), 0
        for own, text, kept, start in zip(pair, prompted, encoded.kept, starts, strict=True):
            (encoding,) = self.tokenizer.encodings.encode_whole([text], with_special=False)
            count = len(encoding)
            rest = slice(max(0, count - kept), None) if drops_left else slice(kept)
            spans = spans_of(encoding, start)
            yield _KeptTokens(own, spans[rest], encoding.ids[rest], kept >= count)

    def _with_prompt(self, limits: PairLimits, prompt: str) -> PairLimits:
        """Return the limits of a pair whose first text has a prompt, which does not count."""
        if not prompt or limits[0] is None:
            return limits
        return limits[0] + self.tokenizer.count(prompt), limits[1]

    def room(
        self,
        query: str,
        prompt_name: str | None,
        limit: int | None,
        document: str = "",
        instruction: str | None = None,
    ) -> int:
        """Return the number of further tokens of a pair's second text that fit without truncation.

        Args:
            query: First text of the pair.
            prompt_name: Name of the prompt of the first text; None: the default prompt.
            limit: Maximum number of tokens of the first text, prompt not counted; None: no limit.
            document: Second text. With a template of pairs, its tokens depend on what precedes it.
            instruction: Instruction of a template of pairs; None: the prompt.

        Raises:
            InvalidInput: The prompt is unknown.
        """
        prompt = self.tokenizer.prompt(prompt_name).text
        if self._templated:
            own = instruction or prompt
            return self._templated.room((query, document), own, (limit, None))
        taken = self.tokenizer.count(prompt + query)
        if limit is not None:
            taken = min(taken, self.tokenizer.count(prompt) + limit)
        return self._pairs.room - taken - self.tokenizer.count(document)

    def tokenize(self, text: str, text_pair: str, prompt_name: str | None) -> TokenizedText:
        """Return the tokens, spans and baselines of a pair of texts, with the prompt of the first.

        Raises:
            InvalidInput: A text is invalid (see `rows`), or the pair has no tokens of its own, or
                is too long for the model; `index` is the index of the text, or 0.
            TooLarge: A text has too many characters.
        """
        texts = text, text_pair
        for index, part in enumerate(texts):
            self.tokenizer.check_text(part, index)
        (row,) = self.rows([texts], prompt_name, "error")
        prompt = self.tokenizer.prompt(prompt_name).text
        if self._templated:
            columns = self._templated.tokens((text, text_pair), prompt)
            return self.tokenizer.with_baselines(texts, row, *columns)
        encoding = self.tokenizer.encodings.of_pair(prompt + text, text_pair)
        if encoding.ids != row.ids:
            raise RuntimeError("the tokenizers library gives a pair other tokens than the service")
        starts = {0: len(prompt), 1: 0}
        sequence_ids = [
            None if index == 0 and 0 < end <= len(prompt) else index
            for index, (_, end) in zip(encoding.sequence_ids, encoding.offsets, strict=True)
        ]
        spans = [
            None if index is None else (max(0, begin - starts[index]), end - starts[index])
            for index, (begin, end) in zip(sequence_ids, encoding.offsets, strict=True)
        ]
        return self.tokenizer.with_baselines(texts, row, encoding.tokens, spans, sequence_ids)

    @cached_property
    def _pairs(self) -> PairTokenizer:
        tokenizer = self.tokenizer.shared.variant(None)
        return PairTokenizer(tokenizer, self.tokenizer.encodings, self._max_tokens)
