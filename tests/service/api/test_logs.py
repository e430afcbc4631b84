"""The access log, and logs as JSON."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import served

KEY = "a-key-of-some-length"
CANARY = "canary-text"


def logged_client(artifact: Artifact, slow_s: float) -> AbstractContextManager[TestClient]:
    auth = {"keys": [{"name": "the app", "key": KEY}]}
    return served(artifact.path, auth=auth, server={"access_log": True, "slow_s": slow_s})


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record) for record in caplog.records if record.name == "vitrine.access"]


def test_access_log_has_the_key_name_and_error_code_of_each_request(
    small_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with logged_client(small_artifact, slow_s=3600.0) as client:
        headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "an-id"}
        caplog.clear()
        for body in ({"inputs": CANARY}, {"inputs": ["", CANARY]}, {CANARY: CANARY}):
            client.post(f"/encode?{CANARY}={CANARY}", json=body, headers=headers)
        client.post("/encode", json={"inputs": CANARY})
        client.get(f"/{CANARY}")
        client.head("/healthz")
    lines = lines_of(caplog)
    shown = ("method", "route", "status", "code", "api_key")
    assert [tuple(line.get(name) for name in shown) for line in lines] == [
        ("POST", "/encode", "200", None, "the app"),
        ("POST", "/encode", "422", "empty", "the app"),
        ("POST", "/encode", "422", "unknown_field", "the app"),
        ("POST", "/encode", "401", "unauthorized", None),
        ("GET", "none", "404", "not_found", None),
        ("HEAD", "/healthz", "200", None, None),
    ]
    assert lines[0]["request_id"] == "an-id"
    assert lines[0]["client"] == "testclient"
    assert "slow" not in lines[0]
    written = [str(line["message"]) for line in lines]
    assert written[1].startswith("POST /encode 422 ")
    assert written[1].endswith(" api_key=the app code=empty")
    assert "canary" not in str(lines)
    assert KEY not in str(lines)


def test_access_log_marks_slow_requests(
    small_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with logged_client(small_artifact, slow_s=1e-9) as client:
        caplog.clear()
        client.get("/healthz")
    assert [line["slow"] for line in lines_of(caplog)] == [True]


def test_access_log_is_off_by_default(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert client.post("/encode", json={"inputs": "a"}).status_code == 200
    assert not lines_of(caplog)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_values_from_outside_forge_no_records_and_send_no_escape_sequences(
    log_format: str,
) -> None:
    program = f"""
from service.logs import configure
configure({log_format!r})
import logging
name = "a\\n2026-01-01 00:00:00,000 CRITICAL forged\\r\\x1b[31m\\u2028\\udcff"
logging.getLogger("vitrine").error("cannot load %s", name)
raise ValueError(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    text = done.stderr.decode()  # all of it is UTF-8
    lines = text.splitlines()
    assert all(line.isprintable() for line in lines)
    records = [line for line in lines if not line.startswith("  ")]
    levels = [
        json.loads(line)["level"] if log_format == "json" else line.split()[2] for line in records
    ]
    assert levels == ["ERROR", "CRITICAL"]
    assert "forged" in records[0]
    assert "ValueError" in text


def test_warnings_and_uncaught_errors_are_logged_as_json() -> None:
    program = """
from service.logs import configure
configure("json")
import warnings
warnings.warn("of a library\\nin two lines")
raise ValueError("at the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "CRITICAL"]
    assert "of a library" in lines[0]["message"]
    assert "ValueError: at the end" in lines[1]["exc_info"]
