"""Pods as Kubernetes' kubelet runs them, with a process as the container.

A pod follows its manifest: probes, restarts, and the termination. A field that could change these
and is not simulated is refused.

https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

_POD = {
    *("terminationGracePeriodSeconds", "containers"),
    # These do not concern a process.
    *("enableServiceLinks", "automountServiceAccountToken", "securityContext", "volumes"),
    "topologySpreadConstraints",
}
_CONTAINER = {
    *("ports", "env", "startupProbe", "readinessProbe", "livenessProbe"),
    *("name", "image", "resources", "securityContext", "volumeMounts"),
}
# Seconds before the second, third and following restarts; the first is at once.
_BACK_OFF_S = (0, 10, 20, 40, 80, 160, 300)


def checked(fields: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """Return the fields of a manifest, all of which must be known."""
    if unknown := fields.keys() - known:
        raise NotImplementedError(f"the simulation does not know {', '.join(sorted(unknown))}")
    return fields


def number_of_pods(fields: Mapping[str, Any], name: str) -> int:
    """Return a number of pods of a manifest, which must be no percentage."""
    value = fields.get(name, "25%")  # Kubernetes' default
    if not isinstance(value, int):
        raise NotImplementedError(f"the simulation knows no percentages, and {name} is {value}")
    return value


class Probe(NamedTuple):
    """A probe of a container; times in seconds."""

    path: str
    period_s: float
    timeout_s: float
    failures: int


class PodSpec:
    """Fields of a Deployment's manifest that concern its pods."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        pod = checked(template["spec"], _POD)
        [container] = pod["containers"]
        checked(container, _CONTAINER)
        [port] = container["ports"]
        self.port: int = port["containerPort"]
        self.grace_s: float = pod["terminationGracePeriodSeconds"]
        self.environment: dict[str, str] = {}
        for entry in container["env"]:
            checked(entry, {"name", "value", "valueFrom"})
            if "value" in entry:
                self.environment[entry["name"]] = entry["value"]
            elif not entry["valueFrom"].get("secretKeyRef", {}).get("optional"):  # these stay unset
                raise NotImplementedError(f"the simulation has no value for {entry['name']}")
        self.probes: dict[str, Probe] = {}
        for kind in ("startup", "readiness", "liveness"):
            fields = checked(
                container[f"{kind}Probe"],
                {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"},
            )
            request = checked(fields["httpGet"], {"path", "port"})
            if request["port"] not in (port.get("name"), self.port):
                raise NotImplementedError(f"the simulation has no port {request['port']}")
            self.probes[kind] = Probe(
                request["path"],
                fields.get("periodSeconds", 10),
                fields.get("timeoutSeconds", 1),
                fields.get("failureThreshold", 3),
            )


class Pod:
    """A pod: its container runs, is probed and restarted, until the pod is deleted.

    Args:
        spec: Fields of the manifest.
        environment: Settings of the service, in addition to those of the manifest.
        address: IP address of the pod, of this machine's loopback network.
        node: Name of its node.
        log: File for the output of the container.
        report: Called when the pod becomes ready or unready, with its address and whether it is
            ready.

    Attributes:
        is_ready: Whether the readiness probe succeeds, and the pod is not deleted.
        changed_at: Time at which `is_ready` last changed, in seconds of `time.monotonic`.
        restarts: Number of restarts of the container.
        failed_probes: Number of failed probes, of all kinds.
        statuses: Exit statuses of the containers that have ended.
        process: The running container.
    """

    def __init__(
        self,
        spec: PodSpec,
        environment: Mapping[str, str],
        address: str,
        node: str,
        log: Path,
        report: Callable[[str, bool], None],
    ) -> None:
        self.environment, self.address, self.node = environment, address, node
        self.is_ready, self.changed_at = False, time.monotonic()
        self.restarts = self.failed_probes = 0
        self.statuses: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._spec, self._log, self._report = spec, log, report
        self._lock, self._deletion = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def is_deleted(self) -> bool:
        """Whether the pod is terminating, or has ended."""
        return self._deletion.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the pod is deleted and its container has ended."""
        return not self._thread.is_alive()

    def delete(self) -> None:
        """Terminate the pod, which leaves the endpoints at the same time."""
        self._deletion.set()
        self._set_ready(False)

    def kill(self) -> None:
        """Delete the pod without a grace period."""
        self.delete()
        if self.process is not None:
            self.process.kill()
        self._thread.join()

    def _set_ready(self, is_ready: bool) -> None:
        with self._lock:  # a deletion can come between a probe and its result
            is_ready = is_ready and not self.is_deleted
            if is_ready != self.is_ready:
                # Before a controller sees the change: all load balancers learn of changes in order.
                self._report(self.address, is_ready)
                self.changed_at, self.is_ready = time.monotonic(), is_ready

    def _run(self) -> None:
        while not self.is_deleted:
            self._run_container()
            if not self.is_deleted:
                index = min(self.restarts, len(_BACK_OFF_S) - 1)
                self.restarts += 1
                self._deletion.wait(_BACK_OFF_S[index])

    def _run_container(self) -> None:
        environment = {
            **os.environ,
            **self._spec.environment,
            **self.environment,
            "VITRINE_SERVER__HOST": self.address,
            "VITRINE_SERVER__PORT": str(self._spec.port),
        }
        with (
            self._log.open("ab") as log,
            subprocess.Popen(
                [sys.executable, "-m", "service.commands", "serve"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            ) as self.process,
        ):
            process = self.process
            try:
                self._probe_until_it_ends(process)
                self._set_ready(False)
                process.terminate()
                process.wait(self._spec.grace_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
            self.statuses.append(process.wait())

    def _probe_until_it_ends(self, process: subprocess.Popen[bytes]) -> None:
        """Return when the container has ended or has to: a probe fails, or the pod is deleted."""
        if not self._starts(process):
            return
        is_dead = threading.Event()
        liveness = threading.Thread(target=self._watch_liveness, args=(process, is_dead))
        liveness.start()
        probe, failures = self._spec.probes["readiness"], 0
        while process.poll() is None and not (self.is_deleted or is_dead.is_set()):
            failures = 0 if self._passes(probe) else failures + 1
            if failures in (0, probe.failures):
                self._set_ready(failures == 0)
            self._deletion.wait(probe.period_s)
        is_dead.set()
        liveness.join()

    def _starts(self, process: subprocess.Popen[bytes]) -> bool:
        probe = self._spec.probes["startup"]
        for _ in range(probe.failures):
            if process.poll() is not None or self.is_deleted:
                return False
            if self._passes(probe):
                return True
            self._deletion.wait(probe.period_s)
        return False

    def _watch_liveness(self, process: subprocess.Popen[bytes], is_dead: threading.Event) -> None:
        probe, failures = self._spec.probes["liveness"], 0
        while failures < probe.failures and not is_dead.wait(probe.period_s):
            failures = 0 if self._passes(probe) else failures + 1
        if process.poll() is None:
            is_dead.set()

    def _passes(self, probe: Probe) -> bool:
        url = f"http://{self.address}:{self._spec.port}{probe.path}"
        try:
            passes = httpx2.get(url, timeout=probe.timeout_s).is_success
        except httpx2.TransportError:
            passes = False
        self.failed_probes += not passes
        return passes
