"""The service as a process of its own, as a user starts it."""

import json
import re
import signal
import subprocess
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.serve_command import example_request
from tests.eventually import eventually
from tests.faulty_service import IS_STUCK, RAISES
from tests.service.api.conftest import Start
from tests.service.api.raw_http import head, post
from tests.serving import (
    PATIENCE_S,
    connect,
    held_process,
    lines_until,
    metrics,
    outcome,
    process,
    ready_model,
    received,
    rest,
    url_of,
)

pytestmark = pytest.mark.slow  # starts processes

# Starts the service where importing torch, transformers or onnx fails.
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "onnx", "onnxscript", "safetensors", "huggingface_hub"):
    sys.modules[name] = None
from service.serve_command import main
sys.exit(main())
"""

# Starts the service, and prints at its end how many objects are tracked by the garbage collector,
# and how many are frozen.
COUNTING = """
import atexit, gc, sys
gc.unfreeze = lambda: None  # the application calls it when it stops
atexit.register(lambda: print(len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr))
from service.serve_command import main
sys.exit(main())
"""


def test_service_runs_where_torch_cannot_be_imported(start: Start) -> None:
    with start("-c", WITHOUT_TORCH) as started:
        url = url_of(started)
        response = httpx2.post(f"{url}/encode", json={"inputs": "a text"}, timeout=PATIENCE_S)
        assert response.status_code == 200
        assert len(response.json()["embeddings"][0]) == 32


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_before_the_service_runs_do_not_end_it(
    start: Start, number: signal.Signals
) -> None:
    code = f"""
import os, signal, sys
from service import commands
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
resolve_name = commands.resolve_name
def resolve(name):
    os.kill(os.getpid(), {int(number)})
    return resolve_name(name)
commands.resolve_name = resolve
sys.exit(commands.serve())
"""
    with start("-c", code) as started:
        lines_until(started, "Serving")


def test_model_may_be_loaded_before_the_name_of_the_host_is_looked_up(start: Start) -> None:
    code = """
import asyncio, sys
from uvicorn.lifespan.on import LifespanOn
from service.serve_command import main
startup = LifespanOn.startup
async def start_and_look_up(self):
    await startup(self)
    while not self.config.app.state.vitrine.registry.is_open:
        await asyncio.sleep(0.01)
