"""Texts in chunks as rows of token ids, and the vectors of the chunks from the rows' results."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from math import ceil, inf

import numpy as np
from tokenizers import Encoding

from models.manifest import Manifest
from service.inference.call_options import CallOptions
from service.inference.errors import InvalidInput, convert_index
from service.inference.results.late_chunking import LateText, apply_heads
from service.inference.results.scores import Scores
from service.inference.results.vectors import Vectors
from service.inference.tokenizing.chunking import Chunk, Chunking, Measure, Piece, split
from service.inference.tokenizing.pair_rows import PairRows
from service.inference.tokenizing.pairs import PairLimits
from service.inference.tokenizing.rows import Prompt, Row, Span
from service.inference.tokenizing.tokenizer import TextTokenizer, without_tokens

# Texts are tokenised whole, then in chunks to measure them, and as rows. With the division this
# takes up to four times as long as the rows alone.
PASSES = 4


class ChunkedTexts:
    """The chunks of the texts of one call.

    A chunk is tokenised as a text of its own, except in late chunking. Its tokens can then differ
    from those that it has within the text, and its length is that of its own tokens.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Texts to divide.
        chunking: How to divide them.
        max_chunks: Maximum number of chunks of all texts together.

    Attributes:
        texts: Texts to divide.
        chunks: Chunks of each text; empty until `rows` or `pair_rows` returns.
        owners: Index of the text of each row.
    """

    def __init__(
        self, tokenizer: TextTokenizer, texts: Sequence[str], chunking: Chunking, max_chunks: int
    ) -> None:
        self.texts = texts
        self.chunks: list[list[Chunk]] = []
        self.owners: list[int] = []
        self._tokenizer = tokenizer
        self._chunking = chunking
        self._max_chunks = max_chunks
        self._late_texts: list[LateText] = []

    def rows(self, prompt_name: str | None) -> list[Row]:
        """Return the rows of the texts: a row per chunk, or a row per window in late chunking.

        Args:
            prompt_name: Name of the prompt of each chunk, or of each window in late chunking; None:
                the default prompt.

        Raises:
            InvalidInput: A text is invalid, as for `TextTokenizer.rows_of_texts`, but for its
                length; `index` is its index. The prompt is unknown. A chunk of the requested size
                does not fit into the model's maximum length, or a token has more characters than
                the model reads. There are too many chunks.
            TooLarge: A text has too many characters.
        """
        prompt, room = self._tokenizer.prompt(prompt_name), self._tokenizer.room(prompt_name)
        size = self._size(room, "special tokens and the prompt")
        if self._chunking.late:
            return self._late_rows(prompt, self._tokenizer.rules(prompt_name).max_tokens, size)
        taken = self._tokenizer.count(prompt.text)
        max_chars = self._tokenizer.rules(prompt_name).max_chars or inf

        def measure(part: str, count: int) -> tuple[int, int]:
            tokens = self._tokenizer.count(part)
            # Tokens at the border of prompt and text can differ from those of each alone.
            whole = self._tokenizer.count(prompt.text + part) if prompt.text else tokens
            excess = max(tokens - size, whole - taken - room)
            if (chars := len(prompt.text) + len(part) - max_chars) > 0:
                if count <= 1:
                    raise InvalidInput(
                        f"an indivisible part of the text has {len(part)} characters, which exceed "
                        f"the model's maximum of {max_chars} for a prompt and a chunk",
                        code="too_long",
                        pointer="/chunking",
                    )
                excess = max(excess, ceil(tokens * chars / len(part)))
            return tokens, excess

        for index in range(len(self.texts)):
            self._divide(index, self._encode(index).offsets, size, measure)
        with self._of_chunks() as parts:
            return self._tokenizer.rows_of_texts(parts, prompt_name, "error")

    def pair_rows(
        self,
        pair_rows: PairRows,
        queries: Sequence[str],
        limits: PairLimits,
        options: CallOptions,
    ) -> list[Row]:
        """Return the row of each chunk with the query of its text.

        Args:
            pair_rows: Tokenizer of pairs of the model.
            queries: One query for all texts, or one per text.
            limits: Maximum number of tokens of a query, prompt not counted, and None.
            options: Options of the call: the prompt and the instruction of queries.

        Raises:
            VitrineError: Any error of `rows`, under the same conditions.
        """
        prompt_name, instruction = options.prompt_name, options.instruction

        def room(query: str, part: str = "") -> int:
            return pair_rows.room(
                query,
                prompt_name=prompt_name,
                limit=limits[0],
                document=part,
                instruction=instruction,
            )

        room_of = cache(room)  # many documents can share a query
        for index in range(len(self.texts)):
            query = self._query(queries, index)
            size = self._size(room_of(query), "special tokens and the query")

            def measure(part: str, _: int, size: int = size, query: str = query) -> tuple[int, int]:
                tokens = self._tokenizer.count(part)
                excess = tokens - size
                if pair_rows.has_template:  # a token can span the border of the document
                    excess = max(excess, -room(query, part))
                return tokens, excess

            self._divide(index, self._encode(index).offsets, size, measure)
        with self._of_chunks() as parts:
            owners = zip(self.owners, parts, strict=True)
            pairs = [(self._query(queries, owner), part) for owner, part in owners]
            return pair_rows.rows(pairs, prompt_name, "error", limits, instruction=instruction)

    @property
    def parts(self) -> list[str]:
        """The texts, as often as they are tokenised; see `LoadedModel.run`."""
        return [*self.texts] * PASSES

    @property
    def chunk_owners(self) -> list[int]:
        """Index of the text of each chunk."""
        return [index for index, own in enumerate(self.chunks) for _ in own]

    def vectors(self, manifest: Manifest, results: Sequence[Vectors]) -> Vectors:
        """Return the vector of each chunk of all texts, `(N, W)`, before normalisation.

        Args:
            manifest: Manifest of the model.
            results: Pooled vector `(W,)` of each row, or in late chunking the vectors of its
                tokens, `(L, D)`.
        """
        if not self._chunking.late:
            return np.array(results)
        rows = iter(results)
        means = [text.pool([next(rows) for _ in text.windows]) for text in self._late_texts]
        return apply_heads(manifest, np.concatenate(means))

    def by_text(self, vectors: Vectors) -> list[Vectors]:
        """Return the vectors `(C, W)` of each text's chunks, from those of all, `(N, W)`."""
        return np.split(vectors, np.cumsum([len(own) for own in self.chunks])[:-1])

    def best(self, scores: Scores) -> list[int]:
        """Return the index among all chunks of each text's best chunk, the first of equals.

        Args:
            scores: Score of each chunk of all texts, `(N,)`.
        """
        starts = np.cumsum([0, *(len(own) for own in self.chunks)]).tolist()
        return [a + int(scores[a:b].argmax()) for a, b in pairwise(starts)]

    def at(self, indices: Sequence[int]) -> list[Chunk]:
        """Return the chunks at indices among all chunks."""
        chunks = [chunk for own in self.chunks for chunk in own]
        return [chunks[index] for index in indices]

    def tokens(self, rows: Sequence[Row]) -> list[int]:
        """Return the number of encoded tokens of each text, special tokens included."""
        totals = [0] * len(self.texts)
        for owner, row in zip(self.owners, rows, strict=True):
            totals[owner] += len(row.ids)
        return totals

    def _late_rows(self, prompt: Prompt, max_tokens: int, size: int) -> list[Row]:
        """Return the row of each window of each text."""
        rows: list[Row] = []
        start = len(prompt.text)
        for index in range(len(self.texts)):
            encoding = self._encode(index, prompt.text, add_special_tokens=True)
            # Special tokens and the prompt come first. A token of prompt and text is the text's.
            mask, offsets = encoding.special_tokens_mask, encoding.offsets
            if len(mask) <= prompt.tokens:
                raise without_tokens(index)
            own = [i for i, (_, end) in enumerate(offsets) if not mask[i] and end > start]
            first, last = (own[0], own[-1] + 1) if own else (len(mask), len(mask))
            spans = [(max(begin - start, 0), end - start) for begin, end in offsets[first:last]]
            pieces = self._divide(index, spans, size, lambda _, tokens: (tokens, tokens - size))
            text = LateText(encoding.ids, first, last, max_tokens, prompt.tokens, pieces)
            self._late_texts.append(text)
            windows = text.rows()
            rows += [Row(ids, False, prompt.tokens, prompt.adapter) for ids in windows]
            self.owners += [index] * len(windows)
        return rows

    def _size(self, room: int, taken_by: str) -> int:
        """Return the maximum number of tokens of a chunk.

        Args:
            room: Number of tokens of a chunk that fits into a row.
            taken_by: Name of the row's other tokens, for errors.
        """
        size = room if self._chunking.size is None else self._chunking.size
        if room < 1:
            raise InvalidInput(
                f"{taken_by} leave no room for a chunk within the model's maximum length",
                code="too_long",
                pointer="/chunking",
            )
        if size > room:
            raise InvalidInput(
                f"size must be at most {room} tokens; {taken_by} take the rest of the model's "
                "maximum length",
                pointer="/chunking/size",
            )
        if self._chunking.overlap >= size:
            raise InvalidInput(
                f"overlap must be less than the size of chunks, {size} tokens",
                pointer="/chunking/overlap",
            )
        return size

    def _divide(
        self, index: int, spans: Sequence[Span], size: int, measure: Measure
    ) -> list[Piece]:
        """Divide a text and add its chunks to `chunks`."""
        strategy, overlap = self._chunking.strategy, self._chunking.overlap
        room = self._max_chunks - sum(map(len, self.chunks))
        pieces: list[Piece] = []
        for piece in split(self.texts[index], spans, strategy, size, overlap, measure):
            if len(pieces) == room:
                raise InvalidInput(
                    f"the inputs have more than {self._max_chunks} chunks, the limit per request",
                    code="too_many_inputs",
                    pointer="/inputs",
                )
            pieces.append(piece)
        self.chunks.append([piece.chunk for piece in pieces])
        return pieces

    @contextmanager
    def _of_chunks(self) -> Iterator[list[str]]:
        """Yield the text of each chunk, each of which is to be a row."""
        self.owners = self.chunk_owners
        with convert_index(self.owners.__getitem__):
            yield [
                text[chunk.start : chunk.end]
                for text, own in zip(self.texts, self.chunks, strict=True)
                for chunk in own
            ]

    def _encode(
        self, index: int, prompt: str = "", *, add_special_tokens: bool = False
    ) -> Encoding:
        """Return the tokens of a text, with a prompt, after a check of the text."""
        text = self.texts[index]
        self._tokenizer.check_text(text, index)
        (encoding,) = self._tokenizer.encodings.encode_whole(
            [prompt + text], with_special=add_special_tokens
        )
        return encoding

    @staticmethod
    def _query(queries: Sequence[str], index: int) -> str:
        return queries[index % len(queries)]  # one for all texts, or one per text
