"""The parts of Kubernetes around pods: a Deployment, evictions, and the endpoints of a Service.

They follow the manifests, and refuse fields that they do not simulate. A load balancer is HAProxy.
"""

import copy
import itertools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from socket import AF_UNIX, socket
from typing import Any, NamedTuple

import httpx2

from tests.deploy.kubelet import Pod, PodSpec, checked, number_of_pods
from tests.deploy.test_gateway import configuration_without_dns, free_port, haproxy
from tests.deploy.test_kubernetes import OWN
from tests.eventually import HANG_S, eventually

# Seconds until a change of the endpoints applies: less than the service's drain of 5 s.
_DELAY_S = 2.0
# A Service as kube-proxy makes it: connections, without probes or retries.
_SERVICE = """
global
    stats socket {control} level admin
defaults
    mode tcp
    retries 0
    timeout connect 10s
    timeout client 600s
    timeout server 600s
listen service
    bind 127.0.0.1:{port}
    balance random
    server-template pod 16 127.0.0.1:1 disabled
"""


class Endpoints:
    """Servers of HAProxy that follow the ready pods, with a delay, as kube-proxy does.

    Connections to a pod that has left stay, also as with kube-proxy.

    Args:
        control: HAProxy's socket for commands.
        servers: Names of the unused servers, such as "encode/worker1".
        port: Port of the pods.
        delay_s: Seconds until a change applies.
    """

    def __init__(self, control: Path, servers: Sequence[str], port: int, delay_s: float) -> None:
        self._control, self._port, self._delay_s = control, port, delay_s
        self._free = deque(servers)  # the least recently used first
        self._used: dict[str, str] = {}
        self._changes: SimpleQueue[tuple[float, str, bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._apply_changes)
        self._thread.start()

    def report(self, address: str, is_ready: bool) -> None:
        """Add a pod that becomes ready, or remove one that is ready no longer."""
        self._changes.put((time.monotonic() + self._delay_s, address, is_ready))

    def close(self) -> None:
        """End when all changes are applied."""
        self._changes.put(None)
        self._thread.join()

    def _apply_changes(self) -> None:
        while (change := self._changes.get()) is not None:
            due, address, is_ready = change
            time.sleep(max(0.0, due - time.monotonic()))
            if is_ready:
                server = self._used[address] = self._free.popleft()
                self._command(f"set server {server} addr {address} port {self._port}")
                self._command(f"set server {server} state ready")
            else:
                server = self._used.pop(address)
                self._command(f"set server {server} state maint")
                self._free.append(server)

    def _command(self, command: str) -> None:
        with socket(AF_UNIX) as connection:
            connection.settimeout(HANG_S)
            connection.connect(str(self._control))
            connection.sendall(f"{command}\n".encode())
            response = b"".join(iter(lambda: connection.recv(4096), b"")).strip()
        if response and b"changed from" not in response:
            raise ValueError(f"{command}: {response.decode()}")


class Deployment:
    """A Deployment with its disruption budget, on nodes of this machine.

    Args:
        manifests: The manifests by kind.
        folder: Folder for the logs of the pods.
        report: Called with the address of each pod that becomes ready or unready, and whether it
            is ready.
        nodes: Names of the nodes.

    Attributes:
        nodes: Names of the nodes that get new pods.
        environment: Settings of the newest version of the pods.
        replicas: Number of replicas: the autoscaler's minimum.
        pods: All pods that have not ended.
        fewest_ready: Smallest number of ready pods since this was set.
        refused: Number of evictions that the budget has refused.
    """

    def __init__(
        self,
        manifests: Mapping[str, Any],
        folder: Path,
        report: Callable[[str, bool], None],
        nodes: Sequence[str],
    ) -> None:
        known = {"minReadySeconds", "strategy", "selector", "template"}
        spec = checked(manifests["Deployment"]["spec"], known)
        strategy = checked(spec["strategy"], {"rollingUpdate"})["rollingUpdate"]
        checked(strategy, {"maxSurge", "maxUnavailable"})
        budget = checked(manifests["PodDisruptionBudget"]["spec"], {"maxUnavailable", "selector"})
        self.replicas: int = manifests["HorizontalPodAutoscaler"]["spec"]["minReplicas"]
        self.environment: Mapping[str, str] = {}
        self.pods: list[Pod] = []
        self.fewest_ready = self.refused = 0
        self._min_ready_s: float = spec.get("minReadySeconds", 0)
        self._max_surge = number_of_pods(strategy, "maxSurge")
        self._min_available = self.replicas - number_of_pods(strategy, "maxUnavailable")
        self._min_healthy = self.replicas - number_of_pods(budget, "maxUnavailable")
        self._spec = PodSpec(spec["template"])
        self._folder, self._report = folder, report
        self.nodes = list(nodes)
        # Other runs of the tests on this machine have other process ids.
        network = f"127.{64 + os.getpid() // 250 % 64}.{1 + os.getpid() % 250}"
        self._addresses = (f"{network}.{host}" for host in itertools.cycle(range(1, 255)))

    def apply(self, environment: Mapping[str, str]) -> None:
        """Begin a rollout to pods with these settings; pods that have them already stay."""
        self.environment = dict(environment)
        self.reconcile()

    @property
    def ready(self) -> int:
        """Number of ready pods."""
        return sum(pod.is_ready for pod in self.pods)

    @property
    def is_complete(self) -> bool:
        """Whether all replicas are available and of the newest version, and the others deleted."""
        pods = [pod for pod in self.pods if not pod.is_deleted]
        is_new = all(pod.environment == self.environment for pod in pods)
        return is_new and sum(map(self._is_available, pods)) == len(pods) == self.replicas

    def _is_available(self, pod: Pod) -> bool:
        return pod.is_ready and time.monotonic() - pod.changed_at >= self._min_ready_s

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Reconcile until the condition is true; fail if it never is."""

        def is_true() -> object:
            self.reconcile()
            return condition()

        eventually(is_true)

    def reconcile(self) -> None:
        """Create and delete pods, as the controllers of a Deployment and its ReplicaSets do."""
        self.pods = [pod for pod in self.pods if not pod.has_ended]
        self.fewest_ready = min(self.fewest_ready, self.ready)
        pods = [pod for pod in self.pods if not pod.is_deleted]
        new = [pod for pod in pods if pod.environment == self.environment]
        room = self.replicas + self._max_surge - len(pods)
        if room > 0 and len(new) < self.replicas:
            self._create()
            return
        old = [pod for pod in pods if pod.environment != self.environment]
        available = {pod for pod in pods if self._is_available(pod)}
        spare = len(pods) - self._min_available - sum(pod not in available for pod in new)
        # Old pods that are not available go first.
        for pod in [pod for pod in old if pod not in available][: max(0, spare)]:
            pod.delete()
        spare = len(available) - self._min_available
        for pod in [pod for pod in old if pod in available][: max(0, spare)]:
            pod.delete()

    def _create(self) -> None:
        address = next(self._addresses)
        crowd = {name: sum(pod.node == name for pod in self.pods) for name in self.nodes}
        node = min(self.nodes, key=crowd.__getitem__)
        log = self._folder / f"{address}.log"
        self.pods.append(Pod(self._spec, self.environment, address, node, log, self._report))

    def evict(self, pod: Pod) -> bool:
        """Delete a pod, unless the disruption budget forbids it; return whether it is deleted."""
        spare = self.ready - self._min_healthy
        if spare < 0 or (spare == 0 and pod.is_ready):
            self.refused += 1
            return False
        pod.delete()
        return True

    def drain(self, node: str) -> None:
        """Evict all pods of a node, which gets no new ones, as `kubectl drain` does."""
        self.nodes.remove(node)
        for pod in [pod for pod in self.pods if pod.node == node]:
            self.wait_until(partial(self.evict, pod))
        self.wait_until(lambda: all(pod.node != node for pod in self.pods))

    def close(self) -> None:
        """Kill all pods."""
        for pod in self.pods:
            pod.kill()


class SimulatedCluster(NamedTuple):
    """A Deployment behind two load balancers.

    Attributes:
        deployment: The Deployment; its pods do not run yet.
        service: URL of its Service.
        gateway: URL of the gateway of the Compose file.
    """

    deployment: Deployment
    service: str
    gateway: str


def manifests(**changes: dict[str, float]) -> dict[str, Any]:
    """Return the manifests of the base by kind, with changed fields of probes.

    Periods are five times shorter. However busy the machine is, no probe times out, and a start may
    take as long as it does.
    """
    own = copy.deepcopy(OWN)
    [container] = own["Deployment"]["spec"]["template"]["spec"]["containers"]
    for kind in ("startup", "readiness", "liveness"):
        probe = container[f"{kind}Probe"]
        probe |= {"periodSeconds": probe["periodSeconds"] / 5, "timeoutSeconds": HANG_S}
        probe |= changes.get(kind, {})
    container["startupProbe"]["failureThreshold"] *= 100
    return own


@contextmanager
def cluster(folder: Path, manifests: Mapping[str, Any]) -> Iterator[SimulatedCluster]:
    """Yield a Deployment with two load balancers, which its ready pods are added to."""
    [container] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    port, ports = container["ports"][0]["containerPort"], (free_port(), free_port())
    controls = folder / "service.sock", folder / "gateway.sock"
    service = _SERVICE.format(control=controls[0], port=ports[0])
    gateway = configuration_without_dns(ports[1]).replace(
        "\nglobal\n", f"\nglobal\n    stats socket {controls[1]} level admin\n"
    )
    gateway = gateway.replace("encode:8000", "127.0.0.1:1 disabled")
    gateway = gateway.replace("debug:8000", "127.0.0.1:1 disabled")
    names = [f"service/pod{n}" for n in range(1, 17)], [f"encode/worker{n}" for n in range(1, 17)]
    with ExitStack() as stack:
        endpoints: list[Endpoints] = []
        for text, control, servers in zip((service, gateway), controls, names, strict=True):
            stack.enter_context(haproxy(control.with_suffix(".cfg"), text))
            eventually(control.exists)
            endpoints.append(Endpoints(control, servers, port, _DELAY_S))
            stack.callback(endpoints[-1].close)

        def report(address: str, is_ready: bool) -> None:
            for each in endpoints:
                each.report(address, is_ready)

        deployment = Deployment(manifests, folder, report, ["first"])
        stack.callback(deployment.close)
        yield SimulatedCluster(deployment, *(f"http://127.0.0.1:{port}" for port in ports))


@contextmanager
def clients(url: str, count: int = 2) -> Iterator[Counter[str]]:
    """Run clients, each with one connection, that encode text after text; yield their outcomes."""
    outcomes: Counter[str] = Counter()
    end = threading.Event()

    def encode() -> None:
        with httpx2.Client(base_url=url, timeout=HANG_S) as client:
            while not end.wait(0.01):
                try:
                    outcome = str(client.post("/encode", json={"inputs": "a text"}).status_code)
                except httpx2.TransportError as error:
                    outcome = type(error).__name__
                outcomes[outcome] += 1

    threads = [threading.Thread(target=encode) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        end.set()
        for thread in threads:
            thread.join()


@contextmanager
def running(
    folder: Path, environment: Mapping[str, str], manifests: Mapping[str, Any]
) -> Iterator[SimulatedCluster]:
    """Yield a cluster whose replicas are ready."""
    with cluster(folder, manifests) as own:
        own.deployment.apply(environment)
        own.deployment.wait_until(lambda: own.deployment.is_complete)
        for url in (own.service, own.gateway):
            eventually(partial(_is_ready, url))
        yield own


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=HANG_S).is_success
    except httpx2.TransportError:
        return False
