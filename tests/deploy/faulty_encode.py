"""`deploy.ray_encode` with faults, while actors publish the files of parts.

The environment variable `FAULTS` has a JSON list of the fields of each `Fault`.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import patch

import ray

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, Location, PartEncoder

_publish = ray_encode.publish


@dataclass(frozen=True)
class Fault:
    """A signal that is sent once.

    Attributes:
        signal: Name of the signal. After SIGSTOP, the actor goes on when it is continued.
        receiver: "actor", "job", or the address of the node whose actor gets it.
        file: Pattern of the name of the published file.
        step: "before" or "after" the publication.
        mark: File that the fault creates, with the process id of the actor.
    """

    signal: str
    receiver: str
    file: str
    step: str
    mark: str

    def strike(self, job: int) -> None:
        """Send the signal to the actor of this process or to the job, if it was not sent before."""
        try:
            with Path(self.mark).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return
        number = signal.Signals[self.signal]
        if self.receiver == "job":
            os.kill(job, number)
        else:
            # Sent to the process, SIGSTOP would let this thread go on until another receives it.
            signal.pthread_kill(threading.get_ident(), number)
        if self.signal != "SIGSTOP":
            threading.Event().wait()  # until Ray ends the actor

    def applies(self, file: str, step: str) -> bool:
        """Return whether it strikes at this step of the publication of a file."""
        here = ("actor", "job", ray.util.get_node_ip_address())
        return self.receiver in here and self.step == step and fnmatch(file, self.file)


def main() -> int:
    """Run the command and return its exit status."""
    job = os.getpid()
    faults = [Fault(**fields) for fields in json.loads(os.environ["FAULTS"])]

    def publish(file: Path, output: Location) -> None:
        for step in ("before", "after"):
            if step == "after":
                _publish(file, output)
            for fault in faults:
                if fault.applies(file.name, step):
                    fault.strike(job)

    class FaultyEncoder(PartEncoder):
        """Actor with the faulty `publish`; a local class, so Ray copies it with the faults."""

        def __init__(self, job: ClusterJob) -> None:
            ray_encode.publish = publish  # for the life of the actor's process
            super().__init__(job)

    with patch.object(ray_encode, "PartEncoder", FaultyEncoder):
        return ray_encode.main()


if __name__ == "__main__":
    # Ray imports the faults' class by this name.
    from tests.deploy.faulty_encode import main as command

    sys.exit(command())
