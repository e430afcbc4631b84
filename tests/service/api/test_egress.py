"""The service, its engines and its gradients open no connections."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.service.api.conftest import Start
from tests.serving import outcome, url_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

# Records connections and datagrams of every thread and child process.
STRACE = ("strace", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o")


def addresses(log: Path) -> list[str]:
    return re.findall(r"sa_family=AF_INET.*", log.read_text())


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
        "import socket as s; s.socket(type=s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('name.invalid', 80)",
    ],
)
def test_outgoing_traffic_is_recorded(tmp_path: Path, program: str) -> None:
    subprocess.run([*STRACE, tmp_path / "log", sys.executable, "-c", program], check=False)
    assert addresses(tmp_path / "log")


# Replaces itself by the service under strace. Libraries send no telemetry from what looks like CI.
TRACED = """
import os, sys
for name in [name for name in os.environ if name.startswith(("CI", "GITHUB", "PYTEST"))]:
    del os.environ[name]
os.execvp("strace", [*sys.argv[1:], sys.executable, "-m", "tests.service.debug.held_worker"])
"""


ENGINES = ("onnxruntime", "openvino")


def test_service_opens_no_connections(start: Start, tmp_path: Path) -> None:
    with ExitStack() as processes:
        services = [
            processes.enter_context(
                start(
                    *("-c", TRACED, *STRACE, str(tmp_path / engine)),
                    VITRINE_ENGINE__NAME=engine,
                    VITRINE_DEBUG__ENABLED="true",
                    VITRINE_SERVER__DRAIN_S="0",
                )
            )
            for engine in ENGINES
        ]
        for started in services:
            url = url_of(started)
            for route, body in (
                ("/encode", {"inputs": "a text"}),
                ("/debug/attribute", {"text": "a text", "target": {"type": "norm"}}),
            ):
                response = httpx2.post(f"{url}{route}", json=body, timeout=240)
                assert response.status_code == 200
        # onnxruntime's telemetry, if it is on, is sent after ten seconds of real time, in a thread
        # that gives no sign before. A slow machine can hide it, but cannot fail the test.
        time.sleep(12)
        for started in services:
            service = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
            os.kill(int(service), signal.SIGTERM)
            assert outcome(started)[0] == 0
    assert {engine: addresses(tmp_path / engine) for engine in ENGINES} == {
        engine: [] for engine in ENGINES
    }
