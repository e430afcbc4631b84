"""Servers under measurement: one process each, suspended while another one is measured."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.benchmarks.workloads import Workload

WRK_SCRIPT = Path(__file__).with_name("wrk.lua")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Kind:
    """Command, route and request format of a server.

    Attributes:
        path: Path of the encode route.
        field: JSON field with the texts.
        environment: Virtual environment of the server.
    """

    command: Sequence[str]
    path: str
    field: str
    environment: Path
    directory: Path = Path()
    variables: Mapping[str, str] | None = None


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


class Server:
    """A running server.

    Attributes:
        ready_s: Seconds from the start of the process to the first vector.

    Args:
        kind: Command, route and request format.
        port: Port to listen on.
        fields: Other fields of a request with texts.
    """

    def __init__(
        self, kind: Kind, port: int, fields: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        self._kind = kind
        self._fields = fields
        self._port = port
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [part.format(port=port) for part in kind.command],
            cwd=kind.directory,
            env={**os.environ, **(kind.variables or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - started > 120:
                self._log.seek(0)
                raise RuntimeError(f"{kind.command[0]} did not start:\n{self._log.read()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - started

    def _is_ready(self) -> bool:
        try:
            return bool(self.encode(["ready?"]))
        except (OSError, http.client.HTTPException):
            return False

    def encode(self, texts: Sequence[str]) -> dict[str, object]:
        """Return the JSON response for some texts; an empty dict for an error status."""
        return self.post({self._kind.field: texts, **self._fields})

    def post(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return the JSON response; an empty dict for an error status."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._kind.path, json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
            return dict(json.loads(content)) if response.status == 200 else {}
        finally:
            connection.close()

    def get(self, path: str) -> str:
        """Return the body of a GET response."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def load(self, workload: Workload, seconds: int) -> Load:
        """Drive the workload with wrk; the server is suspended before and afterwards."""
        bodies = [json.dumps({self._kind.field: texts}) for texts in workload.requests()]
        return self.load_bodies(bodies, workload.clients, seconds)

    def load_bodies(self, bodies: Sequence[str], clients: int, seconds: int) -> Load:
        """Send the bodies in turn with wrk, from several clients; see `load`."""
        self.resume()
        before = self.cpu_s()
        figures = drive(f"http://127.0.0.1:{self._port}{self._kind.path}", bodies, clients, seconds)
        cpu_s = self.cpu_s() - before
        self._finish()
        self.pause()
        return Load(**figures, cpu_s=cpu_s)

    def _finish(self) -> None:
        """Wait for requests that wrk abandoned: they must not run into the next load."""
        before = -1.0
        while self.cpu_s() - before > 0.02:
            before = self.cpu_s()
            time.sleep(0.2)

    def pause(self) -> None:
        """Suspend the process, so that even a server that polls uses no CPU time."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process."""
        self._process.send_signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the CPU time of the process, in seconds."""
        return _cpu_s(Path(f"/proc/{self._process.pid}/stat"))

    def loop_s(self) -> float:
        """Return the CPU time of the main thread, which runs the event loop, in seconds."""
        return _cpu_s(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/stat"))

    def resident_mb(self) -> float:
        """Return the resident memory of the process, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match
        return int(match[1]) * 1024 / 1e6

    def stop(self) -> None:
        """Terminate the process."""
        self.resume()
        self._process.send_signal(signal.SIGINT)  # no server drains on SIGINT
        self._process.wait(30)
        self._log.close()


def _cpu_s(stat: Path) -> float:
    """Return the CPU time in a file `stat` of /proc, in seconds."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS


def drive(url: str, bodies: Sequence[str], clients: int, seconds: int) -> dict[str, Any]:
    """Post the bodies in turn with wrk, from several clients; return the figures of `wrk.lua`."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(bodies))
        file.flush()
        command = ["wrk", "-t1", f"-c{clients}", "--timeout=60s", f"-d{seconds}s"]
        output = subprocess.run(
            [*command, f"-s{WRK_SCRIPT}", url, "--", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    match = re.search("^RESULT (.*)$", output, re.MULTILINE)
    assert match, output
    return dict(json.loads(match[1]))


def installed_mb(environment: Path) -> float:
    """Return the disk usage of a virtual environment's packages, in MB."""
    packages = next(environment.glob("lib/python*/site-packages"))
    return sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6


def need_wrk() -> None:
    """Exit with an error if wrk is not installed."""
    if shutil.which("wrk") is None:
        sys.exit("the load generator wrk is not installed; run: sudo apt-get install wrk")
