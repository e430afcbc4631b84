"""The Ray Serve application, on a local cluster."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from uuid import uuid4

import httpx2
import numpy as np
import pytest
import yaml
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.testclient import TestClient

from deploy.ray_serve import Arguments, Replica, vitrine
from models.artifact import Artifact
from models.engines import EngineError
from service.settings import Settings
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
from tests.sentences import SENTENCES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S)]


# `serve run` gives up if its proxy is not ready after 60 s; there is no setting for that.
_SERVE = """
from ray.serve._private import api
from ray.serve.scripts import cli
api.HTTP_PROXY_TIMEOUT = 3600
cli()
"""
# No limit for this request, instead of that of the proxy.
_UNLIMITED = {"X-Request-Timeout-Seconds": "0"}


class RayCluster(NamedTuple):
    """A running `serve run`.

    Attributes:
        url: URL of the proxy, on the first node.
        nodes: Two linked nodes, or this machine where network namespaces cannot be made.
        log: Output of `serve run`.
        process: Its process.
        logs: Folder of Ray's logs.
        restart: Starts Ray on the second node again, once it has ended there.
    """

    url: str
    nodes: Sequence[Node]
    log: Path
    process: subprocess.Popen[bytes]
    logs: Path
    restart: Callable[[], None]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for the condition; fail with the end of the log, at once if the process ends."""
        for _ in range(PATIENCE_S):
            if condition():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def handled(self) -> dict[str, list[str]]:
        """Return the ids of the requests that each replica has answered, by the name of its log."""
        return {
            log.name: re.findall(r"(\S+) -- POST /encode 200", log.read_text())
            for log in self.logs.glob("serve/replica_*.log")
        }


@pytest.fixture(scope="module")
def cluster(
    small_artifact: Artifact,
    other_artifact: Artifact,
    ray_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RayCluster]:
    """A cluster whose replicas serve two models, one on each node."""
    folder = tmp_path_factory.mktemp("serve")
    models = [
        {"path": str(artifact.path), "name": name}
        for name, artifact in (("small", small_artifact), ("other", other_artifact))
    ]
    # Systems assign higher ports, which another process could get before Ray binds its own.
    port = 20_000 + os.getpid() % 10_000
    config = yaml.safe_load((ROOT / "deploy/ray_serve.yaml").read_text())
    config["proxy_location"] = "HeadOnly"
    config["http_options"]["port"] = port
    config["http_options"]["request_timeout_s"] /= 10
    [application] = config["applications"]
    application["import_path"] = "tests.deploy.quick_ray:vitrine"
    application["args"] = {"cpus": 1, "gpus": 0.5, "max_replicas": 2, "requests": 2}
    application["runtime_env"]["env_vars"] = {
        "VITRINE_MODELS__SERVED": json.dumps(models),
        "VITRINE_MODELS__DEFAULT": "small",
    }
    # Ray replaces a replica whose health check takes over 30 s. A dead one is found by its check.
    health_checks = {"health_check_timeout_s": PATIENCE_S, "health_check_period_s": 2}
    application["deployments"] = [{"name": "vitrine", **health_checks}]
    with ExitStack() as stack:
        nodes: Sequence[Node] = (Node(None, "127.0.0.1"),)
        with suppress(NoNamespacesError):
            nodes = stack.enter_context(linked_nodes())
        config["http_options"]["host"] = nodes[0].address
        (folder / "serve.yaml").write_text(json.dumps(config))  # JSON is YAML
        environment = {
            **ray_environment,
            **(HEALTH_CHECKS if len(nodes) > 1 else {}),
            # The machine needs no GPU.
            "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2 // len(nodes), "GPU": 1}),
            # Ray replaces a proxy that does not respond within 5 s, however busy the machine is.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PATIENCE_S),
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(PATIENCE_S),
            # The proxy sends requests to both nodes.
            "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
        }

        def start(node: Node, *options: str) -> subprocess.Popen[bytes]:
            command = [*START, f"--node-ip-address={node.address}", *options]
            log = folder / f"{node.address}.log"
            return stack.enter_context(ended(node.popen(command, environment, log)))

        head = start(nodes[0], *HEAD, "--port=0")
        ray_folder = Path(environment["RAY_TMPDIR"], "ray")
        current = ray_folder / "ray_current_cluster"
        # Ray creates the file before it writes the address.
        eventually(lambda: has_content(current) or head.poll() is not None)
        address = current.read_text()
        others = [start(node, f"--address={address}") for node in nodes[1:]]
        log = folder / "serve.log"
        command = [sys.executable, "-c", _SERVE, "run", str(folder / "serve.yaml")]
        process = nodes[0].popen(command, environment | {"RAY_ADDRESS": address}, log)
        stack.enter_context(ended(process))

        def restart() -> None:
            own.wait_until(lambda: others[-1].poll() is not None)
            others.append(start(nodes[1], f"--address={address}"))

        logs = ray_folder / "session_latest" / "logs"
        url = f"http://{nodes[0].address}:{port}"
        own = RayCluster(url, nodes, log, process, logs, restart)
        with nodes[0].entered():
            own.wait_until(lambda: is_ready(own.url))
            yield own
    eventually(lambda: not replicas())


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


