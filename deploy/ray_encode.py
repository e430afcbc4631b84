"""Bulk encoding on a Ray cluster: `vitrine-encode` with the actors of Ray Data.

    python -m deploy.ray_encode s3://corpus/texts s3://corpus/vectors --model /models/e5 --actors 8

A row of the dataset is the number of a part. An actor encodes the records of the part and moves its
file into the output folder. Ray repeats the part of an actor that dies: the file is replaced, so no
row is lost or doubled. A job that is started again encodes the parts whose files are missing.

Every machine needs the service's packages, and the artifact at the same path.
"""

import argparse
import asyncio
import json
import logging
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType, LocalFileSystem, copy_files
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError, RayTaskError

from models.artifact import sync
from models.engines import EngineError
from models.json_reader import JsonError, parse_json
from models.manifest import ArtifactError
from service.bulk.columns import copied_columns
from service.bulk.command_line import EPILOG, add_job_options, options_of, run_command
from service.bulk.input_files import InputFile, hash_file, with_verification
from service.bulk.journal import check_settings
from service.bulk.opening import OpenJob, checked_kind, open_job
from service.bulk.options import BulkError, BulkOptions, Kind, OptionError
from service.bulk.parts import PartFiles
from service.bulk.progress import Progress
from service.bulk.readers import Block, ReadPlan, read_parquet
from service.bulk.sources import STDIN, Source, reading_errors
from service.inference.errors import VitrineError

log = logging.getLogger("vitrine")

_SETTINGS = "_settings.json"
_PART = re.compile(r"part-(\d+)\.parquet")
_SUFFIXES = (".parquet", ".pq")
# Threads that read the footers of finished parts, because object stores have high latency.
_FOOTER_THREADS = 32

_Result = TypeVar("_Result")


class Location(NamedTuple):
    """A path in a file system."""

    filesystem: FileSystem
    path: str

    def __truediv__(self, name: str) -> "Location":
        return Location(self.filesystem, f"{self.path}/{name}")


def locate(name: str) -> Location:
    """Return the location of a path or URI.

    Raises:
        OptionError: The file system of the URI is unknown.
    """
    if "://" not in name:
        return Location(LocalFileSystem(), str(Path(name).absolute()))
    try:
        return Location(*FileSystem.from_uri(name))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OptionError(f"{name} cannot be opened: {error}") from error


@dataclass(frozen=True)
class Input:
    """An input file.

    Attributes:
        location: Location of the file.
        file: Path and content.
        rows: Number of records.
        columns: Columns and their types.
    """

    location: Location
    file: InputFile
    rows: int
    columns: pa.Schema


@dataclass(frozen=True)
class OutputPart:
    """A part of the output.

    Attributes:
        number: Number of the part, from 0.
        first: Index of its first record in the input.
        end: Index after its last record.
    """

    number: int
    first: int
    end: int

    @property
    def stem(self) -> str:
        """Name of the part's file without suffix."""
        return f"part-{self.number:05}"

    @property
    def rows(self) -> int:
        """Number of records."""
        return self.end - self.first


