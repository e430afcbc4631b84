"""The service, its engines and its gradients speak to nobody but those who call."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.serving import lines_until, outcome, process

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace, which sees every call, is not installed"
)

# Of every thread and child: who is connected to, or sent to without a connection.
STRACE = ("strace", "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o")


def addresses(log: Path) -> list[str]:
    return re.findall(r"sa_family=AF_INET.*", log.read_text())


@pytest.mark.parametrize(
    "reaches_out",
    [
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
        "import socket as s; s.socket(type=s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('name.invalid', 80)",
    ],
)
def test_whoever_reaches_out_is_seen(tmp_path: Path, reaches_out: str) -> None:
    subprocess.run([*STRACE, tmp_path / "log", sys.executable, "-c", reaches_out], check=False)
    assert addresses(tmp_path / "log")


# The service in its place. Where a library believes that it is tested it keeps quiet.
TRACED = """
import os, sys
for name in [name for name in os.environ if name.startswith(("CI", "GITHUB", "PYTEST"))]:
    del os.environ[name]
os.execvp("strace", [*sys.argv[1:], sys.executable, "-m", "service"])
"""


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_it_reaches_out_to_nobody(artifact: Artifact, tmp_path: Path, engine: str) -> None:
    with process(
        *("-c", TRACED, *STRACE, str(tmp_path / "log")),
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_ENGINE__NAME=engine,
        VITRINE_DEBUG__ENABLED="true",
        VITRINE_SERVER__DRAIN_S="0",
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        for route, body in (
            ("/encode", {"inputs": "a text"}),
            ("/debug/attribute", {"text": "a text", "target": {"type": "norm"}}),
        ):
            answer = httpx2.post(f"{match[1]}{route}", json=body, timeout=240)
            assert answer.status_code == 200
        time.sleep(12)  # onnxruntime would gather what it has to tell for ten seconds
        service = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
        os.kill(int(service), signal.SIGTERM)
        assert outcome(started)[0] == 0
    assert addresses(tmp_path / "log") == []
