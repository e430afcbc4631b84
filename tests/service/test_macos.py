"""The service and its gradient process run without what macOS lacks: functions and files of Linux.

They still run on Linux: wheels and kernels for macOS are not tested.
"""

from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.serving import PATIENCE_S, lines_until, process

# Torch may start slowly.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Python runs this module at the start of each process.
SITECUSTOMIZE = """
import builtins, io, os, select, signal, socket

linux = ("sched_", "SCHED_", "posix_f", "eventfd", "memfd", "O_TMPFILE", "O_PATH", "O_DIRECT")
for name in dir(os):
    if name.startswith(linux) and name != "O_DIRECTORY":
        delattr(os, name)
del os.copy_file_range, os.fdatasync, os.pidfd_open, os.splice
del select.epoll, signal.pidfd_send_signal, socket.SO_PEERCRED
opened = io.open

def open_on_macos(file, *arguments, **options):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return opened(file, *arguments, **options)

io.open = builtins.open = open_on_macos
os.process_cpu_count = os.cpu_count  # from Python 3.13 on
os.nice = lambda increment: 0  # at the lowest priority, torch starts slowly beside other tests
"""


def test_service_and_gradients_run_without_functions_and_files_of_linux(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    settings = {
        "PYTHONPATH": str(tmp_path),
        "VITRINE_MODEL__PATH": str(small_artifact.path),
        "VITRINE_ENGINE__THREADS": "0",  # the number of CPUs
        "VITRINE_DEBUG__ENABLED": "true",
        "VITRINE_DEBUG__DEADLINE_S": "600",
        "VITRINE_LIMITS__REQUEST_S": "600",
    }
    with process(**settings) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        with httpx2.Client(base_url=match[1], timeout=10 * PATIENCE_S) as client:
            encoded = client.post("/encode", json={"inputs": ["The cat sat on the mat."]})
            assert encoded.status_code == 200
            assert client.get("/metrics").status_code == 200
            check = {"source": {"type": "random", "shape": [4, 16], "distribution": "normal"}}
            checked = client.post("/debug/layernorm", json=check)
            assert checked.status_code == 200
            assert checked.json()["passes"]