@dataclass(frozen=True)
class ClusterJob:
    """A job, as each actor receives it.

    Attributes:
        options: Settings of the job; the engine is that of all actors.
        kind: Kind of the results.
        source: Names and types of the input's columns.
        inputs: The input files in their order.
        output: Folder for the results.
        settings: See `OpenJob.settings`.
    """

    options: BulkOptions
    kind: Kind
    source: Source
    inputs: tuple[Input, ...]
    output: Location
    settings: Mapping[str, object]

    @property
    def rows(self) -> int:
        """Number of records to encode."""
        total = sum(file.rows for file in self.inputs)
        return min(total, self.options.limit or total)

    @property
    def parts(self) -> range:
        """Numbers of all parts."""
        return range(-(-self.rows // self.options.part_rows))

    def part(self, number: int) -> OutputPart:
        """Return a part by its number."""
        first = number * self.options.part_rows
        return OutputPart(number, first, min(first + self.options.part_rows, self.rows))

    def read(self, part: OutputPart) -> Iterator[Block]:
        """Yield the records of a part.

        Raises:
            BulkError: A file cannot be read, or was changed.
        """
        plan = ReadPlan(start=part.first, limit=part.end)
        starts = accumulate((file.rows for file in self.inputs), initial=0)
        for start, entry in zip(starts, self.inputs, strict=False):
            if start >= part.end or start + entry.rows <= part.first:
                continue
            filesystem, path = entry.location
            with reading_errors(path), filesystem.open_input_file(path) as raw:
                file = with_verification(raw, entry.file)
                blocks = read_parquet(file, self.source.columns, start, plan)
                yield from (block for block in blocks if block.columns)


async def encode_part(job: ClusterJob, opened: OpenJob, part: OutputPart) -> Progress:
    """Encode a part, write its file, and return its counts.

    Raises:
        BulkError: The input or the output cannot be read or written.
        VitrineError: The engine has stopped.
    """
    counts = Progress()
    try:
        with tempfile.TemporaryDirectory() as name:
            files = PartFiles(Path(name), part.stem, "parquet", opened.schema)
            async with aclosing(opened.pipeline().run(job.read(part))) as blocks:
                async for block in blocks:
                    assert block.rows is not None  # noqa: S101 - `read` yields wanted records only
                    counts.add(block.rows)
                    await asyncio.to_thread(files.add, block.rows)
            for file in await asyncio.to_thread(files.finish):
                await asyncio.to_thread(publish, Path(name) / file, job.output)
    except OSError as error:
        raise BulkError(
            f"{job.output.path} cannot be written: {error.strerror or error}; start again when the "
            "cause is gone"
        ) from error
    return counts


def publish(file: Path, output: Location) -> None:
    """Copy a local file into the output folder under a temporary name, then rename the copy.

    The temporary name is unique, because Ray may repeat a part while an unreachable machine still
    writes it.
    """
    temporary = output / f".{file.name}.{uuid4().hex}.partial"
    copy_files(str(file), temporary.path, LocalFileSystem(), output.filesystem)
    if isinstance(output.filesystem, LocalFileSystem):
        sync(Path(temporary.path))
    output.filesystem.move(temporary.path, (output / file.name).path)


class PartEncoder:
    """Actor with an open model, which encodes a part per call.

    Errors that end the job are returned as texts, because Ray's errors quote them in a traceback.
    """

    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._stack = AsyncExitStack()
        self._error: str | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        try:
            self._opened = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except (BulkError, ArtifactError, EngineError) as error:
            self._error = f"on the machine {ray.util.get_node_ip_address()}: {error}"

    async def _open(self) -> OpenJob:
        job = self._job
        opened = await self._stack.enter_async_context(open_job(job.options, job.kind, job.source))
        check_settings(job.output.path, job.settings, opened.settings)
        return opened

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[object]]:
        """Encode the part of the batch, and return a row with its counts or its error."""
        part = self._job.part(int(batch["part"][0]))
        counts = Progress()
        error = self._error
        if error is None:
            work = encode_part(self._job, self._opened, part)
            try:
                counts = asyncio.run_coroutine_threadsafe(work, self._loop).result()
            except (BulkError, VitrineError) as failure:
                error = str(failure)
        return {
            "rows": [counts.rows],
            "tokens": [counts.tokens],
            "truncated": [counts.truncated],
            "errors": [counts.errors],
            "first_error": [counts.first_error or ""],
            "failure": [error or ""],
        }


def encode_on_cluster(
    options: BulkOptions,
    output: Location,
    actors: int,
    report: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Encode the records of Parquet files, or what is left of them, on the connected Ray cluster.

    Args:
        options: Settings of the job; `threads` is the number of CPUs per actor.
        output: Folder for the results.
        actors: Number of actors.
        report: Called with the state of the job after each part.

    Raises:
        OptionError: A setting is invalid, or contradicts the model, the input or the output folder.
        BulkError: The input or the output cannot be read or written, too many records have errors,
            or Ray gives up. Finished parts are kept.
        ArtifactError: The artifact is incomplete or invalid.
        EngineError: The engine is unavailable, or fails the self-check.
    """
    progress = Progress()
    try:
        _encode(_plan(options, output), actors, progress, report)
    except KeyboardInterrupt:
        return progress
    except RayError as error:
        raise BulkError(f"Ray has ended the job: {str(error).strip().splitlines()[-1]}") from error
    progress.is_complete = True
    return progress


def _encode(
    job: ClusterJob, actors: int, progress: Progress, report: Callable[[Progress], None]
) -> None:
    if not job.rows:
        raise BulkError(f"the input has no records: {' '.join(job.options.inputs)}")
    finished = open_output(job)
    progress.errors_before = sum(finished.values())
    kept = sum(job.part(number).rows for number in finished)
    progress.share = kept / job.rows
    progress.skip(kept)
    progress.start()
    for row in _encoded_parts(job, [n for n in job.parts if n not in finished], actors):
        if row["failure"]:
            raise BulkError(row["failure"])
        progress.rows += row["rows"]
        progress.tokens += row["tokens"]
        progress.truncated += row["truncated"]
        progress.errors += row["errors"]
        progress.first_error = progress.first_error or row["first_error"] or None
        progress.share = (kept + progress.rows) / job.rows
        report(progress)
        progress.check_errors(job.options.max_errors)
    if len(finished) < len(job.parts):
        _check_complete(job)
    _remove_partial_files(job.output)


def _check_complete(job: ClusterJob) -> None:
    """Check that a complete output is there, and is of the input as it is now.

    Raises:
        BulkError: The input was changed, or a part is missing or damaged.
    """
    contents = _on_cluster(_hash, [(entry.location,) for entry in job.inputs], num_cpus=1)
    for entry, now in zip(job.inputs, contents, strict=True):
        entry.file.check_unchanged(now)
    missing = set(job.parts) - _errors_of_parts(job, job.parts).keys()
    if missing:
        raise BulkError(
            f"{job.output.path} lacks the part {min(missing)}, which another process has removed "
            "or changed; start again, and its rows are encoded again"
        )


def _encoded_parts(job: ClusterJob, parts: Sequence[int], actors: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each part as soon as it is encoded."""
    if not parts:
        return
    # One part per block, because a block is what Ray repeats.
    dataset = ray.data.from_items([{"part": n} for n in parts], override_num_blocks=len(parts))
    yield from dataset.map_batches(
        PartEncoder,
        batch_size=1,
        fn_constructor_args=(job,),
        compute=ActorPoolStrategy(size=actors),
        **_resources(job.options),
    ).iter_rows()


def _resources(options: BulkOptions) -> dict[str, int]:
    return {"num_cpus": options.threads, "num_gpus": int(options.engine == "cuda")}


def _plan(options: BulkOptions, output: Location) -> ClusterJob:
    """Read and hash the input, and open the model once on the cluster, to check all settings."""
    kind = checked_kind(options)
    locations = [location for name in options.inputs for location in find(name, output)]
    inputs = _on_cluster(_inspect, [(location,) for location in locations], num_cpus=1)
    texts = options.text_columns(kind)
    schemas = {entry.file.path: entry.columns for entry in inputs}
    copied = copied_columns(schemas, texts, options.copied_columns)
    source = Source("parquet", tuple(entry.file for entry in inputs), tuple(texts), copied)
    [settings] = _on_cluster(_settings, [(options, kind, source)], **_resources(options))
    # All actors use the engine that "auto" has selected.
    options = replace(options, engine=str(settings["--engine"]))
    return ClusterJob(options, kind, source, tuple(inputs), output, settings)


def _on_cluster(
    function: Callable[..., _Result], calls: Sequence[tuple[Any, ...]], **resources: int
) -> list[_Result]:
    task = ray.remote(**resources)(function)
    try:
        results: list[_Result] = ray.get([task.remote(*arguments) for arguments in calls])
    except RayTaskError as error:
        raise error.cause from error
    return results


def find(name: str, output: Location) -> list[Location]:
    """Return the Parquet files at a path or URI: the file, or those in the folder by their names.

    Those in the output folder are left out.

    Raises:
        OptionError: There is no such file, or the name is that of standard input.
        BulkError: The file system cannot be read.
    """
    if name == STDIN:
        raise OptionError("a cluster cannot read standard input; write the texts to a Parquet file")
    filesystem, path = locate(name)
    with reading_errors(name):
        info = filesystem.get_file_info(path)
        if info.type == FileType.File:
            return [Location(filesystem, path)]
        files = filesystem.get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    names = [file.path for file in files if file.type == FileType.File and _is_input(file, path)]
    if filesystem == output.filesystem:
        names = [file for file in names if not file.startswith(f"{output.path}/")]
    if not names:
        raise OptionError(f"there is no Parquet file at {name}")
    return [Location(filesystem, file) for file in sorted(names, key=lambda file: file.split("/"))]


def _is_input(file: FileInfo, folder: str) -> bool:
    parts = file.path.removeprefix(folder).strip("/").split("/")
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    return file.path.lower().endswith(_SUFFIXES) and not is_hidden


def _inspect(location: Location) -> Input:
    """Hash a file, and read its number of records and its columns."""
    filesystem, path = location
    with reading_errors(path), filesystem.open_input_file(path) as file:
        content = hash_file(path, file)
        try:
            parquet = pq.ParquetFile(with_verification(file, content))
        except pa.ArrowInvalid as error:
            raise OptionError(
                f"{path} is not a Parquet file; vitrine-encode reads other formats, on one machine"
            ) from error
        return Input(location, content, parquet.metadata.num_rows, parquet.schema_arrow)


def _hash(location: Location) -> InputFile:
    """Hash a file."""
    filesystem, path = location
    with reading_errors(path), filesystem.open_input_file(path) as file:
        return hash_file(path, file)


def _settings(options: BulkOptions, kind: Kind, source: Source) -> dict[str, object]:
    """Return the settings of a job, for which its model is opened."""

    async def settings() -> dict[str, object]:
        async with open_job(options, kind, source) as opened:
            return opened.settings

    return asyncio.run(settings())


def open_output(job: ClusterJob) -> dict[int, int]:
    """Create the output folder, and return the number of errors of each finished part.

    Raises:
        OptionError: The folder has other files, or was begun with other settings.
        BulkError: The file system cannot be read or written.
    """
    filesystem, path = job.output
    settings = job.output / _SETTINGS
    with reading_errors(path):
        if filesystem.get_file_info(path).type == FileType.File:
            raise OptionError(f"{path} is not a folder")
        filesystem.create_dir(path, recursive=True)
        names = [info.base_name for info in filesystem.get_file_info(FileSelector(path))]
        if _SETTINGS in names:
            with filesystem.open_input_file(settings.path) as file:
                check_settings(path, _settings_in(settings.path, file.read()), job.settings)
        elif not all(map(_is_partial, names)):
            raise OptionError(
                f"{path} has files, but no job was begun there; choose an empty folder"
            )
        else:
            with tempfile.TemporaryDirectory() as folder:
                local = Path(folder) / _SETTINGS
                local.write_text(json.dumps(job.settings))
                publish(local, job.output)
    numbers = [int(match[1]) for match in map(_PART.fullmatch, names) if match]
    return _errors_of_parts(job, numbers)


def _settings_in(path: str, content: bytes) -> dict[str, object]:
    try:
        settings = parse_json(content)
    except JsonError as error:
        raise BulkError(f"{path} is damaged: {error}; choose another output folder") from error
    if not isinstance(settings, dict):
        raise BulkError(f"{path} is damaged: it has no settings; choose another output folder")
    return settings


def _errors_of_parts(job: ClusterJob, numbers: Sequence[int]) -> dict[int, int]:
    """Return the number of errors of each part, without parts whose files are damaged."""
    with ThreadPoolExecutor(_FOOTER_THREADS) as threads:
        errors = threads.map(lambda number: _errors_of(job, job.part(number)), numbers)
        return {n: count for n, count in zip(numbers, errors, strict=True) if count is not None}


def _errors_of(job: ClusterJob, part: OutputPart) -> int | None:
    """Return the number of errors of a finished part; None: its file is damaged."""
    location = job.output / f"{part.stem}.parquet"
    try:
        with location.filesystem.open_input_file(location.path) as file:
            metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        rows = None
    else:
        rows = metadata.num_rows
    if rows != part.rows:
        log.warning("%s was changed; its rows are encoded again", location.path)
        return None
    column = metadata.num_columns - 1  # a copied struct may have a field with the name, too
    groups = [metadata.row_group(group).column(column) for group in range(metadata.num_row_groups)]
    return part.rows - sum(int(group.statistics.null_count) for group in groups)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(".partial")


def _remove_partial_files(output: Location) -> None:
    """Remove the files that actors have left when they died."""
    with reading_errors(output.path):
        for info in output.filesystem.get_file_info(FileSelector(output.path)):
            if _is_partial(info.base_name):
                output.filesystem.delete_file(info.path)


@contextmanager
def connect() -> Iterator[None]:
    """Connect to the Ray cluster of the environment, or start one on this machine.

    SIGTERM raises KeyboardInterrupt until the block ends.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    ray.init(logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    DataContext.get_current().enable_progress_bars = False  # the command has its own
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        ray.shutdown()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "ray_encode",
        description="Encode the texts of Parquet files with a model, on a Ray cluster. Started "
        "again with the same options, the command continues where it was interrupted.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="path or URI of a Parquet file or a folder")
    add("output", metavar="OUTPUT", help="path or URI of the folder for the results")
    add_job_options(parser)
    add("--actors", type=int, required=True, help="number of actors, each with a model")
    add("--cpus-per-actor", type=int, default=1, help="default: 1")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    values = vars(build_parser().parse_args(arguments))
    progress = values.pop("progress")

    def encode(report: Callable[[Progress], None]) -> Progress:
        actors, cpus = values.pop("actors"), values.pop("cpus_per_actor")
        for name, value in (("actors", actors), ("cpus-per-actor", cpus)):
            if value < 1:
                raise OptionError(f"--{name} must be at least 1")
        output = locate(values.pop("output"))
        options = options_of({**values, "output": Path(output.path), "threads": cpus})
        options = replace(options, model=options.model.absolute())  # workers run elsewhere
        with connect():
            return encode_on_cluster(options, output, actors, report)

    return run_command("ray_encode", progress, encode)


if __name__ == "__main__":
    # Ray imports the module's classes by this name on the workers.
    from deploy.ray_encode import main as command

    sys.exit(command())
