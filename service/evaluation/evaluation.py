"""An evaluation: vectors by bulk jobs, rankings, scores of a reranker, measures, and their files.

    FOLDER/documents.parquet, queries.parquet   ids and texts
    FOLDER/documents/, FOLDER/queries/          outputs of bulk jobs: their vectors
    FOLDER/pairs.parquet, FOLDER/pairs/         the best documents of each query, and their scores
    FOLDER/run.trec                             the rankings, in TREC's format
    FOLDER/results.json                         settings, measures, and measures of each query
    FOLDER/comparison.json, comparison.html     differences from another evaluation

A job that was interrupted continues where it was.
"""

import asyncio
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models.artifact import Artifact
from models.quantization import OutputDtype, read_calibration
from service.bulk.job import encode_files, writing_errors
from service.bulk.journal import check_folder, lock_folder
from service.bulk.opening import checked_kind
from service.bulk.options import BulkError, BulkOptions, Kind, OptionError
from service.bulk.parts import METADATA, native_file
from service.bulk.progress import Progress
from service.bulk.sources import reading_errors
from service.evaluation.collection import (
    CollectionFiles,
    JudgedTexts,
    named_when_complete,
    read_collection,
    write_table,
)
from service.evaluation.comparison import TOP
from service.evaluation.measures import Measure, means, measure
from service.evaluation.ranking import Rankings, VectorFiles, VectorSpace, rank
from service.evaluation.server import ServerJob, encode_on_server
from service.inference.results.quantization import make_quantizer
from service.inference.results.vectors import VectorOptions

_PAIRS = pa.schema(
    [pa.field(name, pa.string()) for name in ("query_id", "document_id", "query", "text")]
)
# Key of the hash of the rankings in the metadata of the pairs' file.
_RANKINGS = b"vitrine rankings"
# Number of documents whose texts are read at once.
_BLOCK_ROWS = 1024

