"""Shutdown of the service."""

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.eventually import eventually, eventually_async
from tests.held_service import held
from tests.service.api.conftest import Start
from tests.service.api.raw_http import head
from tests.serving import (
    PATIENCE_S,
    connect,
    held_process,
    lines_until,
    metrics,
    outcome,
    received,
    rest,
    url_of,
)

pytestmark = pytest.mark.slow  # starts processes


def is_port_closed(url: str) -> bool:
    try:
        httpx2.get(f"{url}/healthz", timeout=PATIENCE_S)
    except httpx2.TransportError as error:  # others: it closed after the connection was made
        return isinstance(error, httpx2.ConnectError)
    return False


def test_service_is_unready_and_answers_during_the_drain_period(start: Start) -> None:
    with start(VITRINE_SERVER__DRAIN_S="3600") as started:
        url = url_of(started)
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
            ready = client.get("/readyz")
            assert ready.status_code == 200
            assert "Connection" not in ready.headers
            started.send_signal(signal.SIGTERM)
            lines_until(started, "SIGTERM: shutting down; the port closes in 3600 s")
            # uvicorn renews the date in its main loop, which ends before the port closes.
            before = client.get("/healthz").headers["Date"]
            eventually(lambda: client.get("/healthz").headers["Date"] != before)
            for route in ("/readyz", "/tei/health", "/nothing"):
                response = client.get(route)
                assert response.status_code == (404 if route == "/nothing" else 503)
                assert response.headers["Connection"] == "close"
            response = client.post("/encode", json={"inputs": "a"})
            assert (response.status_code, response.headers["Connection"]) == (200, "close")
            for route in ("/info", "/models", "/v1/models", "/metrics"):
                assert client.get(route).status_code == 200


def test_port_closes_and_process_exits_after_the_drain_period(start: Start) -> None:
    with start(VITRINE_SERVER__DRAIN_S="0.5") as started:
        url = url_of(started)
        started.send_signal(signal.SIGTERM)
        assert outcome(started)[0] == 0
        assert is_port_closed(url)


def test_end_without_requests_is_no_error_if_there_is_no_grace_period(start: Start) -> None:
    with start(VITRINE_SERVER__DRAIN_S="0", VITRINE_SERVER__GRACE_S="0") as started:
        url_of(started)
        started.send_signal(signal.SIGTERM)
        status, errors = rest(started)
    assert status == 0
    assert "ERROR" not in errors


def test_service_without_standard_input_stops_with_status_0(start: Start) -> None:
    code = (
        "import os, sys; os.close(0); os.execv(sys.executable, [sys.executable, '-m', 'service'])"
    )
    with start(*("-c", code), VITRINE_SERVER__DRAIN_S="0") as started:
        url_of(started)
        started.send_signal(signal.SIGTERM)
        assert outcome(started)[0] == 0


async def test_two_hundred_requests_in_flight_are_completed_at_shutdown(
    small_artifact: Artifact, client: TestClient, tmp_path: Path
) -> None:
    texts = [[f"request {i} text {k} " * 10 for k in range(2)] for i in range(200)]
    settings = {"VITRINE_SERVER__DRAIN_S": "0", "VITRINE_SERVER__GRACE_S": "3600"}
    with held_process(small_artifact, tmp_path / "hold", **settings) as started:
        url = url_of(started)
        limits = httpx2.Limits(max_connections=200)
        async with httpx2.AsyncClient(limits=limits, timeout=240) as many:
            with held(tmp_path / "hold"):
                requests = [
                    asyncio.ensure_future(many.post(f"{url}/encode", json={"inputs": pair}))
                    for pair in texts
                ]
                await eventually_async(lambda: metrics(url)["vitrine_inputs_received_total"] == 400)
                started.send_signal(signal.SIGTERM)
                await eventually_async(lambda: is_port_closed(url))
            responses = await asyncio.gather(*requests)
        assert outcome(started)[0] == 0
    assert [response.status_code for response in responses] == [200] * 200
    assert {response.headers["Connection"] for response in responses} == {"close"}
    actual = np.array([response.json()["embeddings"] for response in responses])
    inputs = [text for pair in texts for text in pair]
    expected = client.post("/encode", json={"inputs": inputs}).json()["embeddings"]
    np.testing.assert_allclose(actual.reshape(400, -1), expected, atol=1e-6)


def test_incomplete_body_is_answered_503_after_the_grace_period(start: Start) -> None:
    with start(
        VITRINE_SERVER__DRAIN_S="0", VITRINE_SERVER__GRACE_S="1", VITRINE_LIMITS__BODY_S="3600"
    ) as started:
        with connect(url_of(started)) as connection:
            connection.sendall(head(b"Expect: 100-continue\r\n", length=100))
            # Sent when the service begins to read the body.
            assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"{")
            started.send_signal(signal.SIGTERM)
            assert outcome(started)[0] == 0
            response = received(connection)
        assert response.startswith(b"HTTP/1.1 503 ")
        assert b"the service is stopping" in response


def test_second_signal_ends_the_process_immediately(start: Start) -> None:
    with start(VITRINE_SERVER__DRAIN_S="3600") as started:
        url_of(started)
        started.send_signal(signal.SIGTERM)
        lines_until(started, "shutting down")
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=PATIENCE_S) == 1


def test_crash_of_a_library_leaves_the_running_functions_on_stderr(start: Start) -> None:
    with start() as started:
        url_of(started)
        started.send_signal(signal.SIGSEGV)
        status, errors = rest(started)
    assert status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in errors
    assert "service/serve_command.py" in errors


def test_gradient_process_ends_when_the_service_is_killed(start: Start) -> None:
    with start(
        *("-m", "tests.service.debug.held_worker"), VITRINE_DEBUG__ENABLED="true"
    ) as started:
        url = url_of(started)
        assert httpx2.get(f"{url}/debug/capabilities", timeout=240).status_code == 200
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(started.pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{children[0]}").exists())
