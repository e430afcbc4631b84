"""Texts of pairs whose vectors are compared: each is tokenised and encoded once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from service.inference.call_options import OnOverflow
from service.inference.errors import VitrineError, after
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import TextTokenizer


class _Side:
    """Texts of one side of pairs, and their rows."""

    def __init__(self, tokenizer: TextTokenizer, prompt_name: str, with_offsets: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt_name = prompt_name
        self._with_offsets = with_offsets
        self.indices: dict[str, int] = {}
        self.rows: list[Row] = []

    def add(self, texts: Sequence[str], on_overflow: OnOverflow) -> None:
        """Tokenize the texts, equal ones once; an error has the index among `texts`."""
        distinct = list(dict.fromkeys(texts))
        rules = self._prompt_name, on_overflow, self._with_offsets
        try:
            self.rows = self._tokenizer.rows_of_texts(distinct, *rules)
        except VitrineError as error:
            if error.index is not None:
                error.index = texts.index(distinct[error.index])
            raise
        self.indices = {text: at for at, text in enumerate(distinct)}

    def text(self, row: int) -> str:
        return list(self.indices)[row]


class PairTexts:
    """Queries and documents of pairs, each with its prompt.

    Args:
        tokenizer: Tokenizer of the model.
        with_offsets: Whether rows have token offsets.
    """

    def __init__(self, tokenizer: TextTokenizer, *, with_offsets: bool) -> None:
        self._queries = _Side(tokenizer, "query", with_offsets)
        self._documents = _Side(tokenizer, "document", with_offsets)
        self._pairs: list[tuple[str, str]] = []

    def add(
        self, queries: Sequence[str], documents: Sequence[str], on_overflow: OnOverflow
    ) -> None:
        """Add one pair per document: with the query of its index, or with the only query.

        Raises:
            VitrineError: Any error of `rows_of_texts`; its index is that among queries and
                documents, queries first.
        """
        self._queries.add(queries, on_overflow)
        with after(len(queries)):
            self._documents.add(documents, on_overflow)
        self._pairs = pairs_of(queries, documents)

    @property
    def rows(self) -> list[Row]:
        """Rows of the queries, then those of the documents."""
        return self._queries.rows + self._documents.rows

    @property
    def queries(self) -> int:
        """Number of the queries' rows."""
        return len(self._queries.rows)

    @property
    def indices(self) -> list[tuple[int, int]]:
        """Indices of the rows of each pair."""
        first, second = self._queries.indices, self._documents.indices
        return [(first[query], self.queries + second[document]) for query, document in self._pairs]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of each pair."""
        rows = self.rows
        return [len(rows[first].ids) + len(rows[second].ids) for first, second in self.indices]

    @property
    def truncated(self) -> list[bool]:
        """Whether a text of each pair is truncated."""
        rows = self.rows
        return [rows[first].truncated or rows[second].truncated for first, second in self.indices]

    @contextmanager
    def convert_index(
        self, kind: type[VitrineError], queries: Sequence[str], documents: Sequence[str]
    ) -> Iterator[None]:
        """Convert the index of a row in errors of a kind to one among queries and documents."""
        try:
            yield
        except kind as error:
            if error.index is not None:
                error.index = self._index_of(error.index, queries, documents)
            raise

    def _index_of(self, row: int, queries: Sequence[str], documents: Sequence[str]) -> int:
        if row < self.queries:
            return queries.index(self._queries.text(row))
        return len(queries) + documents.index(self._documents.text(row - self.queries))


def pairs_of(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return one pair per document: with the query of its index, or with the only query."""
    own = [*queries] * len(documents) if len(queries) == 1 else queries
    return list(zip(own, documents, strict=True))
