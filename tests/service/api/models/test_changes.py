"""Models are loaded, compared, swapped and deleted over HTTP."""

import base64
import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from models.artifact import Artifact
from models.engines import weight_bytes
from models.export.exporter import export
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.manifest import CHECK, MANIFEST, TOKENIZER
from service.api.compat import tei
from service.api.middleware import RequestMiddleware
from service.inference.registry import registry
from tests.eventually import eventually
from tests.hostile_artifacts import copy_of, edit, edit_graph, make_slow
from tests.hostile_artifacts import replace as replace_file
from tests.models.checkpoints import edit_json, save_checkpoint, save_tokenizer
from tests.service.api.models.conftest import AUTH, HEADERS, TEXT, Checked, same
from tests.service.api.posting import refused
from tests.serving import ready_model, served


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
    unchanged: TestClient, other_artifact: Artifact, name: str
) -> None:
    body = {"path": str(other_artifact.path)}
    for response, pointer in (
        (unchanged.post(f"/models/{name}", json=body), None),
        (unchanged.post("/models/dogs", json=body | {"aliases": ["hounds", name]}), "/aliases/1"),
    ):
        assert (response.status_code, response.json()["code"]) == (422, "invalid")
        assert response.json().get("pointer") == pointer
        assert response.json()["detail"].startswith(
            "the name of this request is ambiguous in paths under /tei: the last part of a name"
        )


def test_default_model_cannot_be_deleted(unchanged: TestClient) -> None:
    name = unchanged.get("/info").json()["model"]
    assert unchanged.delete(f"/models/{name}").json()["code"] == "default_model"


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
    unchanged: TestClient, small_artifact: Artifact, text: str, code: str
) -> None:
    name = unchanged.get("/info").json()["model"]
    body = {"path": str(small_artifact.path), "texts": [TEXT, text]}
    problem = unchanged.post(f"/models/{name}", json=body).json()
    assert (problem["code"], problem["index"], problem["pointer"]) == (code, 1, "/texts/1")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [({"path": ""}, "/path"), ({"path": "is", "eval": {"folder": ""}}, "/eval/folder")],
)
def test_empty_path_is_not_the_working_directory(
    unchanged: TestClient,
    small_artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    pointer: str,
) -> None:
    monkeypatch.chdir(small_artifact.path)
    problem = unchanged.post("/models/dogs", json=body).json()
    assert (problem["code"], problem["pointer"]) == ("invalid", pointer)
    assert problem["detail"] == "String should have at least 1 character"


