"""One step in a process of its own.

`python -m tests.gpu_report.step LETTER FUNCTION DEVICE SECONDS FOLDER` calls a function, which is
given as in `STEPS`. Its results are appended to FOLDER/LETTER.jsonl. An error is one of them.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.gpu_report.results import ResultFile

FAILED = "Errors of the step"


@dataclass(frozen=True)
class Run:
    """Device, folder, time limit and recorder of a step.

    Attributes:
        device: Name of torch's device; "cpu" is a dry run with small sizes.
        folder: Folder for files of the step.
        ends: Time of `time.monotonic` at which the step must have ended.
        recorder: Receives the results.
    """

    device: str
    folder: Path
    ends: float
    recorder: ResultFile

    @property
    def is_dry(self) -> bool:
        """Whether the code is executed on a CPU, with small sizes."""
        return self.device == "cpu"

    def has_time(self, what: str, seconds: float = 0.0) -> bool:
        """Return whether this many seconds are left; if not, say what was left out."""
        if self.ends - time.monotonic() > seconds:
            return True
        self.recorder.add("Left out", {"what": what, "reason": "the time limit of the step"})
        return False


# Title and function of each step, in the order of their worth.
STEPS: dict[str, tuple[str, str]] = {
    "a": ("Machine", "tests.gpu_report.machine:describe"),
    "b": ("Fused operator: results", "tests.gpu_report.fused_norm:check"),
    "c": ("Fused operator: times", "tests.gpu_report.fused_norm:measure"),
    "d": ("Engine: results and nodes", "tests.gpu_report.engine:check"),
    "e": ("Engine: throughput", "tests.gpu_report.engine:throughput"),
    "f": ("Service", "tests.gpu_report.service:serve"),
    "g": ("Needs of a worker", "tests.gpu_report.service:needs"),
}


def main(letter: str, function: str, device: str, seconds: str, folder: str) -> int:
    """Run a step, and return 0 if it ended without an error."""
    out = Path(folder)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined
    with (out / f"{letter}.jsonl").open("a", encoding="utf-8") as file:
        recorder = ResultFile(letter, file)
        run = Run(device, out, time.monotonic() + float(seconds), recorder)
        try:
            _check(device)
            _function(function)(run)
        except ModuleNotFoundError as error:
            recorder.add(FAILED, {"error": f"not run: the package {error.name} is absent"})
            return 1
        except Exception as error:  # noqa: BLE001 - a result like the others
            traceback.print_exc()
            line = str(error).strip().partition("\n")[0]
            cause = f"{type(error).__name__}: {line}"
            recorder.add(FAILED, {"error": cause}, passes=False, cause=_place(error))
            return 1
    return 0


def _check(device: str) -> None:
    """Raise an error if torch cannot use the device."""
    import torch

    kind, index = torch.device(device).type, torch.device(device).index or 0
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if index >= count:
        raise RuntimeError(f"torch {torch.__version__} finds {count} CUDA devices, not {device}")


def _function(path: str) -> Callable[[Run], None]:
    module, _, name = path.partition(":")
    function: Callable[[Run], None] = getattr(import_module(module), name)
    return function


def _place(error: Exception) -> str:
    """Return the innermost line of this project that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).parents[2])
    own = [frame for frame in frames if frame.filename.startswith(root)]
    return f"{Path(own[-1].filename).relative_to(root)}, line {own[-1].lineno}" if own else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
