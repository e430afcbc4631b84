"""Recall of `vitrine migrate` between two models, in both directions.

The documents are long descriptions of Debian's packages, of 20 to 60 words. Known items, which are
sentences of documents, are one set of queries, and the short descriptions the other.

    python -m tests.benchmarks.migration_quality DESCRIPTIONS ARTIFACT ARTIFACT
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.search_quality import descriptions

_QUERIES = 2000
_ENGINE = ("--engine", "openvino", "--precision", "bfloat16", "--progress", "none")


def write_collection(folder: Path, found: dict[str, tuple[str, str]], count: int) -> None:
    """Write a random part of the packages: documents, short descriptions and judgements."""
    some = sorted(name for name, own in found.items() if 20 <= len(own[1].split()) <= 60)
    names = random.Random(0).sample(some, count)  # noqa: S311
    with (folder / "corpus.jsonl").open("w") as corpus:
        for name in names:
            corpus.write(json.dumps({"id": name, "text": " ".join(found[name][1].split())}) + "\n")
    with (
        (folder / "queries.jsonl").open("w") as queries,
        (folder / "qrels.txt").open("w") as judgements,
    ):
        for name in names[:_QUERIES]:
            queries.write(json.dumps({"id": name, "text": found[name][0]}) + "\n")
            judgements.write(f"{name} 0 {name} 1\n")


def run(verb: str, *arguments: object) -> None:
    """Run a command of `vitrine`, whose output is shown."""
    command = [sys.executable, "-m", "service.commands", verb, *map(str, arguments)]
    subprocess.run(command, check=True)


def main() -> None:
    """Run the benchmark and print the table of each direction and set of queries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("descriptions", type=Path, help="Translation-en of Debian's main section")
    parser.add_argument("artifacts", type=Path, nargs=2, help="the two models")
    parser.add_argument("--documents", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_collection(folder, descriptions(options.descriptions), options.documents)
        sets: dict[str, tuple[object, ...]] = {
            "known-items": ("--known-items", _QUERIES),
            "short": ("--queries", folder / "queries.jsonl", "--qrels", folder / "qrels.txt"),
        }
        for queries, own in sets.items():
            evaluations = [folder / f"{queries}-{index}" for index in (0, 1)]
            for output, artifact in zip(evaluations, options.artifacts, strict=True):
                corpus = ("--corpus", folder / "corpus.jsonl")
                run("eval", output, *corpus, *own, "--model", artifact, *_ENGINE)
            for old, new in (evaluations, evaluations[::-1]):
                output = folder / f"{old.name}-to-{new.name}"
                paths = (output, "--old", old, "--new", new)
                run("migrate", *paths, "--space", "old", "--min-recall", "0")


if __name__ == "__main__":
    main()
