"""The gradient process: `python -m service.debug.worker ARTIFACT DEVICE LOG`.

It reads jobs from its standard input and writes answers to its standard output, one at a time, as
frames. It ends when its input does, so never outlives the service.
"""

import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, cast

from service.debug import frames
from service.debug.frames import Message
from service.logs import LogFormat, configure

log = logging.getLogger("vitrine.gradients")


def main() -> None:
    """Serve until the input ends."""
    path, device, log_format = sys.argv[1:]
    configure(cast(LogFormat, log_format))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service has it too, and ends the input
    _give_way()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What a library prints must not fall between the frames.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jobs: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, jobs), daemon=True).start()
    _write(answers, _open(Path(path), device))
    while True:
        _write(answers, _run(jobs.get()))


def _give_way() -> None:
    """Take what is left of the CPUs, after those who wait for vectors."""
    if sys.platform == "linux":
        # A thread that wakes up takes the CPU from it at once; from a nice one, a tick later.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _read(file: BinaryIO, jobs: queue.SimpleQueue[Message]) -> None:
    """Queue the jobs; end the process with its input, also while a job runs."""
    try:
        while (job := frames.read(file)) is not None:
            jobs.put(job)
    finally:  # also after half a frame
        os._exit(0)


def _write(answers: BinaryIO, answer: Message) -> None:
    answers.write(frames.encode(answer))
    answers.flush()


def _open(path: Path, device: str) -> Message:
    try:
        # torch takes seconds to import: the input's end is heeded meanwhile.
        from service.debug import jobs

        return jobs.open_twin(path, device)
    except Exception as error:
        log.exception("the twin cannot be opened")
        return {"failed": f"{type(error).__name__}: {error}"}


def _run(job: Message) -> Message:
    from service.debug import jobs

    started = time.perf_counter()
    try:
        answer = jobs.run(job)
    except jobs.JobRefused as refusal:
        return {"refused": {"detail": str(refusal), "code": refusal.code, "field": refusal.field}}
    except Exception:
        log.exception("a gradient job failed")
        return {"failed": "the gradient process failed on this request; its log says why"}
    return {**answer, "wall_ms": 1e3 * (time.perf_counter() - started)}


if __name__ == "__main__":
    main()
