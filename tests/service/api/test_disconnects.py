"""A thousand clients that leave take their work with them."""

import json
import socket
import time

import httpx2

from models.artifact import Artifact
from tests.serving import PATIENCE_S, lines_until, metrics, process

CLIENTS, ROWS, TOKENS = 1000, 10, 250


def test_of_a_thousand_clients_that_leave_hardly_a_token_is_computed(artifact: Artifact) -> None:
    body = json.dumps({"inputs": [[1000] * TOKENS] * ROWS}).encode()
    head = (
        "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with process(
        VITRINE_MODEL__PATH=str(artifact.path), VITRINE_BATCH__MAX_QUEUE_TOKENS="10000000"
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        for _ in range(CLIENTS):
            with socket.create_connection((url.host, url.port or 80)) as leaving:
                leaving.sendall(head.encode() + body)
        received = 'vitrine_requests_total{route="/encode",status="disconnected"}'
        while metrics(match[1]).get(received, 0) < 0.9 * CLIENTS:
            time.sleep(0.1)
        while metrics(match[1])["vitrine_queue_tokens"]:
            time.sleep(0.1)
        computed = metrics(match[1])["vitrine_batch_tokens_sum"]
        assert computed < 0.05 * CLIENTS * ROWS * TOKENS
        answer = httpx2.post(
            f"{match[1]}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
