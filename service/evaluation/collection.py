"""Collections: documents, queries, and judgements of which documents are relevant to a query.

Documents and queries are copied into Parquet files of one form, from which jobs of bulk encoding
read them.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import shorten

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.json import read_json

from service.bulk.options import BulkError, BulkOptions, OptionError
from service.bulk.readers import Block
from service.bulk.sources import Source, open_source, reading
from service.bulk.texts import copied_array, items_of

# Relevance of documents, by the id of the query and of the document; above 0: relevant.
Judgements = Mapping[str, Mapping[str, int]]

_SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.string())])
_ALL_ROWS = 2**62
# Key of the hash of the texts in the metadata of their Parquet file.
_CONTENT = b"vitrine texts"
# Names of files in a folder of BEIR's layout, without suffix.
_CORPUS, _QUERIES, _QRELS = "corpus", "queries", "qrels"
# Columns of judgements in BEIR's files; its first line of TSV has these names.
_JUDGEMENT_COLUMNS = ("query-id", "corpus-id", "score")
# https://github.com/usnistgov/trec_eval: query, ignored iteration, document, relevance
_TREC_FIELDS = 4


@dataclass(frozen=True)
class CollectionFiles:
    """The files of a collection.

    Attributes:
        corpus: Documents, with the columns `_id` or `id`, `text`, and optionally `title`, which is
            put before the text.
        queries: Queries, with the columns `_id` or `id`, and `text`.
        judgements: Lines of TREC, BEIR's TSV, JSON Lines or Parquet.
    """

    corpus: Path
    queries: Path
    judgements: Path

    @classmethod
    def in_folder(cls, folder: Path, split: str) -> "CollectionFiles":
        """Return the files in a folder of BEIR's layout.

        Raises:
            OptionError: A file is missing, or there are several.
        """
        corpus, queries = (_only(folder, name) for name in (_CORPUS, _QUERIES))
        return cls(corpus, queries, _only(folder / _QRELS, split))


@dataclass(frozen=True)
class JudgedTexts:
    """A collection that was read.

    Attributes:
        documents: Parquet file with the columns "id" and "text" of the documents.
        queries: The same of the judged queries.
        document_ids: Ids of the documents, in their order.
        query_ids: Ids of the judged queries, in their order.
        judgements: Relevance of documents to these queries.
        sha256: Hash of the content of all files, in hexadecimal.
    """

    documents: Path
    queries: Path
    document_ids: list[str]
    query_ids: list[str]
    judgements: Judgements
    sha256: str


def read_collection(files: CollectionFiles, folder: Path) -> JudgedTexts:
    """Read a collection, and write its texts to a folder, if it does not have them.

    Raises:
        OptionError: A file or a column is missing, or the folder has the texts of other files.
        BulkError: A file cannot be read, a record has no id or text or the id of another, or a
            judgement is invalid or of an unknown query; the message names it.
    """
    with reading(str(files.judgements)):
        judgements = _judgements(files.judgements)
    documents, queries = folder / "documents.parquet", folder / "queries.parquet"
    sources = [_TextFile(path, folder) for path in (files.corpus, files.queries)]
    document_ids = sources[0].write(documents, None)
    query_ids = sources[1].write(queries, judgements.keys())
    if unknown := sorted(judgements.keys() - set(query_ids))[:1]:
        raise BulkError(
            f"{files.judgements} judges the query {unknown[0]!r}, which has no text in "
            f"{files.queries}"
        )
    content = hashlib.sha256(orjson.dumps(judgements, option=orjson.OPT_SORT_KEYS))
    for source in sources:
        content.update(source.sha256.encode())
    digest = content.hexdigest()
    return JudgedTexts(documents, queries, document_ids, query_ids, judgements, digest)


def _only(folder: Path, name: str) -> Path:
    matches = sorted(path for path in folder.glob(f"{name}.*") if path.is_file())
    if len(matches) != 1:
        found = ", ".join(path.name for path in matches) or "none"
        raise OptionError(f"{folder} must have one file {name}.*; it has {found}")
    return matches[0]


@dataclass(frozen=True)
class _EveryRow:
    """A plan that reads all rows; see `readers.ReadPlan`."""

    def rows_from(self, _first: int) -> int:
        return _ALL_ROWS

    def is_wanted(self, _first: int) -> bool:
        return True


class _TextFile:
    """A file of documents or queries.

    Args:
        path: Path of the file.
        folder: Folder of the evaluation.

    Attributes:
        sha256: Hash of its content, in hexadecimal.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._options, self._source = _opened(path, folder)
        self.sha256 = self._source.files[0].sha256

    def write(self, target: Path, wanted: Collection[str] | None) -> list[str]:
        """Write the ids and texts to a Parquet file, unless it has them, and return the ids.

        Args:
            target: Path of the file.
            wanted: Ids of the records to write; None: all.
        """
        own = hashlib.sha256(orjson.dumps([self.sha256, wanted and sorted(wanted)])).hexdigest()
        schema = _SCHEMA.with_metadata({_CONTENT: own})
        if not target.exists():
            partial = target.with_name(f".{target.name}.partial")
            with pq.ParquetWriter(partial, schema) as writer:
                for columns in self._records(wanted):
                    writer.write_batch(pa.record_batch(columns, schema))
            partial.rename(target)
        if pq.read_schema(target).metadata[_CONTENT] != own.encode():
            raise OptionError(
                f"{target.parent} was begun with other texts than those of {self._path}; choose "
                "another folder"
            )
        ids: list[str] = pq.read_table(target, columns=["id"]).column(0).to_pylist()
        return ids

    def _records(self, wanted: Collection[str] | None) -> Iterator[list[list[str]]]:
        """Yield the ids and the texts of records."""
        seen: set[str] = set()
        for block in self._source.read(_EveryRow()):
            ids, texts = self._block(block)
            kept = [i for i, own in enumerate(ids) if wanted is None or own in wanted]
            for own in (ids[i] for i in kept):
                if own in seen:
                    raise BulkError(f"{self._path} has several records with the id {own!r}")
                if len(own.split()) != 1:  # fields of TREC's files are divided by it
                    raise BulkError(f"{self._path}: the id {own!r} is empty or has white space")
                seen.add(own)
            yield [[column[i] for i in kept] for column in (ids, texts)]

    def _block(self, block: Block) -> tuple[list[str], list[str]]:
        """Return the ids and texts of records."""
        items, errors = items_of(block, self._options, "dense")
        (column,) = self._source.copied
        values = copied_array(column.name, column.type, block.columns[column.name], errors)
        ids = values.to_pylist()
        errors |= {i: "its id is null or missing" for i, own in enumerate(ids) if own is None}
        for index, problem in sorted(errors.items()):
            raise BulkError(f"{self._path}, record {block.first + index}: {problem}")
        return [str(own) for own in ids], [str(item).strip() for item in items]


