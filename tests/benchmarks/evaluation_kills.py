"""Kill `vitrine eval` at random moments, start it again each time, and compare the results.

The measures and rankings must equal those of an uninterrupted evaluation. It also prints the
greatest resident memory of the uninterrupted one.

    python -m tests.benchmarks.evaluation_kills --artifact artifacts/all-MiniLM-L6-v2
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.workloads import random_text


def main() -> int:
    """Run the comparison and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifacts/all-MiniLM-L6-v2"))
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - not for secrets
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "corpus.jsonl").open("w") as file:
            for number in range(options.documents):
                # the number makes each document another one
                parts = (random_text(draw, 6), random_text(draw, draw.randint(5, 9)))
                text = f"{parts[0].capitalize()}. {parts[1].capitalize()} {number}."
                file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
        command = [
            *(str(Path(sys.executable).with_name("vitrine")), "eval"),
            *("--corpus", str(folder / "corpus.jsonl"), "--known-items", str(options.queries)),
            *("--model", str(options.artifact), "--progress", "none"),
        ]
        started = time.perf_counter()
        peak = _uninterrupted([*command, str(folder / "expected")])
        seconds = time.perf_counter() - started
        print(f"uninterrupted: {seconds:.0f} s, at most {peak} MB resident", flush=True)
        job = [*command, str(folder / "killed")]
        for kill in range(options.kills):
            with subprocess.Popen(job, stdout=subprocess.DEVNULL) as process:
                # starts take a few seconds, so kills hit them too
                time.sleep(draw.uniform(0, 5 + 2 * seconds / options.kills))
                process.kill()
            print(f"kill {kill + 1}: {_state(folder / 'killed')}", flush=True)
        subprocess.run(job, check=True)
        _compare(folder / "killed", folder / "expected")
        print(f"{options.kills} kills; the results are equal")
    return 0


def _uninterrupted(command: list[str]) -> int:
    """Run an evaluation; return its greatest resident memory, in MB."""
    peak = 0
    with subprocess.Popen(command) as job:
        while job.poll() is None:
            status = Path(f"/proc/{job.pid}/status").read_text()
            if match := re.search(r"VmHWM:\s+(\d+) kB", status):
                peak = int(match[1]) * 1024 // 10**6
            time.sleep(0.1)
    assert job.returncode == 0
    return peak


def _state(folder: Path) -> str:
    parts = {name: len([*(folder / name).glob("part-*")]) for name in ("documents", "queries")}
    return ", ".join(f"{count} parts of {name}" for name, count in parts.items())


def _compare(actual: Path, expected: Path) -> None:
    results, others = (
        json.loads((folder / "results.json").read_text()) for folder in (actual, expected)
    )
    assert results == others
    rankings, others = (_rankings(folder / "run.trec") for folder in (actual, expected))
    assert rankings.keys() == others.keys()
    for query, own in rankings.items():
        # Batches differ in shape, which changes the last bits.
        assert all(abs(a - b) < 1e-5 for a, b in zip(own, others[query], strict=True))


def _rankings(path: Path) -> dict[str, list[float]]:
    """Return the scores of each query, best first."""
    rankings: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        query, _, _, _, score, _ = line.split(" ")
        rankings.setdefault(query, []).append(float(score))
    return rankings


if __name__ == "__main__":
    sys.exit(main())
