"""Collections: documents, queries, and judgements of which documents are relevant to a query.

Documents and queries are copied into Parquet files of one form, from which jobs of bulk encoding
read them.
"""

import hashlib
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from textwrap import shorten
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from models.artifact import sync
from service.bulk.options import BulkError, BulkOptions, OptionError
from service.bulk.parts import native_file
from service.bulk.readers import Block, ReadPlan, json_objects
from service.bulk.sources import (
    Source,
    check_not_compressed,
    open_source,
    reading_errors,
    suffix_format,
)
from service.bulk.texts import column_texts, copied_array, python_values
from service.inference.tokenizing.sentences import sentence_starts
from service.inference.tokenizing.words import word_spans

# Relevance of documents, by the id of the query and of the document; above 0: relevant.
Judgements = Mapping[str, Mapping[str, int]]

_SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.string())])
# Key of the hash of the texts in the metadata of their Parquet file.
CONTENT = b"vitrine texts"
# Names of files in a folder of BEIR's layout, without suffix.
_CORPUS, _QUERIES, _QRELS = "corpus", "queries", "qrels"
# Columns of judgements in BEIR's files; its first line of TSV has these names.
_JUDGEMENT_COLUMNS = ("query-id", "corpus-id", "score")
# End of the error of a record that has a null in a column, or lacks it.
_NULL = "is null or missing"
# https://github.com/usnistgov/trec_eval: query, ignored iteration, document, relevance
_TREC_FIELDS = 4
# trec_eval takes memory in proportion to the greatest relevance.
_MAX_RELEVANCE = 1000
# Number of words of the shortest sentence that is a query.
_MIN_WORDS = 5


@dataclass(frozen=True)
class CollectionFiles:
    """The files of a collection.

    Attributes:
        corpus: Documents, with the columns `_id` or `id`, `text`, and optionally `title`, which is
            put before the text.
        queries: Queries, with the columns `_id` or `id`, and `text`; None: known items. Each is a
            random sentence of a document, which is the relevant one.
        judgements: Lines of TREC, BEIR's TSV, JSON Lines or Parquet; None: there are none.
        known_items: Number of known items, at most.
    """

    corpus: Path
    queries: Path | None
    judgements: Path | None
    known_items: int = 0

    @classmethod
    def in_folder(cls, folder: Path, split: str) -> "CollectionFiles":
        """Return the files in a folder of BEIR's layout.

        Raises:
            OptionError: A file is missing, or there are several.
            BulkError: A folder cannot be read.
        """
        corpus, queries = (the_file(folder, name) for name in (_CORPUS, _QUERIES))
        return cls(corpus, queries, the_file(folder / _QRELS, split))


@dataclass(frozen=True)
class JudgedTexts:
    """Documents and queries that were read, and judgements.

    Attributes:
        documents: Parquet file with the columns "id" and "text" of the documents.
        queries: The same of the queries: the judged ones, or all without judgements.
        document_ids: Ids of the documents, in their order.
        query_ids: Ids of the queries, in their order.
        judgements: Relevance of documents to these queries; empty: there are no judgements.
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
        OptionError: A file or a column is missing, or the folder has vectors of other files.
        BulkError: A file cannot be read, a record has no id or text or the id of another, or a
            judgement is invalid or of an unknown query; the message names it.
    """
    documents, queries = folder / "documents.parquet", folder / "queries.parquet"
    corpus = _TextFile(files.corpus, folder)
    document_ids = corpus.write(documents, None)
    content = [corpus.sha256]
    if files.queries is None:
        query_ids = _write_known_items(files.known_items, documents, queries, corpus.sha256)
        judgements = {query: {query: 1} for query in query_ids}
    else:
        judgements = _judgements(files.judgements) if files.judgements else {}
        own = _TextFile(files.queries, folder)
        query_ids = own.write(queries, judgements.keys() or None)
        content.append(own.sha256)
    digest = _sha256([content, judgements])
    return JudgedTexts(documents, queries, document_ids, query_ids, judgements, digest)


def _write_known_items(count: int, documents: Path, target: Path, corpus_sha256: str) -> list[str]:
    """Write a random sentence of each of some documents, and return the documents' ids.

    Raises:
        BulkError: No document has several sentences of `_MIN_WORDS` words or more.
    """
    chance = random.Random(0)  # noqa: S311
    items: list[tuple[str, str]] = []
    eligible = 0
    for batch in pq.ParquetFile(native_file(documents)).iter_batches():
        for own, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            bounds = pairwise([0, *sentence_starts(text), len(text)])
            sentences = [" ".join(text[start:end].split()) for start, end in bounds]
            sentences = [one for one in sentences if _has_words(one)]
            if len(sentences) < 2:
                continue
            item = own, chance.choice(sentences)
            eligible += 1
            if len(items) < count:
                items.append(item)
            elif (place := chance.randrange(eligible)) < count:  # each is as likely to be kept
                items[place] = item
    if not items:
        raise BulkError(
            f"no document has two sentences of {_MIN_WORDS} words or more, of which one could be a "
            "query"
        )
    ids, texts = map(list, zip(*items, strict=True))
    return _write(target, _sha256(["known items", corpus_sha256, count]), [[ids, texts]])


