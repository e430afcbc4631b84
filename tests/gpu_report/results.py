"""Results of the steps: one JSON line each, and the report made of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

Value = str | int | float | None
Row = dict[str, Value]


@dataclass(frozen=True)
class TableLine:
    """One line of a table.

    Attributes:
        step: Letter of the step.
        table: Title of the table.
        row: Cells by column.
        passes: Whether the result is within its bound; None: it has none.
        cause: Cause of a failure and its place; "": no failure, or an unknown cause.
    """

    step: str
    table: str
    row: Mapping[str, Value]
    passes: bool | None = None
    cause: str = ""


class ResultFile:
    """Appends results of a step to a file; every line is written at once.

    Args:
        step: Letter of the step.
        file: Open file for the lines.
    """

    def __init__(self, step: str, file: TextIO) -> None:
        self._step = step
        self._file = file

    def add(
        self, table: str, row: Mapping[str, Value], *, passes: bool | None = None, cause: str = ""
    ) -> None:
        """Write a result; see `TableLine`."""
        self._file.write(
            json.dumps(asdict(TableLine(self._step, table, row, passes, cause))) + "\n"
        )
        self._file.flush()


def read_results(file: Path) -> list[TableLine]:
    """Return the results in a file; a line that a dying process left incomplete is ignored."""
    if not file.exists():
        return []
    complete = file.read_text("utf-8").rpartition("\n")[0]
    return [TableLine(**json.loads(line)) for line in complete.splitlines()]


def write_report(folder: Path, titles: Mapping[str, str], results: Sequence[TableLine]) -> None:
    """Write report.json and report.md.

    Args:
        folder: Folder for both files.
        titles: Title of each step, by its letter, in the order of the report.
        results: Results of all steps so far.
    """
    content = {"results": [asdict(result) for result in results]}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (folder / "report.md").write_text("\n".join(_lines(titles, results)) + "\n", "utf-8")


def _lines(titles: Mapping[str, str], results: Sequence[TableLine]) -> Iterable[str]:
    failed = sum(result.passes is False for result in results)
    passed = sum(result.passes is True for result in results)
    yield f"# GPU report: {failed} failed, {passed} passed"
    for letter, title in titles.items():
        own = [result for result in results if result.step == letter]
        if own:
            yield from ("", f"## {letter}. {title}")
        for table in dict.fromkeys(result.table for result in own):
            yield from ("", f"### {table}", "")
            yield from table_lines([result for result in own if result.table == table])


def table_lines(results: Sequence[TableLine]) -> Iterable[str]:
    """Yield the lines of a table in Markdown, with the causes of failures below."""
    columns = list(dict.fromkeys(column for result in results for column in result.row))
    judged = any(result.passes is not None for result in results)
    yield "| " + " | ".join([*columns, *(["passes"] if judged else [])]) + " |"
    yield "|---" * (len(columns) + judged) + "|"
    for result in results:
        cells = [_cell(result.row.get(column)) for column in columns]
        if judged:
            cells.append({True: "yes", False: "**no**", None: ""}[result.passes])
        yield "| " + " | ".join(cells) + " |"
    causes = [f"- {result.cause}" for result in results if result.cause]
    if causes:
        yield from ("", *causes)


def _cell(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
