"""Kill `vitrine-encode` at random moments, start it again each time, and compare the output.

Each kill must repeat at most one part, and the final output must equal that of an uninterrupted
job, row by row. It also prints the resident memory of the uninterrupted job.

    python -m tests.benchmarks.bulk_kills --artifact artifacts/all-MiniLM-L6-v2
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from tests.benchmarks.workloads import random_text

_PART_ROWS = 2000


def main() -> int:
    """Run the comparison and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifacts/all-MiniLM-L6-v2"))
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)  # noqa: S311 - not for secrets
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "texts.jsonl"
        with texts.open("w") as file:
            for number in range(options.rows):
                text = random_text(draw, draw.randint(1, 12)) if number % 997 else ""
                file.write(json.dumps({"id": f"d{number}", "text": f"{text}"}) + "\n")
        started = time.perf_counter()
        peaks = _uninterrupted(_command(options.artifact, texts, folder / "expected"))
        seconds = time.perf_counter() - started
        print(f"uninterrupted: {options.rows:,} rows in {seconds:.0f} s")
        print("resident MB at each tenth:", *peaks, flush=True)
        repeated = _killed(options, draw, texts, folder / "killed", seconds)
        _compare(folder / "killed", folder / "expected", options.rows)
        print(f"{options.kills} kills; parts encoded twice: {repeated}; the outputs are equal")
    return 0


def _command(artifact: Path, texts: Path, output: Path) -> list[str]:
    return [
        *(str(Path(sys.executable).with_name("vitrine-encode")), str(texts), str(output)),
        *("--model", str(artifact), "--id-column=id", f"--part-rows={_PART_ROWS}"),
        "--progress=none",
    ]


def _uninterrupted(command: list[str]) -> list[int]:
    """Run a job; return its resident memory at ten moments, in MB."""
    sizes: list[int] = []
    with subprocess.Popen(command) as job:
        while job.poll() is None:
            status = Path(f"/proc/{job.pid}/status").read_text()
            if match := re.search(r"VmRSS:\s+(\d+) kB", status):
                sizes.append(int(match[1]) * 1024 // 10**6)
            time.sleep(0.2)
    assert job.returncode == 3  # some texts are empty
    return sizes[:: max(1, len(sizes) // 10)]


def _killed(
    options: argparse.Namespace, draw: random.Random, texts: Path, output: Path, seconds: float
) -> int:
    """Run a job with kills; return the number of parts that were encoded twice."""
    command = _command(options.artifact, texts, output)
    repeated = 0
    kept: dict[str, int] = {}
    for _ in range(options.kills):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as job:
            # Starts take a few seconds, so kills hit them too.
            time.sleep(draw.uniform(0, 5 + 2 * seconds / options.kills))
            job.kill()
        files = {p.name: p.stat().st_mtime_ns for p in output.glob("*.parquet")}
        changed = [name for name in kept if files[name] != kept[name]]
        assert len(changed) <= 1, changed
        repeated += len(changed)
        kept = files
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 3
    return repeated


def _compare(actual_folder: Path, expected_folder: Path, rows: int) -> None:
    actual, expected = (
        pyarrow.dataset.dataset(folder, format="parquet").to_table().sort_by("row")
        for folder in (actual_folder, expected_folder)
    )
    assert expected["row"].to_pylist() == list(range(rows))
    assert actual.drop_columns("embedding") == expected.drop_columns("embedding")
    valid = expected["error"].is_null()
    a, b = (np.stack(t["embedding"].filter(valid).to_numpy()) for t in (actual, expected))
    print(f"equal to the last bit: {(a == b).all(axis=1).mean():.1%} of the rows", end=", ")
    print(f"largest difference {np.abs(a - b).max():.1e}")
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert isinstance(actual, pa.Table)
    assert not [path for path in os.listdir(actual_folder) if path.startswith(".")]


if __name__ == "__main__":
    sys.exit(main())