# How texts are encoded: by a model in this process, or by a server.
Job = BulkOptions | ServerJob
Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Settings of an evaluation.

    Attributes:
        files: Files of the collection.
        folder: Folder for the results.
        measures: Measures of the rankings.
        documents: Settings of the bulk job for the documents, whose inputs and output are ignored,
            or of a server in its place, whose vectors are compared by their cosine.
        queries: The same for the queries.
        reranker: The same for pairs of a query and its best documents; None: they keep the ranking
            by their vectors.
        rerank_top: Number of documents per query that the reranker ranks.
        ignores_identical_ids: Whether documents with the id of the query are left out of its
            ranking: in some collections the queries are documents.
        compared_sha256: Hash of the collection of an evaluation to compare with; None: of none.
    """

    files: CollectionFiles
    folder: Path
    measures: tuple[Measure, ...]
    documents: Job
    queries: Job
    reranker: BulkOptions | None = None
    rerank_top: int = 100
    ignores_identical_ids: bool = False
    compared_sha256: str | None = None

    @property
    def depth(self) -> int:
        """Number of documents per query that are ranked."""
        reranked = self.rerank_top if self.reranker else 0
        return max(TOP, reranked, *(own.cut for own in self.measures))


async def evaluate(
    options: EvaluationOptions, report: Report, stop: asyncio.Event
) -> dict[str, Any] | None:
    """Evaluate a model, and write and return the content of results.json.

    Args:
        options: Settings of the evaluation.
        report: Called with the state of each bulk job, and of the ranking.
        stop: Ends the evaluation after the current part of a job, if it is set; it returns None.

    Raises:
        OptionError: A setting is invalid, or the folder has the results of other settings.
        BulkError: A file cannot be read or written, or is invalid. Or another process writes to
            the folder.
        ArtifactError: An artifact is incomplete or invalid.
        EngineError: An engine is unavailable on this machine, or fails the self-check.
        VitrineError: An engine has stopped.
    """
    similarity = _similarity(options)
    if options.reranker is not None:
        checked_kind(options.reranker)
    with ExitStack() as stack:
        with writing_errors(options.folder):
            check_folder(options.folder)
            options.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(options.folder))
        return await _evaluate(options, similarity, report, stop)


async def _evaluate(
    options: EvaluationOptions, similarity: VectorSpace, report: Report, stop: asyncio.Event
) -> dict[str, Any] | None:
    with writing_errors(options.folder):
        texts = await asyncio.to_thread(read_collection, options.files, options.folder)
    if options.compared_sha256 not in (None, texts.sha256):
        raise OptionError("the evaluation to compare with is of another collection")

    async def finishes(name: str, settings: Job) -> bool:
        path = options.folder / name
        source = path.with_suffix(".parquet")
        if isinstance(settings, ServerJob):
            with writing_errors(options.folder):
                return await encode_on_server(settings, source, path, stop)
        job = replace(settings, inputs=(str(source),), output=path)
        return (await encode_files(job, report, stop)).is_complete

    jobs: dict[str, Job] = {"documents": options.documents, "queries": options.queries}
    for name, settings in jobs.items():
        if not await finishes(name, settings):
            return None
        _release_memory()
    _check_versions(options)
    with reading_errors(str(options.folder)):
        rankings = await asyncio.to_thread(_rank, options, texts, similarity, report)
    if options.reranker is not None:
        jobs["pairs"] = options.reranker
        with writing_errors(options.folder):
            await asyncio.to_thread(_write_pairs, options, texts, rankings)
        if not await finishes("pairs", options.reranker):
            return None
        with reading_errors(str(options.folder)):
            rankings = await asyncio.to_thread(_rerank, options.folder / "pairs", rankings)
    values = measure(options.measures, texts.judgements, rankings) if texts.judgements else {}
    results = {
        "measures": means(values) if values else {},
        "known_items": options.files.queries is None,
        "collection": _description(texts),
        "jobs": {name: _job_description(options.folder / name, jobs[name]) for name in jobs},
        "rerank_top": options.rerank_top if options.reranker else None,
        "ignores_identical_ids": options.ignores_identical_ids,
        "queries": {
            query: {"measures": values.get(query, {}), "relevant": _relevant(texts, query)}
            for query in texts.query_ids
        },
    }
    with writing_errors(options.folder):
        write_file(options.folder / "run.trec", _trec_lines(rankings))
        write_file(
            options.folder / "results.json", [orjson.dumps(results, option=orjson.OPT_INDENT_2)]
        )
    return results


def _check_versions(options: EvaluationOptions) -> None:
    """Check that a server has computed all vectors with one model.

    Raises:
        BulkError: Those of documents and of queries are of other versions.
    """
    if isinstance(options.documents, ServerJob):
        documents, queries = (
            _job_description(options.folder / name, options.documents)["version"]
            for name in ("documents", "queries")
        )
        if documents != queries:
            raise BulkError(
                f"the vectors of documents are of {documents}, and those of queries of {queries}: "
                "the server has another model by now; choose another folder"
            )


def _similarity(options: EvaluationOptions) -> VectorSpace:
    """Return how the model's vectors are compared.

    Raises:
        OptionError: It has no vectors.
    """
    if isinstance(options.documents, ServerJob):
        return VectorSpace("cosine", 0)
    manifest = Artifact.load(options.documents.model, options.documents.signer).manifest
    kinds = {_kind(own) for own in (options.documents, options.queries)}
    if manifest.similarity is None or kinds & {"scores", "labels"}:
        raise OptionError(
            f"the model {manifest.name} has no vectors to search with; a reranker ranks what "
            "another model has found: give it as --reranker"
        )
    return VectorSpace(manifest.similarity, manifest.vocab_size)


def _kind(job: Job) -> Kind:
    return "dense" if isinstance(job, ServerJob) else checked_kind(job)


def _rank(
    options: EvaluationOptions, texts: JudgedTexts, similarity: VectorSpace, report: Report
) -> Rankings:
    job, quantizer = options.documents, None
    if isinstance(job, BulkOptions) and job.dtype not in ("float32", "float16"):
        artifact = Artifact.load(job.model, job.signer)
        calibration = read_calibration(artifact)
        dtype = cast(OutputDtype, job.dtype)
        quantizer = make_quantizer(
            dtype, artifact.manifest, calibration, VectorOptions(job.dimensions)
        )
    folder = options.folder
    documents = VectorFiles(folder / "documents", texts.document_ids, _kind(job), quantizer)
    queries = VectorFiles(folder / "queries", texts.query_ids, _kind(options.queries))
    progress = Progress(stage="ranking")
    progress.start()

    def report_share(share: float) -> None:
        progress.share = share
        report(progress)

    depth = options.depth + options.ignores_identical_ids
    rankings = rank(queries, documents, similarity, depth, report_share)
    progress.is_complete = True
    report_share(1.0)
    if not options.ignores_identical_ids:
        return rankings
    return {
        query: dict([item for item in own.items() if item[0] != query][: options.depth])
        for query, own in rankings.items()
    }


def _release_memory() -> None:
    """Return the memory of closed models to the operating system.

    glibc keeps what threads have freed, 90 MB of all-MiniLM-L6-v2, and the threads of the next
    model cannot use it. Other systems lack the call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _write_pairs(options: EvaluationOptions, texts: JudgedTexts, rankings: Rankings) -> None:
    """Write the best documents of each query with both texts, in the order of the documents.

    Raises:
        OptionError: The folder has those of other rankings.
    """
    target = options.folder / "pairs.parquet"
    best = {query: list(own)[: options.rerank_top] for query, own in rankings.items()}
    own = hashlib.sha256(orjson.dumps(best, option=orjson.OPT_SORT_KEYS)).hexdigest()
    schema = _PAIRS.with_metadata({_RANKINGS: own})
    if not target.exists():
        write_table(target, schema, _pairs(texts, best))
    with reading_errors(str(target)):  # a file of an earlier run
        written = pq.read_schema(native_file(target))
    if (written.metadata or {}).get(_RANKINGS) != own.encode():
        raise OptionError(f"{target} is of other rankings; choose another folder")


