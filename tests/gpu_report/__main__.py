"""Run the steps one after the other; see the package."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.gpu_report.results import TableLine, read_results, write_report
from tests.gpu_report.step import FAILED, STEPS

_ROOT = Path(__file__).parents[2]
# Seconds for a step to write what it has after its own time limit.
_GRACE_S = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, and return 0 if none of them has a failed result."""
    parser = argparse.ArgumentParser("tests.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of all steps")
    parser.add_argument("--only", default=",".join(STEPS), help="letters of steps, with commas")
    parser.add_argument("--device", default="cuda:0", help="torch's name of the GPU")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    options = parser.parse_args(arguments)
    letters = options.only.split(",")
    if unknown := [letter for letter in letters if letter not in STEPS]:
        parser.error(f"unknown step {unknown[0]!r}; steps: {', '.join(STEPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for letter in letters:
        (options.out / f"{letter}.jsonl").unlink(missing_ok=True)
    device = "cpu" if options.dry_run else options.device
    ends = time.monotonic() + 60 * options.minutes
    results: list[TableLine] = []
    for done, letter in enumerate(letters):
        # What a step leaves of its share belongs to those after it.
        seconds = (ends - time.monotonic()) / (len(letters) - done)
        print(f"{letter}. {STEPS[letter][0]}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        results += run_step(letter, STEPS[letter][1], device, seconds, options.out)
        write_report(options.out, {name: title for name, (title, _) in STEPS.items()}, results)
    print((options.out / "report.md").read_text("utf-8"))
    return 1 if any(result.passes is False for result in results) else 0


def run_step(
    letter: str, function: str, device: str, seconds: float, out: Path, grace_s: float = _GRACE_S
) -> list[TableLine]:
    """Run a step in a process of its own, and return its results.

    Args:
        letter: Letter of the step, and name of its files.
        function: Function of the step, as in `STEPS`.
        device: Name of torch's device.
        seconds: Time limit, which the step itself observes.
        out: Folder for its files.
        grace_s: Seconds after the time limit when the process is killed.
    """
    command = [sys.executable, "-m", "tests.gpu_report.step", letter, function, device]
    with (out / f"{letter}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"{max(seconds, 1):.0f}", str(out.absolute())],
            cwd=_ROOT,
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = _ended(process.wait(max(seconds, 1) + grace_s), log.name)
        except subprocess.TimeoutExpired:
            end = f"the step was killed {grace_s:g} s after its time limit of {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    results = read_results(out / f"{letter}.jsonl")
    if end and not any(result.table == FAILED for result in results):
        results.append(TableLine(letter, FAILED, {"error": end}, passes=False))
    return results


def _environment() -> dict[str, str]:
    """Return variables with which every process finds the CUDA libraries installed with torch.

    onnxruntime looks for them beside itself, and may have been unpacked elsewhere.
    """
    torch = find_spec("torch")
    packages = Path(torch.origin).parents[1] if torch and torch.origin else Path()
    folders = [str(folder) for folder in sorted(packages.glob("nvidia/*/lib"))]
    folders += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}


def _ended(status: int, log: str) -> str:
    """Return a sentence about an exit status; "" for 0."""
    if status < 0:
        return f"the process ended by {signal.Signals(-status).name}; see {Path(log).name}"
    return f"the process ended with status {status}; see {Path(log).name}" if status else ""


if __name__ == "__main__":
    sys.exit(main())
