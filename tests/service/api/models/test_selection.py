"""Requests name one of several models of a process."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api.compat import tei, tei_embed
from service.api.state import AppState
from service.inference.model.opening import ModelOptions
from service.inference.registry.served_models import ModelSpec
from tests.models.checkpoints import edit_json
from tests.service.api.models.conftest import TEXT, same
from tests.serving import served


@pytest.mark.parametrize(
    ("name", "canonical"), [("cats", "cats"), ("felines", "cats"), ("org/dogs", "org/dogs")]
)
def test_field_model_selects_the_model(
    several: TestClient,
    vectors: dict[str, np.typing.NDArray[np.float64]],
    name: str,
    canonical: str,
) -> None:
    response = several.post("/encode", json={"inputs": TEXT, "model": name})
    assert response.json()["model"] == canonical
    assert same(response.json()["embeddings"], vectors[canonical])
    info = several.get(f"/models/{name}/info").json()
    assert (info["model"], info["identity"][:12]) == (
        canonical,
        response.headers["X-Model-Version"],
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": TEXT, "model": "org/dogs"}, "embedding"),
        ("/tei/org/dogs/embed", {"inputs": TEXT}, None),
        ("/tei/org/dogs", {"inputs": TEXT}, None),
    ],
)
def test_compatible_routes_select_the_model(
    several: TestClient,
    vectors: dict[str, np.typing.NDArray[np.float64]],
    path: str,
    body: dict[str, str],
    field: str | None,
) -> None:
    response = several.post(path, json=body)
    assert response.status_code == 200, response.text
    vector = response.json() if field is None else response.json()["data"][0][field]
    assert same(vector, vectors["org/dogs"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"queries": TEXT, "documents": TEXT}),
        ("/rerank", {"query": TEXT, "documents": [TEXT]}),
        ("/vllm/score", {"queries": TEXT, "documents": TEXT}),
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT]}),
    ],
)
def test_routes_of_scores_select_the_model(
    several: TestClient, path: str, body: dict[str, Any]
) -> None:
    response = several.post(path, json=body | {"model": "felines"})
    assert (response.status_code, response.json()["model"]) == (200, "cats")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/encode", {"inputs": TEXT}),
        ("/score", {"queries": TEXT, "documents": TEXT}),
        ("/rerank", {"query": TEXT, "documents": [TEXT]}),
        ("/classify", {"inputs": TEXT}),
        ("/tag", {"inputs": TEXT}),
        ("/debug/attribute", {"text": TEXT, "target": {"type": "norm"}}),
    ],
)
def test_native_routes_list_the_models_if_the_name_is_unknown_or_missing(
    several: TestClient, path: str, body: dict[str, Any]
) -> None:
    host = {"Host": "testserver"}
    unknown = several.post(path, json=body | {"model": "birds"}, headers=host)
    assert unknown.status_code == 404
    problem = unknown.json()
    assert (problem["code"], problem["pointer"]) == ("model_not_found", "/model")
    assert problem["detail"] == "unknown model; served models: cats, org/dogs"
    missing = several.post(path, json=body, headers=host)
    assert missing.status_code == 422
    assert missing.json()["code"] == "model_required"
    assert missing.json()["detail"] == "model is required; served models: cats, org/dogs"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/encode", {"inputs": TEXT, "model": ""}),
        ("/v1/embeddings", {"input": TEXT, "model": ""}),
        ("/v2/rerank", {"query": TEXT, "documents": [TEXT], "model": ""}),
        ("/v1/models/", None),
    ],
)
def test_an_empty_name_is_not_that_of_the_default_model(
    unchanged: TestClient, path: str, body: dict[str, Any] | None
) -> None:
    response = unchanged.request("GET" if body is None else "POST", path, json=body)
    assert (response.status_code, "unknown model" in response.text) == (404, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"input": TEXT, "model": "birds"}, 404),
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT], "model": "birds"}, 404),
        ("/vllm/classify", {"input": [TEXT], "model": "birds"}, 404),
        ("/tei/birds/embed", {"inputs": TEXT}, 404),
        ("/tei/embed", {"inputs": TEXT}, 422),
    ],
)
def test_compatible_routes_list_the_models_if_the_name_is_unknown_or_missing(
    several: TestClient, path: str, body: dict[str, Any], status: int
) -> None:
    response = several.post(path, json=body)
    assert response.status_code == status, response.text
    assert "served models: cats, org/dogs" in response.text


def test_lists_of_models_have_all_names(several: TestClient) -> None:
    summaries = several.get("/models").json()["models"]
    assert [(each["name"], each["aliases"], each["loaded"]) for each in summaries] == [
        ("cats", ["felines"], True),
        ("org/dogs", [], True),
    ]
    listed = several.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["cats", "org/dogs"]
    assert several.get("/v1/models/felines").json()["id"] == "cats"
    assert several.get("/v1/models/birds").status_code == 404


def test_tei_has_health_and_info_of_each_model(several: TestClient) -> None:
    assert several.get("/tei/cats/health").status_code == 200
    assert several.get("/tei/org/dogs/info").json()["served_model_name"] == "org/dogs"


def test_tei_has_the_root_of_each_model_with_and_without_a_slash(
    several: TestClient, vectors: dict[str, np.typing.NDArray[np.float64]]
) -> None:
    for name in ("cats", "org/dogs"):
        for path in (f"/tei/{name}", f"/tei/{name}/"):
            assert same(several.post(path, json={"inputs": TEXT}).json(), vectors[name])
        health = several.get(f"/tei/{name}/")
        assert (health.status_code, health.content) == (200, b"")
    for path in ("/tei/birds/", "/tei/embed/"):
        assert several.get(path).status_code == several.post(path, json={}).status_code == 404


@pytest.mark.parametrize("route", ["health", "ping", ""])
def test_tei_health_of_an_unknown_model_does_not_list_the_models(
    several: TestClient, route: str
) -> None:
    response = several.get(f"/tei/birds/{route}")
    assert (response.status_code, response.text) == (404, "unknown model")


@pytest.mark.parametrize("path", ["/encode", "/classify", "/score", "/rerank", "/tag"])
def test_openapi_has_the_status_of_an_unknown_model(several: TestClient, path: str) -> None:
    operation = several.get("/openapi.json").json()["paths"][path]["post"]
    assert "404" in operation["responses"]


def test_request_to_the_root_of_tei_has_one_version(
    one: TestClient, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = one.post("/tei", json={"inputs": TEXT}).headers["X-Model-Version"]
    name = one.get("/info").json()["model"]

    async def swap_and_embed(request: Request, state: AppState) -> Response:
        options = ModelOptions(name=name, threads=1)
        await state.registry.load(ModelSpec(path=other_artifact.path, options=options))
        return await tei_embed.embed(request, state)

    monkeypatch.setitem(tei._HANDLERS, "embedding", swap_and_embed)
    assert one.post("/tei", json={"inputs": TEXT}).headers["X-Model-Version"] == before
    monkeypatch.undo()
    assert one.post("/tei", json={"inputs": TEXT}).headers["X-Model-Version"] != before


def test_metrics_are_labelled_by_model(several: TestClient) -> None:
    several.post("/encode", json={"inputs": TEXT, "model": "cats"})
    text = several.get("/metrics").text
    for model in ("cats", "org/dogs"):
        assert f'vitrine_queue_tokens{{model="{model}"}} 0.0' in text
        assert f'model="{model}",precision="float32",version="' in text


def test_settings_of_the_same_weights_are_different_versions_everywhere(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    shutil.copytree(small_artifact.path, tmp_path / "raw")
    edit_json(tmp_path / "raw" / "manifest.json", normalize=False)
    paths = {"unit": small_artifact.path, "raw": tmp_path / "raw", "copy": tmp_path / "copy"}
    shutil.copytree(small_artifact.path, paths["copy"])
    models = [{"name": name, "path": path} for name, path in paths.items()]
    seen = []
    with served(models={"served": models}) as client:
        listed = {model["name"]: model for model in client.get("/models").json()["models"]}
        lines = client.get("/metrics").text.splitlines()
        for name in paths:
            header = client.post("/encode", json={"inputs": TEXT, "model": name}).headers
            version = header["X-Model-Version"]
            assert listed[name]["version"] == version
            assert client.get(f"/models/{name}/info").json()["identity"].startswith(version)
            label = (
                f'{{engine="onnxruntime",model="{name}",precision="float32",version="{version}"}}'
            )
            assert f"vitrine_model_info{label} 1.0" in lines
            seen.append(version)
    unit, raw, copy = seen
    assert unit == copy != raw


@pytest.mark.slow
def test_debug_routes_select_the_model(several: TestClient) -> None:
    graphs = {}
    for name in ("cats", "org/dogs"):
        body = {"text": "cat", "target": {"type": "norm"}, "method": "saliency", "model": name}
        response = several.post("/debug/attribute", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["parity"]["agrees"]
        graphs[name] = response.json()["model"]["graph_sha256"]
    assert len(set(graphs.values())) == 2
