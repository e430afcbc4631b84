"""Rollouts, drains and faults of the Deployment, with real processes and a simulated cluster."""

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from models.artifact import Artifact
from tests.deploy.kubelet import Pod
from tests.deploy.simulated_cluster import Deployment, SimulatedCluster, clients, manifests, running
from tests.eventually import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # pods start one after the other, which a busy machine does slowly
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="haproxy is not installed: apt-get install haproxy"
    ),
]


@pytest.fixture(scope="module")
def environment(small_artifact: Artifact) -> dict[str, str]:
    return {"VITRINE_MODEL__PATH": str(small_artifact.path), "VITRINE_ENGINE__THREADS": "1"}


@pytest.fixture(scope="module")
def own(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimulatedCluster]:
    """A cluster whose replicas are ready before and after each test."""
    with running(tmp_path_factory.mktemp("cluster"), environment, manifests()) as own:
        yield own


def wait_for_more(cluster: SimulatedCluster, *outcomes: Counter[str]) -> None:
    """Wait until 20 further requests of each kind have succeeded."""
    totals = [own["200"] + 20 for own in outcomes]
    cluster.deployment.wait_until(
        lambda: all(own["200"] >= total for own, total in zip(outcomes, totals, strict=True))
    )


@contextmanager
def without_failures(own: SimulatedCluster) -> Iterator[None]:
    """Send requests to both load balancers until old pods have ended; all must succeed."""
    deployment = own.deployment
    deployment.fewest_ready = deployment.replicas
    with clients(own.service) as direct, clients(own.gateway) as through_gateway:
        wait_for_more(own, direct, through_gateway)
        yield
        deployment.wait_until(lambda: len(deployment.pods) == deployment.replicas)
        wait_for_more(own, direct, through_gateway)
    assert direct.keys() == through_gateway.keys() == {"200"}, (direct, through_gateway)


def pause(pod: Pod) -> None:
    """Stop the process of a pod, which hangs from then on."""
    os.kill(process_of(pod).pid, signal.SIGSTOP)


def process_of(pod: Pod) -> subprocess.Popen[bytes]:
    eventually(lambda: pod.process)
    assert pod.process is not None
    return pod.process


def test_no_request_fails_during_rolling_updates(
    own: SimulatedCluster, environment: dict[str, str]
) -> None:
    deployment = own.deployment
    first = list(deployment.pods)
    with without_failures(own):
        for update in range(3):
            deployment.apply(environment | {"UPDATE": str(update)})
            deployment.wait_until(lambda: deployment.is_complete)
    assert deployment.fewest_ready == deployment.replicas
    assert [pod.statuses for pod in first] == [[0], [0]]


def test_drain_of_a_node_leaves_as_many_pods_as_the_disruption_budget_demands(
    own: SimulatedCluster,
) -> None:
    deployment = own.deployment
    [node] = deployment.nodes
    deployment.nodes.append("other")
    with without_failures(own):
        deployment.drain(node)
        deployment.wait_until(lambda: deployment.is_complete)
    assert deployment.refused  # both pods at once would have been too many
    assert deployment.fewest_ready == deployment.replicas - 1
    assert {pod.node for pod in deployment.pods} == {"other"}


@pytest.mark.parametrize("fault", ["exits", "hangs"])
def test_replica_that_never_gets_ready_stops_the_rollout(own: SimulatedCluster, fault: str) -> None:
    deployment, old = own.deployment, list(own.deployment.pods)
    environment = deployment.environment
    with without_failures(own):
        if fault == "exits":
            deployment.apply({"VITRINE_MODEL__PATH": "/nowhere"})
            [new] = set(deployment.pods) - set(old)
            deployment.wait_until(lambda: new.restarts)
        else:
            deployment.apply({**environment, "FAULT": fault})
            [new] = set(deployment.pods) - set(old)
            pause(new)
            deployment.wait_until(lambda: new.failed_probes > 10)
        assert deployment.pods == [*old, new]
        assert all(pod.is_ready and not pod.restarts for pod in old)
        if fault == "hangs":
            os.kill(process_of(new).pid, signal.SIGCONT)
        deployment.apply(environment)  # a rollback, which the old pods survive
    assert deployment.is_complete
    assert deployment.pods == old


def test_liveness_probe_restarts_a_replica_that_hangs(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    changed = manifests(
        readiness={"timeoutSeconds": 1}, liveness={"periodSeconds": 0.5, "timeoutSeconds": 0.5}
    )
    changed["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    with running(tmp_path, environment, changed) as own, clients(own.gateway) as outcomes:
        pod, _ = own.deployment.pods
        pause(pod)
        own.deployment.wait_until(lambda: not pod.is_ready)
        wait_for_more(own, outcomes)
        own.deployment.wait_until(lambda: pod.restarts and pod.is_ready)
        assert pod.statuses[-1] == -signal.SIGKILL  # it could not handle SIGTERM
        wait_for_more(own, outcomes)


_SPEC = ("Deployment", "spec")
_POD = (*_SPEC, "template", "spec")
_CONTAINER = (*_POD, "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ((*_CONTAINER, "livenessProbe", "initialDelaySeconds"), 5, "not know initialDelaySeconds"),
        ((*_CONTAINER, "startupProbe", "httpGet", "scheme"), "HTTPS", "not know scheme"),
        ((*_CONTAINER, "readinessProbe", "httpGet", "port"), 9000, "has no port 9000"),
        ((*_CONTAINER, "lifecycle"), {"preStop": {"sleep": {"seconds": 5}}}, "not know lifecycle"),
        ((*_CONTAINER, "env"), [{"name": "A", "valueFrom": {"fieldRef": {}}}], "no value for A"),
        ((*_POD, "initContainers"), [], "not know initContainers"),
        ((*_SPEC, "paused"), True, "not know paused"),
        ((*_SPEC, "strategy", "type"), "Recreate", "not know type"),
        ((*_SPEC, "strategy", "rollingUpdate", "maxSurge"), "50%", "maxSurge is 50%"),
        ((*_SPEC, "strategy", "rollingUpdate"), {"maxSurge": 1}, "maxUnavailable is 25%"),
        (("PodDisruptionBudget", "spec", "maxUnavailable"), "50%", "maxUnavailable is 50%"),
        (("PodDisruptionBudget", "spec", "minAvailable"), 1, "not know minAvailable"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_simulation_refuses_fields_that_it_does_not_follow(
    tmp_path: Path, path: tuple[str | int, ...], value: object, problem: str
) -> None:
    changed = manifests()
    fields: Any = changed
    for key in path[:-1]:
        fields = fields[key]
    fields[path[-1]] = value
    with pytest.raises(NotImplementedError, match=problem):
        Deployment(changed, tmp_path, lambda _, __: None, ["first"])