def _has_words(sentence: str) -> bool:
    """Return whether a sentence has `_MIN_WORDS` words, which some scripts write without spaces."""
    if sentence.count(" ") >= _MIN_WORDS - 1:
        return True
    words = [start for start, _ in word_spans(sentence) if sentence[start].isalnum()]
    return len(words) >= _MIN_WORDS


def _write(target: Path, content: str, columns: Iterable[list[list[str]]]) -> list[str]:
    """Write ids and texts to a Parquet file, unless it has them, and return the ids.

    Other texts are replaced as long as there is no folder of their vectors.

    Args:
        target: Path of the file.
        content: Hash of what determines the ids and texts.
        columns: Ids and texts, in blocks.

    Raises:
        OptionError: The file has other texts, and there are vectors of them.
    """
    has_vectors = target.with_suffix("").exists()
    if not target.exists() or (_content(target) is not None and not has_vectors):
        write_table(target, _SCHEMA.with_metadata({CONTENT: content}), columns)
    if _content(target) != content.encode():
        raise OptionError(f"{target} has other texts than those given; choose another folder")
    with reading_errors(str(target)):
        ids: list[str] = pq.ParquetFile(native_file(target)).read(["id"]).column(0).to_pylist()
    return ids


def _content(path: Path) -> bytes | None:
    """Return the hash in a file of texts; None: it is not of an evaluation."""
    with reading_errors(str(path)):
        metadata: dict[bytes, bytes] | None = pq.read_schema(native_file(path)).metadata
    return (metadata or {}).get(CONTENT)


def write_table(path: Path, schema: pa.Schema, columns: Iterable[Sequence[Any]]) -> None:
    """Write columns in blocks to a Parquet file."""
    with (
        named_when_complete(path) as partial,
        native_file(partial, "wb") as file,
        pq.ParquetWriter(file, schema) as writer,
    ):
        for block in columns:
            writer.write_batch(pa.record_batch(block, schema))


