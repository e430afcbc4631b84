"""A bulk job: open the input, the model and the journal; encode, write and record each part."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

import orjson
import pyarrow as pa

from models.artifact import CALIBRATION, TOKENIZER, Artifact
from models.engines import ENGINES, select_engine
from service.bulk.encoder import Encoder
from service.bulk.journal import FinishedPart, Journal, open_journal
from service.bulk.kinds import RESULT_KINDS, kind_of
from service.bulk.options import ROW, BulkError, BulkOptions, Kind, OptionError
from service.bulk.parts import PartFiles, join, with_metadata
from service.bulk.pipeline import EncodedBlock, Pipeline
from service.bulk.progress import Progress
from service.bulk.readers import Block
from service.bulk.sources import Source, open_source
from service.bulk.verification import verify_rows
from service.inference.model import Model
from service.inference.opening import ModelOptions, open_model

log = logging.getLogger("vitrine")

# The pipeline bounds what is in flight, so that the model needs no limits of its own.
_NO_LIMIT = 2**62
# Maximum cost of a batch on CPU. Batches of 512 tokens, not the service's 384, take 1.8 % less CPU
# time per token, and nobody waits for them (all-MiniLM-L6-v2, AMD EPYC with AVX512-BF16).
_MAX_COST = 512
# Name without suffix of the file that replaces all parts.
_JOINED = "embeddings"


@dataclass
class _Plan:
    """The parts that a run encodes; see `readers.Plan`.

    Attributes:
        options: Settings of the job.
        finished: Numbers of the finished parts.
        reads_all: Whether finished parts are read too, to compare them with the earlier input.
        last: Number of the last part to encode; None: the last part of the input.
        is_cut: Whether there are records after the last part.
    """

    options: BulkOptions
    finished: frozenset[int]
    reads_all: bool
    last: int | None = None
    is_cut: bool = False

    def part_of(self, first: int) -> int:
        return first // self.options.part_rows

    def rows_from(self, first: int) -> int:
        part = self.part_of(first)
        if self.last is not None and part > self.last:
            self.is_cut = True
            return 0
        end = (part + 1) * self.options.part_rows
        return max(0, min(end, self.options.limit or end) - first)

    def is_wanted(self, first: int) -> bool:
        return self.reads_all or self.is_encoded(self.part_of(first))

    def is_encoded(self, part: int) -> bool:
        index, count = self.options.shard
        return part % count == index - 1 and part not in self.finished


async def encode_files(
    options: BulkOptions,
    report: Callable[[Progress], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Encode the records of files into an output folder, or what is left of them.

    Args:
        options: Settings of the job.
        report: Called with the state of the job after each block of records.
        stop: Ends the job after the current part, if it is set. `Progress.is_complete` tells.

    Raises:
        OptionError: A setting is invalid, or contradicts the model, the input or the output folder.
        BulkError: The input or the output cannot be read or written, or too many records have
            errors. Finished parts are kept.
        ArtifactError: The artifact is incomplete or invalid.
        EngineError: The engine is unavailable on this machine, or fails the self-check.
        VitrineError: The engine has stopped.
    """
    artifact = Artifact.load(options.model)
    kind = kind_of(artifact.manifest, options.kind)
    _check_kind(options, kind)
    source = await asyncio.to_thread(open_source, options, kind)
    async with await open_model(options.model, _model_options(options, artifact)) as model:
        encoder = await Encoder.checked(model, options, kind)
        _check_columns(source, encoder)
        settings = _settings(options, kind, source, model)
        with open_journal(options.output, settings, options.shard) as journal:
            pipeline = Pipeline(encoder, options, kind, source.copied)
            metadata = {
                "model": model.name,
                "version": version("vitrine"),
                "files": [str(file.path) for file in source.files],
                **settings,
            }
            run = _Run(options, source, journal, with_metadata(pipeline.schema, metadata), report)
            if journal.rows is None:
                await run.encode(pipeline, stop or asyncio.Event())
            run.finish()
            if options.verify and run.progress.is_complete:
                verified = await verify_rows(source, encoder, options, kind, journal)
                run.progress.verified, run.progress.difference = verified
            return run.progress


def _check_kind(options: BulkOptions, kind: Kind) -> None:
    if options.dimensions is not None and kind not in ("dense", "chunks"):
        raise OptionError(f"--dimensions applies to dense vectors, not to {kind}")
    if options.chunking is not None and kind not in ("chunks", "scores"):
        raise OptionError(f"chunking applies to chunks and scores, not to {kind}")
    if options.dtype not in RESULT_KINDS[kind].dtypes:
        raise OptionError(f"--dtype {options.dtype} does not apply to {kind}")
    if options.format == "npy" and kind != "dense":
        raise OptionError(f"--format npy applies to dense vectors, not to {kind}")


def _check_columns(source: Source, encoder: Encoder) -> None:
    for name in source.copied.names:
        if name in (ROW, *encoder.schema.names):
            raise OptionError(f"the output has a column {name!r} of its own; rename the input's")


def _model_options(options: BulkOptions, artifact: Artifact) -> ModelOptions:
    engine = select_engine(artifact, options.engine, options.precision)
    return ModelOptions(
        engine=options.engine,
        precision=options.precision,
        threads=options.threads,
        max_cost=_MAX_COST if ENGINES[engine].target == "cpu" else 0,
        max_queue_tokens=_NO_LIMIT,
        max_chars=_NO_LIMIT,
        max_token_vectors=_NO_LIMIT,
        max_chunks=_NO_LIMIT,
    )


