"""The gradient process: `python -m service.debug.child ARTIFACT DEVICE LOG [KEY]`.

The process reads jobs from standard input, runs one at a time, and writes each reply to standard
output. Jobs and replies are sent as frames (see `service.debug.pipeline.frames`). The process exits
at the end of its input, so it never outlives the service.
"""

import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from service.debug.pipeline import frames
from service.debug.pipeline.messages import Failed, Refused, encode_reply
from service.inference.errors import InvalidInput
from service.logs import LogFormat, configure

if TYPE_CHECKING:
    from service.debug.child.jobs import Jobs

log = logging.getLogger("vitrine.gradients")

# A start takes seconds of CPU time once, and must end on a busy host too. Jobs get 1.4 % of a core
# that an encode request uses. With Linux's idle scheduling they did not end on a busy host.
_NICE_OF_START, _NICE_OF_JOBS = 5, 19


def main() -> None:
    """Load the reference model, then run jobs until the end of standard input."""
    path, device, log_format, *verify = sys.argv[1:]
    configure(cast(LogFormat, log_format))
    # Ctrl+C sends SIGINT to the service too, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE_OF_START)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Redirects output of libraries to standard error, because it must not mix with the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, bodies), daemon=True).start()
    try:
        jobs = _open(Path(path), device, Path(*verify) if verify else None)
    except Exception:
        log.exception("the reference model could not be loaded")
        _write(replies, encode_reply(Failed()))
        sys.exit(1)
    _lower_priority()
    _write(replies, encode_reply(jobs.describe()))
    while True:
        for body in _run(jobs, bodies.get()):
            _write(replies, body)


def _lower_priority() -> None:
    """Let encode requests go first, in all threads."""
    threads = Path("/proc/self/task")
    if threads.exists():  # on Linux each thread has its own priority
        for thread in threads.iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE_OF_JOBS)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE_OF_JOBS)


def _read(file: BinaryIO, bodies: queue.SimpleQueue[bytes]) -> None:
    """Queue jobs, and exit the process at the end of the input, even while a job runs."""
    try:
        while (body := frames.read(file)) is not None:
            bodies.put(body)
    finally:  # also if reading fails
        os._exit(0)


def _write(replies: BinaryIO, body: bytes) -> None:
    replies.write(frames.frame(body))
    replies.flush()


def _open(path: Path, device: str, verify: Path | None) -> "Jobs":
    # Imported here, because importing torch takes seconds: the reader thread, which has already
    # started, can exit the process in the meantime.
    from service.debug.child.jobs import Jobs

    return Jobs(path, device, verify)


def _run(jobs: "Jobs", body: bytes) -> list[bytes]:
    """Run a job, given as JSON, and return the bodies of the reply and of the frames after it."""
    try:
        done, vectors, file = jobs.run(body)
        return [encode_reply(done), vectors, file]
    except InvalidInput as error:
        return [encode_reply(Refused(error.detail, error.code, error.pointer))]
    except Exception:
        log.exception("a gradient job failed")
        return [encode_reply(Failed())]


if __name__ == "__main__":
    main()
