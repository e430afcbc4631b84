"""`deploy.ray_encode` with one fault, while an actor publishes the file of a part.

The environment variable `FAULT` has the signal, its receiver ("actor" or "job"), the name of the
file, and "before" or "after" its publication. The fault creates the file `FAULT_MARK`.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from unittest.mock import patch

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, Location, PartEncoder

_publish = ray_encode.publish


def publish(file: Path, output: Location) -> None:
    """Publish a file, and cause the fault once."""
    name, receiver, target, step = os.environ["FAULT"].split()
    if step == "after":
        _publish(file, output)
    if file.name == target and _is_first():
        pid = os.getpid() if receiver == "actor" else int(os.environ["FAULT_JOB"])
        os.kill(pid, signal.Signals[name])
        threading.Event().wait()  # until Ray ends the actor
    if step == "before":
        _publish(file, output)


def _is_first() -> bool:
    try:
        Path(os.environ["FAULT_MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FaultyEncoder(PartEncoder):
    """Actor with the faulty `publish`."""

    def __init__(self, job: ClusterJob) -> None:
        ray_encode.publish = publish  # for the life of the actor's process
        super().__init__(job)


def main() -> int:
    """Run the command and return its exit status."""
    os.environ["FAULT_JOB"] = str(os.getpid())
    with patch.object(ray_encode, "PartEncoder", FaultyEncoder):
        return ray_encode.main()


if __name__ == "__main__":
    # Ray imports the actor's class by this name.
    from tests.deploy.faulty_encode import main as command

    sys.exit(command())
