"""Servers under measurement: one process each, suspended while another one is measured."""

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.comparison import BenchmarkError, Figures
from tests.benchmarks.workloads import Workload

_WRK_SCRIPT = Path(__file__).with_name("wrk.lua")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_TIMEOUT_S = 120
# text-embeddings-inference refuses requests of more texts, by default.
_MAX_TEXTS = 32


@dataclass(frozen=True)
class Api:
    """Route that encodes or scores texts, and the format of its requests.

    Attributes:
        text_field: JSON field with the texts.
        fields: Other fields of a request.
    """

    path: str = "/encode"
    text_field: str = "inputs"
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """Measurements of one load.

    Attributes:
        cpu_s: CPU time of the server, in seconds; NaN if its process is unknown.
    """

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_s: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    def figures(self) -> Figures:
        """Return the rate and the latencies."""
        return {"requests/s": self.rate, "p50, ms": self.p50_ms, "p99, ms": self.p99_ms}


class Client:
    """Client of a server that runs already, of which only the URL is known.

    Args:
        url: Base URL, `http://host:port` with an optional path.
        api: Route and format that `encode` and the loads use.
    """

    def __init__(self, url: str, api: Api) -> None:
        self.url = url.rstrip("/")
        self.api = api

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Send one request, with JSON if there is a body; return status and content.

        Raises:
            BenchmarkError: there is no response.
        """
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            content = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, parts.path + path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchmarkError(f"{self.url} does not answer: {error!r}") from error
        finally:
            connection.close()

    def get(self, path: str) -> str:
        """Return the body of a GET response."""
        return self.request("GET", path)[1].decode()

    def post(self, body: Mapping[str, object], path: str | None = None) -> Any:  # noqa: ANN401
        """Return the JSON of the response, by default of the API's route.

        Raises:
            BenchmarkError: there is no response, or its status is not 200.
        """
        path = path or self.api.path
        status, content = self.request("POST", path, body)
        if status != 200:
            raise BenchmarkError(f"POST {self.url}{path}: status {status}, {content[:200]!r}")
        return json.loads(content)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the vectors of the texts, (N, W), from requests of at most 32.

        Raises:
            BenchmarkError: there is no response, or not one vector per text.
        """
        return np.concatenate(
            [self._encode(texts[at : at + _MAX_TEXTS]) for at in range(0, len(texts), _MAX_TEXTS)]
        )

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float64]:
        vectors = _vectors(self.post({self.api.text_field: texts, **self.api.fields}))
        if vectors is None or len(vectors) != len(texts):
            raise BenchmarkError(f"{self.url}{self.api.path} did not return {len(texts)} vectors")
        return vectors

    def load(self, workload: Workload, seconds: int) -> Load:
        """Drive the workload with wrk; see `load_bodies`."""
        requests = workload.requests()
        bodies = [{self.api.text_field: texts, **self.api.fields} for texts in requests]
        return self.load_bodies(bodies, workload.clients, seconds)

    def load_bodies(
        self, bodies: Sequence[Mapping[str, object]], clients: int, seconds: int
    ) -> Load:
        """Send the bodies in turn with wrk, from several clients.

        Raises:
            BenchmarkError: a request failed, or none was completed.
        """
        cpu_s = self.cpu_s()
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(map(json.dumps, bodies)))
            file.flush()
            command = ["wrk", "-t1", f"-c{clients}", "--timeout=60s", f"-d{seconds}s"]
            output = subprocess.run(
                [*command, f"-s{_WRK_SCRIPT}", self.url + self.api.path, "--", file.name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        match = re.search("^RESULT (.*)$", output, re.MULTILINE)
        assert match, output
        load = Load(**json.loads(match[1]), cpu_s=self.cpu_s() - cpu_s)
        self.finish()
        if load.failed:
            raise BenchmarkError(f"failed {load.failed} requests")
        if not load.requests:
            raise BenchmarkError(f"completed no request in {seconds} s; raise --seconds")
        return load

    def cpu_s(self) -> float:
        """Return the CPU time of the server in seconds, NaN if it is unknown."""
        return math.nan

    def finish(self) -> None:
        """Wait for requests that wrk abandoned: they must not run into the next load."""
        self.encode(["the abandoned requests precede this one in the queue"])


def _vectors(payload: Any) -> NDArray[np.float64] | None:  # noqa: ANN401
    """Return the vectors of a response in our, TEI's or OpenAI's shape, (N, W), or None."""
    try:
        if isinstance(payload, dict):
            entries = sorted(payload.get("data", ()), key=lambda entry: int(entry["index"]))
            payload = payload.get("embeddings") or [entry["embedding"] for entry in entries]
        vectors = np.asarray(payload, np.float64)
    except (ValueError, TypeError, LookupError):
        return None
    return vectors if vectors.ndim == 2 else None


@dataclass(frozen=True)
class ServerKind:
    """Command and API of a server.

    Attributes:
        command: Arguments, in which `{port}` stands for the port.
        environment: Virtual environment of the server.
        variables: Environment variables besides ours.
    """

    command: Sequence[str]
    api: Api = Api()
    environment: Path = Path(sys.prefix)
    directory: Path = Path()
    variables: Mapping[str, str] = field(default_factory=dict)


def vitrine(
    *options: str,
    environment: Path = Path(sys.prefix),
    api: Api = Api(),
) -> ServerKind:
    """Return our server with options of its command line, by default as installed here."""
    serve = str(environment.absolute() / "bin/vitrine-serve")
    return ServerKind((serve, "--server.port={port}", *options), api, environment)


class ServerProcess(Client):
    """A server in a process of its own, which is suspended unless it is used.

    It is used by its methods and within `awake`, so even a server that polls takes no CPU time from
    another one.

    Attributes:
        port: The port that it listens on.
        ready_s: Seconds from the start of the process to the first response.

    Raises:
        RuntimeError: the server does not start.
    """

    def __init__(self, kind: ServerKind) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{self.port}", kind.api)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._is_awake = True
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [part.replace("{port}", str(self.port)) for part in kind.command],
            cwd=kind.directory,
            env={**os.environ, **kind.variables},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        while not self._is_ready():
            if self.process.poll() is not None or time.perf_counter() - started > 120:
                self._log.seek(0)
                raise RuntimeError(f"{kind.command[0]} did not start:\n{self._log.read()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - started
        self._suspend()

    def _is_ready(self) -> bool:
        try:
            self.post({self.api.text_field: ["ready?"], **self.api.fields})
        except BenchmarkError:
            return False
        return True

    def _suspend(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self._is_awake = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)  # no server drains on SIGINT
        self.process.wait(30)
        self._log.close()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the process run for the time of the block; threads that use it need this."""
        if self._is_awake:
            yield
            return
        self._is_awake = True
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._suspend()

    @contextmanager
    def busy_client(
        self, body: Mapping[str, object], path: str, seconds: int
    ) -> Iterator[Callable[[], int]]:
        """Let a client send one request after the other for some seconds; yield their count.

        Raises:
            BenchmarkError: it had no response when the block ended.
        """
        end, count = time.perf_counter() + seconds, 0

        def send() -> None:
            nonlocal count
            while time.perf_counter() < end:
                self.post(body, path)
                count += 1

        client = Thread(target=send)
        with self.awake():
            client.start()
            try:
                yield lambda: count
            finally:
                client.join()
        if not count:
            raise BenchmarkError(f"{path} answered nothing beside the load")

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Send one request; see `Client.request`."""
        with self.awake():
            return super().request(method, path, body)

    def load_bodies(
        self, bodies: Sequence[Mapping[str, object]], clients: int, seconds: int
    ) -> Load:
        """Send the bodies in turn with wrk; see `Client.load_bodies`."""
        with self.awake():
            return super().load_bodies(bodies, clients, seconds)

    def finish(self) -> None:
        """Wait until the process is idle."""
        before = -1.0
        while self.cpu_s() - before > 0.02:
            before = self.cpu_s()
            time.sleep(0.2)

    def cpu_s(self) -> float:
        """Return the CPU time of the process, in seconds."""
        return _cpu_s(Path(f"/proc/{self.process.pid}/stat"))

    def loop_s(self) -> float:
        """Return the CPU time of the main thread, which runs the event loop, in seconds."""
        return _cpu_s(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat"))

    def resident_mb(self) -> float:
        """Return the resident memory of the process, in MB."""
        return status_mb("VmRSS", self.process.pid)

    def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics` by name and labels."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines())
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def status_mb(entry: str, pid: int | str = "self") -> float:
    """Return an entry of a process's status, such as `VmRSS`, in MB."""
    match = re.search(rf"^{entry}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert match
    return int(match[1]) * 1024 / 1e6


def _cpu_s(stat: Path) -> float:
    """Return the CPU time in a file `stat` of /proc, in seconds."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
