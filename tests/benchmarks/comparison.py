"""Frame of the benchmarks: contenders take turns, and a report has medians and ratios.

A benchmark gives a `Comparison` one function per contender, which applies a load once and returns
its figures. `parser` has the options that benchmarks share, and `report` prints and writes the
tables.
"""

import argparse
import datetime
import os
import platform
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

# Figures of one measurement by name and unit, such as "p50, ms".
Figures = Mapping[str, float]
Measure = Callable[[], Figures]
_OUT = Path("build/bench")
# Flags of /proc/cpuinfo that decide which precisions an engine has, and how fast they are.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
}


class BenchmarkError(Exception):
    """A contender does not answer, fails requests or returns other results."""


class Turns:
    """Figures of contenders that take turns.

    A ratio is the median of the rounds' ratios, because a machine's speed changes.

    Attributes:
        figures: Values of all rounds by figure and contender.
        references: Other references, by contender.
        problems: The contenders that failed, and why.

    Args:
        reference: Contender that ratios are relative to; none by default.
        contenders_in_rows: Layout of the table; by default, contenders are columns.
    """

    def __init__(self, reference: str = "", *, contenders_in_rows: bool = False) -> None:
        self.reference = reference
        self._contenders_in_rows = contenders_in_rows
        self.references: dict[str, str] = {}
        self.figures: dict[str, dict[str, list[float]]] = {}
        self.problems: list[str] = []
        self._contenders: dict[str, None] = {}  # in the order of their first measurement

    def measure(
        self,
        contenders: Mapping[str, Measure],
        rounds: int,
        *,
        title: str = "",
        warm_up: bool = True,
    ) -> None:
        """Measure the contenders in turn, and add their figures, whose names start with the title.

        Each round begins with the next contender, so that none is always behind the same one. The
        first round is the warm-up. A contender that raises a `BenchmarkError` is not measured again
        and has no figures; the others are.
        """
        names = list(contenders)
        measured: dict[str, list[Figures]] = {name: [] for name in names}
        problems: dict[str, str] = {}
        for round_ in range(-int(warm_up), rounds):
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                if name in problems:
                    continue
                try:
                    figures = contenders[name]()
                except BenchmarkError as error:
                    problems[name] = f"{title}{name}: {error}"
                    measured[name].clear()
                else:
                    measured[name] += [figures] if round_ >= 0 else []
        for name, rounds_ in measured.items():
            self._contenders[name] = None
            for figures in rounds_:
                for figure, value in figures.items():
                    self.add(title + figure, name, value)
        self.problems += problems.values()
        print(
            f"Measured {title or ', '.join(names)}", *problems.values(), sep="\n", file=sys.stderr
        )

    def add(self, figure: str, contender: str, value: float) -> None:
        """Add one value of a figure."""
        self._contenders[contender] = None
        self.figures.setdefault(figure, {}).setdefault(contender, []).append(value)

    def median(self, figure: str, contender: str) -> float:
        """Return the median of the rounds."""
        return statistics.median(self.figures[figure][contender])

    def ratio(self, figure: str, contender: str, reference: str) -> float:
        """Return the median of the rounds' ratios to another contender."""
        by_contender = self.figures[figure]
        pairs = zip(by_contender[contender], by_contender[reference], strict=True)
        return statistics.median(value / other for value, other in pairs)

    def cell(self, figure: str, contender: str) -> str:
        """Return the median with the ratio to the reference in brackets; a dash without figures."""
        by_contender = self.figures[figure]
        if contender not in by_contender:
            return "-"
        median = number(self.median(figure, contender))
        reference = self.references.get(contender, self.reference)
        if reference == contender or not all(by_contender.get(reference, [0])):
            return median
        ratio = self.ratio(figure, contender, reference)
        return f"{median} ({ratio:.2f})" if ratio >= 0.1 else f"{median} ({ratio:.2g})"

    def __str__(self) -> str:
        """Return the figures as a table in Markdown."""
        if self._contenders_in_rows:
            rows = (
                [c, *(self.cell(figure, c) for figure in self.figures)] for c in self._contenders
            )
            return markdown(["", *self.figures], rows)
        rows = (
            [f, *(self.cell(f, contender) for contender in self._contenders)] for f in self.figures
        )
        return markdown(["", *self._contenders], rows)


def number(value: float) -> str:
    """Return a number with three to five significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parser(
    description: str | None, *, rounds: int, seconds: int | None = None
) -> argparse.ArgumentParser:
    """Return the options of a benchmark, with its defaults.

    Args:
        seconds: Duration of one load with wrk. Without it, nothing is loaded.

    Raises:
        SystemExit: wrk is needed and not installed.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--environments", type=Path, default=Path(".venv-bench"), help="environments of peers"
    )
    options.add_argument("--rounds", type=int, default=rounds)
    if seconds is not None:
        options.add_argument("--seconds", type=int, default=seconds, help="duration of one load")
        if shutil.which("wrk") is None:
            sys.exit("the load generator wrk is not installed; run: sudo apt-get install wrk")
    return options


def report(*parts: str | Turns) -> None:
    """Print the parts below machine, date and command, and write them to a file in `build/bench`.

    Raises:
        SystemExit: a contender had a problem; the status is 1.
    """
    module = Path(sys.argv[0]).stem
    command = f"python -m tests.benchmarks.{module} {shlex.join(sys.argv[1:])}".strip()
    facts = f"{machine()}, {datetime.date.today()}\n\n`{command}`"
    compared = [part for part in parts if isinstance(part, Turns)]
    problems = [problem for comparison in compared for problem in comparison.problems]
    text = "\n\n".join([facts, *map(str, parts), *(f"- {problem}" for problem in problems)])
    print(text)
    _OUT.mkdir(parents=True, exist_ok=True)
    (_OUT / f"{module.removeprefix('bench_')}.md").write_text(f"{text}\n", "utf-8")
    if problems:
        sys.exit(f"the report is incomplete: {'; '.join(problems)}")


def machine() -> str:
    """Return the CPU, its instructions, the number of cores and the operating system."""
    file = Path("/proc/cpuinfo")
    cpuinfo = file.read_text("utf-8") if file.exists() else ""
    return f"{cpu(cpuinfo)}, {os.cpu_count()} CPUs, {platform.platform()}"


def cpu(cpuinfo: str) -> str:
    """Return the CPU's name and class: which of the instructions that matter it has."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = fields.get("flags", "").split()
    instructions = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name + (f" with {', '.join(instructions)}" if instructions else "")
