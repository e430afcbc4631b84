"""Time that a required signature adds to the start of a model, and its parts.

    python -m tests.benchmarks.bench_signing [ARTIFACT] [--rounds 9]

Starts with and without a required signature take turns, in this process, from a warm file cache.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import vitrine
from models.artifact import Artifact
from models.manifest import SOURCE, ArtifactError
from models.signing import read_private_key
from tests.signing_keys import new_key

# Prints the seconds that the import takes beside what a service has imported already.
_IMPORT = (
    "import time, service.serve_command; started = time.perf_counter(); import models.signing; "
    "print(time.perf_counter() - started)"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", nargs="?", default="artifacts/all-MiniLM-L6-v2", type=Path)
    parser.add_argument("--rounds", default=9, type=int)
    options = parser.parse_args()
    try:
        Artifact.load(options.artifact)
    except ArtifactError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=options.artifact.parent) as name:
        folder = Path(name) / "signed"
        shutil.copytree(options.artifact, folder, copy_function=os.link)
        private, public = new_key(Path(name), "key")
        artifact = Artifact.load(folder)
        artifact.sign(read_private_key(private), folder.name)
        source = [own for own in artifact.manifest.files if own.startswith(f"{SOURCE}/")]
        cases: dict[str, Callable[[], object]] = {
            "start": partial(start, folder, None),
            "start, signature required": partial(start, folder, public),
            "manifest": partial(Artifact.load, folder),
            "manifest and signature": partial(Artifact.load, folder, public),
            "hashes of source/": lambda: [artifact.verify(own) for own in source],
            "hashes of all files": artifact.verify_all,
        }
        seconds: dict[str, list[float]] = {case: [] for case in (*cases, "import")}
        for _ in range(options.rounds):
            for case, run in cases.items():
                started = time.perf_counter()
                run()
                seconds[case].append(time.perf_counter() - started)
            command = [sys.executable, "-c", _IMPORT]
            seconds["import"].append(float(subprocess.check_output(command)))
    for case, times in seconds.items():
        print(f"{case:26} {median(times) * 1e3:7.1f} ms")


def start(folder: Path, verify: Path | None) -> None:
    """Open a model as the service does, and close it."""

    async def run() -> None:
        async with await vitrine.open_model(folder, vitrine.ModelOptions(verify=verify)):
            pass

    asyncio.run(run())


if __name__ == "__main__":
    main()