def _settings(options: BulkOptions, kind: Kind, source: Source, model: Model) -> dict[str, object]:
    """Return all that determines the output. A job is resumed with the same settings only."""
    return {
        **{f"input file {i + 1}": file.sha256 for i, file in enumerate(source.files)},
        "--input-format": source.format,
        "--template": options.template,
        "text columns": list(source.text_columns),
        "copied columns": {column.name: str(column.type) for column in source.copied},
        "--prompt-name": options.prompt_name,
        "--kind": kind,
        "chunking": None if options.chunking is None else asdict(options.chunking),
        "--dimensions": options.dimensions,
        "--dtype": options.dtype,
        "--limit": options.limit,
        "--format": options.format,
        "--part-rows": options.part_rows,
        "graph": model.graph_sha256,
        "tokenizer": model.files[TOKENIZER],
        "calibration": model.files.get(CALIBRATION),
        "--engine": model.engine.name,
        "--precision": model.engine.precision,
    }


class _Run:
    """One run of a job: encodes the parts that are left, and writes them."""

    def __init__(
        self,
        options: BulkOptions,
        source: Source,
        journal: Journal,
        schema: pa.Schema,
        report: Callable[[Progress], None],
    ) -> None:
        before = sum(part.errors for part in journal.finished.values())
        self.progress = Progress(errors_before=before)
        self._options = options
        self._source = source
        self._journal = journal
        self._schema = schema
        self._report = report
        self._hashes: dict[int, Any] = {}  # of the records of each part of standard input
        self._part: _Part | None = None

    async def encode(self, pipeline: Pipeline, stop: asyncio.Event) -> None:
        """Encode the parts that are left, until `stop` is set."""
        try:
            await self._encode(pipeline, stop)
        except OSError as error:
            raise BulkError(
                f"{self._options.output} cannot be written: {error.strerror or error}; start again "
                "when the cause is gone"
            ) from error
        finally:
            if self._part is not None:
                self._part.files.discard()

    async def _encode(self, pipeline: Pipeline, stop: asyncio.Event) -> None:
        is_stream = self._source.stream is not None
        plan = _Plan(self._options, frozenset(self._journal.finished), is_stream)
        blocks = self._source.read(plan)
        if is_stream:
            blocks = self._checked(blocks, plan)
        total = 0
        self.progress.start()
        async with aclosing(pipeline.run(blocks)) as encoded:
            async for block in encoded:
                number = plan.part_of(block.first)
                if stop.is_set() and plan.last is None:
                    plan.last = number
                if not plan.rows_from(block.first):
                    break  # it was read before the stop
                total = block.first + block.count
                await self._add(number, block)
                if plan.rows_from(total) == 0 or plan.part_of(total) > number:
                    await self._end_part()
        await self._end_part()
        self.progress.is_complete = not plan.is_cut
        if self.progress.is_complete and not total:
            raise BulkError("the input has no records")
        if self.progress.is_complete and self._options.shard == (1, 1):
            self._journal.complete(total)

    async def _add(self, number: int, block: EncodedBlock) -> None:
        progress = self.progress
        progress.share = block.share
        if block.rows is None:
            progress.skip(block.count)
            return
        progress.add(block.rows)
        limit = self._options.max_errors
        if limit is not None and progress.all_errors > limit:
            raise BulkError(
                f"more than {limit} records have errors; the first is {progress.first_error}"
            )
        if self._part is None:
            stem = f"part-{number:05}"
            files = PartFiles(self._options.output, stem, self._options.format, self._schema)
            self._part = _Part(number, files)
        self._part.counts.add(block.rows)
        await asyncio.to_thread(self._part.files.add, block.rows)
        self._report(progress)

    async def _end_part(self) -> None:
        """Finish the files of the current part, and record it."""
        if self._part is None:
            return
        part, counts = self._part, self._part.counts
        hashes = await asyncio.to_thread(part.files.finish)
        digest = self._hashes.get(part.number)
        self._journal.add(
            FinishedPart(
                part.number,
                counts.rows,
                counts.tokens,
                counts.truncated,
                counts.errors,
                hashes,
                None if digest is None else digest.hexdigest(),
            )
        )
        self._part = None

    def _checked(self, blocks: Iterator[Block], plan: _Plan) -> Iterator[Block]:
        """Yield the blocks of standard input; those of finished parts are compared with before."""
        previous: int | None = None
        for block in blocks:
            number = plan.part_of(block.first)
            if previous not in (None, number):
                self._compare(previous)
            digest = self._hashes.setdefault(number, hashlib.sha256())
            for values in block.columns.values():
                digest.update(orjson.dumps(values))
            previous = number
            yield block if plan.is_encoded(number) else replace(block, columns={})
        self._compare(previous)

    def _compare(self, number: int | None) -> None:
        part = self._journal.finished.get(-1 if number is None else number)
        if part is not None and self._hashes[part.number].hexdigest() != part.records_sha256:
            first = part.number * self._options.part_rows
            raise BulkError(
                f"the input differs from the one that {self._options.output} was begun with, in "
                f"rows {first} to {first + part.rows - 1}"
            )

    def finish(self) -> None:
        """Join the parts, if that is requested and all parts are finished."""
        progress, journal, options = self.progress, self._journal, self._options
        if journal.rows is not None:
            progress.is_complete = True
            progress.kept = journal.rows - progress.rows
            progress.share = 1.0
        if journal.rows is None or not options.concat:
            return
        parts = [journal.finished[number] for number in sorted(journal.finished)]
        if journal.joined is None:
            names = [list(part.files) for part in parts]
            journal.join(join(options.output, _JOINED, options.format, names))
        for part in parts:
            for name in part.files:
                (options.output / name).unlink(missing_ok=True)


@dataclass
class _Part:
    """The part that is being written."""

    number: int
    files: PartFiles
    counts: Progress = field(default_factory=Progress)
