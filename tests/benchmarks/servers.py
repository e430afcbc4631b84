"""Servers as the benchmarks start them: one process each, stopped while another one is measured."""

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

from tests.benchmarks.workloads import Workload

WRK_SCRIPT = Path(__file__).with_name("wrk.lua")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Kind:
    """How to start a server, and how to speak to it.

    Attributes:
        path: Of the route that encodes.
        field: Of the JSON body, that holds the texts.
        environment: The virtual environment that it is installed in.
    """

    command: Sequence[str]
    path: str
    field: str
    environment: Path
    directory: Path = Path()
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Load:
    """What came of a load.

    Attributes:
        cpu_s: Seconds of CPU that the server took.
    """

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_s: float


class Server:
    """A server that runs, until `stop`.

    Attributes:
        ready_s: From its start until it had answered a first text.
    """

    def __init__(self, kind: Kind, port: int) -> None:
        self._kind = kind
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
        while not self._answers():
            if self._process.poll() is not None or time.perf_counter() - started > 120:
                self._log.seek(0)
                raise RuntimeError(f"{kind.command[0]} did not start:\n{self._log.read()[-2000:]}")
            time.sleep(0.02)
        self.ready_s = time.perf_counter() - started

    def _answers(self) -> bool:
        try:
            return bool(self.encode(["ready?"]))
        except (OSError, http.client.HTTPException):
            return False

    def encode(self, texts: Sequence[str]) -> dict[str, object]:
        """Return the JSON answer, or nothing while the server refuses."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            body = json.dumps({self._kind.field: texts})
            connection.request("POST", self._kind.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            return dict(json.loads(content)) if answer.status == 200 else {}
        finally:
            connection.close()

    def get(self, path: str) -> str:
        """Return what a route answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def load(self, workload: Workload, seconds: int) -> Load:
        """Drive the workload with wrk for so many seconds; the server runs meanwhile only."""
        bodies = (json.dumps({self._kind.field: texts}) for texts in workload.requests())
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(bodies))
            file.flush()
            url = f"http://127.0.0.1:{self._port}{self._kind.path}"
            command = ["wrk", "-t1", f"-c{workload.clients}", "--timeout=60s"]
            self.resume()
            before = self.cpu_s()
            output = subprocess.run(
                [*command, f"-d{seconds}s", f"-s{WRK_SCRIPT}", url, "--", file.name],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            cpu_s = self.cpu_s() - before
            self._finish()
            self.pause()
        found = re.search("^RESULT (.*)$", output, re.MULTILINE)
        assert found, output
        return Load(**json.loads(found[1]), cpu_s=cpu_s)

    def _finish(self) -> None:
        """Wait until what wrk has left behind is done: it must not fall into the next load."""
        before = -1.0
        while self.cpu_s() - before > 0.02:
            before = self.cpu_s()
            time.sleep(0.2)

    def pause(self) -> None:
        """Stop the process, so that even a server that polls takes nothing from another one."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send_signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the seconds of CPU that the process has taken."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

    def resident_mb(self) -> float:
        """Return the resident memory of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024 / 1e6

    def stop(self) -> None:
        """End the process."""
        self.resume()
        self._process.send_signal(signal.SIGINT)  # at which none waits for load balancers
        self._process.wait(30)
        self._log.close()


def installed_mb(environment: Path) -> float:
    """Return what the packages of a virtual environment take on disk."""
    packages = next(environment.glob("lib/python*/site-packages"))
    return sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6


def need_wrk() -> None:
    """End the program with a sentence if the load generator is not there."""
    if shutil.which("wrk") is None:
        sys.exit("wrk is needed, which sends the load: sudo apt-get install wrk")
