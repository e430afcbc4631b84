"""Several models in one process: names, routes, swaps and artifacts that change on disk."""

import base64
import gc
import json
import logging
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from models.artifact import Artifact
from models.engines import weight_bytes
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.manifest import CHECK, MANIFEST, TOKENIZER
from service.api.compat import tei, tei_embed
from service.api.middleware import RequestMiddleware
from service.api.state import AppState
from service.app import create_app
from service.inference.call_options import Deadline
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.registry import memory, registry
from service.inference.registry.served_models import ModelSpec
from service.settings import (
    ApiKey,
    AuthSettings,
    DebugSettings,
    EngineSettings,
    ModelSettings,
    ModelsSettings,
    ServedModel,
    Settings,
)
from tests.eventually import eventually
from tests.hostile_artifacts import copy_of, edit, edit_graph, make_slow
from tests.hostile_artifacts import replace as replace_file
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.serving import PATIENCE_S, lines_until, process, ready_model, serving, state_of

KEY = "admin-key-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
AUTH = AuthSettings(
    keys=(
        ApiKey(name="admin", key=SecretStr(KEY), scopes=("encode", "debug", "metrics", "admin")),
        ApiKey(name="user", key=SecretStr("user-key-0123456789"), scopes=("encode",)),
    )
)
TEXT = "The cat sat on the mat."
ENGINE = EngineSettings(threads=2)


