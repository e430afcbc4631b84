"""Bulk encoding on Ray clusters: killed actors, interrupted jobs, and a node that is cut off."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.deploy.conftest import RAY_PATH, ROWS, Arguments, assert_equal_output
from tests.deploy.faulty_encode import Fault
from tests.deploy.test_monitoring import ROOT
from tests.eventually import eventually

# Ray starts a dozen processes: minutes, on a machine whose cores are busy.
_PATIENCE_S = 3600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_PATIENCE_S)]

# Starts of processes take most of the time. None is started ahead of its task, and a job keeps its
# idle processes for later tasks.
_FEW_PROCESSES = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_idle_worker_killing_time_threshold_ms": str(1000 * _PATIENCE_S),
}
_START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
_HEAD = ["--head", "--include-dashboard=false", "--no-monitor"]


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[dict[str, str]]:
    # Ray creates sockets in this folder; their paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory() as short:
        yield {
            **os.environ,
            **_FEW_PROCESSES,
            "PYTHONPATH": RAY_PATH,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_TMPDIR": short,
        }


@pytest.fixture(scope="module")
def on_cluster(ray_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of jobs on one running cluster."""
    options = [*_HEAD, "--port=0", "--include-log-monitor=false"]
    process = subprocess.Popen([*_START, *options], cwd=ROOT, env=ray_environment)
    address = Path(ray_environment["RAY_TMPDIR"], "ray", "ray_current_cluster")
    try:
        eventually(lambda: address.exists() or process.poll() is not None)
        yield ray_environment | {"RAY_ADDRESS": address.read_text()}
    finally:
        process.terminate()
        process.wait()


def run(
    module: str, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def environment_of(*faults: Fault) -> dict[str, str]:
    return {"FAULTS": json.dumps([asdict(fault) for fault in faults])}


def test_cluster_writes_the_files_of_vitrine_encode(
    arguments: Arguments, ray_environment: dict[str, str], output: Path, expected: Path
) -> None:
    command = arguments()
    command[1] = output.as_uri()
    job = run("deploy.ray_encode", command, ray_environment)
    assert job.returncode == 3, job.stderr  # some texts are null
    assert f"{ROWS} rows encoded" in job.stderr
    assert "the first: row" in job.stderr
    assert_equal_output(output, expected)


def test_part_of_a_killed_actor_is_neither_lost_nor_doubled(
    arguments: Arguments, on_cluster: dict[str, str], output: Path, expected: Path, tmp_path: Path
) -> None:
    faults = [
        Fault("SIGKILL", "actor", "part-00003.parquet", "before", str(tmp_path / "before")),
        Fault("SIGKILL", "actor", "part-00006.parquet", "after", str(tmp_path / "after")),
    ]
    job = run("tests.deploy.faulty_encode", arguments(), on_cluster | environment_of(*faults))
    assert job.returncode == 3, job.stderr
    assert all(Path(fault.mark).exists() for fault in faults)
    assert f"{ROWS} rows encoded" in job.stderr
    assert_equal_output(output, expected)


def test_interrupted_job_keeps_finished_parts_when_it_is_started_again(
    arguments: Arguments, on_cluster: dict[str, str], output: Path, expected: Path, tmp_path: Path
) -> None:
    def finished() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_mtime_ns) for path in output.glob("*.parquet")}

    command = arguments("--actors=1")

    def interrupt(signal: str) -> subprocess.CompletedProcess[str]:
        fault = Fault(signal, "job", "part-00004.parquet", "before", str(tmp_path / signal))
        environment = on_cluster | environment_of(fault)
        return run("tests.deploy.faulty_encode", command, environment)

    job = interrupt("SIGTERM")
    assert job.returncode == 4, job.stderr
    assert "interrupted: start again" in job.stderr
    after_sigterm = finished()
    assert after_sigterm
    job = interrupt("SIGKILL")
    assert job.returncode == -9, job.stderr
    after_sigkill = finished()
    job = run("deploy.ray_encode", command, on_cluster)
    assert job.returncode == 3, job.stderr
    assert "rows were there already" in job.stderr
    assert after_sigterm <= after_sigkill <= finished()
    assert_equal_output(output, expected)


