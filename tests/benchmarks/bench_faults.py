"""`make bench-faults`: latency of `/encode` during faults and hostile requests.

A client encodes one text after the other while something breaks. A supervisor restarts the service
when it exits, as an orchestrator does.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.benchmarks.comparison import (
    BenchmarkError,
    Figures,
    Turns,
    markdown,
    parser,
    report,
)
from tests.benchmarks.servers import Api, Client, status_mb
from tests.faulty_service import BREAKS, HANGS, IS_NAN, IS_STUCK, RAISES
from tests.serving import process

_MEGABYTE = 2**20
_JOB = {"text": "The cat sat on the mat.", "target": {"type": "norm"}, "tolerance": 1e-6}


class Service(Client):
    """The service, restarted whenever it exits."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{self.port}", Api())
        self.pid = 0
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            with process(
                "-m",
                "tests.faulty_service",
                VITRINE_SERVER__PORT=str(self.port),
                VITRINE_ENGINE__TIMEOUT_S="1",
                VITRINE_BATCH__MAX_QUEUE_TOKENS="20000",
                VITRINE_LIMITS__BODY_S="1",
                VITRINE_DEBUG__ENABLED="true",
            ) as started:
                self.pid = started.pid
                started.wait()

    def stop(self) -> None:
        """Terminate the service and do not restart it."""
        self._ending = True
        os.kill(self.pid, signal.SIGKILL)
        self._thread.join()

    def status(self, body: object, path: str = "/encode") -> tuple[int, bytes]:
        """Return status and content of the response; status 0 if there is none."""
        try:
            return self.request("POST", path, body)
        except BenchmarkError:
            return 0, b""


# Start and duration of a request in seconds, and its status.
Poll = tuple[float, float, int]


@contextmanager
def _watching(service: Service) -> Iterator[list[Poll]]:
    """Encode one text after the other in a thread; at the end, until 20 requests succeed."""
    polls: list[Poll] = []
    end = threading.Event()

    def watch() -> None:
        while not end.is_set() or [status for _, _, status in polls[-20:]] != [200] * 20:
            started = time.perf_counter()
            status, _ = service.status({"inputs": "a text that anybody may send"})
            polls.append((started, time.perf_counter() - started, status))
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.5)
    try:
        yield polls
        time.sleep(1)  # a service with a broken engine responds before it exits
    finally:
        end.set()
        thread.join()


def _outage_s(polls: Sequence[Poll]) -> float:
    """Return the seconds from the first failed request to the next success after all failures."""
    failed = [when for when, _, status in polls if status != 200]
    if not failed:
        return 0.0
    return min(when for when, _, status in polls if when > failed[-1]) - failed[0]


def _longest_s(polls: Sequence[Poll]) -> float:
    """Return the longest duration of a successful request, in seconds."""
    return max(duration for _, duration, status in polls if status == 200)


def _attack(service: Service, body: bytes) -> Figures:
    before = status_mb("VmRSS", service.pid)
    with _watching(service) as polls:
        status, content = service.status(body)
    return {
        "status": status,
        "bytes": len(content),
        "longest latency of others, ms": 1e3 * _longest_s(polls),
        "memory, MB": status_mb("VmRSS", service.pid) - before,
    }


def _counts(*statuses: int) -> str:
    return ", ".join(f"{n or 'none'}: {statuses.count(n)}" for n in sorted(set(statuses)))


def _one_input(service: Service, token: int) -> str:
    inputs = [[1000 + i] for i in range(32)]
    inputs[17] = [token]
    status, content = service.status({"inputs": inputs})
    payload = json.loads(content) if content else {}
    return f"{status or 'no response'}, index {payload.get('index', '-')}"


def _many(service: Service, count: int, rows: int, tokens: int) -> list[Future[tuple[int, bytes]]]:
    clients = ThreadPoolExecutor(count)
    inputs = [[1000 + i % 20_000] * tokens for i in range(rows)]
    futures = [clients.submit(service.status, {"inputs": inputs}) for _ in range(count)]
    clients.shutdown(wait=False)
    return futures


def _full_queue(service: Service) -> str:
    return _counts(*(future.result()[0] for future in _many(service, 64, rows=40, tokens=100)))


def _leave(service: Service) -> str:
    body = json.dumps({"inputs": [[1000] * 250] * 10}).encode()
    for _ in range(1000):
        _send(service, body, len(body)).close()
    service.status({"inputs": "behind them all"})
    return "-"


def _send(service: Service, body: bytes, length: int) -> socket.socket:
    """Send a body that declares a length, and return the connection."""
    head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=30)
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


def _slow_bodies(service: Service) -> str:
    connections = [_send(service, b"{", 2) for _ in range(200)]
    responses = [connection.recv(4096) for connection in connections]
    for connection in connections:
        connection.close()
    return _counts(*(int(response.split()[1]) if response else 0 for response in responses))


def _end(service: Service, number: signal.Signals) -> str:
    futures = _many(service, 200, rows=1, tokens=50)
    wait(futures, return_when=FIRST_COMPLETED)
    os.kill(service.pid, number)
    return _counts(*(future.result()[0] for future in futures))


def _kill_gradients(service: Service) -> str:
    job = partial(service.status, _JOB, "/debug/attribute")
    job()
    with ThreadPoolExecutor(1) as clients:
        killed = clients.submit(job)
        time.sleep(0.05)
        children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text()
        os.kill(int(children.split()[0]), signal.SIGKILL)
        status, _ = killed.result()
    started = time.perf_counter()
    again, _ = job()
    return f"{status}; the next job {again}, after {time.perf_counter() - started:.1f} s"


FAULTS: dict[str, Callable[[Service], str]] = {
    "the engine raises on one input of 32": partial(_one_input, token=RAISES),
    "it gives a NaN for one of 32": partial(_one_input, token=IS_NAN),
    "it hangs on one of 32 (`timeout_s` 1)": partial(_one_input, token=HANGS),
    "it hangs and cannot be cancelled": partial(_one_input, token=IS_STUCK),
    "it raises from now on": partial(_one_input, token=BREAKS),
    "64 clients where the queue holds 5": _full_queue,
    "1,000 clients that disconnect": _leave,
    "200 bodies that do not arrive (`body_s` 1)": _slow_bodies,
    "the gradient process is killed in mid-job": _kill_gradients,
    "SIGTERM with 200 in flight": partial(_end, number=signal.SIGTERM),
    "SIGKILL with 200 in flight": partial(_end, number=signal.SIGKILL),
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
    options = parser(__doc__, rounds=5).parse_args()
    service = Service()
    attacks = Turns(contenders_in_rows=True)
    faults: list[list[str]] = []
    try:
        with _watching(service):
            pass
        contenders = {name: partial(_attack, service, body) for name, body in ATTACKS.items()}
        attacks.measure(contenders, options.rounds, warm_up=False)
        for name, fault in FAULTS.items():
            with _watching(service) as polls:
                outcome = fault(service)
            faults.append([name, outcome, f"{_outage_s(polls):.1f}", f"{_longest_s(polls):.2f}"])
    finally:
        service.stop()
    header = ["fault", "response to the guilty client", "outage for others, s"]
    table = markdown([*header, "their longest latency, s"], faults)
    report(attacks, table)


if __name__ == "__main__":
    main()