def _opened(path: Path, folder: Path) -> tuple[BulkOptions, Source]:
    """Open a file with those names of columns that it has.

    Raises:
        OptionError: There is no such file, or it has no ids or texts.
    """
    choices = product(("_id", "id"), ("{title} {text}", "{text}"))
    for id_column, template in choices:
        options = BulkOptions(
            inputs=(str(path),), output=folder, model=folder, template=template, id_column=id_column
        )
        try:
            return options, open_source(options, "dense")
        except OptionError as error:
            failure = error
    raise failure


def _judgements(path: Path) -> dict[str, dict[str, int]]:
    """Return the relevance of documents, by query and document.

    Raises:
        BulkError: A judgement is invalid, or there is none.
    """
    judgements: dict[str, dict[str, int]] = {}
    for number, fields in _judgement_fields(path):
        try:
            query, document, relevance = fields
            judgements.setdefault(str(query), {})[str(document)] = _integer(relevance)
        except (TypeError, ValueError):
            raise BulkError(
                f"{path}, line {number}: a judgement has a query, a document and an integer, with "
                f"TREC's ignored field or without; this one is {shorten(str(fields), 80)}"
            ) from None
    if not judgements:
        raise BulkError(f"{path} has no judgements")
    return judgements


def _integer(value: object) -> int:
    number = float(str(value))
    if not number.is_integer():
        raise ValueError
    return int(number)


def _judgement_fields(path: Path) -> Iterator[tuple[int, Sequence[object]]]:
    """Yield the number and the fields of each judgement."""
    if path.suffix in (".parquet", ".jsonl"):
        table = pq.read_table(path) if path.suffix == ".parquet" else read_json(path)
        if missing := set(_JUDGEMENT_COLUMNS) - set(table.column_names):
            raise OptionError(f"{path} has no column {min(missing)!r}")
        rows = zip(*(table.column(name).to_pylist() for name in _JUDGEMENT_COLUMNS), strict=True)
        yield from enumerate(rows, 1)
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            tabs = line.rstrip("\r\n").split("\t")
            fields = tabs if len(tabs) == len(_JUDGEMENT_COLUMNS) else line.split()
            if fields and tuple(fields) != _JUDGEMENT_COLUMNS:
                yield number, [fields[0], *fields[2:]] if len(fields) == _TREC_FIELDS else fields
