"""`deploy.ray_encode` with faults, while actors publish the files of parts.

The environment variable `FAULTS` has a JSON list of the fields of each `Fault`.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, Location, PartEncoder

_publish = ray_encode.publish


@dataclass(frozen=True)
class Fault:
    """A signal that is sent once.

    Attributes:
        signal: Name of the signal.
        receiver: "actor" or "job".
        file: Name of the published file.
        step: "before" or "after" the publication.
        mark: File that the fault creates.
    """

    signal: str
    receiver: str
    file: str
    step: str
    mark: str

    def strike(self, job: int) -> None:
        """Send the signal to the actor of this process or to the job, if it was not sent before."""
        try:
            Path(self.mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid() if self.receiver == "actor" else job, signal.Signals[self.signal])
        threading.Event().wait()  # until Ray ends the actor


def main() -> int:
    """Run the command and return its exit status."""
    job = os.getpid()
    faults = [Fault(**fields) for fields in json.loads(os.environ["FAULTS"])]

    def publish(file: Path, output: Location) -> None:
        for step in ("before", "after"):
            if step == "after":
                _publish(file, output)
            for fault in faults:
                if (fault.file, fault.step) == (file.name, step):
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