LifespanOn.startup = start_and_look_up
sys.exit(main())
"""
    with start("-c", code) as started:
        url = url_of(started)
        assert httpx2.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 200


def test_startup_prints_urls_and_a_working_curl_command(start: Start) -> None:
    with start() as started:
        lines, match = lines_until(started, r"Try: (curl .*)$")
        command = match[1].replace("curl ", "curl --silent --fail ")
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert len(json.loads(done.stdout)["embeddings"]) == 2
        pages = re.findall(r"(Docs|Page of explanations) on (\S+)", "\n".join(lines))
        assert [name for name, _ in pages] == ["Docs", "Page of explanations"]
        for _, url in pages:
            assert httpx2.get(url, timeout=PATIENCE_S).status_code == 200
        assert not any("everybody has access" in line for line in lines)


@pytest.mark.parametrize(
    ("model", "path", "field"),
    [
        ("client", "/encode", "embeddings"),
        ("sparse_client", "/encode", "embeddings"),
        ("multi_client", "/rerank", "results"),
        ("rerank_client", "/rerank", "results"),
        ("classify_client", "/classify", "labels"),
        ("tag_client", "/tag", "entities"),
        ("entity_client", "/tag", "entities"),
    ],
)
def test_example_at_startup_fits_the_kind_of_model(
    request: pytest.FixtureRequest, model: str, path: str, field: str
) -> None:
    client: TestClient = request.getfixturevalue(model)
    route, body = example_request(ready_model(client).artifact.manifest)
    answer = client.post(route, json=body)
    assert (route, answer.status_code) == (path, 200)
    assert field in answer.json()


def test_startup_prints_no_url_of_a_page_that_is_disabled(start: Start) -> None:
    with start(VITRINE_SERVER__PAGE="false") as started:
        lines, _ = lines_until(started, "Try: curl ")
    assert not any("Page" in line for line in lines)


def test_service_starts_without_docstrings(small_artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(small_artifact.path), PYTHONOPTIMIZE="2") as started:
        lines_until(started, "Serving")


def test_page_is_read_as_utf8_in_any_locale(small_artifact: Artifact) -> None:
    # Python would take the locale "C" for UTF-8.
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with process(VITRINE_MODEL__PATH=str(small_artifact.path), **locale) as started:
        _, match = lines_until(started, r"Page of explanations on (\S+)")
        page = httpx2.get(match[1], timeout=PATIENCE_S)
    assert (page.status_code, "\N{HORIZONTAL ELLIPSIS}" in page.text) == (200, True)


def test_example_at_startup_is_for_the_default_model(
    classifier: Artifact, small_artifact: Artifact
) -> None:
    paths = {"a": classifier.path, "b": small_artifact.path}
    served = [{"name": name, "path": str(path)} for name, path in paths.items()]
    settings = {"VITRINE_MODELS__SERVED": json.dumps(served), "VITRINE_MODELS__DEFAULT": "b"}
    with process(**settings) as started:
        _, match = lines_until(started, r"Try: curl (\S+) .* -d '(.*)'")
        response = httpx2.post(match[1], json=json.loads(match[2]), timeout=PATIENCE_S)
    assert (response.status_code, response.json().get("model")) == (200, "b")


def test_loaded_objects_are_excluded_from_garbage_collection(start: Start) -> None:
    with start("-c", COUNTING) as started:
        url_of(started)
        started.send_signal(signal.SIGINT)
        tracked, frozen = map(int, rest(started)[1].split()[-2:])
        assert tracked < frozen / 10


def test_disconnect_within_a_body_is_not_logged_as_an_error(start: Start) -> None:
    with start() as started:
        url = url_of(started)
        with connect(url) as connection:
            connection.sendall(head(length=100) + b'{"inputs"')
        disconnected = 'vitrine_requests_total{route="/encode",status="disconnected"}'
        eventually(lambda: metrics(url).get(disconnected) == 1)
        started.send_signal(signal.SIGINT)
        assert outcome(started)[0] == 0


def test_stuck_engine_fails_its_requests_and_ends_the_process(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    settings = {"VITRINE_ENGINE__TIMEOUT_S": "0.5"}
    with held_process(small_artifact, tmp_path / "hold", **settings) as started:
        with httpx2.Client(base_url=url_of(started), timeout=PATIENCE_S) as client:
            assert client.post("/encode", json={"inputs": [[5]]}).status_code == 200
            response = client.post("/encode", json={"inputs": [[IS_STUCK]]})
        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
        status, errors = outcome(started)
    assert status == 1
    assert "the engine has stopped: a batch did not return within 0.5 s" in errors


def test_public_address_without_keys_logs_a_warning(start: Start) -> None:
    with start(
        VITRINE_SERVER__HOST="0.0.0.0",  # noqa: S104
    ) as started:
        lines, _ = lines_until(started, r"Serving ")
        assert any("no API key is set: everybody has access" in line for line in lines)


def test_public_address_with_keys_logs_no_warning_and_a_curl_command_with_a_key(
    start: Start,
) -> None:
    key = "a-key-of-some-length"
    keys = json.dumps([{"name": "app", "key": key}])
    with start(
        VITRINE_SERVER__HOST="0.0.0.0",  # noqa: S104
        VITRINE_AUTH__KEYS=keys,
    ) as started:
        lines, match = lines_until(started, r"Try: (.*)$")
        assert not any("everybody has access" in line for line in lines)
        assert "'Authorization: Bearer KEY'" in match[1]
        assert not any(key in line for line in lines)


# The variable of Compose, and those that Kubernetes sets for a service named vitrine.
def test_variables_of_compose_and_kubernetes_are_ignored(tmp_path: Path) -> None:
    with process(
        VITRINE_MODEL__PATH=str(tmp_path),
        VITRINE_KEYS="[]",
        VITRINE_PORT="tcp://10.0.0.1:8000",
        VITRINE_SERVICE_HOST="10.0.0.1",
        VITRINE_SERVICE_PORT="8000",
        VITRINE_SERVICE_PORT_HTTP="8000",
        VITRINE_PORT_8000_TCP="tcp://10.0.0.1:8000",
        VITRINE_PORT_8000_TCP_ADDR="10.0.0.1",
        VITRINE_SERVER_PORT="tcp://10.0.0.2:80",
    ) as started:
        status, errors = outcome(started)
    assert status == 2
    assert "is no model folder" in errors
    assert "VITRINE_KEYS is not a setting and is ignored" in errors
    assert errors.count("is ignored") == 1


def test_body_timeout_returns_408_and_closes_the_connection(start: Start) -> None:
    with start(VITRINE_LIMITS__BODY_S="0.3") as started:
        url = url_of(started)
        with connect(url) as connection:
            connection.sendall(head(length=100) + b"{")
            response = received(connection)
        assert response.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in response
        # In one segment: a client that pauses between head and body could reach the timeout.
        with connect(url) as connection:
            connection.sendall(post())
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_json_logs_have_request_ids_and_no_content_of_requests(start: Start) -> None:
    key, text = "canary-key-of-some-length", "canary-text"
    with start(
        "-m",
        "tests.faulty_service",
        VITRINE_SERVER__LOG="json",
        VITRINE_AUTH__KEYS=json.dumps([{"name": "app", "key": key, "scopes": ["encode", "debug"]}]),
        VITRINE_DEBUG__ENABLED="true",
    ) as started:
        lines, match = lines_until(started, r"Serving .* on (http://[^\s\"]+)")
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "an-id"}
        statuses, responses = [], []
        for route, body in (
            ("/encode", {"inputs": [text, ""]}),
            ("/encode", {"inputs": text, text: 1}),
            ("/encode", {"inputs": [[1000], [RAISES]]}),
            ("/v1/embeddings", {"input": text, "model": text}),
            ("/tei/embed", {"inputs": [text, text * 10_000]}),
            ("/debug/attribute", {"text": text, "target": {"type": "norm"}, "point": text}),
        ):
            response = httpx2.post(f"{match[1]}{route}", json=body, headers=headers, timeout=240)
            statuses.append(response.status_code)
            responses.append(response.text)
        unknown = {"Authorization": f"Bearer {text}"}
        response = httpx2.get(f"{match[1]}/info", headers=unknown, timeout=PATIENCE_S)
        responses.append(response.text)
        assert statuses == [422, 422, 500, 404, 422, 422]
        started.send_signal(signal.SIGINT)
        status, errors = rest(started)
        assert status == 0
    logged = [json.loads(line) for line in (*lines, *errors.splitlines())]
    assert all({"time", "level", "message"} <= line.keys() for line in logged)
    [failure] = [line for line in logged if line["level"] == "ERROR"]
    assert failure["request_id"] == "an-id"
    assert "engine fault" in failure["exc_info"]
    assert "canary" not in "".join((*lines, errors, *responses))
