"""Work of clients that disconnect is dropped."""

import json
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.eventually import eventually
from tests.held_service import held
from tests.service.api.raw_http import BODY, chunked, get, post
from tests.serving import PATIENCE_S, connect, held_process, metrics, url_of

pytestmark = pytest.mark.slow  # starts processes

CLIENTS, ROWS, TOKENS = 1000, 10, 250
PATIENT = {"VITRINE_LIMITS__REQUEST_S": "3600"}
DISCONNECTED = 'vitrine_requests_total{route="/encode",status="disconnected"}'


def test_requests_of_a_thousand_disconnected_clients_are_hardly_computed(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    sent = post(body=json.dumps({"inputs": [[1000] * TOKENS] * ROWS}).encode())
    settings = PATIENT | {"VITRINE_BATCH__MAX_QUEUE_TOKENS": "10000000"}
    with held_process(small_artifact, tmp_path / "hold", **settings) as started:
        url = url_of(started)
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
    with held_process(small_artifact, tmp_path / "hold", **PATIENT) as started:
        url = url_of(started)
        with held(tmp_path / "hold"):
            with connect(url) as leaving:
                leaving.sendall(chunked(BODY) + get())
            eventually(lambda: metrics(url).get(DISCONNECTED) == 1)


def test_texts_of_a_disconnected_client_are_removed_from_the_queue(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    texts = [f"word{i} " * 200 for i in range(1000)]
    with held_process(small_artifact, tmp_path / "hold", **PATIENT) as started:
        url = url_of(started)
        with held(tmp_path / "hold"):
            with connect(url) as connection:
                connection.sendall(post(body=json.dumps({"inputs": texts}).encode()))
                eventually(lambda: metrics(url)["vitrine_queue_tokens"])
            # Nothing runs meanwhile, so the queue becomes empty only by the removal.
            eventually(lambda: not metrics(url)["vitrine_queue_tokens"])
        eventually(lambda: metrics(url).get(DISCONNECTED) == 1)
        response = httpx2.post(f"{url}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S)
        assert response.status_code == 200
        # Of 200,000 tokens; what ran are the batches that were formed before the disconnect.
        assert metrics(url)["vitrine_batch_tokens_sum"] < 100_000
