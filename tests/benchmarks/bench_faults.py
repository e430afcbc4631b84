"""`make bench-faults`: latency of `/encode` during faults and hostile requests.

A client encodes one text after the other while something breaks. A supervisor restarts the service
when it exits, as an orchestrator does.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.faulty_service import BREAKS, HANGS, IS_NAN, IS_STUCK, RAISES
from tests.serving import process

_PORT = 8140
_MEGABYTE = 2**20
_HELD_S = 10
_JSON = {"Content-Type": "application/json"}
_JOB = {"text": "The cat sat on the mat.", "target": {"type": "norm"}, "tolerance": 1e-6}


class Supervised:
    """The service, restarted whenever it exits."""

    def __init__(self) -> None:
        self.pid = 0
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            with process(
                "-m",
                "tests.faulty_service",
                VITRINE_SERVER__PORT=str(_PORT),
                VITRINE_ENGINE__TIMEOUT_S="1",
                VITRINE_BATCH__MAX_QUEUE_TOKENS="20000",
                VITRINE_LIMITS__BODY_S="1",
                VITRINE_DEBUG__ENABLED="true",
            ) as started:
                self.pid = started.pid
                started.wait()

    def resident_mb(self) -> float:
        """Return the resident memory of the process, in MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> None:
        """Terminate the service and do not restart it."""
        self._ending = True
        os.kill(self.pid, signal.SIGKILL)
        self._thread.join()


def post(route: str, body: bytes, headers: dict[str, str] = _JSON) -> tuple[int, bytes]:
    """Return status and content of the response; status 0 if there is none."""
    connection = HTTPConnection("127.0.0.1", _PORT, timeout=60)
    try:
        connection.request("POST", route, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def encode(inputs: object) -> tuple[int, bytes]:
    """Request vectors."""
    return post("/encode", json.dumps({"inputs": inputs}).encode())


@dataclass
class Seen:
    """Observations of a client that encodes one text after the other.

    Attributes:
        polls: Start and duration of each request in seconds, and its status.
    """

    polls: list[tuple[float, float, int]] = field(default_factory=list)

    def outage_s(self) -> float:
        """Return the seconds from the first failed request to the next success."""
        failed = [when for when, _, status in self.polls if status != 200]
        if not failed:
            return 0.0
        return min(when for when, _, status in self.polls if when > failed[-1]) - failed[0]

    def p99_s(self) -> float:
        """Return the 99th percentile of the request durations, in seconds."""
        waits = sorted(wait for _, wait, status in self.polls if status == 200)
        return waits[int(0.99 * len(waits))]

    def longest_s(self) -> float:
        """Return the longest request duration, in seconds."""
        return max(wait for _, wait, status in self.polls if status == 200)


@contextmanager
def watching() -> Iterator[Seen]:
    """Encode one text after the other in a thread; at the end, until a request succeeds."""
    seen, end = Seen(), threading.Event()

    def watch() -> None:
        while not end.is_set() or [status for _, _, status in seen.polls[-20:]] != [200] * 20:
            started = time.perf_counter()
            status, _ = encode("a text that anybody may send")
            seen.polls.append((started, time.perf_counter() - started, status))
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.5)
    try:
        yield seen
        time.sleep(1)  # a service with a broken engine responds before it exits
    finally:
        end.set()
        thread.join()


def _status(*statuses: int) -> str:
    return ", ".join(f"{n or 'none'}: {statuses.count(n)}" for n in sorted(set(statuses)))


def _one_input(token: int) -> str:
    inputs = [[1000 + i] for i in range(32)]
    inputs[17] = [token]
    status, content = encode(inputs)
    payload = json.loads(content) if content else {}
    return f"{status or 'no response'}, index {payload.get('index', '-')}"


def _many(count: int, rows: int, tokens: int) -> list[concurrent.futures.Future[tuple[int, bytes]]]:
    clients = concurrent.futures.ThreadPoolExecutor(count)
    inputs = [[1000 + i % 20_000] * tokens for i in range(rows)]
    futures = [clients.submit(encode, inputs) for _ in range(count)]
    clients.shutdown(wait=False)
    return futures


def _full_queue(_service: Supervised) -> str:
    return _status(*(response.result()[0] for response in _many(64, rows=40, tokens=100)))


def _leave(_service: Supervised) -> str:
    body = json.dumps({"inputs": [[1000] * 250] * 10}).encode()
    for _ in range(1000):
        _half_sent(body, b"").close()
    encode("behind them all")
    return "-"


def _half_sent(body: bytes, missing: bytes) -> socket.socket:
    head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + (
        f"Content-Length: {len(body + missing)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", _PORT), timeout=30)
    connection.sendall(head.encode() + body)
    return connection


def _slow_bodies(_service: Supervised) -> str:
    connections = [_half_sent(b"{", b"}") for _ in range(200)]
    responses = [connection.recv(4096) for connection in connections]
    for connection in connections:
        connection.close()
    return _status(*(int(response.split()[1]) if response else 0 for response in responses))


def _nothing(_service: Supervised) -> str:
    time.sleep(_HELD_S)
    return "-"


def _bodies_that_lack_a_byte(_service: Supervised) -> str:
    # A separate process, so that it does not slow down the observing client.
    with concurrent.futures.ProcessPoolExecutor(1) as senders:
        return senders.submit(_hold_bodies).result()


