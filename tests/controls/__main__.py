"""Remove each guard of the service once and show that its test fails: `make controls`.

A test that passes without the code that it tests proves nothing. The tree is copied, a guard in the
copy is replaced by a plausible mistake, and the test named beside it must fail.
`--sample 12 --seed 7` runs 12 of the guards: consecutive seeds cover the whole table. `--only
bulk/journal` runs those whose file or test has that text in its path.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tests.controls import (
    batches,
    benchmarks,
    bulk,
    gradients,
    http,
    models,
    results,
    several_models,
    signatures,
)
from tests.controls.guard import Guard

ROOT = Path(__file__).parents[2]
_LIMIT_S = 120  # a hanging test counts as failing
_AREAS = (bulk, models, results, batches, several_models, http, gradients, signatures, benchmarks)
GUARDS = tuple(guard for area in _AREAS for guard in area.GUARDS)


def main() -> int:
    """Remove the chosen guards one after the other; return 1 if a test does not fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=len(GUARDS), help="number of guards to run")
    parser.add_argument("--seed", type=int, default=0, help="position of the sample in the table")
    parser.add_argument("--only", default="", help="part of the file or the test of each guard")
    arguments = parser.parse_args()
    guards = sample(arguments.sample, arguments.seed)
    guards = [guard for guard in guards if arguments.only in guard.file + guard.test]
    if not guards:
        parser.error(f"no guard of the sample has {arguments.only!r} in its file or its test")
    print(f"{len(guards)} of {len(GUARDS)} guards, first with all of them in place", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "vitrine"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in tracked.rstrip("\0").split("\0"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        log = Path(folder) / "log"
        if _status({guard.test for guard in guards}, copy, log, limit_s=None) != 0:
            print(f"{log.read_text()}\na test fails with all guards in place")
            return 1
        unnoticed = [guard for guard in guards if not _notices(guard, copy, log)]
    for guard in unnoticed:
        print(f"not noticed: {guard.file}: {guard.code.strip()}")
    print(f"{len(guards) - len(unnoticed)} of {len(guards)} removals are noticed")
    return int(bool(unnoticed))


def sample(size: int, seed: int) -> list[Guard]:
    """Return guards at even distances; seeds 0 to len(GUARDS) / size choose each one once."""
    windows = -(-len(GUARDS) // size)
    return list(GUARDS[seed % windows :: windows])


def _status(tests: Collection[str], copy: Path, log: Path, limit_s: float | None) -> int:
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-qxp", "no:cacheprovider", *sorted(tests)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},  # takes precedence over the installed tree
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return run.wait(limit_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # with its children


def _notices(guard: Guard, copy: Path, log: Path) -> bool:
    file = copy / guard.file
    whole = file.read_text()
    file.write_text(whole.replace(guard.code, guard.mistake))
    began = time.monotonic()
    try:
        status = _status([guard.test], copy, log, _LIMIT_S)
    except subprocess.TimeoutExpired:
        status = 1
    finally:
        file.write_text(whole)
    # pytest exits with 1 if a test failed, and with more if it could not run.
    result = {0: "PASSES WITHOUT IT", 1: "fails"}.get(status, f"DID NOT RUN: status {status}")
    print(f"{time.monotonic() - began:4.0f} s  {result:18} {guard.test}", flush=True)
    return status == 1


if __name__ == "__main__":
    sys.exit(main())