@pytest.fixture(scope="module")
def several(small_artifact: Artifact, other_artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service with two models and no default."""
    served = (
        ServedModel(name="cats", path=small_artifact.path, aliases=("felines",)),
        ServedModel(name="org/dogs", path=other_artifact.path),
    )
    settings = Settings(
        models=ModelsSettings(served=served),
        engine=ENGINE,
        debug=DebugSettings(enabled=True, hosts=("testserver",)),
    )
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        yield client


@pytest.fixture(scope="module")
def vectors(
    small_artifact: Artifact, other_artifact: Artifact
) -> dict[str, np.typing.NDArray[np.float64]]:
    """The vector of the text by each model, as served alone."""
    found = {}
    for name, artifact in (("cats", small_artifact), ("org/dogs", other_artifact)):
        settings = Settings(model=ModelSettings(path=artifact.path), engine=ENGINE)
        with serving(create_app(settings)) as client:
            body = client.post("/encode", json={"inputs": TEXT}).json()
            found[name] = np.array(body["embeddings"])
    assert np.abs(found["cats"] - found["org/dogs"]).max() > 0.01
    return found


@pytest.fixture
def one(small_artifact: Artifact) -> Iterator[TestClient]:
    """A client, with the admin's key, of a service with one model."""
    settings = Settings(model=ModelSettings(path=small_artifact.path), engine=ENGINE, auth=AUTH)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        client.headers.update(HEADERS)
        yield client


def same(actual: object, expected: np.typing.NDArray[np.float64]) -> bool:
    return bool(np.abs(np.array(actual) - expected).max() < 1e-5)


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
    one: TestClient, path: str, body: dict[str, Any] | None
) -> None:
    response = one.request("GET" if body is None else "POST", path, json=body)
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
    served = tuple(ServedModel(name=name, path=path) for name, path in paths.items())
    settings = Settings(models=ModelsSettings(served=served), engine=ENGINE)
    seen = []
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
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
    for name in ("cats", "org/dogs", "cats"):
        body = {"text": "cat", "target": {"type": "norm"}, "method": "saliency", "model": name}
        response = several.post("/debug/attribute", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["parity"]["agrees"]
        graphs[name] = response.json()["model"]["graph_sha256"]
    assert len(set(graphs.values())) == 2


def test_swap_serves_the_new_version_and_its_path_brings_the_old_one_back(
    one: TestClient,
    small_artifact: Artifact,
    other_artifact: Artifact,
    vectors: dict[str, np.typing.NDArray[np.float64]],
) -> None:
    before = one.post("/encode", json={"inputs": TEXT})
    name = before.json()["model"]
    swapped = one.post(f"/models/{name}", json={"path": str(other_artifact.path)}).json()
    after = one.post("/encode", json={"inputs": TEXT})
    assert same(after.json()["embeddings"], vectors["org/dogs"])
    assert swapped["version"] == after.headers["X-Model-Version"]
    assert swapped["previous"] == {
        "version": before.headers["X-Model-Version"],
        "path": str(small_artifact.path),
    }
    again = one.post(f"/models/{name}", json={"path": swapped["previous"]["path"]}).json()
    assert again["version"] == before.headers["X-Model-Version"]
    last = one.post("/encode", json={"inputs": TEXT})
    assert last.json() == before.json()


def test_new_model_is_served_until_it_is_deleted(one: TestClient, other_artifact: Artifact) -> None:
    body = {"path": str(other_artifact.path), "aliases": ["second"]}
    assert one.post("/models/dogs", json=body).json()["previous"] is None
    assert one.post("/encode", json={"inputs": TEXT, "model": "second"}).json()["model"] == "dogs"
    assert one.delete("/models/dogs").status_code == 204
    assert one.post("/encode", json={"inputs": TEXT, "model": "second"}).status_code == 404
    assert one.post("/encode", json={"inputs": TEXT}).status_code == 200


def test_metrics_of_a_deleted_model_are_gone(one: TestClient, other_artifact: Artifact) -> None:
    one.post("/models/dogs", json={"path": str(other_artifact.path)})
    one.post("/encode", json={"inputs": TEXT, "model": "dogs"})
    assert 'model="dogs"' in one.get("/metrics").text
    one.delete("/models/dogs")
    one.post("/models/birds", json={"path": str(other_artifact.path / "source")})
    text = one.get("/metrics").text
    assert "dogs" not in text
    assert "birds" not in text


def tei_routes() -> set[str]:
    """The names of the routes under /tei."""
    paths = {route.path for route in tei.router.routes if isinstance(route, Route)}
    return {path.removeprefix("/tei/") for path in paths - {"/tei", "/tei/"}}


@pytest.mark.parametrize("name", [*sorted(tei_routes()), "org/predict", "org/"])
def test_names_that_are_ambiguous_under_tei_are_refused(
    one: TestClient, other_artifact: Artifact, name: str
) -> None:
    body = {"path": str(other_artifact.path)}
    for response in (
        one.post(f"/models/{name}", json=body),
        one.post("/models/dogs", json=body | {"aliases": [name]}),
    ):
        assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
        assert response.json()["detail"].startswith(
            "the name of this request is ambiguous in paths under /tei: the last part of a name"
        )
    assert len(one.get("/models").json()["models"]) == 1


def test_default_model_cannot_be_deleted(one: TestClient) -> None:
    name = one.get("/info").json()["model"]
    assert one.delete(f"/models/{name}").json()["code"] == "default_model"


def test_shadow_comparison_decides_about_the_swap(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    name = one.get("/info").json()["model"]
    version = one.get("/info").json()["graph_sha256"]
    texts = [TEXT, "A feline rested on the rug."]
    body = {"path": str(small_artifact.path), "texts": texts, "min_cosine": 0.999999}
    equal = one.post(f"/models/{name}", json=body).json()
    assert equal["shadow"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert equal["shadow"]["norm"] < 1e-5
    refused = one.post(f"/models/{name}", json=body | {"path": str(other_artifact.path)})
    assert (refused.status_code, refused.json()["code"]) == (422, "shadow")
    assert "min_cosine is 0.999999" in refused.json()["detail"]
    assert one.get("/info").json()["graph_sha256"] == version


@pytest.mark.parametrize(("text", "code"), [("", "empty"), ("a" * 100_001, "text_too_large")])
def test_invalid_text_of_a_comparison_is_named(
    one: TestClient, small_artifact: Artifact, text: str, code: str
) -> None:
    name = one.get("/info").json()["model"]
    body = {"path": str(small_artifact.path), "texts": [TEXT, text]}
    problem = one.post(f"/models/{name}", json=body).json()
    assert (problem["code"], problem["index"], problem["pointer"]) == (code, 1, "/texts/1")


@pytest.mark.parametrize("path", ["", ".", "is"])
def test_path_without_an_artifact_is_not_repeated(
    one: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = one.post("/models/dogs", json={"path": path}).json()
    assert problem["code"] == "invalid_artifact"
    assert problem["detail"] == (
        "the path is not an artifact: it has no manifest.json, which vitrine-export writes"
    )


def test_incompatible_version_needs_the_consent_of_the_request(
    one: TestClient, small_artifact: Artifact, tmp_path: Path
) -> None:
    shutil.copytree(small_artifact.path, tmp_path / "dot")
    edit_json(tmp_path / "dot" / MANIFEST, similarity="dot")
    before = one.get("/info").json()
    body = {"path": str(tmp_path / "dot")}
    for fields in ({}, {"allow_incompatible": False}, {"texts": [TEXT]}):
        refused = one.post(f"/models/{before['model']}", json=body | fields)
        problem = refused.json()
        assert (refused.status_code, problem["code"]) == (422, "incompatible")
        assert problem["pointer"] == "/path"
        assert "the similarity dot in place of cosine" in problem["detail"]
        assert one.get("/info").json() == before
    allowed = one.post(f"/models/{before['model']}", json=body | {"allow_incompatible": True})
    assert allowed.status_code == 200
    assert one.get("/info").json()["similarity"] == "dot"
    assert one.post("/score", json={"queries": TEXT, "documents": TEXT}).json()["kind"] == "dot"


@pytest.mark.slow
def test_version_of_another_width_leaves_the_old_one_serving(
    one: TestClient, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", "bert", hidden_size=48, num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    overrides = Overrides(pooling=["mean"])
    export(resolve(str(tmp_path / "model")), tmp_path / "wide", overrides=overrides)
    name = one.get("/info").json()["model"]
    response = one.post(f"/models/{name}", json={"path": str(tmp_path / "wide")})
    assert (response.status_code, response.json()["code"]) == (422, "incompatible")
    assert "the width 48 in place of 32" in response.json()["detail"]
    assert one.post("/encode", json={"inputs": TEXT}).json()["dimensions"] == 32


@pytest.mark.parametrize("damage", ["missing", "graph", "weights"])
def test_broken_artifact_leaves_the_old_version_serving(
    one: TestClient, other_artifact: Artifact, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    if damage != "missing":
        shutil.copytree(other_artifact.path, broken)
        file = broken / ("model.onnx" if damage == "graph" else "model.weights")
        file.write_bytes(file.read_bytes()[:-1])
    before = one.post("/encode", json={"inputs": TEXT})
    response = one.post(f"/models/{before.json()['model']}", json={"path": str(broken)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
    assert str(broken) not in response.text
    assert one.post("/encode", json={"inputs": TEXT}).json() == before.json()


PANICKING = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "panic": (lambda folder: edit(folder, TOKENIZER, normalizer=PANICKING), "tokenizer.json"),
    "manifest": (lambda folder: replace_file(folder, MANIFEST, b"[" * 100_000), "manifest.json"),
    "check": (lambda folder: replace_file(folder, CHECK, b"[" * 100_000), "check.json"),
    "type": (lambda folder: edit(folder, MANIFEST, hidden_size="x"), "hidden_size"),
    "graph": (lambda folder: replace_file(folder, "model.onnx", b"\x08"), "model.onnx"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_artifact_is_refused_with_its_fault(
    one: TestClient, other_artifact: Artifact, tmp_path: Path, name: str
) -> None:
    folder = copy_of(other_artifact.path, tmp_path / "hostile")
    change, fault = HOSTILE[name]
    change(folder)
    response = one.post("/models/another", json={"path": str(folder)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
    assert response.headers["Content-Type"] == "application/problem+json"
    assert fault in response.json()["detail"]
    assert one.post("/encode", json={"inputs": TEXT}).is_success


@pytest.mark.slow
def test_load_of_a_graph_without_end_stops_at_the_deadline_of_the_request(
    one: TestClient,
    other_artifact: Artifact,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = copy_of(other_artifact.path, tmp_path / "endless")
    edit_graph(folder, "model.onnx", make_slow)
    headers = {"X-Request-Timeout-Ms": "3000"}
    response = one.post("/models/another", json={"path": str(folder)}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (504, "deadline")
    assert "abandoned" not in caplog.text
    body = {"path": str(other_artifact.path)}
    assert one.post("/models/another", json=body).is_success  # loads wait for each other


@pytest.mark.parametrize(
    ("name", "aliases", "pointer"),
    [("b\x1b[31m", [], None), ("b\u2028c", [], None), ("b", ["c", "\u202ed"], "/aliases/1")],
)
def test_invalid_name_of_a_model_is_refused_without_repeating_it(
    one: TestClient, other_artifact: Artifact, name: str, aliases: list[str], pointer: str | None
) -> None:
    body = {"path": str(other_artifact.path), "aliases": aliases}
    response = one.post(f"/models/{quote(name, safe='')}", json=body)
    assert (response.status_code, response.json().get("pointer")) == (422, pointer)
    assert "must have printable characters only" in response.json()["detail"]
    assert one.get("/metrics").is_success


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_changes_require_the_scope_admin(one: TestClient, method: str) -> None:
    headers = {"Authorization": "Bearer user-key-0123456789"}
    response = one.request(method, "/models/a", json={"path": "/"}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_changes_are_refused_if_there_are_no_keys(client: TestClient, method: str) -> None:
    response = client.request(method, "/models/a", json={"path": "/"})
    assert (response.status_code, response.json()["code"]) == (403, "keys_required")


@pytest.fixture
def on_demand(small_artifact: Artifact, other_artifact: Artifact) -> Iterator[TestClient]:
    """A client of a service with the models `cats` and `dogs`, of which one fits into memory."""
    size = weight_bytes(small_artifact)
    served = tuple(
        ServedModel(name=name, path=artifact.path)
        for name, artifact in (("cats", small_artifact), ("dogs", other_artifact))
    )
    models = ModelsSettings(served=served, max_bytes=size, default="cats")
    with serving(create_app(Settings(models=models, engine=ENGINE))) as client:
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


def test_folder_and_list_of_models_are_mutually_exclusive(small_artifact: Artifact) -> None:
    served = (ServedModel(path=small_artifact.path),)
    models = ModelsSettings(folder=small_artifact.path.parent, served=served)
    reasons: list[str] = []
    with TestClient(create_app(Settings(models=models), on_fatal=reasons.append)):
        eventually(lambda: reasons)
    assert reasons == ["cannot start: models.folder and models.served are mutually exclusive"]


@pytest.mark.slow
def test_swaps_under_load_fail_no_request_and_mix_no_versions(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    name = one.get("/info").json()["model"]
    inputs = [TEXT, "A feline rested on the rug.", "dog", "Nothing at all happened today."]
    body = {"inputs": inputs, "encoding": "base64"}
    expected: dict[str, list[str]] = {}
    paths = [str(other_artifact.path), str(small_artifact.path)]
    for path in paths:
        one.post(f"/models/{name}", json={"path": path})
        response = one.post("/encode", json=body)
        expected[response.headers["X-Model-Version"]] = response.json()["embeddings"]
    assert len(expected) == 2
    served: set[str] = set()
    counts = {"requests": 0}
    is_done = threading.Event()

    def send() -> None:
        while not is_done.is_set():
            response = one.post("/encode", json=body)
            assert response.status_code == 200, response.text
            version = response.headers["X-Model-Version"]
            # Batches differ in shape, which changes the last bits.
            for actual, vector in zip(
                decoded(response.json()["embeddings"]), decoded(expected[version]), strict=True
            ):
                np.testing.assert_allclose(actual, vector, rtol=0, atol=1e-5)
            served.add(version)
            counts["requests"] += 1

    def is_served_on(requests: int) -> bool:
        return counts["requests"] >= requests or any(thread.error for thread in threads)

    threads = [Checked(send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for swap in range(10):
        response = one.post(f"/models/{name}", json={"path": paths[swap % 2]})
        assert response.status_code == 200, response.text
        enough = counts["requests"] + 5
        eventually(partial(is_served_on, enough))
    is_done.set()
    for thread in threads:
        thread.join()
        assert thread.error is None
    assert served == expected.keys()


class Checked(threading.Thread):
    """A thread that keeps the exception that ended it."""

    def __init__(self, work: Any) -> None:  # noqa: ANN401
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.error = error


def decoded(embeddings: Sequence[str]) -> list[np.typing.NDArray[np.float32]]:
    return [np.frombuffer(base64.b64decode(vector), "<f4") for vector in embeddings]


@pytest.fixture
def folder(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A folder of artifacts, with the model `cats`."""
    models = tmp_path / "models"
    shutil.copytree(small_artifact.path, models / "cats")
    return models


def replace(folder: Path, artifact: Artifact) -> None:
    """Replace an artifact by another one, as the README tells."""
    temporary = folder.with_name(f".{folder.name}")
    shutil.copytree(artifact.path, temporary)
    if folder.exists():
        folder.rename(folder.with_name(".old"))
    temporary.rename(folder)


def test_scan_loads_new_and_changed_artifacts_and_unloads_deleted_ones(
    folder: Path,
    other_artifact: Artifact,
    vectors: dict[str, np.typing.NDArray[np.float64]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vitrine")
    settings = Settings(models=ModelsSettings(folder=folder, watch_s=0.01), engine=ENGINE)

    def vector(model: str) -> object:
        return client.post("/encode", json={"inputs": TEXT, "model": model}).json()["embeddings"]

    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert same(vector("cats"), vectors["cats"])
        replace(folder / "dogs", other_artifact)
        eventually(lambda: len(client.get("/models").json()["models"]) == 2)
        assert same(vector("dogs"), vectors["org/dogs"])
        replace(folder / "cats", other_artifact)
        eventually(lambda: same(vector("cats"), vectors["org/dogs"]))
        (folder / "dogs").rename(folder / ".gone")
        eventually(lambda: len(client.get("/models").json()["models"]) == 1)
        # The artifact of the default model cannot be missed.
        (folder / "cats").rename(folder / ".gone too")
        shutil.copytree(other_artifact.path, folder / "birds")
        eventually(lambda: "the default model cannot be deleted" in caplog.text)
        assert same(vector("cats"), vectors["org/dogs"])


def test_artifact_that_is_copied_slowly_is_loaded_when_it_is_complete(
    folder: Path, other_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(models=ModelsSettings(folder=folder), engine=ENGINE)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert client.portal is not None
        shutil.copytree(
            other_artifact.path, folder / "dogs", ignore=shutil.ignore_patterns("*.weights")
        )
        client.portal.call(state_of(client).watch.scan)
        assert "cannot load" in caplog.text
        shutil.copy(other_artifact.path / "model.weights", folder / "dogs")
        client.portal.call(state_of(client).watch.scan)
        assert client.post("/encode", json={"inputs": TEXT, "model": "dogs"}).is_success


@pytest.mark.slow
def test_sighup_loads_a_changed_artifact(folder: Path, other_artifact: Artifact) -> None:
    settings = {"VITRINE_MODEL__PATH": str(folder / "cats")}
    with process(**settings) as started:
        url = lines_until(started, r"Serving .* on (http://\S+)")[1][1]

        def version() -> str:
            body = {"inputs": TEXT}
            return httpx2.post(f"{url}/encode", json=body, timeout=PATIENCE_S).headers[
                "X-Model-Version"
            ]

        before = version()
        replace(folder / "cats", other_artifact)
        os.kill(started.pid, signal.SIGHUP)
        eventually(lambda: version() != before)


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
def test_sigusr1_logs_the_state(small_artifact: Artifact) -> None:
    with process(VITRINE_MODEL__PATH=str(small_artifact.path)) as started:
        lines_until(started, r"Serving .* on (http://\S+)")
        os.kill(started.pid, signal.SIGUSR1)
        line = lines_until(started, r"state: (\{.*\})")[1][1]
        assert json.loads(line)["models"][0]["path"] == str(small_artifact.path)


def test_alias_of_another_model_is_refused_without_repeating_it(
    one: TestClient, other_artifact: Artifact
) -> None:
    name = one.get("/info").json()["model"]
    body = {"path": str(other_artifact.path), "aliases": [name]}
    response = one.post("/models/another", json=body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
    assert (
        response.json()["detail"]
        == "two models have the name of this request; every name must be unique"
    )


def test_model_beyond_the_memory_budget_is_refused_without_repeating_its_name(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        model=ModelSettings(path=small_artifact.path),
        models=ModelsSettings(max_bytes=weight_bytes(small_artifact)),
        engine=ENGINE,
        auth=AUTH,
    )
    body = {"path": str(small_artifact.path)}
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        monkeypatch.setattr(registry, "read_artifact", lambda _: (small_artifact, 10**9))
        response = client.post("/models/another", json=body, headers=HEADERS)
    assert response.status_code == 422
    assert response.json()["detail"].startswith("the model of this request has 1000000000 bytes")


@pytest.mark.slow
def test_scope_of_a_finished_request_does_not_keep_a_replaced_model_in_memory(
    one: TestClient, other_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    scopes: list[Scope] = []
    serve = RequestMiddleware.__call__

    async def kept(self: RequestMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)  # as the server does, until the connection has another request
        await serve(self, scope, receive, send)

    monkeypatch.setattr(RequestMiddleware, "__call__", kept)
    name = one.post("/encode", json={"inputs": TEXT}).json()["model"]
    replaced = weakref.ref(ready_model(one))
    assert one.post(f"/models/{name}", json={"path": str(other_artifact.path)}).status_code == 200

    def is_freed() -> bool:
        gc.collect()
        return replaced() is None

    eventually(is_freed)
    assert len(scopes) == 2


def test_new_version_under_an_alias_is_refused_with_the_name_of_the_model(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    one.post("/models/dogs", json={"path": str(small_artifact.path), "aliases": ["hounds"]})
    response = one.post("/models/hounds", json={"path": str(other_artifact.path)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid")
    assert (
        response.json()["detail"]
        == "the name is an alias of the model dogs; use the name of the model"
    )
    assert one.get("/models/hounds/info").json()["model"] == "dogs"


def test_new_version_keeps_the_aliases_of_the_old_one(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    one.post("/models/dogs", json={"path": str(small_artifact.path), "aliases": ["hounds"]})
    one.post("/models/dogs", json={"path": str(other_artifact.path)})
    assert one.post("/encode", json={"inputs": TEXT, "model": "hounds"}).json()["model"] == "dogs"
    one.post("/models/dogs", json={"path": str(other_artifact.path), "aliases": []})
    assert one.post("/encode", json={"inputs": TEXT, "model": "hounds"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("/models/dogs", {"texts": [TEXT]}, "/texts"),
        ("/models/dogs", {"min_cosine": 0.9}, "/min_cosine"),
        ("/models/", {}, None),
        (f"/models/{'n' * 257}", {}, None),
    ],
)
def test_load_without_effect_or_name_is_refused(
    one: TestClient, other_artifact: Artifact, path: str, body: dict[str, Any], pointer: str | None
) -> None:
    response = one.post(path, json={"path": str(other_artifact.path)} | body)
    assert response.status_code == 422, response.text
    assert response.json().get("pointer") == pointer
    assert len(one.get("/models").json()["models"]) == 1


def test_scan_leaves_a_model_that_was_moved_to_another_path(
    folder: Path, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    replace(folder / "dogs", other_artifact)
    settings = Settings(
        models=ModelsSettings(folder=folder, default="cats"), engine=ENGINE, auth=AUTH
    )
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert client.portal is not None
        client.headers.update(HEADERS)
        moved = client.post("/models/dogs", json={"path": str(small_artifact.path)})
        assert moved.status_code == 200, moved.text
        (folder / "dogs").rename(folder / ".gone")
        client.portal.call(state_of(client).watch.scan)
        assert client.post("/encode", json={"inputs": TEXT, "model": "dogs"}).is_success


def test_scan_keeps_the_aliases_that_a_request_has_set(
    folder: Path, other_artifact: Artifact
) -> None:
    settings = Settings(models=ModelsSettings(folder=folder), engine=ENGINE, auth=AUTH)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert client.portal is not None
        client.headers.update(HEADERS)
        body = {"path": str(folder / "cats"), "aliases": ["felines"]}
        first = client.post("/models/cats", json=body).json()["version"]
        replace(folder / "cats", other_artifact)
        client.portal.call(state_of(client).watch.scan)
        response = client.post("/encode", json={"inputs": TEXT, "model": "felines"})
        assert response.status_code == 200
        assert response.headers["X-Model-Version"] != first


def test_patient_scan_unloads_an_artifact_that_is_missing_twice(
    folder: Path, other_artifact: Artifact
) -> None:
    replace(folder / "dogs", other_artifact)
    settings = Settings(models=ModelsSettings(folder=folder, default="cats"), engine=ENGINE)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert client.portal is not None
        scan = partial(state_of(client).watch.scan, is_patient=True)
        (folder / "dogs").rename(folder / ".gone")
        client.portal.call(scan)
        assert len(client.get("/models").json()["models"]) == 2
        client.portal.call(scan)
        assert len(client.get("/models").json()["models"]) == 1


def test_missing_artifact_of_a_configured_path_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model=ModelSettings(path=folder / "cats"), engine=ENGINE)
    with serving(create_app(settings, on_fatal=pytest.fail)) as client:
        assert client.portal is not None
        (folder / "cats").rename(folder / ".gone")
        for _ in range(2):
            client.portal.call(state_of(client).watch.scan)
        assert caplog.text.count("is gone; its model stays in service") == 1
        assert client.post("/encode", json={"inputs": TEXT}).is_success
