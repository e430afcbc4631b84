"""How the service ends: in order, in time, and with everybody answered."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import lines_until, outcome, process


def url_of(started: subprocess.Popen[str]) -> str:
    return lines_until(started, r"Serving .* on (http://\S+)")[1][1]


def test_at_sigterm_it_is_not_ready_but_answers_until_the_port_closes(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_SERVER__DRAIN_S="1.5") as started:
        url = url_of(started)
        assert httpx2.get(f"{url}/readyz").status_code == 200
        started.send_signal(signal.SIGTERM)
        lines_until(started, "SIGTERM: shutting down; the port closes in 1.5 s")
        for route in ("/readyz", "/tei/health"):
            assert httpx2.get(f"{url}{route}").status_code == 503
        assert httpx2.post(f"{url}/encode", json={"inputs": "a"}).status_code == 200
        assert outcome(started)[0] == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/healthz")


async def test_two_hundred_requests_in_flight_get_their_vectors(
    artifact: Artifact, client: TestClient
) -> None:
    texts = [[f"request {i} text {k} " * 10 for k in range(2)] for i in range(200)]
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_SERVER__DRAIN_S="1") as started:
        url = url_of(started)
        limits = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(limits=limits, timeout=60) as many:
            asked = [
                asyncio.ensure_future(many.post(f"{url}/encode", json={"inputs": pair}))
                for pair in texts
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            started.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*asked)
        assert outcome(started)[0] == 0
    assert [answer.status_code for answer in answers] == [200] * 200
    found = np.array([answer.json()["embeddings"] for answer in answers]).reshape(400, -1)
    every = [text for pair in texts for text in pair]
    wanted = client.post("/encode", json={"inputs": every}).json()["embeddings"]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_body_that_never_comes_does_not_keep_it(artifact: Artifact) -> None:
    with process(
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_SERVER__DRAIN_S="0",
        VITRINE_SERVER__GRACE_S="1",
    ) as started:
        url = httpx2.URL(url_of(started))
        head = b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            started.send_signal(signal.SIGTERM)
            assert outcome(started)[0] == 0
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"the service is stopping" in answer


def test_a_second_signal_ends_it_at_once(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_SERVER__DRAIN_S="60") as started:
        url_of(started)
        started.send_signal(signal.SIGTERM)
        lines_until(started, "shutting down")
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=5) == 1


def test_control_c_ends_it_soon_and_without_a_traceback(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        lines_until(started, r"Try: ")
        started.send_signal(signal.SIGINT)
        assert outcome(started)[0] == 0


def test_the_gradient_process_does_not_outlive_a_service_that_is_killed(
    artifact: Artifact,
) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_DEBUG__ENABLED="true") as started:
        url = url_of(started)
        assert httpx2.get(f"{url}/debug/capabilities", timeout=240).status_code == 200
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(started.pid, signal.SIGKILL)
        while Path(f"/proc/{children[0]}").exists():
            time.sleep(0.01)
