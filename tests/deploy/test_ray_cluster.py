"""Bulk encoding on Ray clusters: killed actors, interrupted jobs, and a node that is cut off."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from tests.deploy.conftest import ROWS, Arguments, assert_equal_output
from tests.deploy.faulty_encode import Fault
from tests.deploy.ray_nodes import (
    DEAD,
    HEAD,
    HEALTH_CHECKS,
    PATIENCE_S,
    START,
    Node,
    NoNamespacesError,
    ended,
    has_content,
    linked_nodes,
)
from tests.deploy.test_monitoring import ROOT
from tests.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S)]


@pytest.fixture(scope="module")
def on_cluster(ray_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of jobs on one running cluster."""
    options = [*HEAD, "--port=0", "--include-log-monitor=false"]
    process = subprocess.Popen([*START, *options], cwd=ROOT, env=ray_environment)
    address = Path(ray_environment["RAY_TMPDIR"], "ray", "ray_current_cluster")
    try:
        eventually(lambda: has_content(address) or process.poll() is not None)
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


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    try:
        with linked_nodes() as pair:
            yield pair
    except NoNamespacesError as error:
        pytest.skip(str(error))


def is_stopped(mark: Path) -> bool:
    """Return whether the actor that is named by the file is stopped."""
    if not mark.exists() or not (pid := mark.read_text()):
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def resume(marks: Sequence[Path]) -> None:
    """Continue the stopped actors that are named by the files."""
    for mark in marks:
        if mark.exists():
            with suppress(ProcessLookupError):
                os.kill(int(mark.read_text()), signal.SIGCONT)


def wait_until(condition: Callable[[], object], job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a condition; fail with the log of the job, at once if the job ends."""
    for _ in range(10 * PATIENCE_S):
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
        Fault("SIGSTOP", node.address, "part-*.parquet", "before", str(tmp_path / node.address))
        for node in nodes
    ]
    with ExitStack() as stack:
        short = stack.enter_context(tempfile.TemporaryDirectory())
        environment = ray_environment | {
            "RAY_TMPDIR": short,
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 1}',  # so each node has an actor
            **HEALTH_CHECKS,
        }

        def start(node: Node, *options: str) -> subprocess.Popen[bytes]:
            command = [*START, f"--node-ip-address={node.address}", *options]
            log = tmp_path / f"{node.name}.log"
            return stack.enter_context(ended(node.popen(command, environment, log)))

        start(head, *HEAD, "--port=6379")
        eventually(partial(has_content, Path(short, "ray", "ray_current_cluster")))
        raylet = start(other, f"--address={address}")
        log = tmp_path / "job.log"
        command = [sys.executable, "-m", "tests.deploy.faulty_encode", *arguments()]
        settings = environment | environment_of(*faults) | {"RAY_ADDRESS": address}
        job = stack.enter_context(ended(head.popen(command, settings, log)))

        # Both actors have encoded a part. The other node's is published while the link is down, the
        # head's when the node is back, so that the job does not end before.
        marks = [Path(fault.mark) for fault in faults]
        stack.callback(resume, marks)  # a stopped process would outlive a failed test
        wait_until(lambda: all(map(is_stopped, marks)), job, log)
        assert not list(output.glob("*.parquet"))
        other.connect("down")
        resume(marks[1:])
        wait_until(lambda: list(output.glob("*.parquet")), job, log)
        gcs = Path(short, "ray", "session_latest", "logs", "gcs_server.out")
        wait_until(lambda: DEAD in gcs.read_text(), job, log)
        other.connect("up")
        # Ray ends the node that it has declared dead, and its supervisor starts it again.
        wait_until(lambda: raylet.poll() is not None, job, log)
        start(other, f"--address={address}")
        resume(marks[:1])
        assert job.wait() == 3, log.read_text()  # some texts are null
        assert f"{ROWS} rows encoded" in log.read_text()
    assert_equal_output(output, expected)