@pytest.mark.parametrize("path", [" ", ".", "is"])
def test_path_without_an_artifact_is_not_repeated(
    unchanged: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = unchanged.post("/models/dogs", json={"path": path}).json()
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
    unchanged: TestClient, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "model", "bert", hidden_size=48, num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    overrides = Overrides(pooling=["mean"])
    export(resolve(str(tmp_path / "model")), tmp_path / "wide", overrides=overrides)
    name = unchanged.get("/info").json()["model"]
    response = unchanged.post(f"/models/{name}", json={"path": str(tmp_path / "wide")})
    assert (response.status_code, response.json()["code"]) == (422, "incompatible")
    assert "the width 48 in place of 32" in response.json()["detail"]
    assert unchanged.post("/encode", json={"inputs": TEXT}).json()["dimensions"] == 32


@pytest.mark.parametrize("damage", ["missing", "graph", "weights"])
def test_broken_artifact_leaves_the_old_version_serving(
    unchanged: TestClient, other_artifact: Artifact, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    if damage != "missing":
        shutil.copytree(other_artifact.path, broken)
        file = broken / ("model.onnx" if damage == "graph" else "model.weights")
        file.write_bytes(file.read_bytes()[:-1])
    before = unchanged.post("/encode", json={"inputs": TEXT})
    response = unchanged.post(f"/models/{before.json()['model']}", json={"path": str(broken)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
    assert str(broken) not in response.text
    assert unchanged.post("/encode", json={"inputs": TEXT}).json() == before.json()


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
    unchanged: TestClient, other_artifact: Artifact, tmp_path: Path, name: str
) -> None:
    folder = copy_of(other_artifact.path, tmp_path / "hostile")
    change, fault = HOSTILE[name]
    change(folder)
    response = unchanged.post("/models/another", json={"path": str(folder)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
    assert response.headers["Content-Type"] == "application/problem+json"
    assert fault in response.json()["detail"]
    assert unchanged.post("/encode", json={"inputs": TEXT}).is_success


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


def test_load_with_an_invalid_deadline_does_not_begin(
    unchanged: TestClient, other_artifact: Artifact
) -> None:
    headers = {"X-Request-Timeout-Ms": "soon"}
    response = unchanged.post("/models/b", json={"path": str(other_artifact.path)}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "timeout")
    gc.collect()  # warns of a coroutine that was not awaited


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_changes_require_the_scope_admin(unchanged: TestClient, method: str) -> None:
    headers = {"Authorization": "Bearer user-key-0123456789"}
    response = unchanged.request(method, "/models/a", json={"path": "/"}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_changes_are_refused_if_there_are_no_keys(client: TestClient, method: str) -> None:
    response = client.request(method, "/models/a", json={"path": "/"})
    assert (response.status_code, response.json()["code"]) == (403, "keys_required")


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


def decoded(embeddings: Sequence[str]) -> list[np.typing.NDArray[np.float32]]:
    return [np.frombuffer(base64.b64decode(vector), "<f4") for vector in embeddings]


def test_model_beyond_the_memory_budget_is_refused_without_repeating_its_name(
    small_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {"max_bytes": weight_bytes(small_artifact)}
    body = {"path": str(small_artifact.path)}
    with served(small_artifact.path, models=models, auth=AUTH) as client:
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


def test_change_under_an_alias_is_refused_with_the_name_of_the_model(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    one.post("/models/dogs", json={"path": str(small_artifact.path), "aliases": ["hounds"]})
    response = one.post("/models/hounds", json={"path": str(other_artifact.path)})
    assert (response.status_code, response.json()["code"]) == (422, "invalid")
    assert (
        response.json()["detail"]
        == "the name is an alias of the model dogs; use the name of the model"
    )
    deletion = one.delete("/models/hounds")
    assert (deletion.status_code, deletion.json()["detail"]) == (422, response.json()["detail"])
    assert one.get("/models/hounds/info").json()["model"] == "dogs"


def test_new_version_keeps_the_aliases_of_the_old_one(
    one: TestClient, small_artifact: Artifact, other_artifact: Artifact
) -> None:
    one.post("/models/dogs", json={"path": str(small_artifact.path), "aliases": ["hounds"]})
    one.post("/models/dogs", json={"path": str(other_artifact.path)})
    assert one.post("/encode", json={"inputs": TEXT, "model": "hounds"}).json()["model"] == "dogs"
    one.post("/models/dogs", json={"path": str(other_artifact.path), "aliases": []})
    assert one.post("/encode", json={"inputs": TEXT, "model": "hounds"}).status_code == 404


PRINTABLE = "must have printable characters only"
TEXTS = "there is no served version to compare with; omit texts"
TWO_MODELS = "two models have the name of this request; every name must be unique"
# By name of the model and fields of the body: the pointer and the detail.
INVALID_LOADS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("dogs", {"path": 5}, "/path", "Input should be a valid string"),
    ("dogs", {"texts": [TEXT]}, "/texts", TEXTS),
    ("dogs", {"min_cosine": 0.9}, "/min_cosine", "min_cosine needs texts to compare"),
    (
        "dogs",
        {"allow_incompatible": "true"},
        "/allow_incompatible",
        "Input should be a valid boolean",
    ),
    ("dogs", {"share": "inf"}, "/share", "Input should be a valid number"),
    ("", {}, None, "a name must have 1 to 256 characters"),
    ("n" * 257, {}, None, "a name must have 1 to 256 characters"),
    ("b\x1b[31m", {}, None, f"a name {PRINTABLE}"),
    ("b\u2028c", {}, None, f"a name {PRINTABLE}"),
    ("b", {"aliases": ["c", "\u202ed"]}, "/aliases/1", f"an alias {PRINTABLE}"),
    ("dogs", {"aliases": ["hounds", "small"]}, "/aliases/1", TWO_MODELS),
    (
        "dogs",
        {"aliases": ["dogs", "hounds", "hounds"]},
        "/aliases/1",
        "a model has the alias of this request twice",
    ),
]


@pytest.mark.parametrize(("name", "fields", "pointer", "detail"), INVALID_LOADS)
def test_invalid_load_is_refused_without_repeating_names(
    unchanged: TestClient,
    other_artifact: Artifact,
    name: str,
    fields: dict[str, Any],
    pointer: str | None,
    detail: str,
) -> None:
    body = {"path": str(other_artifact.path), **fields}
    problem = refused(unchanged, f"/models/{quote(name, safe='')}", **body)
    code = "shadow" if "texts" in fields else "invalid"
    assert (problem["status"], problem["code"], problem.get("pointer")) == (422, code, pointer)
    assert problem["detail"] == detail
    assert unchanged.get("/metrics").is_success
