"""The Ray application, on a cluster of this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from deploy.ray_serve import Arguments, Replica, vitrine
from models.artifact import Artifact
from models.engines import EngineError
from service.settings import Settings
from tests.deploy.test_monitoring import ROOT
from tests.sentences import SENTENCES

pytestmark = pytest.mark.timeout(900)


@contextmanager
def serve_run(model: Path, folder: Path, **arguments: float) -> Iterator[tuple[str, Path]]:
    """Start a cluster that ends with this; gives its address and its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "vitrine", "import_path": "deploy.ray_serve:vitrine", "args": arguments}
        ],
    }
    (folder / "serve.yaml").write_text(json.dumps(config))  # which is YAML, too
    log = folder / "serve.log"
    serve = Path(sys.executable).with_name("serve")
    # Ray's own folder has sockets, whose paths must be short.
    with log.open("w") as stream, tempfile.TemporaryDirectory() as short:
        environment = {
            **os.environ,
            "VITRINE_MODEL__PATH": str(model),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}',  # which may not be there
            "RAY_TMPDIR": short,
        }
        process = subprocess.Popen(
            [serve, "run", folder / "serve.yaml"],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()  # who started this may have had SIGINT ignored
            try:
                process.wait(60)
            finally:
                process.kill()


def wait_until(reached: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 240
    while not reached():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def replicas() -> set[int]:
    """The processes of the cluster's replicas."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"ray::ServeReplica:vitrine" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


@contextmanager
def clients(url: str, count: int = 8) -> Iterator[Counter[int]]:
    """Clients that ask up to three times; counts how often they had to, and 0 for what was lost."""
    seen: Counter[int] = Counter()
    end = threading.Event()

    def ask(client: int) -> None:
        while not end.is_set():
            body = {"inputs": f"text {seen.total()} of client {client}"}
            for attempt in (1, 2, 3):
                try:
                    if httpx2.post(f"{url}/encode", json=body, timeout=30).status_code == 200:
                        seen[attempt] += 1
                        break
                except httpx2.TransportError:
                    pass
                time.sleep(0.2)
            else:
                seen[0] += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_replicas_answer_as_the_service_does_are_more_under_load_and_replaced_when_they_die(
    artifact: Artifact, client: TestClient, tmp_path: Path
) -> None:
    arguments = {"cpus": 1, "gpus": 0.5, "min_replicas": 1, "max_replicas": 2, "requests": 2}
    with serve_run(artifact.path, tmp_path, **arguments) as (url, log):
        wait_until(lambda: is_ready(url) and len(replicas()) == 1, log)
        body = {"inputs": list(SENTENCES)}
        found = httpx2.post(f"{url}/encode", json=body, timeout=60).json()["embeddings"]
        wanted = client.post("/encode", json=body).json()["embeddings"]
        np.testing.assert_allclose(found, wanted, atol=2e-6)
        assert httpx2.get(f"{url}/info").json()["threads"] == 1
        with clients(url) as seen:
            wait_until(lambda: len(replicas()) == 2, log)
            time.sleep(5)
            before = replicas()
            os.kill(min(before), signal.SIGKILL)
            wait_until(lambda: len(replicas()) == 2 and replicas() != before, log)
            time.sleep(5)
    assert seen[1] > 50
    assert seen[0] == 0, seen
    wait_until(lambda: not replicas(), log)


async def test_a_replica_is_healthy_while_its_engine_gives_the_vectors_of_the_model(
    settings: Settings,
) -> None:
    replica = Replica(settings)
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        await replica.check_health()
        engine = app.state.vitrine.ready_model().engine
        [run, *_] = engine.runs
        engine.runs = [lambda batch, output: 1 - run(batch, output)]
        with pytest.raises(EngineError, match="self-check failed"):
            await replica.check_health()


async def test_a_replica_that_cannot_start_says_why(settings: Settings, tmp_path: Path) -> None:
    nowhere = settings.model.model_copy(update={"path": tmp_path})
    replica = Replica(settings.model_copy(update={"model": nowhere}))
    app = replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app):
        with pytest.raises(RuntimeError, match="is not an artifact"):
            await replica.check_health()


def test_gradients_are_not_given_to_a_network_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRINE_DEBUG__ENABLED", "true")
    with pytest.raises(ValueError, match="set API keys"):
        vitrine(Arguments())


def test_an_engine_for_gpus_is_not_started_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRINE_ENGINE__NAME", "cuda")
    with pytest.raises(ValueError, match="pass gpus=1"):
        vitrine(Arguments())
    vitrine(Arguments(gpus=0.5))
