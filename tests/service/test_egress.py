"""The service speaks to nobody but those who call it."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.serving import lines_until, process

# Python runs it before anything else in every process of the service; it tells of each call that
# could reach out.
WATCH = """
import os, sys
def watch(event, arguments):
    if event.startswith(("socket.connect", "socket.get", "socket.send")):
        with open(os.environ["EGRESS"], "a") as file:
            print(event, arguments, file=file)
sys.addaudithook(watch)
"""


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    (tmp_path / "egress").touch()
    return {"PYTHONPATH": str(tmp_path), "EGRESS": str(tmp_path / "egress")}


@pytest.mark.parametrize(
    "reaches_out",
    [
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import socket; socket.socket().connect_ex(('127.0.0.1', 9))",
    ],
)
def test_whoever_reaches_out_is_seen(watched: dict[str, str], reaches_out: str) -> None:
    subprocess.run([sys.executable, "-c", reaches_out], env=watched, check=True)
    assert Path(watched["EGRESS"]).read_text()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_it_reaches_out_to_nobody(artifact: Artifact, watched: dict[str, str], engine: str) -> None:
    with process(
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_ENGINE__NAME=engine,
        VITRINE_DEBUG__ENABLED="true",
        **watched,
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        for route, body in (
            ("/encode", {"inputs": "a text"}),
            ("/debug/attribute", {"text": "a text", "target": {"type": "norm"}}),
        ):
            answer = httpx2.post(f"{match[1]}{route}", json=body, timeout=60)
            assert answer.status_code == 200
    assert Path(watched["EGRESS"]).read_text() == ""
