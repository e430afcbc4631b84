"""The service as a process of its own, as a user starts it."""

import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

from models.artifact import Artifact
from tests.faulty_service import IS_STUCK, RAISES
from tests.serving import lines_until, metrics, outcome, process, rest

# Starts the service where importing torch, transformers or onnx fails.
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "onnx", "onnxscript", "safetensors", "huggingface_hub"):
    sys.modules[name] = None
from service.__main__ import main
sys.exit(main())
"""

# Starts the service, and says at its end how many objects are searched for garbage, and are not.
COUNTING = """
import atexit, gc, sys
atexit.register(lambda: print(len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr))
from service.__main__ import main
sys.exit(main())
"""


def test_it_serves_where_torch_cannot_be_imported(artifact: Artifact) -> None:
    with process("-c", WITHOUT_TORCH, VITRINE_MODEL__PATH=str(artifact.path)) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        answer = httpx2.post(f"{match[1]}/encode", json={"inputs": "a text"}, timeout=30)
        assert answer.status_code == 200
        assert len(answer.json()["embeddings"][0]) == 384


def test_it_prints_the_urls_and_a_curl_line_that_works(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        lines, match = lines_until(started, r"Try: (curl .*)$")
        command = match[1].replace("curl ", "curl --silent --fail ")
        answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert len(json.loads(answer.stdout)["embeddings"]) == 2
        docs = re.search(r"Docs on (\S+)", "\n".join(lines))
        assert docs is not None
        assert httpx2.get(docs[1]).status_code == 200
        assert not any("everybody has access" in line for line in lines)


def test_what_was_loaded_is_not_searched_for_garbage(artifact: Artifact) -> None:
    with process("-c", COUNTING, VITRINE_MODEL__PATH=str(artifact.path)) as started:
        lines_until(started, "Serving")
        started.send_signal(signal.SIGINT)
        searched, spared = map(int, rest(started)[1].split()[-2:])
        assert searched < spared / 10


def test_gradients_are_not_given_to_the_network_without_keys(artifact: Artifact) -> None:
    with process(
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_SERVER__HOST="0.0.0.0",  # noqa: S104 - it does not come to that
        VITRINE_DEBUG__ENABLED="true",
    ) as started:
        status, errors = outcome(started)
        assert status == 2
        assert "set API keys, or disable debug.enabled" in errors


def long_texts(count: int) -> dict[str, list[str]]:
    return {"inputs": [f"word{i} " * 200 for i in range(count)]}


def test_a_client_that_goes_away_takes_its_texts_out_of_the_queue(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        body = json.dumps(long_texts(1000)).encode()
        head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not metrics(match[1])["vitrine_queue_tokens"]:
                time.sleep(0.01)
        # All of it is 200,000 tokens; what is run is at most the batches until the client left.
        while metrics(match[1])["vitrine_queue_tokens"]:
            time.sleep(0.01)
        found = metrics(match[1])
        assert found["vitrine_batch_tokens_sum"] < 100_000
        assert found['vitrine_requests_total{route="/encode",status="disconnected"}'] == 1


def test_a_body_that_ends_too_soon_is_no_error_of_the_service(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path)) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"inputs"'.encode())
        while 'status="disconnected"} 1.0' not in httpx2.get(f"{match[1]}/metrics").text:
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        assert outcome(started)[0] == 0


def test_an_engine_that_hangs_answers_its_callers_and_ends_the_process(artifact: Artifact) -> None:
    with process(
        "-m",
        "tests.faulty_service",
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_ENGINE__TIMEOUT_S="0.5",
    ) as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        assert httpx2.post(f"{match[1]}/encode", json={"inputs": [[5]]}).status_code == 200
        answer = httpx2.post(f"{match[1]}/encode", json={"inputs": [[IS_STUCK]]}, timeout=10)
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        status, errors = outcome(started)
    assert status == 1
    assert "the engine has stopped: a batch did not return within 0.5 s" in errors


def test_a_bind_to_other_than_loopback_without_keys_warns(artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_SERVER__HOST="0.0.0.0") as started:  # noqa: S104
        lines, _ = lines_until(started, r"Serving ")
        assert any("no API key is set: everybody has access" in line for line in lines)


def test_with_keys_it_does_not_warn_and_the_curl_line_shows_where_the_key_goes(
    artifact: Artifact,
) -> None:
    key = "a-key-of-some-length"
    keys = json.dumps([{"name": "app", "key": key}])
    with process(
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_SERVER__HOST="0.0.0.0",  # noqa: S104
        VITRINE_AUTH__KEYS=keys,
    ) as started:
        lines, match = lines_until(started, r"Try: (.*)$")
        assert not any("everybody has access" in line for line in lines)
        assert "'Authorization: Bearer KEY'" in match[1]
        assert not any(key in line for line in lines)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"VITRINE_MODEL__PATH": "/nowhere"}, "/nowhere is not an artifact"),
        ({"VITRINE_ENGINE__NAME": "tensorrt"}, "unknown engine 'tensorrt'"),
    ],
)
def test_what_cannot_start_ends_with_the_reason(
    artifact: Artifact, environment: dict[str, str], message: str
) -> None:
    settings = {"VITRINE_MODEL__PATH": str(artifact.path), **environment}
    with process(**settings) as started:
        status, errors = outcome(started)
    assert status == 1
    assert message in errors


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"VITRINE_SERVER__PORT": "http"}, "server.port: Input should be a valid integer"),
        ({"VITRINE_SERVER__PROT": "1"}, "VITRINE_SERVER__PROT is no setting"),
        ({"VITRINE_MODEL_PATH": "x"}, "no setting; did you mean VITRINE_MODEL__PATH?"),
        ({"VITRINE_ENGIN__NAME": "x"}, "VITRINE_ENGIN__NAME is no setting"),
        ({"VITRINE_ENGINE__PRECISION": "int8"}, "engine.precision: Input should be 'float32'"),
        ({"VITRINE_AUTH__KEYS_FILE": "/nowhere"}, "No such file or directory: '/nowhere'"),
        ({"VITRINE_AUTH__KEYS": "[{"}, "auth"),
    ],
)
def test_a_setting_that_is_wrong_is_named(environment: dict[str, str], message: str) -> None:
    with process(**environment) as started:
        status, errors = outcome(started)
    assert status == 2
    assert message in errors


# Compose's variable, and those that Kubernetes sets for a service named vitrine.
def test_variables_that_are_no_settings_do_not_stop_the_start(tmp_path: Path) -> None:
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
    assert status == 1
    assert "is not an artifact" in errors


def test_options_take_the_place_of_the_environment(artifact: Artifact) -> None:
    with process(
        "-m", "service", "--model.path", "/elsewhere", VITRINE_MODEL__PATH=str(artifact.path)
    ) as started:
        status, errors = outcome(started)
    assert status == 1
    assert "/elsewhere is not an artifact" in errors


def test_a_damaged_artifact_is_refused_with_the_files_name(
    artifact: Artifact, tmp_path: Path
) -> None:
    for file in artifact.path.rglob("*"):
        copy = tmp_path / file.relative_to(artifact.path)
        copy.mkdir() if file.is_dir() else copy.write_bytes(file.read_bytes())
    content = bytearray((tmp_path / "model.onnx").read_bytes())
    content[5_000_000] ^= 4
    (tmp_path / "model.onnx").write_bytes(content)
    with process(VITRINE_MODEL__PATH=str(tmp_path)) as started:
        status, errors = outcome(started)
    assert status == 1
    assert "model.onnx" in errors
    assert "is not the exported file" in errors


def test_a_body_that_does_not_come_is_given_up_and_the_connection_closed(
    artifact: Artifact,
) -> None:
    with process(VITRINE_MODEL__PATH=str(artifact.path), VITRINE_LIMITS__BODY_S="0.3") as started:
        _, match = lines_until(started, r"Serving .* on (http://\S+)")
        url = httpx2.URL(match[1])
        head = "POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer
        assert httpx2.post(f"{match[1]}/encode", json={"inputs": "a"}).status_code == 200


def test_logs_are_json_if_wanted_and_hold_ids_but_nothing_of_what_was_sent(
    artifact: Artifact,
) -> None:
    key, text = "canary-key-of-some-length", "canary-text"
    with process(
        "-m",
        "tests.faulty_service",
        VITRINE_MODEL__PATH=str(artifact.path),
        VITRINE_SERVER__LOG="json",
        VITRINE_AUTH__KEYS=json.dumps([{"name": "app", "key": key, "scopes": ["encode", "debug"]}]),
        VITRINE_DEBUG__ENABLED="true",
    ) as started:
        lines, match = lines_until(started, r"Serving .* on (http://[^\s\"]+)")
        headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "an-id"}
        statuses, answers = [], []
        for route, body in (
            ("/encode", {"inputs": [text, ""]}),
            ("/encode", {"inputs": text, text: 1}),
            ("/encode", {"inputs": [[1000], [RAISES]]}),
            ("/v1/embeddings", {"input": text, "model": text}),
            ("/tei/embed", {"inputs": [text, text * 10_000]}),
            ("/debug/attribute", {"text": text, "target": {"type": "norm"}, "point": text}),
        ):
            answer = httpx2.post(f"{match[1]}{route}", json=body, headers=headers, timeout=240)
            statuses.append(answer.status_code)
            answers.append(answer.text)
        stranger = {"Authorization": f"Bearer {text}"}
        answers.append(httpx2.get(f"{match[1]}/info", headers=stranger).text)
        assert statuses == [422, 422, 500, 404, 422, 422]
        started.send_signal(signal.SIGINT)
        status, said = rest(started)
        assert status == 0
    logged = [json.loads(line) for line in (*lines, *said.splitlines())]
    assert all({"time", "level", "message"} <= line.keys() for line in logged)
    [failure] = [line for line in logged if line["level"] == "ERROR"]
    assert failure["request_id"] == "an-id"
    assert "engine fault" in failure["exc_info"]
    assert "canary" not in "".join((*lines, said, *answers))
