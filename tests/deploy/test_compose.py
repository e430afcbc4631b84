"""Images and the compose file, built and run with Docker."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml
from starlette.testclient import TestClient

from tests.deploy.test_monitoring import expressions
from tests.eventually import eventually
from tests.sentences import SENTENCES
from tests.service.api.raw_http import JSON
from tests.service.api.test_wire import SHAPES, exchange

ROOT = Path(__file__).parents[2]
KEYS = {
    "encode": "a-key-that-only-encodes",
    "debug": "a-key-that-only-debugs",
    "metrics": "a-key-that-only-measures",
}
NORM = {"text": "a cat on a mat", "target": {"type": "norm"}}


def has_engine() -> bool:
    return shutil.which("docker") is not None and not subprocess.call(
        ["docker", "info"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.docker,
    pytest.mark.timeout(3600),  # images are built
    pytest.mark.skipif(not has_engine(), reason="there is no Docker engine"),
]


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def compose_command() -> tuple[str, ...]:
    v2 = not subprocess.call(
        ["docker", "compose", "version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return ("docker", "compose") if v2 else ("docker-compose",)


@dataclass(frozen=True)
class ComposeDeployment:
    """Containers of `compose up`.

    Attributes:
        url: URL of the gateway.
        environment: Variables of the compose file.
        files: Further compose files.
    """

    url: str
    environment: dict[str, str]
    files: tuple[str, ...] = ()

    def compose(self, *arguments: str) -> str:
        profiles = ("--profile", "debug", "--profile", "export", "--profile", "monitoring")
        names = ("deploy/compose.yaml", "tests/deploy/stand_ins.yaml", *self.files)
        files = [part for name in names for part in ("-f", name)]
        return run(*compose_command(), *files, *profiles, *arguments, **self.environment)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def scale(self, workers: int) -> None:
        services = ("gateway", "encode", "debug")
        self.compose("up", "-d", "--no-build", "--scale", f"encode={workers}", *services)

    def post(self, route: str, body: object, key: str | None = KEYS["encode"]) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.post(f"{self.url}{route}", json=body, headers=headers, timeout=250)

    def wait_for(self, service: str, count: int) -> None:
        """Wait until the service has that many containers, all of them ready."""
        code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"

        def ready() -> list[bool]:
            return [
                not subprocess.call(
                    ["docker", "exec", container, "python", "-c", code], stderr=subprocess.DEVNULL
                )
                for container in self.containers(service)
            ]

        eventually(lambda: ready() == [True] * count)

    def wait_until_served(self) -> None:
        """Wait until the gateway has found a worker that is ready."""
        eventually(lambda: httpx2.get(f"{self.url}/readyz", timeout=60).status_code == 200)


def test_gpu_compose_file_changes_only_image_memory_and_device_of_the_workers() -> None:
    def configured(*files: str) -> Any:  # noqa: ANN401 - parsed YAML
        named = [part for file in files for part in ("-f", f"deploy/{file}")]
        out = run(*compose_command(), *named, "--profile", "debug", "config", VITRINE_GPU="1")
        services = yaml.safe_load(out)["services"]
        for service in services.values():  # a list, or a mapping
            service["networks"] = sorted(service["networks"])
        return services

    on_cpu, on_gpu = configured("compose.yaml"), configured("compose.yaml", "compose.gpu.yaml")
    assert on_cpu.keys() == on_gpu.keys()
    for name, target in (("encode", "gpu"), ("debug", "gpu-debug")):
        cpu, gpu = on_cpu[name], on_gpu[name]
        [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
        expected = {"driver": "nvidia", "device_ids": ["1"], "capabilities": ["gpu"]}
        assert {part: device[part] for part in expected} == expected
        assert gpu["build"] == {**cpu["build"], "target": target}
        assert gpu["environment"]["VITRINE_ENGINE__PRECISION"] == "float16"
        changed = {part for part in gpu if gpu[part] != cpu.get(part)}
        assert changed == {"image", "build", "mem_limit", "deploy", "environment"}
    assert on_cpu["gateway"] == on_gpu["gateway"]


@pytest.fixture(scope="module")
def deployment() -> Iterator[ComposeDeployment]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        address = f"127.0.0.1:{one.getsockname()[1]}"
        prometheus_port = str(other.getsockname()[1])
    keys = [{"name": name, "key": key, "scopes": [name]} for name, key in KEYS.items()]
    # Builds use the network and the package index of the machine that runs the tests.
    deployed = ComposeDeployment(
        f"http://{address}",
        {
            "COMPOSE_PROJECT_NAME": "vitrine-test",
            "COMPOSE_HTTP_TIMEOUT": "600",  # Docker may respond late while it builds
            "VITRINE_LISTEN": address,
            "VITRINE_TAG": "test",
            "VITRINE_KEYS": json.dumps(keys),
            "VITRINE_METRICS_KEY": KEYS["metrics"],
            "PROMETHEUS_PORT": prometheus_port,
            "VITRINE_BUILD_NETWORK": "host",
            "TORCH_INDEX": os.environ.get("TORCH_INDEX", ""),
        },
    )
    deployed.compose("build", "encode", "debug", "export", "prometheus")
    try:
        deployed.scale(2)
        deployed.wait_for("encode", 2)
        deployed.wait_until_served()
        yield deployed
    finally:
        deployed.compose("down", "--volumes", "--remove-orphans")


@contextmanager
def clients(deployment: ComposeDeployment, count: int = 6) -> Iterator[Counter[str]]:
    """Run clients that encode text after text without retries; yield their outcomes."""
    outcomes: Counter[str] = Counter()
    end = threading.Event()

    def encode(client: int) -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS['encode']}"}
        address = deployment.url.removeprefix("http://")
        with closing(HTTPConnection(address, timeout=60)) as connection:
            while not end.is_set():
                body = json.dumps({"inputs": f"text {outcomes.total()} of client {client}"})
                try:
                    connection.request("POST", "/encode", body, headers)
                    response = connection.getresponse()
                    response.read()
                    outcomes[str(response.status)] += 1
                except (OSError, HTTPException) as error:
                    outcomes[type(error).__name__] += 1
                    connection.close()

    threads = [threading.Thread(target=encode, args=(client,)) for client in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        end.set()
        for thread in threads:
            thread.join()


def wait_for_more(outcomes: Counter[str], count: int = 100) -> None:
    """Wait until the clients have had that many further outcomes."""
    total = outcomes.total() + count
    eventually(lambda: outcomes.total() >= total)


def test_vectors_through_the_gateway_equal_those_of_the_service(
    deployment: ComposeDeployment, minilm_client: TestClient
) -> None:
    texts = list(SENTENCES)
    actual = deployment.post("/encode", {"inputs": texts}).json()["embeddings"]
    expected = minilm_client.post("/encode", json={"inputs": texts}).json()["embeddings"]
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_request_beyond_the_retry_buffer_of_the_gateway_succeeds(
    deployment: ComposeDeployment,
) -> None:
    response = deployment.post(
        "/encode", {"inputs": ["a text " + "x" * 300] * 2000, "dimensions": 2}
    )
    assert int(response.request.headers["Content-Length"]) > 2 * 262_144
    assert len(response.json()["embeddings"]) == 2000


def test_ready_worker_container_becomes_healthy(deployment: ComposeDeployment) -> None:
    worker = deployment.containers("encode")[0]
    health = ("docker", "inspect", "-f", "{{.State.Health.Status}}", worker)
    eventually(lambda: run(*health) == "healthy\n")


def test_serving_image_is_below_425_mb_and_has_no_torch(deployment: ComposeDeployment) -> None:
    del deployment
    layers = run("docker", "history", "--format", "{{.Size}} {{.CreatedBy}}", "vitrine:test")
    base = len(run("docker", "history", "-q", "python:3.11-slim-bookworm").splitlines())
    units = {"B": 1e-6, "kB": 1e-3, "MB": 1, "GB": 1e3}
    sizes = re.findall(r"^([\d.]+)(\w+) ", layers, re.MULTILINE)
    above = sum(float(size) * units[unit] for size, unit in sizes[:-base])
    assert 200 < above <= 425  # 17 of them for cryptography, which verifies signatures
    code = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'onnx', 'pip')])"
    program = ("docker", "run", "--rm", "--entrypoint", "python", "vitrine:test", "-c", code)
    assert run(*program) == "[None, None, None]\n"


def test_no_request_fails_while_workers_crash_restart_and_scale(
    deployment: ComposeDeployment,
) -> None:
    with clients(deployment) as outcomes:
        wait_for_more(outcomes)
        # Docker restarts a crashed container.
        worker = deployment.containers("encode")[0]
        pid = run("docker", "inspect", "-f", "{{.State.Pid}}", worker).strip()
        run("kill", "-9", pid)
        restarts = ("docker", "inspect", "-f", "{{.RestartCount}}", worker)
        eventually(lambda: int(run(*restarts)) == 1)
        deployment.wait_for("encode", 2)
        deployment.scale(3)
        deployment.wait_for("encode", 3)
        for worker in deployment.containers("encode"):
            run("docker", "restart", "--time", "120", worker)
            deployment.wait_for("encode", 3)
        deployment.scale(1)
        wait_for_more(outcomes)
        deployment.scale(2)
        deployment.wait_for("encode", 2)
        wait_for_more(outcomes)
    assert outcomes.keys() == {"200"}, outcomes


def test_stopped_worker_exits_with_status_0(deployment: ComposeDeployment) -> None:
    worker = deployment.containers("encode")[-1]
    run("docker", "stop", "--time", "120", worker)
    assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", worker).strip() == "0"
    run("docker", "start", worker)
    deployment.wait_for("encode", 2)


def test_debug_routes_require_the_debug_key(deployment: ComposeDeployment) -> None:
    deployment.wait_for("debug", 1)
    assert deployment.post("/debug/attribute", NORM, key=None).status_code == 401
    assert deployment.post("/debug/attribute", NORM).status_code == 403
    response = deployment.post("/debug/attribute", NORM, KEYS["debug"])
    assert response.status_code == 200, response.text
    assert len(response.json()["tokens"]) == 7


def test_prometheus_scrapes_every_target_and_has_data_for_every_dashboard_query(
    deployment: ComposeDeployment,
) -> None:
    url = f"http://127.0.0.1:{deployment.environment['PROMETHEUS_PORT']}/api/v1"

    def get(path: str, **parameters: str) -> Any:  # noqa: ANN401 - parsed JSON
        response = httpx2.get(f"{url}/{path}", params=parameters, timeout=60)
        return response.raise_for_status().json()["data"]

    def missing() -> list[str]:
        """Return the queries without data, and the alerts that fire or are not evaluated yet."""
        # Those of the week before have data on the second day.
        queries = {
            name: text.replace("$__rate_interval", "1m")
            for name, text in expressions().items()
            if "offset 1d" not in text
        }
        empty = [name for name, text in queries.items() if not get("query", query=text)["result"]]
        [group] = get("rules")["groups"]
        inactive = {"health": "ok", "state": "inactive"}
        return empty + [
            rule["name"] for rule in group["rules"] if not inactive.items() <= rule.items()
        ]

    def is_complete() -> bool:
        deployment.post("/debug/attribute", NORM, KEYS["debug"]).raise_for_status()
        try:
            names = missing()
        except httpx2.TransportError as error:  # not started yet
            names = [repr(error)]
        print(names)  # in the report if the test fails
        return not names

    deployment.compose("up", "-d", "--no-build", "prometheus")
    with clients(deployment):
        eventually(is_complete)
    targets = Counter((t["labels"]["job"], t["health"]) for t in get("targets")["activeTargets"])
    assert targets == {("encode", "up"): 2, ("debug", "up"): 1, ("gateway", "up"): 1}


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("h2c, ")])
def test_h2c_upgrade_through_the_gateway_gets_one_response_per_request(
    deployment: ComposeDeployment, name: str
) -> None:
    shape = SHAPES[name]
    with_key = JSON + b"Authorization: Bearer " + KEYS["encode"].encode() + b"\r\n"
    keyed = replace(shape, segments=tuple(s.replace(JSON, with_key) for s in shape.segments))
    statuses, _ = exchange(deployment.url, keyed)
    # The gateway unfolds a folded header.
    assert statuses == ([200] if "folded" in name else list(shape.statuses))


def test_encoded_paths_do_not_bypass_the_rules_of_the_gateway(
    deployment: ComposeDeployment,
) -> None:
    def get(path: str, key: str) -> int:
        headers = f"Host: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        url = httpx2.URL(deployment.url)
        with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode())
            return int(b"".join(iter(lambda: connection.recv(4096), b"")).split()[1])

    for path in ("/metrics", "/%6Detrics", "/%6d%65trics", "/metrics?a", "http://x/%6Detrics"):
        assert get(path, KEYS["metrics"]) == 403, path
    for path in ("//metrics", "/./metrics", "/metrics/", "/%256Detrics"):
        assert get(path, KEYS["metrics"]) in (403, 404), path
    assert get("/metrics%00", KEYS["metrics"]) == 400
    deployment.wait_for("debug", 1)
    # The response is that of the debug worker; an encode worker would return 404.
    for path in ("/debug/capabilities", "/%64ebug/capabilities", "/debug%2Fcapabilities"):
        assert get(path, KEYS["encode"]) == 403, path
        assert get(path, KEYS["debug"]) == 403, path  # its host name is not x


def test_gateway_errors_have_the_format_of_the_service(
    deployment: ComposeDeployment,
) -> None:
    closed = httpx2.get(f"{deployment.url}/metrics")
    assert (closed.status_code, closed.json()["code"]) == (403, "forbidden")
    for size, status in ((20_000, 431), (300_000, 400)):
        assert httpx2.get(deployment.url, headers={"X": "x" * size}).status_code == status
    for service in ("encode", "debug"):
        deployment.compose("stop", "--timeout", "120", service)
    unavailable = deployment.post("/encode", {"inputs": "a"})
    assert (unavailable.status_code, unavailable.json()["code"]) == (503, "not_ready")
    assert unavailable.headers["Retry-After"] == "1"
    deployment.scale(2)
    deployment.wait_until_served()
    assert deployment.post("/encode", {"inputs": "a"}).status_code == 200


def test_worker_container_has_no_privileges_and_no_outbound_network(
    deployment: ComposeDeployment,
) -> None:
    worker = deployment.containers("encode")[0]
    code = """
