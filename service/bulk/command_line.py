"""`vitrine-encode`: the command line of bulk encoding.

A first SIGINT or SIGTERM ends the job after the current part, a second one at once.
"""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from models.engines import EngineError, Precision, select_engine
from models.local_path import local_path
from models.manifest import ArtifactError
from models.printable import printable
from service.bulk.job import encode_files
from service.bulk.options import (
    DTYPES,
    INPUT_FORMATS,
    KINDS,
    OUTPUT_FORMATS,
    BulkError,
    BulkOptions,
    OptionError,
)
from service.bulk.progress import Progress, ReportKind, as_json, duration, report_progress
from service.inference.errors import InvalidInput, VitrineError
from service.inference.tokenizing.chunking import Chunking, Strategy
from service.model_cache import artifact_of, model_path, required_signer

log = logging.getLogger("vitrine")

EPILOG = (
    "Exit status: 0: done; 1: failed, finished parts are kept; 2: an option was refused; "
    "3: done, with errors of records; 4: interrupted."
)
INTERRUPTED = 4

Result = TypeVar("Result")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError("a shard must have the form 3/16")
    return int(match[1]), int(match[2])


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text)
    if match is None:
        raise argparse.ArgumentTypeError("a size must have the form 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "vitrine-encode",
        description="Encode the texts of files with a model. Started again with the same options, "
        "the command continues where it was interrupted.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        type=local_path,
        metavar="INPUT",
        help="file, folder or glob pattern; -: standard input",
    )
    add("output", type=local_path, metavar="OUTPUT", help="folder for the results")
    add("--input-format", choices=INPUT_FORMATS, help="default: by the names of the files")
    add_job_options(parser)
    add(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="share of this process, such as 3/16 (default: everything)",
    )
    add("--format", choices=OUTPUT_FORMATS, default="parquet", help="output (default: parquet)")
    add("--concat", action="store_true", help="join all parts in one file at the end")
    add(
        "--verify",
        type=int,
        default=0,
        metavar="N",
        help="compare N rows, each encoded alone (default: %(default)s)",
    )
    add("--threads", type=int, default=0, help="number of threads (default: one per CPU)")
    return parser


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that apply on one machine and on a cluster."""
    add = parser.add_argument
    add(
        "--model",
        type=model_path,
        required=True,
        help="artifact, folder, installed package or hub id",
    )
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument(
        "--text-column", default="text", help="column with the texts (default: text)"
    )
    texts.add_argument(
        "--template",
        type=_unescape,
        help=r"text of each record, with columns in braces: '{title}\n{body}' "
        "(default: one column)",
    )
    add("--query-column", default="query", help="column with queries, for scores (default: query)")
    add("--id-column", help="column with ids, copied to the output (default: none)")
    add(
        "--columns",
        type=_names,
        default=(),
        help="further columns to copy, such as year,author (default: none)",
    )
    add("--prompt-name", help="name of the prompt before each text (default: the model's default)")
    add("--kind", choices=KINDS, help="kind of results (default: by the model)")
    add_chunking(parser)
    add(
        "--highlight",
        type=int,
        metavar="N",
        help="store the best N sentences, for scores (default: none)",
    )
    add("--dimensions", type=int, help="number of leading dimensions to keep (default: all)")
    add("--dtype", choices=DTYPES, default="float32", help="type of vectors (default: float32)")
    add("--limit", type=int, help="maximum number of records (default: all)")
    add("--part-rows", type=int, default=8192, help="records per part (default: 8192)")
    add("--max-memory", type=_bytes, default="256M", help="for records in flight (default: 256M)")
    add("--max-errors", type=int, help="maximum number of records with errors (default: no limit)")
    add("--engine", default="auto", help="onnxruntime, openvino or cuda (default: auto)")
    add("--precision", choices=get_args(Precision), default="float32", help="default: float32")
    add("--progress", choices=("auto", "json", "none"), default="auto", help="default: auto")


def add_chunking(parser: argparse.ArgumentParser) -> None:
    """Add the options of chunking."""
    add = parser.add_argument
    add(
        "--chunking",
        choices=get_args(Strategy),
        help="divide texts, for chunks and scores (default: texts are not divided)",
    )
    add("--chunk-size", type=int, help="tokens per chunk (default: as many as the model takes)")
    add("--chunk-overlap", type=int, default=0, help="tokens that chunks share (default: 0)")
    add("--late", action="store_true", help="late chunking: encode the whole text at once")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    values = vars(build_parser().parse_args(arguments))

    def encode(report: Callable[[Progress], None]) -> Progress:
        options = options_of(values)
        return asyncio.run(interruptible(lambda stop: encode_files(options, report, stop)))

    return run_command("vitrine-encode", values.pop("progress"), encode)


def options_of(values: Mapping[str, Any]) -> BulkOptions:
    """Return the settings of a job by the values of the command line.

    A model that is no artifact is exported; see `artifact_of`.

    Raises:
        OptionError: An option is invalid, or a file of the model cannot be read.
        EngineError: The engine is unknown or unavailable on this machine.
        ArtifactError: The model cannot be found or exported; the message has the remedy.
    """
    values = {
        **values,
        "inputs": tuple(map(str, values["inputs"])),
        "chunking": chunking_of(values),
    }
    for name in ("chunk_size", "chunk_overlap", "late"):
        del values[name]
    if values["chunking"] is not None:
        values["kind"] = values["kind"] or "chunks"
    options = BulkOptions(**values)
    model = export_if_needed(options.model, options.engine, options.precision)
    return replace(options, model=model, signer=required_signer())


def chunking_of(values: Mapping[str, Any]) -> Chunking | None:
    """Return how texts are divided, by the values of the command line; None: they are not.

    Raises:
        OptionError: An option is invalid.
    """
    size, overlap, late = (values[name] for name in ("chunk_size", "chunk_overlap", "late"))
    if values["chunking"] is None:
        if size is not None or overlap or late:
            raise OptionError("--chunk-size, --chunk-overlap and --late need --chunking")
        return None
    try:
        return Chunking(strategy=values["chunking"], size=size, overlap=overlap, late=late)
    except InvalidInput as error:
        raise OptionError(error.detail) from None


def export_if_needed(model: Path, engine: str, precision: Precision) -> Path:
    """Return the path of a model's artifact; see `artifact_of`.

    Raises:
        OptionError: A file of the model cannot be read.
        EngineError: The engine is unknown or unavailable on this machine.
        ArtifactError: The model cannot be found or exported; the message has the remedy.
    """
    select_engine(None, engine, precision)  # before an export
    try:
        may_export = required_signer() is None
        return artifact_of(model, engine, precision, cache=None, may_export=may_export)
    except OSError as error:
        raise OptionError(f"{model} cannot be read: {error}") from error


def run_command(
    name: str, progress: ReportKind, encode: Callable[[Callable[[Progress], None]], Progress]
) -> int:
    """Run a job, print its summary or its error, and return the exit status of the command.

    Args:
        name: Name of the command, which begins its messages.
        progress: Kind of the reports; see `report_progress`.
        encode: Runs the job, given a function that reports its progress.
    """

    def run() -> int:
        with report_progress(progress) as report:
            result = encode(report)
        if progress == "json":
            print(json.dumps(as_json(result)), file=sys.stderr)
        else:
            print(printable(f"{name}: {_summary(result)}"), file=sys.stderr)
        if not result.is_complete:
            return INTERRUPTED
        return 3 if result.all_errors else 0

    return exit_status(name, run)


def exit_status(name: str, run: Callable[[], int]) -> int:
    """Run a command, log its warnings, print its error, and return its exit status.

    Args:
        name: Name of the command, which begins its messages.
        run: Runs the command and returns its exit status if no error is raised.
    """
    logging.basicConfig(format=f"{name}: %(message)s", level=logging.WARNING)
    logging.getLogger("vitrine.export").setLevel(logging.INFO)
    try:
        return run()
    except (OptionError, ArtifactError, EngineError) as error:
        status, reason = 2, str(error)
    except (BulkError, VitrineError) as error:
        status, reason = 1, str(error)
    print(printable(f"{name}: {reason}"), file=sys.stderr)
    return status


async def interruptible(job: Callable[[asyncio.Event], Awaitable[Result]]) -> Result:
    """Run a job, which a first SIGINT or SIGTERM ends after the current part, a second at once.

    Args:
        job: Runs the job until the event is set.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        if stop.is_set():
            # A thread that waits for standard input would block an orderly end.
            print("interrupted; finished parts are kept", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED)
        stop.set()
        log.warning("the job ends after the current part; a second signal ends it now")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    return await job(stop)


def _summary(progress: Progress) -> str:
    texts = []
    if progress.rows or not progress.kept:
        texts.append(
            f"{progress.rows:,} rows encoded, {progress.tokens:,} tokens in "
            f"{duration(progress.elapsed_s)}, {progress.tokens_per_s:,.0f} tokens/s"
        )
    if progress.kept:
        texts.append(f"{progress.kept:,} rows were there already")
    if progress.truncated:
        texts.append(f"{progress.truncated:,} texts were truncated")
    if progress.all_errors:
        first = f"; the first: {progress.first_error}" if progress.first_error else ""
        texts.append(f"{progress.all_errors:,} rows have errors{first}")
    if progress.verified:
        texts.append(
            f"{progress.verified:,} rows verified, largest difference {progress.difference:.1e}"
        )
    if not progress.is_complete:
        texts.append("interrupted: start again with the same options")
    return "; ".join(texts)
