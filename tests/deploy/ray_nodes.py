"""Nodes of a Ray cluster: network namespaces with real addresses, and a link that can be cut."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.test_monitoring import ROOT
from tests.eventually import HANG_S

_CLONE_NEWNET = 0x40000000  # linux/sched.h

# Ray starts a dozen processes: minutes, on a machine whose cores are busy.
PATIENCE_S = 3600
# Starts of processes take most of the time. None is started ahead of its task, and a job keeps its
# idle processes for later tasks.
FEW_PROCESSES = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_idle_worker_killing_time_threshold_ms": str(1000 * PATIENCE_S),
}
# A node gives up if it is not registered after 30 s; there is no setting for that.
_RAY = """
import time, types
from ray._private import node
from ray.scripts.scripts import main
node.time = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: 0.0})
main()
"""
START = [sys.executable, "-c", _RAY, "start", "--block"]
HEAD = ["--head", "--include-dashboard=false", "--no-monitor"]
# A node is dead after five checks without a response.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
# In the log of the cluster's control store, when that has happened.
DEAD = "dead because the health check failed"


def has_content(file: Path) -> bool:
    """Return whether a file is there and has been written."""
    return file.exists() and file.stat().st_size > 0


class NoNamespacesError(Exception):
    """Network namespaces cannot be made; the message has the reason."""


@dataclass
class Node:
    """A machine of a cluster: a network namespace with an address of its own, and its processes.

    Attributes:
        name: Name of the namespace; None: that of this process.
        address: Address of its only network interface but loopback.
    """

    name: str | None
    address: str

    def popen(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on the node, with its output in a file."""
        with log.open("wb") as stream:
            return subprocess.Popen(
                [*(("ip", "netns", "exec", self.name) if self.name else ()), *command],
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def connect(self, state: str) -> None:
        """Set the link to the other node "up" or "down"."""
        ip(f"-n {self.name} link set veth0 {state}")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run this thread on the node; threads that it starts are there too."""
        if self.name is None:
            yield
            return
        own = Path("/proc/thread-self/ns/net")
        with own.open() as outside, Path("/run/netns", self.name).open() as inside:
            _set_namespace(inside.fileno())
            try:
                yield
            finally:
                _set_namespace(outside.fileno())

    def has(self, pid: int) -> bool:
        """Return whether a process runs on the node, whose namespace has a name."""
        try:
            return os.path.samefile(f"/proc/{pid}/ns/net", f"/run/netns/{self.name}")
        except FileNotFoundError:
            return False  # it has ended


def _set_namespace(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def ip(command: str) -> None:
    """Run the command "ip"."""
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@contextmanager
def linked_nodes() -> Iterator[tuple[Node, Node]]:
    """Yield two machines with a link between them, which is up.

    Raises:
        NoNamespacesError: Namespaces cannot be made here.
    """
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
            raise NoNamespacesError(f"network namespaces cannot be made: {reason}") from error
        for node in pair:
            ip(f"-n {node.name} addr add {node.address}/24 dev veth0")
            ip(f"-n {node.name} link set lo up")
            node.connect("up")
        yield pair


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Terminate a process after the block; kill it if it does not end."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
