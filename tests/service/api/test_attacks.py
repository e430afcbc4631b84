"""What is sent on purpose, to a service that runs: it is refused, and the next request works."""

import contextlib
import socket
from collections.abc import Iterator

import httpx2
import pytest

from models.artifact import Artifact
from tests.serving import lines_until, process

HEAD = b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

# Starts the service with as many files, sockets included, as a careless system grants.
WITH_FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from service.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def url(artifact: Artifact) -> Iterator[httpx2.URL]:
    settings = {"VITRINE_MODEL__PATH": str(artifact.path), "VITRINE_DEBUG__ENABLED": "true"}
    with process("-c", WITH_FEW_FILES, **settings) as started:
        yield httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])


@pytest.fixture(autouse=True)
def _the_next_request_works(url: httpx2.URL) -> Iterator[None]:
    yield
    assert httpx2.post(f"{url}/encode", json={"inputs": "the next one"}).status_code == 200


def connected(url: httpx2.URL) -> socket.socket:
    return socket.create_connection((url.host, url.port or 80), timeout=60)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"inputs": "' + b"a" * 200_000 + b'"}', b"413"),  # a text that is too long
        (b'{"inputs": ' + b" " * 200_000, b"400"),
        (b" " * (5 * 2**20), b"413"),  # a body that is too long, and never ends
    ],
)
def test_a_body_in_chunks_of_one_byte_is_read_or_given_up(
    url: httpx2.URL, body: bytes, status: bytes
) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connected(url) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # who has been refused may not go on
            connection.sendall(chunks + b"0\r\n\r\n")
        assert connection.recv(4096).split()[1] == status


def test_more_sockets_than_there_may_be_files_do_no_lasting_harm(url: httpx2.URL) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(url))
        with pytest.raises(httpx2.TransportError):  # the control: there is no room indeed
            httpx2.get(f"{url}/healthz", timeout=1)


def test_without_a_free_descriptor_what_needs_one_is_a_503(url: httpx2.URL) -> None:
    with httpx2.Client(base_url=url) as client, contextlib.ExitStack() as stack:
        assert client.get("/healthz").status_code == 200  # so it has a connection
        for _ in range(400):
            stack.enter_context(connected(url))
        # uvloop accepts what is in the backlog in its next turns.
        while (answer := client.get("/debug")).status_code == 200:
            pass
        assert (answer.status_code, answer.json()["code"]) == (503, "no_descriptor")
        job = client.post("/debug/parity", json={}, timeout=60)
        assert (job.status_code, job.json()["code"]) == (503, "gradients_unavailable")
        assert client.post("/encode", json={"inputs": "a"}).status_code == 200


def test_names_that_clients_make_up_do_not_grow_the_metrics(url: httpx2.URL) -> None:
    def lines() -> int:
        return len(httpx2.get(f"{url}/metrics").text.splitlines())

    def ask(number: int) -> None:
        body = {"input": "a", "model": f"model-{number}"}
        headers = {"X-Request-Id": f"id-{number}", "User-Agent": f"agent-{number}"}
        assert httpx2.post(f"{url}/v1/embeddings", json=body, headers=headers).status_code == 404
        assert httpx2.get(f"{url}/route-{number}").status_code == 404

    ask(0)
    lines()
    before = lines()
    for number in range(1, 200):
        ask(number)
    assert lines() == before
