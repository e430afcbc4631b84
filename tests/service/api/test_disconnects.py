"""Work of clients that disconnect is dropped."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.eventually import eventually
from tests.held_service import held
from tests.serving import PATIENCE_S, lines_until, metrics, process

pytestmark = pytest.mark.slow  # starts processes

CLIENTS, ROWS, TOKENS = 1000, 10, 250
HEAD = b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
DISCONNECTED = 'vitrine_requests_total{route="/encode",status="disconnected"}'


@contextmanager
def held_service(artifact: Artifact, hold: Path, **settings: str) -> Iterator[str]:
    """Yield the URL of a service whose engine waits while the file `hold` exists."""
    with process(
        *("-m", "tests.held_service"),
        ENGINE_HOLD=str(hold),
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_LIMITS__REQUEST_S="3600",
        **settings,
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        yield match[1]


def connect(url: str) -> socket.socket:
    address = httpx2.URL(url)
    return socket.create_connection((address.host, address.port or 80))


def request(body: object) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(content), content)


def test_requests_of_a_thousand_disconnected_clients_are_hardly_computed(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    sent = request({"inputs": [[1000] * TOKENS] * ROWS})
    settings = {"VITRINE_BATCH__MAX_QUEUE_TOKENS": "10000000"}
    with held_service(small_artifact, tmp_path / "hold", **settings) as url:
        # Nothing is computed before all clients have left. What is computed then are the batches
        # that were formed before.
        with held(tmp_path / "hold"):
            for _ in range(CLIENTS):
                with connect(url) as leaving:
                    leaving.sendall(sent)
            eventually(lambda: metrics(url).get(DISCONNECTED) == CLIENTS)
            assert metrics(url)["vitrine_queue_tokens"] == 0
        response = httpx2.post(f"{url}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S)
        assert response.status_code == 200
        assert metrics(url)["vitrine_batch_tokens_sum"] < 0.05 * CLIENTS * ROWS * TOKENS


def test_request_before_a_pipelined_one_ends_when_the_client_disconnects(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    # One part of a chunked body, as the parser reads it, can have the next request.
    body = b'{"inputs": "a text"}'
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with held_service(small_artifact, tmp_path / "hold") as url, held(tmp_path / "hold"):
        with connect(url) as leaving:
            leaving.sendall(HEAD + chunked + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: metrics(url).get(DISCONNECTED) == 1)


def test_texts_of_a_disconnected_client_are_removed_from_the_queue(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    texts = [f"word{i} " * 200 for i in range(1000)]
    with held_service(small_artifact, tmp_path / "hold") as url:
        with held(tmp_path / "hold"):
            with connect(url) as connection:
                connection.sendall(request({"inputs": texts}))
                eventually(lambda: metrics(url)["vitrine_queue_tokens"])
            # Nothing runs meanwhile, so the queue becomes empty only by the removal.
            eventually(lambda: not metrics(url)["vitrine_queue_tokens"])
        eventually(lambda: metrics(url).get(DISCONNECTED) == 1)
        response = httpx2.post(f"{url}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S)
        assert response.status_code == 200
        # Of 200,000 tokens; what ran are the batches that were formed before the disconnect.
        assert metrics(url)["vitrine_batch_tokens_sum"] < 100_000
