"""The books balance: what is received is done, refused, failed, late, cancelled or under way."""

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from models.artifact import Artifact
from service.api.metrics import Metrics
from service.debug.messages import KINDS
from tests.serving import lines_until, metrics, process


@pytest.fixture(scope="module")
def url(artifact: Artifact) -> Iterator[str]:
    with process(
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_BATCH__MAX_QUEUE_TOKENS="5000",
        VITRINE_DEBUG__ENABLED="true",
    ) as started:
        yield lines_until(started, r"Serving .* on (http://\S+)")[1][1]


def outcomes(found: dict[str, float]) -> dict[str, float]:
    return {
        match[1]: value
        for name, value in found.items()
        if (match := re.fullmatch(r'vitrine_inputs_total\{outcome="(\w+)"\}', name))
    }


def test_every_input_is_accounted_for(url: str) -> None:
    def post(count: int, tokens: int, headers: dict[str, str] | None = None) -> int:
        inputs = [[1000 + i % 20_000] * tokens for i in range(count)]
        answer = httpx2.post(f"{url}/encode", json={"inputs": inputs}, headers=headers, timeout=240)
        return answer.status_code

    assert post(5, 3) == 200
    assert httpx2.post(f"{url}/encode", json={"inputs": ["a", ""]}).status_code == 422
    with ThreadPoolExecutor(3) as clients:
        large = clients.submit(post, 100, 250)  # an empty queue takes it, though it is too large
        while metrics(url)["vitrine_queue_tokens"] < 5_000:
            time.sleep(0.001)
        assert post(7, 3) == 429
        assert metrics(url)["vitrine_oldest_queued_request_age_seconds"] >= 0
        while metrics(url)["vitrine_queue_tokens"] > 4_000:
            time.sleep(0.001)
        assert post(8, 100, {"X-Request-Timeout-Ms": "1"}) == 429  # the queue is too long for it
        body = b'{"inputs": [[1000, 1001], [1002]]}'
        head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port or 80)) as leaving:
            leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert large.result() == 200
    assert post(8, 250, {"X-Request-Timeout-Ms": "1"}) == 504
    found = metrics(url)
    while outcomes(found)["cancelled"] + outcomes(found)["done"] < 107:
        found = metrics(url)
    told = outcomes(found)
    assert (told["refused"], told["late"], told["failed"]) == (2 + 7 + 8, 8, 0)
    # Who leaves may have been answered before.
    assert (told["done"], told["cancelled"]) in ((105, 2), (107, 0))
    assert found["vitrine_inputs_received_total"] == sum(told.values())
    for status, count in (("504", 0), ("client_deadline", 1)):
        name = f'vitrine_requests_total{{route="/encode",status="{status}"}}'
        assert found.get(name, 0) == count
    assert found["vitrine_queue_tokens"] == found["vitrine_oldest_queued_request_age_seconds"] == 0


@pytest.mark.parametrize(("longest_s", "last"), [(120.0, "120.0"), (7.5, "7.5"), (900.0, "900.0")])
def test_histograms_of_seconds_reach_the_longest_deadline(longest_s: float, last: str) -> None:
    exposed = Metrics(longest_s).exposition().decode()
    bounds = re.findall(r'vitrine_batch_seconds_bucket\{le="([^"]+)"\}', exposed)
    assert bounds[-2:] == [last, "+Inf"]


def test_counters_of_all_job_kinds_exist_before_the_first_job(url: str) -> None:
    counters = metrics(url)
    for kind in KINDS:
        assert f'vitrine_debug_jobs_total{{kind="{kind}",outcome="failed"}}' in counters


def test_gradient_jobs_are_counted(url: str) -> None:
    asked = {"text": "a cat", "target": {"type": "norm"}, "method": "saliency"}
    assert httpx2.post(f"{url}/debug/attribute", json=asked, timeout=240).status_code == 200
    asked["layer"] = "nowhere"
    assert httpx2.post(f"{url}/debug/attribute", json=asked, timeout=240).status_code == 422
    found = metrics(url)
    for outcome in ("done", "refused"):
        assert found[f'vitrine_debug_jobs_total{{kind="attribute",outcome="{outcome}"}}'] == 1