def _pairs(texts: JudgedTexts, best: dict[str, list[str]]) -> Iterator[list[list[str]]]:
    queries_of: dict[str, list[str]] = {}
    for query, documents in best.items():
        for document in documents:
            queries_of.setdefault(document, []).append(query)
    table = pq.ParquetFile(native_file(texts.queries)).read()
    query_texts = dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
    for batch in pq.ParquetFile(native_file(texts.documents)).iter_batches(_BLOCK_ROWS):
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        pairs = [
            (query, document, query_texts[query], text)
            for document, text in rows
            for query in queries_of.get(document, ())
        ]
        if pairs:
            yield [list(column) for column in zip(*pairs, strict=True)]


def _rerank(folder: Path, rankings: Rankings) -> Rankings:
    """Return the rankings by the scores of pairs; other documents follow in their order."""
    scores: dict[str, dict[str, float]] = {query: {} for query in rankings}
    for path in sorted(folder.glob("part-*.parquet")):
        table = pq.ParquetFile(native_file(path)).read(["query_id", "document_id", "score"])
        table = table.filter(pc.is_valid(table.column("score")))
        for query, document, score in zip(*(c.to_pylist() for c in table.columns), strict=True):
            scores[query][document] = score
    reranked = {}
    for query, own in scores.items():
        first = dict(sorted(own.items(), key=lambda item: (item[1], item[0]), reverse=True))
        lowest = min(first.values(), default=0.0)
        rest = [document for document in rankings[query] if document not in own]
        scored = first | {rest[i]: lowest - 1 - i for i in range(len(rest))}
        reranked[query] = dict(zip(scored, _distinct(scored.values()), strict=True))
    return reranked


def _distinct(scores: Iterable[float]) -> Iterator[float]:
    """Yield scores, best first, in float32, in which trec_eval compares them, without ties.

    Different scores near 1 can be equal in float32.
    """
    previous = np.float32(np.inf)
    for score in scores:
        previous = min(np.float32(score), np.nextafter(previous, np.float32(-np.inf)))
        yield float(previous)


def _relevant(texts: JudgedTexts, query: str) -> dict[str, int]:
    """Return the relevance of the relevant documents of a query."""
    judged = texts.judgements.get(query, {})
    return {document: relevance for document, relevance in judged.items() if relevance > 0}


def _description(texts: JudgedTexts) -> dict[str, object]:
    known = set(texts.document_ids)
    judged = [document for own in texts.judgements.values() for document in own]
    return {
        "sha256": texts.sha256,
        "documents": len(known),
        "queries": len(texts.query_ids),
        "judgements": len(judged),
        "judgements_of_unknown_documents": sum(document not in known for document in judged),
    }


def _job_description(folder: Path, job: Job) -> dict[str, object]:
    """Return the settings of a bulk job, which its files have, and the number of its errors."""
    parts = sorted(folder.glob("part-*.parquet"))
    metadata = pq.read_schema(native_file(parts[0])).metadata
    settings: dict[str, object] = orjson.loads(metadata[METADATA])
    errors = [pq.ParquetFile(native_file(path)).read(["error"]).column(0) for path in parts]
    settings["errors"] = sum(len(column) - column.null_count for column in errors)
    if isinstance(job, BulkOptions):
        # JSON cannot have names that are not UTF-8.
        settings["artifact"] = os.fsencode(job.model.absolute()).decode(errors="backslashreplace")
    return settings


def _trec_lines(rankings: Rankings) -> Iterator[bytes]:
    for query, own in rankings.items():
        for position, (document, score) in enumerate(own.items(), 1):
            yield f"{query} Q0 {document} {position} {score!r} vitrine\n".encode()


def write_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file under a temporary name, and rename it."""
    with named_when_complete(path) as partial, partial.open("wb") as file:
        file.writelines(lines)