@contextmanager
def named_when_complete(path: Path) -> Iterator[Path]:
    """Yield the temporary path of a file, which gets its name at the end, or is removed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)  # after a power failure, it could be empty
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(content: object) -> str:
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def the_file(folder: Path, name: str) -> Path:
    """Return the only file with a name and any suffix.

    Raises:
        OptionError: There is none, or there are several.
        BulkError: The folder cannot be read.
    """
    with reading_errors(str(folder)):
        own = [path for path in folder.iterdir() if path.name.startswith(f"{name}.")]
    matches = sorted(path for path in own if path.is_file())
    if len(matches) != 1:
        names = ", ".join(path.name for path in matches) or "none"
        raise OptionError(f"{folder} must have one file {name}.*; it has {names}")
    return matches[0]


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
        self._source = _open(path, folder)
        self.sha256 = "".join(file.sha256 for file in self._source.files)

    def write(self, target: Path, only: Collection[str] | None) -> list[str]:
        """Write the ids and texts to a Parquet file, unless it has them, and return the ids.

        Args:
            target: Path of the file.
            only: Ids of the records to write; None: all.
        """
        content = _sha256([self.sha256, only and sorted(only)])
        ids = _write(target, content, self._records(only))
        if not ids:
            raise BulkError(f"{self._path} has no texts; give a file that has some")
        return ids

    def _records(self, only: Collection[str] | None) -> Iterator[list[list[str]]]:
        """Yield the ids and the texts of records."""
        seen: set[str] = set()
        for block in self._source.read(ReadPlan()):
            ids, texts = self._block(block)
            kept = [i for i, own in enumerate(ids) if only is None or own in only]
            for own in (ids[i] for i in kept):
                if own in seen:
                    raise BulkError(f"{self._path} has several records with the id {own!r}")
                if own.split() != [own]:  # fields of TREC's files are divided by it
                    raise BulkError(f"{self._path}: the id {own!r} is empty or has white space")
                seen.add(own)
            yield [[column[i] for i in kept] for column in (ids, texts)]
        if only is not None and (missing := sorted(set(only) - seen)[:1]):
            raise BulkError(
                f"{self._path} has no text of the query {missing[0]!r}, which is judged"
            )

    def _block(self, block: Block) -> tuple[list[str], list[str]]:
        """Return the ids and texts of records.

        Raises:
            BulkError: A record has no id or no text, or a title that is no text.
        """
        errors = dict(block.errors)
        texts = column_texts("text", block.columns, errors)
        if "title" in block.columns:
            of_titles: dict[int, str] = {}
            titles = column_texts("title", block.columns, of_titles)
            errors |= {
                index: problem
                for index, problem in of_titles.items()
                if index not in errors and not problem.endswith(_NULL)
            }
            pairs = zip(titles, texts, strict=True)
            texts = [f"{title or ''} {text or ''}".strip() for title, text in pairs]
        (column,) = self._source.copied
        values = copied_array(column.name, column.type, block.columns[column.name], errors)
        ids = python_values(column.name, values, errors)
        for index, own in enumerate(ids):
            if own is None:
                errors.setdefault(index, f"its id {_NULL}")
        for index, problem in sorted(errors.items()):
            raise BulkError(f"{self._path}, record {block.first + index}: {problem}")
        return [str(own) for own in ids], [str(text).strip() for text in texts]


def _open(path: Path, folder: Path) -> Source:
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
            source = open_source(options, "dense")
        except OptionError as error:
            failure = error
            continue
        if source.format == "jsonl":  # titles may begin after the records whose columns are read
            source = replace(source, text_columns=("title", "text"))
        return source
    raise failure


def _judgements(path: Path) -> dict[str, dict[str, int]]:
    """Return the relevance of documents, by query and document.

    Raises:
        BulkError: A judgement is invalid, or there is none.
        OptionError: The file is compressed, or lacks a column.
    """
    judgements: dict[str, dict[str, int]] = {}
    with reading_errors(str(path)):
        for number, fields in _judgement_fields(path):
            try:
                query, document, value = (
                    own.decode() if isinstance(own, bytes) else own for own in fields
                )
                if not all(type(own) in (str, int) for own in (query, document)):
                    raise ValueError
                relevance = _relevance(value)
            except (TypeError, ValueError):
                raise BulkError(
                    f"{path}, line {number}: a judgement has a query, a document and an integer up "
                    f"to {_MAX_RELEVANCE}, with TREC's ignored field or without; this one is "
                    f"{shorten(str(fields), 80)}"
                ) from None
            own = judgements.setdefault(str(query), {})
            if own.setdefault(str(document), relevance) != relevance:
                raise BulkError(
                    f"{path}, line {number}: the document {document!r} was judged differently for "
                    f"the query {query!r} in a line before"
                )
    if not judgements:
        raise BulkError(f"{path} has no judgements")
    return judgements


def _json_fields(line: str) -> Sequence[object]:
    """Return the fields of a judgement in JSON; the line itself if it is none."""
    try:
        (record,) = json_objects(line.encode())
        return [record[name] for name in _JUDGEMENT_COLUMNS]
    except (ValueError, KeyError):
        return [line]


def _relevance(value: object) -> int:
    """Return a relevance; those below 0, which TREC's tracks have for spam, are 0.

    Raises:
        ValueError: It is no integer, or above `_MAX_RELEVANCE`.
    """
    number = re.fullmatch(r"\s*([+-]?\d+)(\.0*)?\s*", str(value))
    if number is None or int(number[1]) > _MAX_RELEVANCE:
        raise ValueError
    return max(0, int(number[1]))


def _judgement_fields(path: Path) -> Iterator[tuple[int, Sequence[object]]]:
    """Yield the number and the fields of each judgement.

    Raises:
        OptionError: The file is compressed, or lacks a column.
    """
    check_not_compressed(path)
    format_ = suffix_format(path)
    if format_ == "parquet":
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]  # as Spark writes it
        table = pa.concat_tables([pq.ParquetFile(native_file(file)).read() for file in files])
        if missing := set(_JUDGEMENT_COLUMNS) - set(table.column_names):
            raise OptionError(f"{path} has no column {min(missing)!r}")
        rows = zip(*(table.column(name).to_pylist() for name in _JUDGEMENT_COLUMNS), strict=True)
        yield from enumerate(rows, 1)
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            if format_ == "jsonl":
                yield number, _json_fields(line)
                continue
            tabs = line.rstrip("\r\n").split("\t")
            fields = tabs if len(tabs) == len(_JUDGEMENT_COLUMNS) else line.split()
            if tuple(fields) != _JUDGEMENT_COLUMNS:
                yield number, [fields[0], *fields[2:]] if len(fields) == _TREC_FIELDS else fields
