"""Connections of real and of hostile clients to a running service."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.eventually import HANG_S, eventually
from tests.held_service import held
from tests.service.api.conftest import Start
from tests.service.api.raw_http import BODY, CHUNKED, WEBSOCKET, chunked, get, head
from tests.serving import (
    PATIENCE_S,
    address_of,
    connect,
    held_process,
    lines_until,
    metrics,
    received,
    rest,
    url_of,
)

pytestmark = pytest.mark.slow  # starts processes

MIB = 2**20


def test_curl_with_http2_upgrade_gets_vectors(url: str) -> None:
    command = ["curl", "--silent", "--fail", "--http2", f"{url}/encode", "--data", BODY.decode()]
    response = subprocess.check_output([*command, "--header", "Content-Type: application/json"])
    assert len(json.loads(response)["embeddings"][0]) == 32


@pytest.mark.skipif(shutil.which("java") is None, reason="no JDK is installed")
def test_java_http_client_gets_vectors(url: str) -> None:
    source = Path(__file__).with_name("HttpClientPost.java")
    output = subprocess.check_output(
        ["java", str(source), f"{url}/encode", BODY.decode()], text=True
    )
    assert [line.split()[0] for line in output.splitlines()] == ["200", "200"]


def test_websocket_requests_get_400_and_do_not_prevent_graceful_shutdown(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    upgrade = WEBSOCKET + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    requests = (
        head(upgrade, length=5) + b"abcde",  # cannot be parsed by the package websockets
        chunked(headers=upgrade),
        head(upgrade, length=None),
    )
    settings = {"VITRINE_SERVER__DRAIN_S": "0", "VITRINE_SERVER__GRACE_S": "3600"}
    with (
        held_process(small_artifact, tmp_path / "hold", **settings) as started,
        ThreadPoolExecutor(1) as clients,
        ExitStack() as connections,
    ):
        url = url_of(started)
        for request in requests:
            hostile = connections.enter_context(connect(url))
            hostile.sendall(request)
            assert hostile.recv(4096).startswith(b"HTTP/1.1 400 ")
        texts = {"inputs": [f"word{i} " * 200 for i in range(100)]}
        with held(tmp_path / "hold"):
            long = clients.submit(httpx2.post, f"{url}/encode", json=texts, timeout=240)
            eventually(lambda: metrics(url)["vitrine_queue_tokens"])
            started.send_signal(signal.SIGTERM)
            lines_until(started, "shutting down")
        assert long.result().status_code == 200
        assert rest(started)[0] == 0


def test_bounded_part_of_the_body_is_read_after_413(url: str) -> None:
    sent, piece = 0, b" " * MIB
    with connect(url) as connection:
        connection.sendall(head(length=2**40))
        with suppress(ConnectionError):
            while sent < 2**12 * MIB:
                sent += connection.send(piece)
    # 8 MiB, and the buffers of both sockets.
    assert sent < 64 * MIB


def test_client_that_sends_its_whole_body_first_reads_the_413(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(head(length=6 * MIB) + b" " * 6 * MIB)
        response = received(connection)
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in response


def test_pipelined_requests_are_answered_in_bounded_memory(url: str) -> None:
    before = metrics(url)["process_resident_memory_bytes"]
    with connect(url) as connection, ThreadPoolExecutor(1) as readers:

        def count() -> int:
            responses, tail = 0, b""
            while responses < 20_000:
                tail += connection.recv(2**16)
                responses += tail.count(b'{"status":"ok"}')
                tail = tail[-14:]
            return responses

        counting = readers.submit(count)
        connection.sendall(get() * 20_000)
        assert counting.result() == 20_000
    assert metrics(url)["process_resident_memory_bytes"] - before < 50 * MIB


async def test_large_body_beyond_the_budget_is_refused_before_it_arrives(start: Start) -> None:
    with start(VITRINE_LIMITS__BODY_S="600", VITRINE_LIMITS__MAX_BODIES_BYTES=str(MIB)) as started:
        url = url_of(started)

        async def answer() -> bytes:
            reader, writer = await asyncio.open_connection(*address_of(url))
            writer.write(head(length=MIB))
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
async def test_memory_of_a_thousand_incomplete_bodies_stays_within_the_budget(start: Start) -> None:
    size = 4 * MIB
    pieces = [b" " * 65_536] * (size // 65_536 - 1) + [b" " * 65_535]
    with start(VITRINE_LIMITS__BODY_S="600") as started:
        url = url_of(started)
        idle = metrics(url)["process_resident_memory_bytes"]
        writers: list[asyncio.StreamWriter] = []
        refused = asyncio.Semaphore(0)

        async def send() -> None:
            reader, writer = await asyncio.open_connection(*address_of(url))
            writers.append(writer)
            with suppress(ConnectionError):
                writer.write(head(length=size))
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
        large = json.dumps({"inputs": ["word " * 100] * 200}).encode()
        # Refused until the service has noticed that the others have left.
        eventually(lambda: _status_of_encode(url, large) != 429)
        assert _status_of_encode(url, large) == 200


def _status_of_process(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def _status_of_encode(url: str, body: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    response = httpx2.post(f"{url}/encode", content=body, headers=headers, timeout=PATIENCE_S)
    return response.status_code


def test_protocol_errors_are_problems_that_are_counted_and_logged_with_the_client_address(
    start: Start,
) -> None:
    with start() as started:
        url = url_of(started)
        for count, content in enumerate((b"nonsense\r\n\r\n", head(CHUNKED, None) + b"zz\r\n"), 1):
            with connect(url) as connection:
                connection.sendall(content)
                response = received(connection)
            headers, _, body = response.partition(b"\r\n\r\n")
            assert b"content-type: application/problem+json" in headers
            problem = json.loads(body)
            assert (problem["status"], problem["code"]) == (400, "malformed")
            line = rf"request {problem['request_id']} from 127\.0\.0\.1: the input is not an HTTP"
            lines_until(started, line)
            wait_for_count(url, count)


def wait_for_count(url: str, count: int) -> None:
    """Wait for the metric, which is updated after the response has been sent."""
    name = 'vitrine_requests_total{route="none",status="400"}'
    eventually(lambda: metrics(url).get(name) == count)