def replicas(node: Node | None = None) -> set[int]:
    """Return the process ids of the replicas, on a node or on all."""
    pids: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ServeReplica:vitrine" in (folder / "cmdline").read_bytes():
                pids.add(int(folder.name))
        except OSError:
            continue  # it has ended
    return pids if node is None else {pid for pid in pids if node.has(pid)}


@contextmanager
def clients(
    url: str, headers: Mapping[str, str] = MappingProxyType({}), count: int = 8
) -> Iterator[Counter[str]]:
    """Run clients that encode text after text, with retries.

    Args:
        url: URL of the proxy.
        headers: Further headers of each request.
        count: Number of clients.

    Yields:
        Number of texts that were encoded "at once", "after retries" and never ("lost"), and of
        responses by their status, with "no response" and "of another request".
    """
    outcomes: Counter[str] = Counter()
    end = threading.Event()

    def encode(client: int) -> None:
        while not end.is_set():
            text = f"text {outcomes['at once']} of client {client}"
            if has_succeeded(url, text, headers, outcomes):
                outcomes["at once"] += 1
                continue
            try:
                eventually(partial(has_succeeded, url, text, headers, outcomes))
            except AssertionError:
                outcomes["lost"] += 1
            else:
                outcomes["after retries"] += 1

    threads = [threading.Thread(target=encode, args=(client,)) for client in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        end.set()
        for thread in threads:
            thread.join()


def has_succeeded(url: str, text: str, headers: Mapping[str, str], outcomes: Counter[str]) -> bool:
    """Encode a text, count the response, and return whether it has the vector."""
    name = uuid4().hex
    headers = {"X-Request-ID": name, **headers}
    try:
        response = httpx2.post(
            f"{url}/encode", json={"inputs": text}, headers=headers, timeout=PATIENCE_S
        )
    except httpx2.TransportError:
        outcomes["no response"] += 1
        return False
    outcomes[str(response.status_code)] += 1
    names = {*response.headers.get_list("X-Request-ID")}  # of the proxy and of the service
    outcomes["of another request"] += not names <= {name}
    return response.is_success


def wait_for_more(outcomes: Counter[str], cluster: RayCluster) -> None:
    """Wait until 50 further requests have succeeded at once."""
    total = outcomes["at once"] + 50
    cluster.wait_until(lambda: outcomes["at once"] >= total)


def test_replica_returns_the_vectors_of_the_service_for_each_of_its_models(
    cluster: RayCluster, client: TestClient
) -> None:
    body = {"inputs": list(SENTENCES)}

    def vectors(**fields: str) -> list[list[float]]:
        response = httpx2.post(
            f"{cluster.url}/encode", json=body | fields, headers=_UNLIMITED, timeout=PATIENCE_S
        )
        result: list[list[float]] = response.raise_for_status().json()["embeddings"]
        return result

    expected = client.post("/encode", json=body).json()["embeddings"]
    np.testing.assert_allclose(vectors(model="small"), expected, atol=2e-6)
    np.testing.assert_allclose(vectors(), expected, atol=2e-6)
    assert np.abs(np.subtract(vectors(model="other"), expected)).max() > 0.01


def test_replicas_scale_with_load_and_survive_a_crash(cluster: RayCluster) -> None:
    cluster.wait_until(lambda: len(replicas()) == 1)
    info = httpx2.get(f"{cluster.url}/info", headers=_UNLIMITED, timeout=PATIENCE_S).json()
    assert info["threads"] == 1
    with clients(cluster.url, _UNLIMITED) as outcomes:
        cluster.wait_until(lambda: len(replicas()) == 2)
        wait_for_more(outcomes, cluster)
        before = replicas()
        os.kill(min(before), signal.SIGKILL)
        cluster.wait_until(lambda: len(replicas()) == 2 and replicas() != before)
        wait_for_more(outcomes, cluster)
    assert outcomes["lost"] == 0, outcomes
    # Only requests on the killed replica need a second attempt.
    assert outcomes["after retries"] < outcomes["at once"], outcomes


@pytest.mark.namespaces
def test_every_request_is_answered_while_a_node_is_cut_off_and_its_replica_returns(
    cluster: RayCluster,
) -> None:
    if len(cluster.nodes) == 1:
        pytest.skip("network namespaces cannot be made")
    _, other = cluster.nodes
    with clients(cluster.url) as outcomes:
        cluster.wait_until(lambda: all(replicas(node) for node in cluster.nodes))
        wait_for_more(outcomes, cluster)
        other.connect("down")
        store = cluster.logs / "gcs_server.out"
        cluster.wait_until(lambda: DEAD in store.read_text())
        wait_for_more(outcomes, cluster)
        before = cluster.handled()
        other.connect("up")
        cluster.restart()
        cluster.wait_until(
            lambda: any(ids for name, ids in cluster.handled().items() if name not in before)
        )
        wait_for_more(outcomes, cluster)
    assert outcomes["lost"] == 0, outcomes
    assert {name for name in outcomes if name.isdigit()} <= {"200", "408", "500"}, outcomes
    assert outcomes["no response"] == outcomes["of another request"] == 0, outcomes
    assert [len(replicas(node)) for node in cluster.nodes] == [1, 1]
    # Ray sends no request to a second replica: those that fail are sent again by the client.
    handled = Counter(name for names in cluster.handled().values() for name in names)
    assert handled.total() == len(handled)


def test_request_id_of_ray_is_the_only_one(settings: Settings) -> None:
    app = Replica(settings).__serve_build_asgi_app__()
    with TestClient(app):  # which starts it
        client = TestClient(RequestIdMiddleware(app))  # of Ray's proxy
        for path, status in (("/healthz", 200), ("/nowhere", 404)):
            response = client.get(path, headers={"X-Request-Id": "own"})
            assert response.status_code == status
            assert response.headers.get_list("X-Request-Id") == ["own"]


async def test_replica_is_unhealthy_once_its_engine_returns_other_vectors(
    settings: Settings,
) -> None:
    replica = Replica(settings)
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        await replica.check_health()
        engine = app.state.vitrine.registry.current().engine
        [run, *_] = engine.runs
        engine.runs = [lambda batch, outputs: [1 - y for y in run(batch, outputs)]]
        with pytest.raises(EngineError, match="self-check failed"):
            await replica.check_health()


async def test_health_check_of_a_replica_that_cannot_start_has_the_reason(
    settings: Settings, tmp_path: Path
) -> None:
    nowhere = settings.model.model_copy(update={"path": tmp_path})
    replica = Replica(settings.model_copy(update={"model": nowhere}))
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        with pytest.raises(RuntimeError, match="is not an artifact"):
            await replica.check_health()


def test_ray_application_has_absolute_paths_because_replicas_run_in_other_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRINE_MODEL__PATH", "model")
    monkeypatch.setenv("VITRINE_MODELS__FOLDER", "models")
    monkeypatch.setenv("VITRINE_MODELS__VERIFY", "signer.pub.pem")
    monkeypatch.setenv("VITRINE_MODELS__SERVED", '[{"path": "served"}]')
    monkeypatch.setenv("VITRINE_AUTH__KEYS_FILE", "keys.json")
    [settings] = vitrine(Arguments())._bound_deployment.init_args
    assert settings.model.path == tmp_path / "model"
    assert settings.models.folder == tmp_path / "models"
    assert settings.models.verify == tmp_path / "signer.pub.pem"
    assert [served.path for served in settings.models.served] == [tmp_path / "served"]
    assert settings.auth.keys_file == tmp_path / "keys.json"


def test_ray_application_with_debug_routes_requires_api_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VITRINE_DEBUG__ENABLED", "true")
    with pytest.raises(ValueError, match="set API keys"):
        vitrine(Arguments())


def test_ray_application_with_a_gpu_engine_requires_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRINE_ENGINE__NAME", "cuda")
    with pytest.raises(ValueError, match="pass gpus=1"):
        vitrine(Arguments())
    vitrine(Arguments(gpus=0.5))
