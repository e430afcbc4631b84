"""Texts of pairs whose vectors are compared: each is tokenised and encoded once."""

from collections.abc import Sequence

from service.inference.call_options import OnOverflow
from service.inference.errors import convert_index
from service.inference.tokenizing.rows import Row
from service.inference.tokenizing.tokenizer import TextTokenizer


class PairTexts:
    """Queries and documents of pairs, each once.

    Args:
        queries: One query for all documents, or one per document.
        documents: Text of each document.

    Attributes:
        queries: The queries, each once.
        documents: The documents, each once.
        pairs: Indices of query and document of each pair, among the queries and then the documents.
    """

    def __init__(self, queries: Sequence[str], documents: Sequence[str]) -> None:
        self.queries = list(dict.fromkeys(queries))
        self.documents = list(dict.fromkeys(documents))
        first = {text: index for index, text in enumerate(self.queries)}
        second = {text: index for index, text in enumerate(self.documents, len(first))}
        self.pairs = [(first[a], second[b]) for a, b in pairs_of(queries, documents)]
        self._all = queries, documents

    def rows(
        self, tokenizer: TextTokenizer, on_overflow: OnOverflow, *, with_offsets: bool
    ) -> list[Row]:
        """Return the rows of the queries, then those of the documents, with their prompts.

        Raises:
            VitrineError: Any error of `rows_of_texts`, with the index of the row.
        """
        rows = tokenizer.rows_of_texts(self.queries, "query", on_overflow, with_offsets)
        with convert_index(lambda document: len(self.queries) + document):
            return rows + tokenizer.rows_of_texts(
                self.documents, "document", on_overflow, with_offsets
            )

    def index_of(self, row: int) -> int:
        """Return the index of the text of a row, among all queries and then all documents."""
        queries, documents = self._all
        if row < len(self.queries):
            return queries.index(self.queries[row])
        return len(queries) + documents.index(self.documents[row - len(self.queries)])


def pairs_of(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return one pair per document: with the query of its index, or with the only query."""
    own = [*queries] * len(documents) if len(queries) == 1 else queries
    return list(zip(own, documents, strict=True))
