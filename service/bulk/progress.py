"""The progress of a job, and its reports: a bar on a terminal, or lines of JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from service.bulk.options import ERROR, ROW, TOKENS, TRUNCATED, BulkError

ReportKind = Literal["auto", "json", "none"]
# Seconds between two lines of JSON.
_LINE_S = 5.0


@dataclass
class Progress:
    """State of a job.

    Attributes:
        stage: The work: "encoding", or another one of an evaluation, which counts no rows.
        rows: Number of encoded rows, by this run.
        tokens: Number of their tokens.
        truncated: Number of truncated texts among them.
        errors: Number of rows with an error among them.
        errors_before: Number of rows with an error in parts that were finished before.
        kept: Number of rows of parts that were finished before.
        share: Share of the input, or of the limit of records if that is more, that has been read,
            from 0 to 1; 0 for standard input without a limit.
        started: Time at which the run began to read, by `time.monotonic`; None: not yet.
        share_before: Share of the input before the first row that the run encoded.
        first_error: The first error, with its row.
        is_complete: Whether all parts of the job's shard are finished.
        verified: Number of rows that were encoded again and compared.
        difference: Largest difference of one of these.
    """

    stage: str = "encoding"
    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    errors: int = 0
    errors_before: int = 0
    kept: int = 0
    share: float = 0.0
    started: float | None = None
    share_before: float = 0.0
    first_error: str | None = None
    is_complete: bool = False
    verified: int = 0
    difference: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began to read."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    @property
    def all_errors(self) -> int:
        """Number of rows with an error, by all runs."""
        return self.errors_before + self.errors

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of this run."""
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Estimated seconds until the end, by `share`; None: not known."""
        done = self.share - self.share_before
        return self.elapsed_s * (1 - self.share) / done if done > 0 else None

    def start(self) -> None:
        """Begin to measure the throughput."""
        self.started = time.monotonic()

    def skip(self, rows: int) -> None:
        """Count rows of parts that were finished before."""
        self.kept += rows
        if not self.rows:
            self.share_before = self.share

    def add(self, rows: pa.RecordBatch) -> None:
        """Count encoded rows."""
        self.rows += len(rows)
        self.tokens += pc.sum(rows.column(TOKENS)).as_py() or 0
        self.truncated += pc.sum(rows.column(TRUNCATED)).as_py() or 0
        errors = rows.select([ROW, ERROR]).filter(pc.is_valid(rows.column(ERROR)))
        self.errors += len(errors)
        if len(errors) and self.first_error is None:
            row, error = (column[0].as_py() for column in errors)
            self.first_error = f"row {row}: {error}"

    def check_errors(self, limit: int | None) -> None:
        """Check the number of rows with an error, by all runs.

        Raises:
            BulkError: It exceeds the limit.
        """
        if limit is not None and self.all_errors > limit:
            first = f"; the first is {self.first_error}" if self.first_error else ""
            raise BulkError(f"more than {limit} records have errors{first}")


@contextmanager
def report_progress(kind: ReportKind) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that reports the progress on standard error.

    Args:
        kind: "auto": a bar, if standard error is a terminal; "json": a line of JSON every five
            seconds; "none": nothing.
    """
    if kind == "json":
        yield _json_lines()
    elif kind == "auto" and sys.stderr.isatty():
        with Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[details]}"),
            console=Console(stderr=True),
        ) as bar:
            task = bar.add_task("", total=1.0, details="")
            yield lambda progress: bar.update(
                task,
                description=progress.stage,
                completed=progress.share,
                details=_details(progress),
            )
    else:
        yield lambda _: None


def _details(progress: Progress) -> str:
    details = []
    if rows := progress.kept + progress.rows:
        details.append(f"{rows:,} rows, {progress.tokens_per_s:,.0f} tokens/s")
    if progress.all_errors:
        details.append(f"{progress.all_errors:,} errors")
    if progress.remaining_s is not None:
        details.append(f"{duration(progress.remaining_s)} left")
    return ", ".join(details)


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds, such as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _json_lines() -> Callable[[Progress], None]:
    latest = -_LINE_S

    def report(progress: Progress) -> None:
        nonlocal latest
        if time.monotonic() - latest < _LINE_S:
            return
        latest = time.monotonic()
        print(json.dumps(as_json(progress)), file=sys.stderr, flush=True)

    return report


def as_json(progress: Progress) -> dict[str, object]:
    """Return the progress for orchestrators."""
    remaining_s = progress.remaining_s
    return {
        "stage": progress.stage,
        "rows": progress.kept + progress.rows,
        "tokens": progress.tokens,
        "tokens_per_s": round(progress.tokens_per_s, 1),
        "errors": progress.all_errors,
        "truncated": progress.truncated,
        "share": round(progress.share, 4),
        "remaining_s": None if remaining_s is None else round(remaining_s, 1),
        "complete": progress.is_complete,
    }
