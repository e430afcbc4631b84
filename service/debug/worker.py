"""The gradient process: `python -m service.debug.worker ARTIFACT DEVICE LOG`.

It reads jobs from its standard input and writes replies to its standard output, one at a time, as
frames. It exits at the end of its input, so it never outlives the service.
"""

import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from service.debug import frames
from service.debug.messages import JOB, Failed, Refused, encode_reply
from service.logs import LogFormat, configure

if TYPE_CHECKING:
    from service.debug.jobs import Jobs

log = logging.getLogger("vitrine.gradients")


def main() -> None:
    """Run jobs until the end of the input."""
    path, device, log_format = sys.argv[1:]
    configure(cast(LogFormat, log_format))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service receives it too and closes the input
    _lower_priority()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Redirects output of libraries, which must not mix with the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, bodies), daemon=True).start()
    try:
        jobs = _open(Path(path), device)
    except Exception:
        log.exception("the reference model could not be loaded")
        _write(replies, encode_reply(Failed()))
        sys.exit(1)
    _write(replies, encode_reply(jobs.describe()))
    while True:
        _write(replies, _run(jobs, bodies.get()))


def _lower_priority() -> None:
    """Limit the process to CPU time that encode requests do not use."""
    if hasattr(os, "SCHED_IDLE"):
        # Other threads preempt it as soon as they wake. They preempt a nice process only at the
        # next scheduler tick.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:  # macOS
        os.nice(19)


def _read(file: BinaryIO, bodies: queue.SimpleQueue[bytes]) -> None:
    """Queue jobs, and exit the process at the end of the input, even while a job runs."""
    try:
        while (body := frames.read(file)) is not None:
            bodies.put(body)
    finally:  # also after an incomplete frame
        os._exit(0)


def _write(replies: BinaryIO, body: bytes) -> None:
    replies.write(frames.frame(body))
    replies.flush()


def _open(path: Path, device: str) -> "Jobs":
    # Importing torch takes seconds. The reader thread, already started, can exit the process during
    # the import.
    from service.debug.jobs import Jobs

    return Jobs(path, device)


def _run(jobs: "Jobs", body: bytes) -> bytes:
    """Run a job and return its reply, both as JSON."""
    from service.debug.jobs import JobRefused

    try:
        return encode_reply(jobs.run(JOB.validate_json(body)))
    except JobRefused as refusal:
        return encode_reply(Refused(str(refusal), refusal.code, refusal.pointer))
    except Exception:
        log.exception("a gradient job failed")
        return encode_reply(Failed())


if __name__ == "__main__":
    main()
