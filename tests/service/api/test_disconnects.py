"""Work of clients that disconnect is dropped."""

import json
import socket
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.eventually import eventually
from tests.held_service import held
from tests.serving import PATIENCE_S, lines_until, metrics, process

pytestmark = pytest.mark.slow  # starts processes

CLIENTS, ROWS, TOKENS = 1000, 10, 250


def test_requests_of_a_thousand_disconnected_clients_are_hardly_computed(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    body = json.dumps({"inputs": [[1000] * TOKENS] * ROWS}).encode()
    head = (
        "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    disconnected = 'vitrine_requests_total{route="/encode",status="disconnected"}'
    with process(
        *("-m", "tests.held_service"),
        ENGINE_HOLD=str(tmp_path / "hold"),
        VITRINE_MODEL__PATH=str(small_artifact.path),
        VITRINE_BATCH__MAX_QUEUE_TOKENS="10000000",
        VITRINE_LIMITS__REQUEST_S="3600",
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        # Nothing is computed before all clients have left. What is computed then are the batches
        # that were formed before.
        with held(tmp_path / "hold"):
            for _ in range(CLIENTS):
                with socket.create_connection((url.host, url.port or 80)) as leaving:
                    leaving.sendall(head.encode() + body)
            eventually(lambda: metrics(match[1]).get(disconnected) == CLIENTS)
            assert metrics(match[1])["vitrine_queue_tokens"] == 0
        response = httpx2.post(
            f"{match[1]}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S
        )
        assert response.status_code == 200
        assert metrics(match[1])["vitrine_batch_tokens_sum"] < 0.05 * CLIENTS * ROWS * TOKENS


def test_request_before_a_pipelined_one_ends_when_the_client_disconnects(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    # One part of a chunked body, as the parser reads it, can have the next request.
    body = b'{"inputs": "a text"}'
    chunked = (
        b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    )
    with process(
        *("-m", "tests.held_service"),
        ENGINE_HOLD=str(tmp_path / "hold"),
        VITRINE_MODEL__PATH=str(small_artifact.path),
        VITRINE_LIMITS__REQUEST_S="3600",
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        with held(tmp_path / "hold"):
            with socket.create_connection((url.host, url.port or 80)) as leaving:
                leaving.sendall(chunked + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            disconnected = 'vitrine_requests_total{route="/encode",status="disconnected"}'
            eventually(lambda: metrics(match[1]).get(disconnected) == 1)
