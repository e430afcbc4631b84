"""A gradient process for tests: at normal priority, on one thread, and held while a file exists.

At its own priority, the process gets 1 % of a CPU while other processes are busy on all of them.
`GRADIENT_HOLD=file python -m tests.service.debug.held_worker` is the service with such a process;
without GRADIENT_HOLD, its jobs are not held.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from service.debug.pipeline.process import worker_command
from service.logs import LogFormat
from service.serve_command import main

NO_FILE = "/nonexistent"

_SCRIPT = """
import os
import time
from pathlib import Path
from unittest.mock import patch
import models.engines
from service.debug.child import __main__ as worker

run = worker._run

def hold(jobs, body):
    while Path({hold!r}).exists():
        time.sleep(0.005)
    return run(jobs, body)

models.engines.available_cpus = lambda: 1
with patch.object(os, "nice"), patch.object(os, "setpriority"), patch.object(worker, "_run", hold):
    worker.main()
"""


def held_worker_command(
    hold: Path, artifact: Path, device: str, log: LogFormat, verify: Path | None = None
) -> list[str]:
    """Return the command of a gradient process whose jobs wait while the file exists."""
    command = worker_command(artifact, device, log, verify)
    module = command.index("-m")
    command[module : module + 2] = ["-c", _SCRIPT.format(hold=str(hold))]
    return command


@contextmanager
def held_workers(hold: Path) -> Iterator[None]:
    """Use such a gradient process in applications that are created within the block."""
    with patch("service.app.worker_command", partial(held_worker_command, hold)):
        yield


@contextmanager
def held(hold: Path) -> Iterator[None]:
    """Hold the jobs within the block."""
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


if __name__ == "__main__":
    with held_workers(Path(os.environ.get("GRADIENT_HOLD", NO_FILE))):
        sys.exit(main())