import socket
names = ("Uid", "CapEff", "NoNewPrivs", "Seccomp")
lines = dict(line.split(":", 1) for line in open("/proc/1/status") if ":" in line)
print({name: lines[name].split()[0] for name in names})
for path in ("/x", "/model/x", "/models/x", "/opt/vitrine/x"):
    try:
        open(path, "w")
    except OSError as error:
        print(error.strerror)
open("/tmp/written", "w")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=3)  # reserved for documentation
except OSError as error:
    print(error.strerror or "timed out")
"""
    output = run("docker", "exec", worker, "python", "-c", code).splitlines()
    rights = {"Uid": "10001", "CapEff": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    assert output[:-1] == [str(rights), *["Read-only file system"] * 4]
    assert output[-1] in ("Network is unreachable", "timed out")


def test_local_model_folder_is_exported_and_served(
    deployment: ComposeDeployment, minilm_folder: Path
) -> None:
    # Symbolic links of a package manager would be dangling in the mount.
    source = ("-v", f"{minilm_folder.resolve()}:/source:ro")
    deployment.compose("run", "--rm", *source, "export", "/source", "--out", "/models/own")
    environment = {**deployment.environment, "VITRINE_MODEL": "/models/own"}
    own = ComposeDeployment(deployment.url, environment)
    own.scale(1)
    own.wait_until_served()
    response = own.post("/encode", {"inputs": "a text"})
    assert response.status_code == 200
    assert len(response.json()["embeddings"][0]) == 384


def test_model_is_exported_once_before_the_workers_start(
    deployment: ComposeDeployment, minilm_folder: Path, tmp_path: Path
) -> None:
    source = {"volumes": [f"{minilm_folder.resolve()}:/source:ro"]}
    mounts = tmp_path / "mounts.yaml"
    mounts.write_text(yaml.safe_dump({"services": {"model": source, "encode": source}}))
    environment = {**deployment.environment, "VITRINE_MODEL": "/source"}
    own = ComposeDeployment(deployment.url, environment, ("deploy/compose.model.yaml", str(mounts)))
    for _ in range(2):
        own.compose("up", "-d", "--no-build", "gateway", "encode")
        own.wait_for("encode", 1)
        own.wait_until_served()
    response = own.post("/encode", {"inputs": "a text"})
    assert response.status_code == 200
    assert response.json()["model"] == "source"
    assert own.compose("logs", "model").count(" exporting ") == 1
