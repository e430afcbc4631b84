"""Models beyond the memory budget are loaded when a request needs them."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.engines import weight_bytes
from service.inference.call_options import Deadline
from service.inference.model.model import Model
from service.inference.model.opening import open_model
from service.inference.registry import memory
from tests.service.api.models.conftest import TEXT
from tests.serving import served


@pytest.fixture
def on_demand(small_artifact: Artifact, other_artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service with the models `cats` and `dogs`, of which one fits into memory."""
    paths = {"cats": small_artifact.path, "dogs": other_artifact.path}
    two = [{"name": name, "path": path} for name, path in paths.items()]
    max_bytes = weight_bytes(small_artifact)
    with served(models={"served": two, "max_bytes": max_bytes, "default": "cats"}) as client:
        yield client


def loaded_models(client: TestClient) -> list[str]:
    return [each["name"] for each in client.get("/models").json()["models"] if each["loaded"]]


def test_models_beyond_the_memory_budget_are_loaded_on_demand(on_demand: TestClient) -> None:
    for name in ("dogs", "cats", "dogs"):
        assert on_demand.post("/encode", json={"inputs": TEXT, "model": name}).is_success
        assert loaded_models(on_demand) == [name]
    assert on_demand.get("/readyz").status_code == 200


def test_invalid_priority_does_not_load_a_model(on_demand: TestClient) -> None:
    pairs = {"query": TEXT, "documents": [TEXT], "model": "dogs"}
    bodies: dict[str, dict[str, Any]] = {
        "/encode": {"inputs": TEXT, "model": "dogs"},
        "/classify": {"inputs": TEXT, "model": "dogs"},
        "/tag": {"inputs": TEXT, "model": "dogs"},
        "/score": {"queries": TEXT, "documents": [TEXT], "model": "dogs"},
        "/rerank": pairs,
        "/v1/embeddings": {"input": TEXT, "model": "dogs"},
        "/v1/rerank": pairs,
        "/vllm/classify": {"input": [TEXT], "model": "dogs"},
        "/vllm/v1/score": {"queries": TEXT, "documents": [TEXT], "model": "dogs"},
        "/tei/dogs": {"inputs": TEXT},
        "/tei/dogs/embed": {"inputs": TEXT},
        "/tei/dogs/embed_all": {"inputs": TEXT},
        "/tei/dogs/embed_sparse": {"inputs": TEXT},
        "/tei/dogs/predict": {"inputs": TEXT},
        "/tei/dogs/rerank": {"query": TEXT, "texts": [TEXT]},
        "/tei/dogs/similarity": {"inputs": {"source_sentence": TEXT, "sentences": [TEXT]}},
    }
    for path, body in bodies.items():
        response = on_demand.post(path, json=body, headers={"X-Priority": "urgent"})
        assert (path, response.status_code) == (path, 400), response.text
        assert "X-Priority must be" in response.text
        assert loaded_models(on_demand) == ["cats"]


def test_wait_for_a_load_counts_towards_the_deadline(
    on_demand: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_s = 0.2
    timeouts: list[float] = []

    async def slow(*arguments: Any, **options: Any) -> Model:  # noqa: ANN401 - those of `open_model`
        time.sleep(load_s)  # noqa: ASYNC251 - also while the event loop is blocked
        return await open_model(*arguments, **options)

    async def late(*_: object, timeout_s: Deadline, **__: object) -> None:
        timeouts.append(timeout_s.remaining_s)
        raise timeout_s.error()

    monkeypatch.setattr(memory, "open_model", slow)
    monkeypatch.setattr(Model, "encode_outputs", late)
    headers = {"X-Request-Timeout-Ms": "20000"}
    response = on_demand.post("/encode", json={"inputs": TEXT, "model": "dogs"}, headers=headers)
    assert response.status_code == 504, response.text
    assert response.json()["detail"] == "deadline of 20 s exceeded"
    assert 0 < timeouts[0] <= 20 - load_s