def _hold_bodies() -> str:
    """Keep 1,000 connections open that each send 4 MiB less one byte; reopen closed ones."""
    body = memoryview(b" " * (4 * _MEGABYTE - 1))
    statuses: list[int] = []

    async def hold() -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", _PORT)
            try:
                writer.write(
                    b"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                )
                writer.write(b"Content-Length: %d\r\n\r\n" % (len(body) + 1))
                for start in range(0, len(body), 65_536):
                    writer.write(body[start : start + 65_536])
                    await writer.drain()
            except ConnectionError:
                pass
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                response = await reader.readuntil(b"\r\n\r\n")
                statuses.append(int(response.split()[1]))
                await reader.read()
            writer.close()
            await asyncio.sleep(1)

    async def all_of_them() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HELD_S), asyncio.TaskGroup() as tasks:
                for _ in range(1000):
                    tasks.create_task(hold())

    asyncio.run(all_of_them())
    return _status(*statuses)


def _end(service: Supervised, number: signal.Signals) -> str:
    futures = _many(200, rows=1, tokens=50)
    concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
    os.kill(service.pid, number)
    return _status(*(response.result()[0] for response in futures))


def _kill_gradients(service: Supervised) -> str:
    post("/debug/attribute", json.dumps(_JOB).encode())
    with concurrent.futures.ThreadPoolExecutor(1) as clients:
        job = clients.submit(post, "/debug/attribute", json.dumps(_JOB).encode())
        time.sleep(0.05)
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        status, _ = job.result()
    started = time.perf_counter()
    again, _ = post("/debug/attribute", json.dumps(_JOB).encode())
    return f"{status}; the next job {again}, after {time.perf_counter() - started:.1f} s"


FAULTS: dict[str, Callable[[Supervised], str]] = {
    "nothing, for 10 s": _nothing,
    "1,000 bodies of 4 MiB that lack a byte, for 10 s": _bodies_that_lack_a_byte,
    "the engine raises on one input of 32": lambda _: _one_input(RAISES),
    "it gives a NaN for one of 32": lambda _: _one_input(IS_NAN),
    "it hangs on one of 32 (`timeout_s` 1)": lambda _: _one_input(HANGS),
    "it hangs and cannot be cancelled": lambda _: _one_input(IS_STUCK),
    "it raises from now on": lambda _: _one_input(BREAKS),
    "64 clients where the queue holds 5": _full_queue,
    "1,000 clients that leave": _leave,
    "200 bodies that do not come (`body_s` 1)": _slow_bodies,
    "the gradient process is killed in mid-job": _kill_gradients,
    "SIGTERM with 200 in flight": lambda service: _end(service, signal.SIGTERM),
    "SIGKILL with 200 in flight": lambda service: _end(service, signal.SIGKILL),
}

ATTACKS: dict[str, bytes] = {
    "NaN": b'{"inputs": NaN}',
    "100,000 brackets": b'{"inputs": ' + b"[" * 100_000,
    "an integer of a megabyte": b'{"inputs": [[' + b"9" * _MEGABYTE + b"]]}",
    "50,000 rows of a float": b'{"inputs": [' + b"[1.5]," * 50_000 + b"[1]]}",
    "2,000 rows of a float": b'{"inputs": [' + b"[1.5]," * 2000 + b"[1]]}",
    "a million ids": b'{"inputs": [[' + b"1," * 1_000_000 + b"1]]}",
    "a million ids beside a colon": (
        b'{"inputs": [[' + b"1," * 1_000_000 + b'1]], "prompt_name": ":"}'
    ),
    "100,000 keys": b"{" + b",".join(b'"%d":0' % i for i in range(100_000)) + b"}",
    "a text of a megabyte": b'{"inputs": "' + b"a" * _MEGABYTE + b'"}',
    "40 texts of 99 letters a word": json.dumps(
        {"inputs": [("a" * 99 + " ") * 1000] * 40}
    ).encode(),
    "40 texts of 100,000 '!'": json.dumps({"inputs": ["!" * 100_000] * 40}).encode(),
    "40 texts of combining marks": json.dumps(
        {"inputs": ["a" + "\u0301" * 16_000] * 40}, ensure_ascii=False
    ).encode(),
    "five megabytes": b" " * (5 * _MEGABYTE),
}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per attack")
    options = parser.parse_args()
    service = Supervised()
    try:
        with watching():
            pass
        print("| attack | response | bytes | longest other request, ms | memory, MB |")
        print("|---|--:|--:|--:|--:|")
        for name, body in ATTACKS.items():
            waits, growths = [], []
            for _ in range(options.rounds):
                before = service.resident_mb()
                with watching() as seen:
                    status, content = post("/encode", body)
                waits.append(1e3 * seen.longest_s())
                growths.append(service.resident_mb() - before)
            print(
                f"| {name} | {status} | {len(content)} | {statistics.median(waits):.0f} "
                f"| {statistics.median(growths):+.0f} |",
                flush=True,
            )
        print(
            "\n| fault | whose fault it is sees | others see none for, s | their p99, ms "
            "| their longest wait, s |"
        )
        print("|---|---|--:|--:|--:|")
        for name, fault in FAULTS.items():
            with watching() as seen:
                outcome = fault(service)
            print(
                f"| {name} | {outcome} | {seen.outage_s():.1f} | {1e3 * seen.p99_s():.1f} "
                f"| {seen.longest_s():.2f} |",
                flush=True,
            )
    finally:
        service.stop()


if __name__ == "__main__":
    main()
