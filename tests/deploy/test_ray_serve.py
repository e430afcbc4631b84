"""The Ray Serve application, on a local cluster."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from deploy.ray_serve import Arguments, Replica, vitrine
from models.artifact import Artifact
from models.engines import EngineError
from service.settings import Settings
from tests.deploy.conftest import RAY_PATH
from tests.deploy.test_monitoring import ROOT
from tests.eventually import eventually
from tests.sentences import SENTENCES

# Ray starts a dozen processes: minutes, on a machine whose cores are busy.
_PATIENCE_S = 3600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_PATIENCE_S)]


# `serve run` gives up if its proxy is not ready after 60 s; there is no setting for that.
_SERVE = """
from ray.serve._private import api
from ray.serve.scripts import cli
api.HTTP_PROXY_TIMEOUT = 3600
cli()
"""


class Cluster(NamedTuple):
    """A running `serve run`."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition; fail with the end of the log, at once if the process ends."""
        for _ in range(_PATIENCE_S):
            if condition():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])


@pytest.fixture(scope="module")
def cluster(
    small_artifact: Artifact, other_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster whose replicas serve two models; its settings are in its environment."""
    folder = tmp_path_factory.mktemp("serve")
    # Systems assign higher ports, which another process could get before Ray binds its own.
    port = 20_000 + os.getpid() % 10_000
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "vitrine",
                "import_path": "tests.deploy.quick_ray:vitrine",
                "args": {"cpus": 1, "gpus": 0.5, "max_replicas": 2, "requests": 2},
                "deployments": [
                    {
                        "name": "vitrine",
                        # Ray replaces a replica whose health check takes over 30 s.
                        "health_check_timeout_s": _PATIENCE_S,
                        "health_check_period_s": 2,  # a dead replica is found by its health check
                    }
                ],
            }
        ],
    }
    (folder / "serve.yaml").write_text(json.dumps(config))  # JSON is YAML
    models = [
        {"path": str(artifact.path), "name": name}
        for name, artifact in (("small", small_artifact), ("other", other_artifact))
    ]
    log = folder / "serve.log"
    # Ray creates sockets there; their paths are limited to about 100 characters.
    with log.open("w") as stream, tempfile.TemporaryDirectory() as short:
        environment = {
            **os.environ,
            "VITRINE_MODELS__SERVED": json.dumps(models),
            "VITRINE_MODELS__DEFAULT": "small",
            "PYTHONPATH": RAY_PATH,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}',  # the machine needs none
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_TMPDIR": short,
            # Ray replaces a proxy that does not respond within 5 s, however busy the machine is.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_PATIENCE_S),
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(_PATIENCE_S),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, "run", folder / "serve.yaml"],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        cluster = Cluster(f"http://127.0.0.1:{port}", log, process)
        try:
            cluster.wait_until(lambda: is_ready(cluster.url))
            yield cluster
        finally:
            process.terminate()  # SIGINT may be ignored
            try:
                process.wait(60)
            finally:
                process.kill()
    eventually(lambda: not replicas())


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


def replicas() -> set[int]:
    """Return the process ids of the cluster's replicas."""
    pids: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ServeReplica:vitrine" in (folder / "cmdline").read_bytes():
                pids.add(int(folder.name))
        except OSError:
            continue  # it has ended
    return pids


@contextmanager
def clients(url: str, count: int = 8) -> Iterator[Counter[str]]:
    """Run clients that encode text after text, with retries; yield their outcomes."""
    outcomes: Counter[str] = Counter()
    end = threading.Event()

    def has_succeeded(body: dict[str, str]) -> bool:
        try:
            return httpx2.post(f"{url}/encode", json=body, timeout=_PATIENCE_S).status_code == 200
        except httpx2.TransportError:
            return False

    def encode(client: int) -> None:
        while not end.is_set():
            body = {"inputs": f"text {outcomes.total()} of client {client}"}
            if has_succeeded(body):
                outcomes["at once"] += 1
                continue
            try:
                eventually(partial(has_succeeded, body))
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


def wait_for_more(outcomes: Counter[str], cluster: Cluster) -> None:
    """Wait until 50 further requests have succeeded at once."""
    total = outcomes["at once"] + 50
    cluster.wait_until(lambda: outcomes["at once"] >= total)


def test_replica_returns_the_vectors_of_the_service_for_each_of_its_models(
    cluster: Cluster, client: TestClient
) -> None:
    body = {"inputs": list(SENTENCES)}

    def vectors(**fields: str) -> list[list[float]]:
        response = httpx2.post(f"{cluster.url}/encode", json=body | fields, timeout=_PATIENCE_S)
        result: list[list[float]] = response.raise_for_status().json()["embeddings"]
        return result

    expected = client.post("/encode", json=body).json()["embeddings"]
    np.testing.assert_allclose(vectors(model="small"), expected, atol=2e-6)
    np.testing.assert_allclose(vectors(), expected, atol=2e-6)
    assert np.abs(np.subtract(vectors(model="other"), expected)).max() > 0.01


def test_replicas_scale_with_load_and_survive_a_crash(cluster: Cluster) -> None:
    cluster.wait_until(lambda: len(replicas()) == 1)
    assert httpx2.get(f"{cluster.url}/info", timeout=_PATIENCE_S).json()["threads"] == 1
    with clients(cluster.url) as outcomes:
        cluster.wait_until(lambda: len(replicas()) == 2)
        wait_for_more(outcomes, cluster)
        before = replicas()
        os.kill(min(before), signal.SIGKILL)
        cluster.wait_until(lambda: len(replicas()) == 2 and replicas() != before)
        wait_for_more(outcomes, cluster)
    assert outcomes["lost"] == 0, outcomes
    # Only requests on the killed replica need a second attempt.
    assert outcomes["after retries"] < outcomes["at once"], outcomes


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
