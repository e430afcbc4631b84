"""A bulk job: open the input, the model and the journal; encode, write and record each part."""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from service.bulk.journal import FinishedPart, Journal, check_unlocked, open_journal
from service.bulk.opening import OpenJob, checked_kind, open_job
from service.bulk.options import BulkError, BulkOptions
from service.bulk.parts import FORMATS, PartFiles, join
from service.bulk.pipeline import EncodedBlock
from service.bulk.progress import Progress
from service.bulk.readers import Block, ReadPlan
from service.bulk.sources import no_records, open_source
from service.bulk.verification import verify_rows

log = logging.getLogger("vitrine")

Result = TypeVar("Result")

# Name without suffix of the file that replaces all parts.
_JOINED = "embeddings"


async def encode_files(
    options: BulkOptions,
    report: Callable[[Progress], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Encode the records of files into an output folder, or what is left of them.

    If the caller is cancelled, finished parts are kept.

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
    kind = checked_kind(options)
    with writing_errors(options.output):
        check_unlocked(options.output, options.shard)
    source = await asyncio.to_thread(open_source, options, kind)
    async with open_job(options, kind, source) as job:
        with (
            writing_errors(options.output),
            open_journal(options.output, job.settings, options.shard) as journal,
        ):
            run = _JobRun(job, journal, report)
            if journal.rows is None or source.stream is not None:
                await run.encode(stop or asyncio.Event())
                await asyncio.to_thread(run.check)
            await _run_to_end(run.finish)
            if options.verify and run.progress.is_complete:
                run.progress.verified, run.progress.difference = await verify_rows(job, journal)
            return run.progress


async def _run_to_end(write: Callable[..., Result], *arguments: object) -> Result:
    """Call a function that writes in a thread; a caller that is cancelled waits for its end.

    A thread cannot be stopped, and pyarrow crashes if a file is closed while a thread writes it.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(write, *arguments))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        if not thread.cancelled():
            thread.exception()  # retrieved: the caller gets no other error
        raise


@contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of writing to the output folder into a `BulkError`."""
    try:
        yield
    except (OSError, UnicodeError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or error
        raise BulkError(
            f"{folder} cannot be written: {reason}; start again when the cause is gone"
        ) from error


class _JobRun:
    """One run of a job: encodes the parts that are left, and writes them."""

    def __init__(self, job: OpenJob, journal: Journal, report: Callable[[Progress], None]) -> None:
        self._job = job
        self._options = job.options
        self._source = job.source
        self._journal = journal
        self.progress = Progress(errors_before=sum(part.errors for part in self._own_parts))
        self._schema = job.schema
        self._report = report
        self._kept = frozenset(journal.finished)  # parts that were finished before
        self._hashes: dict[int, Any] = {}  # of the records of each part of standard input
        self._part: _Part | None = None
        self._tidy()

    async def encode(self, stop: asyncio.Event) -> None:
        """Encode the parts that are left, until `stop` is set."""
        try:
            await self._encode(stop)
        finally:
            if self._part is not None:
                self._part.files.discard()

    async def _encode(self, stop: asyncio.Event) -> None:
        is_stream = self._source.stream is not None
        plan = ReadPlan(self._options.part_rows, limit=self._options.limit)
        if is_stream:
            blocks = self._check(self._source.read(plan), plan)
        else:
            plan.wants = self._is_left
            blocks = self._source.read(plan)
        total = 0
        self.progress.start()
        async with aclosing(self._job.pipeline().run(blocks)) as encoded:
            async for block in encoded:
                number = plan.part_of(block.first)
                if stop.is_set() and plan.last is None:
                    plan.last = number
                if plan.last is not None and number > plan.last:
                    break  # it was read before the stop
                total = block.first + block.count
                await self._add(number, block, is_kept=number in self._kept)
                if plan.rows_from(total) == 0 or plan.part_of(total) > number:
                    await self._end_part()
        await self._end_part()
        # With rows left to read, the input has ended before the last part.
        self.progress.is_complete = plan.last is None or plan.rows_from(total) > 0
        if self.progress.is_complete and not total:
            raise no_records(self._options)
        if self.progress.is_complete and (is_stream or self._options.shard == (1, 1)):
            self._journal.complete(total)

    def _is_left(self, part: int) -> bool:
        return self._options.has_part(part) and part not in self._kept

    async def _add(self, number: int, block: EncodedBlock, *, is_kept: bool) -> None:
        progress = self.progress
        limit = self._options.limit or math.inf
        progress.share = max(block.share, (block.first + block.count) / limit)
        if block.rows is None:
            progress.skip(block.count if is_kept else 0)
            self._report(progress)
            return
        progress.add(block.rows)
        progress.check_errors(self._options.max_errors)
        if self._part is None:
            stem = f"part-{number:05}"
            files = PartFiles(self._options.output, stem, self._options.format, self._schema)
            self._part = _Part(number, files)
        self._part.counts.add(block.rows)
        await _run_to_end(self._part.files.add, block.rows)
        self._report(progress)

    async def _end_part(self) -> None:
        """Finish the files of the current part, and record it."""
        if self._part is None:
            return
        part, counts = self._part, self._part.counts
        hashes = await _run_to_end(part.files.finish)
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

    def _check(self, blocks: Iterator[Block], plan: ReadPlan) -> Iterator[Block]:
        """Yield the blocks of standard input; those of finished parts are compared with before.

        Raises:
            BulkError: The input differs from the one with which the output was begun.
        """
        previous, total, complete = -1, 0, self._journal.input_rows
        for block in blocks:
            number = plan.part_of(block.first)
            total = block.first + block.rows
            if complete is not None and total > complete:
                raise self._differs(f"which had {complete} rows")
            if previous not in (-1, number):
                self._compare(previous)
            digest = self._hashes.setdefault(number, hashlib.sha256())
            for values in block.columns.values():
                digest.update(json.dumps(values).encode())  # orjson refuses long integers
            previous = number
            yield block if self._is_left(number) else replace(block, columns={})
        for number in {previous, *self._kept} - {-1}:
            if plan.last is None or number <= plan.last:
                self._compare(number)
        if plan.last is None and complete not in (None, total):
            raise self._differs(f"which had {complete} rows")

    def _compare(self, number: int) -> None:
        part = self._journal.finished.get(number)
        digest = self._hashes.get(number, hashlib.sha256()).hexdigest()
        if part is not None and digest != part.records_sha256:
            first = part.number * self._options.part_rows
            raise self._differs(f"in rows {first} to {first + part.rows - 1}")

    def _differs(self, detail: str) -> BulkError:
        output = self._options.output
        return BulkError(f"the input differs from the one that {output} was begun with, {detail}")

    def check(self) -> None:
        """Check that a complete output is there, and is of the input as it is now.

        Raises:
            BulkError: The input or a part was changed, or is missing.
        """
        if self.progress.is_complete:
            self._source.check_unchanged()
            if self._journal.joined is None:  # else its file replaces them
                self._journal.check_files(self._own_parts)

    @property
    def _own_parts(self) -> list[FinishedPart]:
        parts = self._journal.finished.values()
        return [part for part in parts if self._options.has_part(part.number)]

    def finish(self) -> None:
        """Join the parts, if that is requested and all parts are finished."""
        progress, journal, options = self.progress, self._journal, self._options
        if journal.rows is not None and self._source.stream is None:
            progress.is_complete = True
            progress.kept = journal.rows - progress.rows
            progress.share = 1.0
        if progress.is_complete and options.concat and journal.joined is None:
            parts = [journal.finished[number] for number in sorted(journal.finished)]
            names = [list(part.files) for part in parts]
            files = join(options.output, _JOINED, options.format, names)
            journal.check_files(parts)  # as they are when they have been read
            journal.join(files)
        self._tidy()
        if progress.is_complete and options.shard == (1, 1):
            journal.check_strangers()

    def _tidy(self) -> None:
        """Remove the parts that a joined file replaces, or a joined file that is not recorded.

        A job may have ended between the two. Otherwise readers of the folder would find each row
        twice.
        """
        folder, joined = self._options.output, self._journal.joined
        if joined is None:
            names = [_JOINED + suffix for suffix in FORMATS[self._options.format].suffixes]
        else:
            names = [name for part in self._journal.finished.values() for name in part.files]
        for name in names:
            (folder / name).unlink(missing_ok=True)


@dataclass
class _Part:
    """The part that is being written."""

    number: int
    files: PartFiles
    counts: Progress = field(default_factory=Progress)
