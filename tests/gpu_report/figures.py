"""Write the figures of a report into the page of benchmarks.

`python -m tests.gpu_report.figures build/gpu-report/report.json` replaces what is between the two
comments named `gpu-report` in tests/benchmarks/README.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.gpu_report.results import Row, TableLine, table_lines

_PAGE = Path(__file__).parents[1] / "benchmarks/README.md"
_MARKED = re.compile(r"(<!-- gpu-report -->\n).*?(<!-- end of gpu-report -->)", re.DOTALL)
# Tables of the report that the page shows whole, and their titles there.
_WHOLE = {
    "Texts of mixed lengths": "Texts of mixed lengths, float16, beside sentence-transformers",
    "Beside PyTorch": "Engine `cuda` in float16 beside PyTorch in float32",
    "Processes on one device": "Processes that share the GPU, each with its streams",
    "Mixed load": "`/encode` under load",
    "Gradients": "Gradient jobs on the GPU",
    "A worker": "Needs of a worker",
}
# Bytes of one array from which the page shows the operator's times.
_SHOWN_BYTES = 48e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the figures, and return 0."""
    parser = argparse.ArgumentParser("tests.gpu_report.figures", description=__doc__)
    parser.add_argument("report", type=Path, help="report.json")
    parser.add_argument("--page", type=Path, default=_PAGE, help="page with the two comments")
    options = parser.parse_args(arguments)
    content = json.loads(options.report.read_text("utf-8"))
    results = [TableLine(**result) for result in content["results"]]
    text = "\n".join(_lines(results)) + "\n"
    page = options.page.read_text("utf-8")
    if not _MARKED.search(page):
        parser.error(f"{options.page} has no comments <!-- gpu-report --> and its end")
    options.page.write_text(_MARKED.sub(lambda marks: marks[1] + text + marks[2], page), "utf-8")
    return 0


def _lines(results: Sequence[TableLine]) -> Iterable[str]:
    facts = {r.row["fact"]: r.row["value"] for r in results if r.table == "Device"}
    packages = {r.row["package"]: r.row["version"] for r in results if r.table == "Packages"}
    names = ("torch", "triton", "onnxruntime-gpu", "sentence-transformers")
    versions = ", ".join(f"{name} {packages.get(name, 'absent')}" for name in names)
    yield f"{facts.get('device')}, driver {facts.get('driver')}; {versions}; {facts.get('date')}."
    yield from ("", "Fused operator, in CUDA graphs with a flushed L2 cache; its time is 1:", "")
    yield from table_lines(list(_times(results)))
    for table, title in _WHOLE.items():
        own = [result for result in results if result.table == table]
        if own:
            yield from ("", f"{title}:", "", *table_lines(own))


def _times(results: Sequence[TableLine]) -> Iterable[TableLine]:
    """Yield a line for each size and pass of the operator, with the alternatives' ratios."""
    lines: dict[tuple[object, ...], Row] = {}
    for result in results:
        row = result.row
        if result.table != "Times":
            continue
        size = 2 if row["dtype"] == "bf16" else 4
        if int(str(row["rows"])) * int(str(row["width"])) * size < _SHOWN_BYTES:
            continue
        key = (row["pass"], row["rows"], row["width"], row["dtype"])
        line = lines.setdefault(key, dict(zip(("pass", "rows", "D", "dtype"), key, strict=True)))
        if str(row["implementation"]).startswith("vitrine"):
            line |= {"us": row["us"], "of the copy's rate": row["of copy"]}
        else:
            line[str(row["implementation"])] = float(str(row["us"])) / float(str(line["us"]))
    for line in lines.values():
        yield TableLine("c", "Times", line)


if __name__ == "__main__":
    sys.exit(main())
