"""Hostile requests to a running service are refused, and the next request works."""

import contextlib
from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.artifact import Artifact
from tests.eventually import eventually
from tests.service.api.raw_http import CHUNKED, chunks, head
from tests.serving import PATIENCE_S, connect, process, url_of

pytestmark = pytest.mark.slow  # starts processes

MANY_FILES = 256

# Starts the service with few file descriptors.
WITH_FEW_FILES = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({MANY_FILES}, {MANY_FILES}))
from service.serve_command import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def url(artifact: Artifact) -> Iterator[str]:
    settings = {"VITRINE_MODEL__PATH": str(artifact.path), "VITRINE_DEBUG__ENABLED": "true"}
    with process("-c", WITH_FEW_FILES, **settings) as started:
        yield url_of(started)


@pytest.fixture(autouse=True)
def _the_next_request_works(url: str) -> Iterator[None]:
    yield
    response = httpx2.post(f"{url}/encode", json={"inputs": "the next one"}, timeout=PATIENCE_S)
    assert response.status_code == 200
    # The next test finds the connections of this one closed.
    eventually(lambda: open_files(url) < MANY_FILES // 2)


def open_files(url: str) -> float:
    metrics = httpx2.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return next(
        metric.samples[0].value
        for metric in text_string_to_metric_families(metrics)
        if metric.name == "process_open_fds"
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"inputs": "' + b"a" * 200_000 + b'"}', b"413"),  # the text is too long
        (b'{"inputs": ' + b" " * 200_000, b"400"),
        (b" " * (5 * 2**20), b"413"),  # the body is too long, and never ends
    ],
)
def test_body_in_chunks_of_one_byte_is_read_or_refused(
    url: str, body: bytes, status: bytes
) -> None:
    with connect(url) as connection:
        connection.sendall(head(CHUNKED, None))
        with contextlib.suppress(ConnectionError):  # the service may close after a refusal
            connection.sendall(chunks(*(bytes([byte]) for byte in body)))
        assert connection.recv(4096).split()[1] == status


def test_service_recovers_from_more_connections_than_descriptors(url: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connect(url))
        with pytest.raises(httpx2.TransportError):  # the control: none is free
            httpx2.get(f"{url}/healthz", timeout=1)


def test_request_that_needs_a_descriptor_returns_503_if_none_is_free(url: str) -> None:
    # The client keeps its connection, however long it is idle: it could not open another one.
    limits = httpx2.Limits(keepalive_expiry=None)
    with (
        httpx2.Client(base_url=url, limits=limits, timeout=PATIENCE_S) as client,
        contextlib.ExitStack() as stack,
    ):
        assert client.get("/healthz").status_code == 200

        def is_refused_beside_one_more_connection() -> bool:
            stack.enter_context(connect(url))
            return client.get("/debug").status_code != 200

        eventually(is_refused_beside_one_more_connection)
        response = client.get("/debug")
        assert (response.status_code, response.json()["code"]) == (503, "no_descriptor")
        files = client.post("/debug/parity", json={})  # reads the files of the artifact
        assert (files.status_code, files.json()["code"]) == (503, "no_descriptor")
        job = client.post("/debug/attribute", json={"text": "a", "target": {"type": "norm"}})
        assert (job.status_code, job.json()["code"]) == (503, "gradients_unavailable")
        assert client.post("/encode", json={"inputs": "a"}).status_code == 200


def test_names_in_requests_add_no_metrics(url: str) -> None:
    client = httpx2.Client(base_url=url, timeout=PATIENCE_S)

    def lines() -> int:
        return len(client.get("/metrics").text.splitlines())

    def send(number: int) -> None:
        body = {"input": "a", "model": f"model-{number}"}
        headers = {"X-Request-Id": f"id-{number}", "User-Agent": f"agent-{number}"}
        assert client.post("/v1/embeddings", json=body, headers=headers).status_code == 404
        assert client.get(f"/route-{number}").status_code == 404

    with client:
        send(0)
        lines()
        before = lines()
        for number in range(1, 200):
            send(number)
        assert lines() == before
