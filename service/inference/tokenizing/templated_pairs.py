"""Tokenization of a query and a document in the template of a language model.

The body of a row is tokenised as plain text. A query or document that spells a special token, such
as one that ends a turn, so has the tokens of its characters: it cannot leave its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from tokenizers import Encoding

from models.manifest import TOKENIZER, ArtifactError, PairTemplate
from service.inference.tokenizing.encodings import TextEncodings, slices
from service.inference.tokenizing.pairs import Pair, PairLimits
from service.inference.tokenizing.rows import Row, Span
from service.inference.tokenizing.shared_tokenizers import SharedTokenizer
from service.inference.tokenizing.text_parts import MARGIN

# Number of pairs whose bodies exist at the same time: each has a copy of the query.
_PAIRS = 64


@dataclass(frozen=True)
class _Body:
    """The tokens of a body.

    Attributes:
        ids: Token ids, at most as many as fit.
        is_too_long: Whether it has lost tokens.
        spellings: Spelling of each token; empty unless requested.
        spans: Span of each token in the body, in characters; empty unless requested.
    """

    ids: list[int]
    is_too_long: bool
    spellings: list[str]
    spans: list[Span]


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
        fixed = max(len(template.prefix), sum(map(len, template.body("", "", ""))))
        self._encodings = TextEncodings(shared, max_whole_chars + fixed, encodes_special=True)
        tokenizer = shared.variant(None)
        self._prefix, self._suffix = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (template.prefix, template.suffix)
        )
        room = max_tokens - len(self._prefix) - len(self._suffix)
        # Maximum number of tokens of each text of a body; that of the last is for all together.
        self._limits: tuple[int, ...] = (room * 3 // 4, room) if template.splits_body else (room,)
        if self._limits[0] < 1:
            raise ArtifactError(
                f"{TOKENIZER} gives the template of pairs {max_tokens - room} tokens; max_tokens "
                f"is {max_tokens}"
            )
        for limit in (None, *self._limits):  # in advance, because it takes long
            shared.variant(limit, encodes_special=True)

    def has_room(self, instruction: str) -> bool:
        """Return whether an instruction leaves room for a query."""
        first, _ = self._template.body("", "", instruction)
        (encoding,) = self._encodings.encode_truncated([first], self._limits[0], with_special=False)
        return len(encoding) < self._limits[0]

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
        limited = self._limit(pairs, limits)
        fills_room = cache(partial(self._fills_room, instruction))  # many pairs share a query
        for start in range(0, len(pairs), _PAIRS):
            own = limited[start : start + _PAIRS]
            # Without their documents, equal bodies are tokenised once.
            read = [(pair[0], "") if fills_room(pair[0]) else pair for pair in own]
            for body in self._bodies(read, instruction):
                are_too_long.append(body.is_too_long)
                ids = [*self._prefix.ids, *body.ids, *self._suffix.ids]
                is_truncated = body.is_too_long or limited[len(rows)] != pairs[len(rows)]
                rows.append(Row(ids, is_truncated, 0))
        return rows, are_too_long

    def read_spans(self, pair: Pair, instruction: str, limits: PairLimits) -> tuple[Span, Span]:
        """Return the span of each text that is left after truncation; see `rows`."""
        (own,) = self._limit([pair], limits)
        (body,) = self._bodies([own], instruction, with_spans=True)
        if not body.is_too_long:
            return (0, len(own[0])), (0, len(own[1]))
        query, document = (
            max((min(end, stop) for begin, end in body.spans if begin < stop), default=start)
            - start
            for start, stop in self._places(own, instruction)
        )
        return (0, max(0, query)), (0, max(0, document))

    def room(self, pair: Pair, instruction: str, limits: PairLimits) -> int:
        """Return the number of tokens that a pair leaves; negative: it is too long by as many."""
        (own,) = self._limit([pair], limits)
        texts = self._texts(own, instruction)
        *first, last = map(len, self._encodings.without_special(texts))
        taken = (min(count, limit) for count, limit in zip(first, self._limits, strict=False))
        return self._limits[-1] - sum(taken) - last

    def tokens(
        self, pair: Pair, instruction: str
    ) -> tuple[list[str], list[Span | None], list[int | None]]:
        """Return the spellings, spans and indices of the texts of a row's tokens, for display.

        A token of two texts belongs to the last. The index of tokens of the template is None.
        """
        (body,) = self._bodies([pair], instruction, with_spans=True)
        places = self._places(pair, instruction)
        spans: list[Span | None] = [None] * len(self._prefix)
        indices: list[int | None] = [None] * len(self._prefix)
        for begin, end in body.spans:
            own = [
                (index, (max(begin, start) - start, min(end, stop) - start))
                for index, (start, stop) in enumerate(places)
                if end > start and begin < stop
            ]
            index, span = own[-1] if own else (None, None)
            spans.append(span)
            indices.append(index)
        added: list[None] = [None] * len(self._suffix)
        spellings = [*self._prefix.tokens, *body.spellings, *self._suffix.tokens]
        return spellings, [*spans, *added], [*indices, *added]

    def _texts(self, pair: Pair, instruction: str) -> Sequence[str]:
        """Return the texts of a body that are tokenised apart."""
        parts = self._template.body(*pair, instruction)
        return parts if self._template.splits_body else ("".join(parts),)

    def _places(self, pair: Pair, instruction: str) -> tuple[Span, Span]:
        """Return the spans of query and document in the body."""
        first, second = map(len, self._template.body(*pair, instruction))
        return (first - len(pair[0]), first), (first + second - len(pair[1]), first + second)

    def _bodies(
        self, pairs: Sequence[Pair], instruction: str, *, with_spans: bool = False
    ) -> list[_Body]:
        """Return the tokens of the bodies of pairs, truncated."""
        texts = [self._texts(pair, instruction) for pair in pairs]
        columns: list[list[Encoding]] = []
        for column, limit in zip(zip(*texts, strict=True), self._limits, strict=True):
            distinct = list(dict.fromkeys(column))  # many pairs share a query
            encodings = (
                encoding
                for part in slices(distinct)
                for encoding in self._encodings.encode_truncated(
                    part, limit, with_offsets=with_spans, with_special=False
                )
            )
            of_text = dict(zip(distinct, encodings, strict=True))
            columns.append([of_text[text] for text in column])
        bodies: list[_Body] = []
        for own, of_body in zip(texts, zip(*columns, strict=True), strict=True):
            ids: list[int] = []
            spellings: list[str] = []
            spans: list[Span] = []
            is_too_long, start = False, 0
            for text, encoding in zip(own, of_body, strict=True):
                kept = self._limits[-1] - len(ids)
                is_too_long |= bool(encoding.overflowing) or len(encoding) > kept
                ids += encoding.ids[:kept]
                if with_spans:
                    spellings += encoding.tokens[:kept]
                    spans += [(start + a, start + b) for a, b in encoding.offsets[:kept]]
                start += len(text)
            bodies.append(_Body(ids, is_too_long, spellings, spans))
        return bodies

    def _fills_room(self, instruction: str, query: str) -> bool:
        """Return whether the text before a document leaves no token of it, nor changes by it."""
        limit = self._limits[-1]
        text = self._template.body(query, "", instruction)[0]
        # Most queries have fewer characters than fit. Their tokens need not be counted.
        if len(self._limits) > 1 or not self._encodings.cuts_texts or len(text) < limit:
            return False
        (encoding,) = self._encodings.encode_truncated([text], limit, with_special=False)
        return sum(map(len, encoding.overflowing)) >= MARGIN

    def _limit(self, pairs: Sequence[Pair], limits: PairLimits) -> list[Pair]:
        first = cache(self._first)  # many pairs share a query

        def cut(text: str, limit: int | None) -> str:
            return text if limit is None else first(text, limit)

        return [(cut(query, limits[0]), cut(document, limits[1])) for query, document in pairs]

    def _first(self, text: str, limit: int) -> str:
        """Return the part of a text that has its first tokens; whole, if a body takes no more."""
        # A tokenizer that truncates to `limit` would stay in memory for every limit.
        (encoding,) = self._encodings.encode_truncated(
            [text], self._limits[-1], with_offsets=True, with_special=False
        )
        ends = [end for _, end in encoding.offsets[:limit]]
        return text if len(ends) == len(encoding) else text[: max(ends)]
