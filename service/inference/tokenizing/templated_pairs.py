"""Tokenization of a query and a document in the template of a language model.

The body of a row is tokenised as plain text. A query or document that spells a special token, such
as one that ends a turn, so has the tokens of its characters: it cannot leave its place.
"""

from collections.abc import Sequence

from models.artifact import TOKENIZER, ArtifactError, PairTemplate
from service.inference.tokenizing.encodings import TextEncodings, slices
from service.inference.tokenizing.pairs import Pair, PairLimits
from service.inference.tokenizing.rows import Row, Span
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer

# Number of pairs whose bodies exist at the same time: each has a copy of the query.
_PAIRS = 64


class TemplatedPairs:
    """Tokenizes pairs of texts in a template; a body that is too long loses its end.

    Args:
        template: The template.
        shared: The tokenizer.
        max_tokens: Maximum number of tokens of a row.
        max_whole_chars: Maximum number of characters that are tokenised at once.

    Raises:
        ArtifactError: The template leaves no room for a pair.
    """

    def __init__(
        self,
        template: PairTemplate,
        shared: SharedTokenizer,
        max_tokens: int,
        max_whole_chars: int,
    ) -> None:
        self._template = template
        fixed = max(len(template.prefix), len(template.head("", "")))
        self._encodings = TextEncodings(shared, max_whole_chars + fixed, is_plain=True)
        tokenizer = shared.variant(None)
        self._prefix, self._suffix = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (template.prefix, template.suffix)
        )
        self._room = max_tokens - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise ArtifactError(
                f"{TOKENIZER} gives the template of pairs {max_tokens - self._room} tokens; "
                f"max_tokens is {max_tokens}"
            )

    def rows(
        self, pairs: Sequence[Pair], instruction: str, limits: PairLimits
    ) -> tuple[list[Row], list[bool]]:
        """Return the row of each pair, and whether the pair, within its limits, was too long.

        Args:
            pairs: Queries with their documents.
            instruction: Instruction; empty: that of the template.
            limits: Maximum number of tokens of each query and of each document, to which they are
                truncated beforehand.
        """
        rows: list[Row] = []
        are_too_long: list[bool] = []
        for start in range(0, len(pairs), _PAIRS):
            whole = pairs[start : start + _PAIRS]
            own = [self._limited(pair, limits) for pair in whole]
            bodies = [self._template.head(query, instruction) + document for query, document in own]
            encodings = [
                encoding
                for part in slices(bodies)
                for encoding in self._encodings.truncated(part, self._room, with_special=False)
            ]
            for pair, kept, encoding in zip(whole, own, encodings, strict=True):
                are_too_long.append(bool(encoding.overflowing))
                ids = [*self._prefix.ids, *encoding.ids, *self._suffix.ids]
                rows.append(Row(ids, are_too_long[-1] or kept != pair, 0))
        return rows, are_too_long

    def read_spans(self, pair: Pair, instruction: str, limits: PairLimits) -> tuple[Span, Span]:
        """Return the span of each text that is left after truncation; see `rows`."""
        query, document = self._limited(pair, limits)
        head = self._template.head(query, instruction)
        (encoding,) = self._encodings.truncated(
            [head + document], self._room, with_offsets=True, with_special=False
        )
        if not encoding.overflowing:
            return (0, len(query)), (0, len(document))
        end = max(end for _, end in encoding.offsets)
        before_query = len(head) - len(query) - len(self._template.before_document)
        return (
            (0, min(len(query), max(0, end - before_query))),
            (0, min(len(document), max(0, end - len(head)))),
        )

    def room(self, pair: Pair, instruction: str, limits: PairLimits) -> int:
        """Return the number of tokens that a pair leaves; negative: it is too long by as many."""
        query, document = self._limited(pair, limits)
        body = self._template.head(query, instruction) + document
        return self._room - len(self._encodings.plain([body])[0])

    def tokens(
        self, pair: Pair, instruction: str
    ) -> tuple[list[str], list[Span | None], list[int | None]]:
        """Return the spellings, spans and indices of the texts of a row's tokens, for display.

        A token of two texts belongs to the last. The index of tokens of the template is None.
        """
        query, document = pair
        head = self._template.head(query, instruction)
        starts = len(head) - len(query) - len(self._template.before_document), len(head)
        (encoding,) = self._encodings.untruncated([head + document], with_special=False)
        spans: list[Span | None] = [None] * len(self._prefix)
        indices: list[int | None] = [None] * len(self._prefix)
        for begin, end in encoding.offsets:
            own = [
                (index, (max(begin, start) - start, end - start))
                for index, (start, text) in enumerate(zip(starts, pair, strict=True))
                if end > start and begin < start + len(text)
            ]
            index, span = own[-1] if own else (None, None)
            spans.append(None if span is None else (span[0], min(span[1], len(pair[index or 0]))))
            indices.append(index)
        added: list[None] = [None] * len(self._suffix)
        spellings = [*self._prefix.tokens, *encoding.tokens, *self._suffix.tokens]
        return spellings, [*spans, *added], [*indices, *added]

    def _limited(self, pair: Pair, limits: PairLimits) -> Pair:
        query, document = (
            text if limit is None else self._first(text, limit)
            for text, limit in zip(pair, limits, strict=True)
        )
        return query, document

    def _first(self, text: str, limit: int) -> str:
        """Return the part of a text that has its first tokens."""
        (encoding,) = self._encodings.truncated(
            [text], limit, with_offsets=True, with_special=False
        )
        return text[: max(end for _, end in encoding.offsets)] if encoding.overflowing else text