@dataclass
class Node:
    """A machine of a cluster: a network namespace with an address of its own, and its processes.

    Attributes:
        name: Name of the namespace.
        address: Address of its only network interface but loopback.
    """

    name: str
    address: str

    def popen(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on the node, with its output in a file."""
        with log.open("wb") as stream:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def connect(self, state: str) -> None:
        """Set the link to the other node "up" or "down"."""
        ip(f"-n {self.name} link set veth0 {state}")


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two machines with a link between them, which is up."""
    name = f"vitrine-{os.getpid()}"
    pair = Node(f"{name}-a", "10.77.0.1"), Node(f"{name}-b", "10.77.0.2")
    with ExitStack() as stack:
        try:
            for node in pair:
                ip(f"netns add {node.name}")
                stack.callback(ip, f"netns del {node.name}")
            ends = [f"veth0 netns {node.name}" for node in pair]
            ip(f"link add {ends[0]} type veth peer name {ends[1]}")
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", b"").decode().strip() or error
            pytest.skip(f"network namespaces cannot be made: {reason}")
        for node in pair:
            ip(f"-n {node.name} addr add {node.address}/24 dev veth0")
            ip(f"-n {node.name} link set lo up")
            node.connect("up")
        yield pair


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Terminate a process after the block."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def resume(marks: Sequence[Path]) -> None:
    """Continue the stopped actors that are named by the files."""
    for mark in marks:
        if mark.exists():
            with suppress(ProcessLookupError):
                os.kill(int(mark.read_text()), signal.SIGCONT)


def wait_until(condition: Callable[[], object], job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a condition; fail with the log of the job, at once if the job ends."""
    for _ in range(10 * _PATIENCE_S):
        if condition():
            return
        if job.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.namespaces
def test_rows_of_a_node_that_is_cut_off_and_brought_back_are_neither_lost_nor_doubled(
    nodes: tuple[Node, Node],
    arguments: Arguments,
    ray_environment: dict[str, str],
    output: Path,
    expected: Path,
    tmp_path: Path,
) -> None:
    head, other = nodes
    address = f"{head.address}:6379"
    faults = [
        Fault("SIGSTOP", node.address, "part-*.parquet", "before", str(tmp_path / node.name))
        for node in nodes
    ]
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory())
        environment = ray_environment | {
            "RAY_TMPDIR": short,
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 1}',  # so each node has an actor
            # A node is dead after three checks without a response.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "3000",
            "RAY_health_check_failure_threshold": "3",
        }

        def start(node: Node, *options: str) -> subprocess.Popen[bytes]:
            command = [*_START, f"--node-ip-address={node.address}", *options]
            log = tmp_path / f"{node.name}.log"
            return stack.enter_context(ended(node.popen(command, environment, log)))

        start(head, *_HEAD, "--port=6379")
        eventually(Path(short, "ray", "ray_current_cluster").exists)
        raylet = start(other, f"--address={address}")
        log = tmp_path / "job.log"
        command = [sys.executable, "-m", "tests.deploy.faulty_encode", *arguments()]
        settings = environment | environment_of(*faults) | {"RAY_ADDRESS": address}
        job = stack.enter_context(ended(head.popen(command, settings, log)))

        # Both actors have encoded a part, and publish it when the link is down.
        marks = [Path(fault.mark) for fault in faults]
        stack.callback(resume, marks)  # a stopped process would outlive a failed test
        wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks), job, log)
        assert not list(output.glob("*.parquet"))
        other.connect("down")
        resume(marks)
        gcs = Path(short, "ray", "session_latest", "logs", "gcs_server.out")
        wait_until(lambda: "dead because the health check failed" in gcs.read_text(), job, log)
        other.connect("up")
        # Ray ends the node that it has declared dead, and its supervisor starts it again.
        wait_until(lambda: raylet.poll() is not None, job, log)
        start(other, f"--address={address}")
        assert job.wait() == 3, log.read_text()  # some texts are null
        assert f"{ROWS} rows encoded" in log.read_text()
    assert_equal_output(output, expected)
