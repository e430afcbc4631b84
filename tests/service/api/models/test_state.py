"""The state of a service: its models, queues, requests and processes."""

import json
import os
import signal
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.eventually import eventually
from tests.service.api.conftest import Start
from tests.service.api.models.conftest import TEXT, Checked
from tests.serving import PATIENCE_S, lines_until, state_of, url_of


def test_state_shows_models_queues_and_processes(one: TestClient, small_artifact: Artifact) -> None:
    name = one.get("/info").json()["model"]
    one.post("/encode", json={"inputs": TEXT})
    state = one.get("/debug/state").json()
    (model,) = state["models"]
    assert (model["name"], model["path"], model["default"]) == (
        name,
        str(small_artifact.path),
        True,
    )
    assert (model["engine"], model["precision"]) == ("onnxruntime", "float32")
    assert (model["requests"], model["queue_tokens"], model["oldest_s"]) == (0, 0, 0.0)
    assert state["gradient_process"] is None
    assert (state["stopping"], state["closing_versions"]) == (False, 0)


def test_state_shows_requests_in_flight_and_running_batches(
    one: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = state_of(one).registry.current()
    may_end = threading.Event()
    run = model.engine.run_outputs

    def held(*arguments: Any) -> Any:  # noqa: ANN401 - those of the engine
        assert may_end.wait(PATIENCE_S)
        return run(*arguments)

    monkeypatch.setattr(model.engine, "run_outputs", held)
    thread = Checked(lambda: one.post("/encode", json={"inputs": TEXT}))
    thread.start()

    def state() -> dict[str, Any]:
        shown: dict[str, Any] = one.get("/debug/state").json()["models"][0]
        return shown

    eventually(lambda: state()["batches"])
    assert [batch["rows"] for batch in state()["batches"]] == [1]
    assert state()["requests"] == 1
    may_end.set()
    thread.join()
    assert thread.error is None
    assert (state()["requests"], state()["batches"]) == (0, [])


@pytest.mark.slow
def test_sigusr1_logs_the_state(small_artifact: Artifact, start: Start) -> None:
    with start() as started:
        url_of(started)
        os.kill(started.pid, signal.SIGUSR1)
        line = lines_until(started, r"state: (\{.*\})")[1][1]
        assert json.loads(line)["models"][0]["path"] == str(small_artifact.path)
