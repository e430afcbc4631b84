"""Connections of real and of hostile clients to a running service."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.eventually import HANG_S, eventually
from tests.held_service import held
from tests.serving import PATIENCE_S, lines_until, metrics, process, rest

pytestmark = pytest.mark.slow  # starts processes

HEAD = b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"inputs": "a text"})
MIB = 2**20

# Starts the service with time for clients that are slow to send the rest of a refused body.
PATIENT = """
import sys
from service.serve_command import main
from service.api import http_protocol
http_protocol._LINGER_S = 3600
sys.exit(main())
"""


@pytest.fixture(scope="module")
def url(small_artifact: Artifact) -> Iterator[httpx2.URL]:
    with process("-c", PATIENT, VITRINE_MODEL__PATH=str(small_artifact.path)) as started:
        yield httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])


def connected(url: httpx2.URL) -> socket.socket:
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S)


def test_curl_with_http2_upgrade_gets_vectors(url: httpx2.URL) -> None:
    command = ["curl", "--silent", "--fail", "--http2", f"{url}/encode", "--data", BODY]
    response = subprocess.check_output([*command, "--header", "Content-Type: application/json"])
    assert len(json.loads(response)["embeddings"][0]) == 32


@pytest.mark.skipif(shutil.which("java") is None, reason="no JDK is installed")
def test_java_http_client_gets_vectors(url: httpx2.URL) -> None:
    source = Path(__file__).with_name("HttpClientPost.java")
    output = subprocess.check_output(["java", str(source), f"{url}/encode", BODY], text=True)
    assert [line.split()[0] for line in output.splitlines()] == ["200", "200"]


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Content-Length: 5\r\n\r\nabcde",  # cannot be parsed by the package websockets
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\r\n",
    ],
)
def test_websocket_request_gets_400_and_does_not_prevent_graceful_shutdown(
    small_artifact: Artifact, upgrade: bytes, tmp_path: Path
) -> None:
    with (
        process(
            *("-m", "tests.held_service"),
            ENGINE_HOLD=str(tmp_path / "hold"),
            VITRINE_MODEL__PATH=str(small_artifact.path),
            VITRINE_SERVER__DRAIN_S="0",
            VITRINE_SERVER__GRACE_S="3600",
        ) as started,
        ThreadPoolExecutor(1) as clients,
    ):
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        with connected(url) as hostile:
            headers = (
                b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            )
            hostile.sendall(HEAD + headers + upgrade)
            assert hostile.recv(4096).startswith(b"HTTP/1.1 400 ")
            texts = {"inputs": [f"word{i} " * 200 for i in range(100)]}
            with held(tmp_path / "hold"):
                long = clients.submit(httpx2.post, f"{url}/encode", json=texts, timeout=240)
                eventually(lambda: metrics(str(url))["vitrine_queue_tokens"])
                started.send_signal(signal.SIGTERM)
                lines_until(started, "shutting down")
            assert long.result().status_code == 200
            assert rest(started)[0] == 0


def test_bounded_part_of_the_body_is_read_after_413(url: httpx2.URL) -> None:
    sent, piece = 0, b" " * MIB
    with connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % 2**40)
        with suppress(ConnectionError):
            while sent < 2**12 * MIB:
                sent += connection.send(piece)
    # 8 MiB, and the buffers of both sockets.
    assert sent < 64 * MIB


def test_client_that_sends_its_whole_body_first_reads_the_413(url: httpx2.URL) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (6 * MIB) + b" " * 6 * MIB)
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in response


def test_pipelined_requests_are_answered_in_bounded_memory(url: httpx2.URL) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    before = metrics(str(url))["process_resident_memory_bytes"]
    with connected(url) as connection, ThreadPoolExecutor(1) as readers:

        def count() -> int:
            responses, tail = 0, b""
            while responses < 20_000:
                tail += connection.recv(2**16)
                responses += tail.count(b'{"status":"ok"}')
                tail = tail[-14:]
            return responses

        counting = readers.submit(count)
        connection.sendall(request * 20_000)
        assert counting.result() == 20_000
    assert metrics(str(url))["process_resident_memory_bytes"] - before < 50 * MIB


async def test_large_body_beyond_the_budget_is_refused_before_it_arrives(
    small_artifact: Artifact,
) -> None:
    with process(
        VITRINE_MODEL__PATH=str(small_artifact.path),
        VITRINE_LIMITS__BODY_S="600",
        VITRINE_LIMITS__MAX_BODIES_BYTES=str(MIB),
    ) as started:
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])

        async def answer() -> bytes:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % MIB)
            try:
                return await reader.readuntil(b"\r\n\r\n")
            finally:
                writer.transport.abort()

        # One of the two takes the budget, and waits for its body.
        clients = [asyncio.create_task(answer()) for _ in range(2)]
        done, waiting = await asyncio.wait(
            clients, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED
        )
        for client in waiting:
            client.cancel()
        assert [client.result()[:13] for client in done] == [b"HTTP/1.1 429 "]


@pytest.mark.timeout(600)
async def test_memory_of_a_thousand_incomplete_bodies_stays_within_the_budget(
    small_artifact: Artifact,
) -> None:
    size = 4 * MIB
    head = HEAD + b"Content-Length: %d\r\n\r\n" % size
    pieces = [b" " * 65_536] * (size // 65_536 - 1) + [b" " * 65_535]
    with process(
        VITRINE_MODEL__PATH=str(small_artifact.path), VITRINE_LIMITS__BODY_S="600"
    ) as started:
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        idle = metrics(str(url))["process_resident_memory_bytes"]
        writers: list[asyncio.StreamWriter] = []
        refused = asyncio.Semaphore(0)

        async def send() -> None:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writers.append(writer)
            with suppress(ConnectionError):
                writer.write(head)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            with suppress(ConnectionError):
                response = await reader.readuntil(b"\r\n\r\n")
                assert response.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: " in response.lower()
            refused.release()

        clients = [asyncio.create_task(send()) for _ in range(1000)]
        try:
            for _ in range(1000 - 16):  # the budget holds 16
                await refused.acquire()
            assert await asyncio.to_thread(_status_of_encode, url, BODY) == 200
            peak = re.search(r"VmHWM:\s+(\d+) kB", _status_of_process(started.pid))
            assert peak is not None
            grown = int(peak[1]) * 1024 - idle
            assert grown < 64 * MIB + 100 * MIB
            assert not any(client.done() and client.exception() for client in clients)
        finally:
            for client in clients:
                client.cancel()
            for writer in writers:
                writer.transport.abort()
        await asyncio.wait(clients)
        large = json.dumps({"inputs": ["word " * 100] * 200})
        # Refused until the service has noticed that the others have left.
        eventually(lambda: _status_of_encode(url, large) != 429)
        assert _status_of_encode(url, large) == 200


def _status_of_process(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _status_of_encode(url: httpx2.URL, body: str) -> int:
    headers = {"Content-Type": "application/json"}
    response = httpx2.post(f"{url}/encode", content=body, headers=headers, timeout=PATIENCE_S)
    return response.status_code


def test_protocol_errors_are_problems_that_are_counted_and_logged_with_the_client_address(
    small_artifact: Artifact,
) -> None:
    broken = HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    with process(VITRINE_MODEL__PATH=str(small_artifact.path)) as started:
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        for count, content in enumerate((b"nonsense\r\n\r\n", broken), 1):
            with connected(url) as connection:
                connection.sendall(content)
                response = b"".join(iter(lambda: connection.recv(4096), b""))
            head, _, body = response.partition(b"\r\n\r\n")
            assert b"content-type: application/problem+json" in head
            problem = json.loads(body)
            assert (problem["status"], problem["code"]) == (400, "malformed")
            line = rf"request {problem['request_id']} from 127\.0\.0\.1: the input is not an HTTP"
            lines_until(started, line)
            wait_for_count(str(url), count)


def wait_for_count(url: str, count: int) -> None:
    """Wait for the metric, which is updated after the response has been sent."""
    name = 'vitrine_requests_total{route="none",status="400"}'
    eventually(lambda: metrics(url).get(name) == count)
