"""Connections of real and of hostile clients, in a service that runs."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.serving import PATIENCE_S, lines_until, metrics, process, rest

HEAD = b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"inputs": "a text"})
MIB = 2**20


@pytest.fixture(scope="module")
def url(artifact: Artifact) -> Iterator[httpx2.URL]:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        yield httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])


def connected(url: httpx2.URL) -> socket.socket:
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_S)


def test_curl_that_offers_http2_gets_its_vectors(url: httpx2.URL) -> None:
    command = ["curl", "--silent", "--fail", "--http2", f"{url}/encode", "--data", BODY]
    answer = subprocess.check_output([*command, "--header", "Content-Type: application/json"])
    assert len(json.loads(answer)["embeddings"][0]) == 384


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no JDK")
def test_the_jdks_client_gets_its_vectors(url: httpx2.URL) -> None:
    source = Path(__file__).with_name("HttpClientPost.java")
    said = subprocess.check_output(["java", str(source), f"{url}/encode", BODY], text=True)
    assert [line.split()[0] for line in said.splitlines()] == ["200", "200"]


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Content-Length: 5\r\n\r\nabcde",  # which the package websockets cannot parse
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\r\n",
    ],
)
def test_a_websocket_request_does_not_keep_the_service_from_an_orderly_stop(
    artifact: Artifact, upgrade: bytes
) -> None:
    with process(
        VITRINE_MODEL__PATH=str(artifact.path), VITRINE_SERVER__DRAIN_S="0"
    ) as started, ThreadPoolExecutor(1) as clients:  # fmt: skip
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        with connected(url) as hostile:
            headers = (
                b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            )
            hostile.sendall(HEAD + headers + upgrade)
            assert hostile.recv(4096).startswith(b"HTTP/1.1 400 ")
            texts = {"inputs": [f"word{i} " * 200 for i in range(100)]}
            long = clients.submit(httpx2.post, f"{url}/encode", json=texts, timeout=PATIENCE_S)
            while not metrics(str(url))["vitrine_queue_tokens"]:
                time.sleep(0.001)
            started.send_signal(signal.SIGTERM)
            assert long.result().status_code == 200
            assert rest(started)[0] == 0


def test_after_a_413_a_bounded_part_of_the_rest_is_read(url: httpx2.URL) -> None:
    sent, piece = 0, b" " * MIB
    with connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % 2**40)
        with suppress(ConnectionError):
            while sent < 2**12 * MIB:
                sent += connection.send(piece)
    # 8 MiB, and what the buffers of both sockets hold.
    assert sent < 64 * MIB


def test_a_client_that_first_sends_all_reads_the_413(url: httpx2.URL) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (6 * MIB) + b" " * 6 * MIB)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_pipelined_input_is_held_within_bounds_and_answered(url: httpx2.URL) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    before = metrics(str(url))["process_resident_memory_bytes"]
    with connected(url) as connection, ThreadPoolExecutor(1) as readers:

        def count() -> int:
            found, tail = 0, b""
            while found < 20_000:
                tail += connection.recv(2**16)
                found += tail.count(b'{"status":"ok"}')
                tail = tail[-14:]
            return found

        counting = readers.submit(count)
        connection.sendall(request * 20_000)
        assert counting.result() == 20_000
    assert metrics(str(url))["process_resident_memory_bytes"] - before < 50 * MIB


@pytest.mark.timeout(600)
async def test_a_thousand_bodies_that_lack_a_byte_take_no_more_memory_than_their_budget(
    artifact: Artifact,
) -> None:
    size = 4 * MIB
    head = HEAD + b"Content-Length: %d\r\n\r\n" % size
    pieces = [b" " * 65_536] * (size // 65_536 - 1) + [b" " * 65_535]
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_LIMITS__BODY_S="600") as started:
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        idle = metrics(str(url))["process_resident_memory_bytes"]
        kept: list[asyncio.StreamWriter] = []
        refused = asyncio.Semaphore(0)

        async def send() -> None:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            kept.append(writer)
            with suppress(ConnectionError):
                writer.write(head)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            with suppress(ConnectionError):
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: " in answer.lower()
            refused.release()

        clients = [asyncio.create_task(send()) for _ in range(1000)]
        try:
            for _ in range(1000 - 16):  # as many as the budget holds
                await asyncio.wait_for(refused.acquire(), PATIENCE_S)
            assert (await _encode(url)).status_code == 200
            peak = re.search(r"VmHWM:\s+(\d+) kB", _status_of(started.pid))
            assert peak is not None
            grown = int(peak[1]) * 1024 - idle
            assert grown < 64 * MIB + 100 * MIB
            assert not any(client.done() and client.exception() for client in clients)
        finally:
            for client in clients:
                client.cancel()
            for writer in kept:
                writer.transport.abort()
        await asyncio.wait(clients)
        large = json.dumps({"inputs": ["word " * 100] * 200})
        while (answer := await _encode(url, large)).status_code == 429:  # until all have left
            await asyncio.sleep(0.01)
        assert answer.status_code == 200


def _status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


async def _encode(url: httpx2.URL, body: str = BODY) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        headers = {"Content-Type": "application/json"}
        return await client.post(f"{url}/encode", content=body, headers=headers)


def test_protocol_errors_are_counted_logged_with_the_clients_address_and_shaped_as_problems(
    artifact: Artifact,
) -> None:
    broken = HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        url = httpx2.URL(lines_until(started, r"Serving .* on (http://\S+)")[1][1])
        counted = 'vitrine_requests_total{route="none",status="400"}'
        for count, sent in enumerate((b"nonsense\r\n\r\n", broken), 1):
            with connected(url) as connection:
                connection.sendall(sent)
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"content-type: application/problem+json" in head
            problem = json.loads(body)
            assert (problem["status"], problem["code"]) == (400, "malformed")
            said = rf"request {problem['request_id']} from 127\.0\.0\.1: the input is not an HTTP"
            lines_until(started, said)
            while metrics(str(url)).get(counted) != count:  # a moment after the response
                time.sleep(0.01)
