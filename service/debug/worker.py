"""The gradient process: `python -m service.debug.worker ARTIFACT DEVICE LOG`.

It reads jobs from its standard input and writes replies to its standard output, one at a time, as
frames. It ends with its input, so it never outlives the service.
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
from service.debug.messages import JOB, Failed, Refused, Unavailable, encode_reply
from service.logs import LogFormat, configure

if TYPE_CHECKING:
    from service.debug.jobs import Jobs

log = logging.getLogger("vitrine.gradients")


def main() -> None:
    """Serve until the input ends."""
    path, device, log_format = sys.argv[1:]
    configure(cast(LogFormat, log_format))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service receives it too, and ends the input
    _give_way()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # The output of a library must not mix with the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, bodies), daemon=True).start()
    try:
        jobs = _open(Path(path), device)
    except Exception:
        log.exception("the reference model cannot be loaded")
        _write(replies, encode_reply(Failed()))
        sys.exit(1)
    _write(replies, encode_reply(jobs.describe()))
    while True:
        _write(replies, _run(jobs, bodies.get()))


def _give_way() -> None:
    """Use only CPU time that encode requests leave."""
    if hasattr(os, "SCHED_IDLE"):
        # A waking thread preempts it at once; a nice process only at the next tick.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:  # macOS
        os.nice(19)


def _read(file: BinaryIO, bodies: queue.SimpleQueue[bytes]) -> None:
    """Queue the jobs; end the process with its input, even while a job runs."""
    try:
        while (body := frames.read(file)) is not None:
            bodies.put(body)
    finally:  # also after half a frame
        os._exit(0)


def _write(replies: BinaryIO, body: bytes) -> None:
    replies.write(frames.frame(body))
    replies.flush()


def _open(path: Path, device: str) -> "Jobs":
    # torch takes seconds to import; the process reacts to the end of its input meanwhile.
    from service.debug.jobs import Jobs

    return Jobs(path, device)


def _run(jobs: "Jobs", body: bytes) -> bytes:
    """Return the reply to a job, as JSON."""
    from service.debug.jobs import ArtifactUnavailable, JobRefused

    try:
        return encode_reply(jobs.run(JOB.validate_json(body)))
    except JobRefused as refusal:
        return encode_reply(Refused(str(refusal), refusal.code, refusal.pointer))
    except ArtifactUnavailable as error:
        log.exception("a gradient job needs the artifact")
        return encode_reply(Unavailable(str(error)))
    except Exception:
        log.exception("a gradient job failed")
        return encode_reply(Failed())


if __name__ == "__main__":
    main()
