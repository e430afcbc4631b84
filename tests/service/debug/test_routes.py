import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact, sha256
from models.export.exporter import export
from models.export.sources import resolve
from models.gradients import inputs
from models.gradients.inputs import Method, Row
from models.identity import identity_of
from service.app import create_app
from service.debug.child import jobs
from service.debug.child.jobs import nonfinite
from service.debug.flow import CosineObjective, FlowJob, FlowRequest
from service.debug.parity import ParityResponse
from service.debug.pipeline.messages import Done, NonFinite, encode_reply
from service.debug.target import TARGETS, Target
from service.inference.errors import InvalidInput
from service.settings import DebugSettings, Settings
from tests.eventually import eventually
from tests.models.gradients.toys import toy_model
from tests.models.jina_v3 import TASKS, save_with_tokenizer
from tests.service.debug.conftest import ask
from tests.service.debug.held_worker import held, held_workers
from tests.serving import flat_routes, serving, state_of

CAT = "The cat sat on the mat."
FELINE = "A feline rested on the rug."
COSINE = {"type": "cosine", "text": FELINE}

Json = dict[str, Any]


@pytest.fixture(scope="module")
def debugging(settings: Settings) -> Settings:
    # No deadline is hit by accident on a slow machine.
    engine = settings.engine.model_copy(update={"timeout_s": 300.0})
    limits = settings.limits.model_copy(update={"request_s": 300.0})
    debug = DebugSettings(enabled=True, hosts=("testserver",), device="cpu", deadline_s=300)
    return settings.model_copy(update={"engine": engine, "limits": limits, "debug": debug})


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file; while it exists, no gradient job runs."""
    path = tmp_path_factory.mktemp("hold") / "hold"
    with held_workers(path):
        yield path


@pytest.fixture(scope="module")
def client(debugging: Settings, hold: Path) -> Iterator[TestClient]:
    del hold  # in place before the application is created
    with serving(create_app(debugging)) as client:
        yield client


def vector(client: TestClient, text: str, *, normalize: bool = True) -> np.ndarray:
    result = client.post("/encode", json={"inputs": text, "normalize": normalize}).json()
    return np.array(result["embeddings"][0])


def test_flow_lists_every_step_and_the_first_non_finite_one_in_float16(client: TestClient) -> None:
    pairs = [CAT, FELINE, "A dog sat on the mat.", "The cat lay on a rug."]
    result = ask(client, "flow", texts=pairs, objective={"type": "mnrl"})
    names = [step["name"] for step in result["steps"]]
    assert names[0] == "embeddings.words"
    assert names[-1] == "objective"
    assert {f"layers.{i}.norm2" for i in range(2)} <= set(names)
    assert all(step["gradient"]["l2"] > 0 for step in result["steps"])
    assert (result["first_nonfinite"], result["verdicts"]) == (None, [])
    scores = (
        20
        * np.stack([vector(client, t) for t in pairs[::2]])
        @ np.stack([vector(client, t) for t in pairs[1::2]]).T
    )
    expected = np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores))
    assert result["objective"] == pytest.approx(expected, rel=1e-4)

    # 2^32 exceeds float16: the gradient overflows at the cast to half precision.
    huge = {"emulate": "float16", "loss_scale": 2.0**32}
    broken = ask(client, "flow", texts=pairs, objective={"type": "mnrl"}, **huge)
    assert broken["first_nonfinite"]["phase"] == "backward"
    assert broken["first_nonfinite"]["role"] == "producer"
    assert broken["nonfinite_steps"][0] == broken["first_nonfinite"]


def test_flow_computes_every_objective(client: TestClient) -> None:
    cat = vector(client, CAT)
    objectives: list[tuple[Json, float]] = [
        ({"type": "cosine"}, cat @ vector(client, FELINE)),
        ({"type": "dot", "vector": [1.0] * 32}, cat.sum() + vector(client, FELINE).sum()),
        ({"type": "mse", "vectors": [[0.0] * 32] * 2}, 1 / 32),
        ({"type": "cotangent", "vectors": [[1.0] * 32, [0.0] * 32]}, cat.sum()),
    ]
    for objective, value in objectives:
        result = ask(client, "flow", texts=[CAT, FELINE], objective=objective)
        assert result["objective"] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"texts": [CAT], "objective": {"type": "cosine"}}, "objective", "/objective"),
        ({"texts": [CAT, ""], "objective": {"type": "cosine"}}, "empty", "/texts/1"),
        ({"texts": [], "objective": {"type": "cosine"}}, "invalid", "/texts"),
        (
            {"texts": [CAT], "objective": {"type": "dot", "vector": [1.0]}},
            "objective",
            "/objective",
        ),
    ],
)
def test_invalid_flow_request_has_code_and_pointer(
    client: TestClient, body: Json, code: str, pointer: str
) -> None:
    problem = client.post("/debug/flow", json=body).json()
    assert (problem["code"], problem["pointer"]) == (code, pointer)


COTANGENT = [1.0, *[0.0] * 30, -2.0]


def test_vjp_equals_the_attribution_of_a_dot_product(client: TestClient) -> None:
    for reduce, method in (("norm", "saliency"), ("dot", "grad_x_input")):
        result = ask(client, "vjp", text=CAT, cotangent=COTANGENT, reduce=reduce)
        target = {"type": "dot", "vector": COTANGENT}
        same = ask(client, "attribute", text=CAT, target=target, method=method)
        np.testing.assert_allclose(result["gradient"], same["scores"], rtol=1e-4, atol=1e-6)
        assert result["tokens"] == same["tokens"]


@pytest.mark.slow
def test_full_vjp_is_refused_unless_it_is_switched_on(
    client: TestClient, debugging: Settings
) -> None:
    body = {"text": CAT, "cotangent": COTANGENT, "reduce": "full"}
    refused = client.post("/debug/vjp", json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "full_gradients")
    debug = debugging.debug.model_copy(update={"full_gradients": True})
    with serving(create_app(debugging.model_copy(update={"debug": debug}))) as open_client:
        full = np.array(ask(open_client, "vjp", **body)["gradient"])
    norms = ask(client, "vjp", text=CAT, cotangent=COTANGENT)["gradient"]
    np.testing.assert_allclose(np.linalg.norm(full, axis=1), norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("cotangent", "code"),
    [([0.0] * 32, "zero_cotangent"), ([1.0], "vector_length"), ([], "invalid")],
)
def test_invalid_cotangent_has_code_and_pointer(
    client: TestClient, cotangent: list[float], code: str
) -> None:
    problem = client.post("/debug/vjp", json={"text": CAT, "cotangent": cotangent}).json()
    assert (problem["code"], problem["pointer"]) == (code, "/cotangent")


def test_parity_of_the_served_graph_and_the_reference_model_passes(client: TestClient) -> None:
    result = ask(client, "parity")
    assert (result["passes"], result["failures"]) == (True, [])
    assert len(result["weights"]) == 37
    assert {weight["max_abs"] for weight in result["weights"]} == {0.0}
    assert [layer["layer"] for layer in result["curve"]][-1] == "output"
    assert len(result["vectors"]) == 8
    one = ask(client, "parity", texts=[CAT])
    assert len(one["vectors"]) == 1
    assert one["parity"]["cosine"] >= 1 - 1e-6


def test_responses_identify_the_model_and_its_parity(
    client: TestClient, small_artifact: Artifact
) -> None:
    manifest = small_artifact.manifest
    result = ask(client, "attribute", text=CAT, target=COSINE, method="saliency")
    assert result["model"] == {
        "name": manifest.name,
        "version": identity_of(small_artifact, "onnxruntime", "float32")[:12],
        "weights_sha256": manifest.weights_sha256,
        "graph_sha256": small_artifact.graph_sha256("onnxruntime"),
        "tokenizer_sha256": manifest.files["tokenizer.json"],
    }
    assert result["parity"]["cosine"] >= 1 - 1e-6
    assert result["parity"]["max_abs"] < 1e-5
    assert result["parity"]["engine"] == "onnxruntime; precision=float32"
    assert result["wall_ms"] > 0


def test_dry_run_returns_the_cost_and_starts_no_process(debugging: Settings) -> None:
    with serving(create_app(debugging)) as client:
        result = ask(client, "attribute", text=CAT, target=COSINE, dry_run=True)
        assert result["cost"] == {"token_steps": 9 * 256, "limit": 131072}
        assert result.keys() == {"model", "cost"}
        result = ask(client, "attribute/pair", a=CAT, b=FELINE, dry_run=True)
        assert result["cost"]["token_steps"] == 9 + 10
        result = ask(client, "attribute/pair", a=CAT, b=FELINE, layer="words", dry_run=True)
        assert result["cost"]["token_steps"] == 128 * (9**2 + 10**2)
        assert state_of(client).gradients.pid is None


@pytest.mark.slow
def test_capabilities_list_every_accepted_value(debugging: Settings) -> None:
    with serving(create_app(debugging)) as client:  # a new one starts the gradient process
        capabilities = client.get("/debug/capabilities").json()
    assert capabilities["layers"] == [
        "words",
        "embeddings",
        "layers.0",
        "output",
    ]
    assert capabilities["norms"][:2] == ["embeddings.norm", "layers.0.norm1"]
    assert capabilities["methods"] == list(get_args(Method))
    assert capabilities["objectives"] == list(get_args(inputs.ObjectiveName))
    assert "large_mean" in capabilities["distributions"]
    assert capabilities["targets"] == [*("cosine", "similarity", "margin", "dot", "dim", "norm")]
    assert capabilities["baselines"] == ["pad", "mask", "zero"]
    assert (capabilities["device"], capabilities["op"]) == (
        "cpu",
        {"forward": "cpp", "backward": "cpp"},
    )


LONG = "word " * 300


def test_text_beyond_the_token_limit_of_gradients_is_refused(debugging: Settings) -> None:
    debug = debugging.debug.model_copy(update={"max_tokens": 8})
    with serving(create_app(debugging.model_copy(update={"debug": debug}))) as client:
        response = client.post("/debug/attribute/pair", json={"a": "short", "b": CAT})
        assert response.json()["code"] == "too_many_tokens"
        assert response.json()["pointer"] == "/b"


def test_disabled_debug_routes_return_404(settings: Settings) -> None:
    with serving(create_app(settings)) as client:
        routes = [route.path for route in flat_routes(create_app(settings).routes)]
        debug = [path for path in routes if path.startswith("/debug/") and path != "/debug/state"]
        assert len(debug) >= 7
        for path in [*debug, "/debug"]:
            reads = ("/debug", "/debug/capabilities", "/debug/assets/{name}")
            response = client.request("GET" if path in reads else "POST", path, json={})
            assert (response.status_code, response.json()["code"]) == (404, "disabled")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "host"),
        ({"Host": "evil.example:8000"}, "host"),
        ({"Host": "testserver", "Origin": "http://evil.example"}, "origin"),
        ({"Host": "testserver", "Origin": "http://eviltestserver"}, "origin"),
        ({"Host": "testserver", "Origin": "null"}, "origin"),
        ({"Host": "testserver", "Origin": "http://testserver"}, None),
        ({"Host": "testserver:8000", "Origin": "http://testserver:8000"}, None),
        ({"Host": "testserver", "Sec-Fetch-Site": "cross-site"}, "origin"),
        ({"Host": "testserver", "Sec-Fetch-Site": "same-site"}, "origin"),
        ({"Host": "testserver", "Sec-Fetch-Site": "same-origin"}, None),
    ],
)
def test_pages_of_other_hosts_are_refused(
    client: TestClient, headers: dict[str, str], code: str | None
) -> None:
    body = {"text": CAT, "target": COSINE, "dry_run": True}
    response = client.post("/debug/attribute", json=body, headers=headers)
    assert response.status_code == (403 if code else 200)
    assert response.json().get("code") == code


def test_non_finite_numbers_become_null_and_are_listed() -> None:
    result = {
        "value": math.nan,
        "scores": np.array([1.0, -math.inf]),
        "path": [[0.0, math.inf]],
        "pid": 3,
    }
    numbers = nonfinite(result)
    assert numbers == [
        NonFinite("/value", "nan"),
        NonFinite("/scores/1", "-inf"),
        NonFinite("/path/0/1", "inf"),
    ]
    reply = json.loads(encode_reply(Done(result, numbers, True, 1.0)))
    assert reply["result"] == {
        "value": None,
        "scores": [1.0, None],
        "path": [[0.0, None]],
        "pid": 3,
    }
    assert reply["nonfinite"][1] == {"pointer": "/scores/1", "kind": "-inf"}


def test_errors_within_flow_are_not_errors_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("internal")

    rows = [Row([1, 2]), Row([3, 4])]
    request = FlowRequest(texts=["", ""], objective=CosineObjective(type="cosine"))
    flow_job = FlowJob(request=request, rows=rows, compare=[])
    monkeypatch.setattr(jobs, "flow", broken)
    with pytest.raises(ValueError, match="internal"):
        jobs._flow(toy_model(), flow_job)
    with pytest.raises(InvalidInput, match="even number of texts"):
        jobs._flow(toy_model(), replace(flow_job, rows=rows[:1]))


def types_of(union: object) -> set[str]:
    """The values of `type` in a discriminated union of request models."""
    return {
        get_args(model.model_fields["type"].annotation)[0] for model in get_args(get_args(union)[0])
    }


def test_requests_accept_exactly_the_named_targets_and_objectives() -> None:
    assert types_of(Target) == set(chain(*TARGETS.values()))
    objective = FlowRequest.model_fields["objective"].annotation
    names = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(objective)}
    assert names == set(get_args(inputs.ObjectiveName))


def test_response_models_document_every_field_and_property_of_a_result() -> None:
    schema = ParityResponse.model_json_schema()
    assert {"passes", "failures", "curve"} <= schema["properties"].keys()
    assert schema["$defs"]["WeightDifference"]["properties"].keys() == {"name", "max_abs", "status"}
    for model in (schema, *schema["$defs"].values()):
        described = {"files", "failures", "status", "relative"} & model["properties"].keys()
        assert all(model["properties"][name].get("description") for name in described)
    difference = schema["$defs"]["LayerDifference"]["properties"]["relative"]
    assert [kind["type"] for kind in difference["anyOf"]] == ["number", "null"]


@pytest.mark.slow  # the gradient process is ended and started again
def test_client_timeout_header_bounds_a_job(client: TestClient, hold: Path) -> None:
    body = {"text": CAT, "target": COSINE}
    with held(hold):
        response = client.post(
            "/debug/attribute", json=body, headers={"X-Request-Timeout-Ms": "50"}
        )
    assert (response.status_code, response.json()["code"]) == (504, "deadline")
    assert "deadline of 0.05 s exceeded" in response.json()["detail"]
    for dry_run in (False, True):
        response = client.post(
            "/debug/attribute",
            json={"text": CAT, "target": COSINE, "dry_run": dry_run},
            headers={"X-Request-Timeout-Ms": "soon"},
        )
        assert (response.status_code, response.json()["code"]) == (400, "timeout")
    ask(client, "attribute", text=CAT, target=COSINE)


@pytest.mark.slow  # the gradient process is ended and started again
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("attribute", {"text": CAT, "target": COSINE, "faithfulness": "words"}),
        ("activations", {"texts": [CAT], "taps": ["output"]}),
        ("patch", {"text": CAT, "source": CAT, "target": COSINE, "taps": ["output"]}),
    ],
)
def test_job_of_every_kind_ends_at_the_deadline_of_its_request(
    client: TestClient, hold: Path, path: str, body: Json
) -> None:
    def post(**headers: str) -> httpx2.Response:
        response: httpx2.Response = client.post(f"/debug/{path}", json=body, headers=headers)
        return response

    assert post().status_code == 200
    process = state_of(client).gradients.pid
    with held(hold):
        response = post(**{"X-Request-Timeout-Ms": "50"})
        assert (response.status_code, response.json()["code"]) == (504, "deadline")
        eventually(lambda: state_of(client).gradients.pid != process)
    assert post().status_code == 200


def test_flow_and_parity_cost_counts_every_traced_step(
    client: TestClient,
) -> None:
    flow = ask(client, "flow", texts=[CAT, FELINE], objective={"type": "cosine"})
    assert flow["cost"]["token_steps"] == 4 * (9 + 10) + 2 * 150
    parity = ask(client, "parity", texts=[CAT])
    assert parity["cost"]["token_steps"] == 4 * 9


@pytest.mark.slow
def test_parity_names_files_that_are_changed_under_the_service(
    debugging: Settings, small_artifact: Artifact, tmp_path: Path
) -> None:
    copy, moved = tmp_path / "artifact", tmp_path / "moved"
    shutil.copytree(small_artifact.path, copy)
    model = debugging.model.model_copy(update={"path": copy})
    with serving(create_app(debugging.model_copy(update={"model": model}))) as client:
        created = client.get("/v1/models").json()
        ask(client, "parity", texts=[CAT])
        copy.rename(moved)
        assert client.get("/v1/models").json() == created
        for body in ({}, {"texts": [CAT]}):
            gone = ask(client, "parity", **body)
            assert "tokenizer.json was removed since the service started" in gone["failures"]
            assert all(vector["relative"] < 1e-4 for vector in gone["vectors"])
            assert str(tmp_path) not in str(gone)
        ask(client, "attribute", text=CAT, target=COSINE)
        moved.rename(copy)
        assert ask(client, "parity", texts=[CAT])["passes"]
        (copy / "tokenizer.json").write_text("{}")
        changed = "tokenizer.json was changed or replaced since the service started"
        assert ask(client, "parity")["failures"] == [changed]
        (copy / "manifest.json").write_text("{}")
        assert "manifest.json" in ask(client, "parity")["failures"][1]


def tampered(artifact: Artifact, folder: Path, edit: Callable[[Json], None]) -> Path:
    """Return a copy of the artifact with another tokenizer, and a manifest that has its hash."""
    shutil.copytree(artifact.path, folder)
    tokenizer, manifest = folder / "tokenizer.json", folder / "manifest.json"
    content = json.loads(tokenizer.read_text())
    edit(content)
    tokenizer.write_text(json.dumps(content))
    described = json.loads(manifest.read_text())
    described["files"]["tokenizer.json"] = sha256(tokenizer)
    manifest.write_text(json.dumps(described))
    return folder


@pytest.mark.slow
def test_gradients_use_the_adapter_of_the_prompt(debugging: Settings, tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "model")
    export(resolve(str(tmp_path / "model")), tmp_path / "artifact")
    model = debugging.model.model_copy(update={"path": tmp_path / "artifact"})
    with serving(create_app(debugging.model_copy(update={"model": model}))) as client:
        assert ask(client, "parity")["failures"] == []
        texts = [{"text": "w7 w9 w21", "prompt_name": task} for task in (None, *TASKS)]
        assert ask(client, "parity", texts=texts)["failures"] == []
        results = [ask(client, "attribute", text=text, target=COSINE) for text in texts]
    assert all(result["completeness"]["converged"] for result in results)
    assert len({result["value"] for result in results}) == len(texts)


def swap_words(tokenizer: Json) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]


def lose_lowercase(tokenizer: Json) -> None:
    tokenizer["normalizer"]["lowercase"] = False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "first_tokens"),
    [(swap_words, {CAT: 2, "my dog": 2}), (lose_lowercase, {CAT: 1, "A DOG": 1})],
)
def test_parity_names_texts_that_another_tokenizer_would_tokenize_differently(
    small_artifact: Artifact,
    debugging: Settings,
    tmp_path: Path,
    edit: Callable[[Json], None],
    first_tokens: dict[str, int],
) -> None:
    path = tampered(small_artifact, tmp_path / "artifact", edit)
    model = debugging.model.model_copy(update={"path": path})
    with serving(create_app(debugging.model_copy(update={"model": model}))) as client:
        results = {text: ask(client, "parity", texts=[text]) for text in first_tokens}
    for text, result in results.items():
        assert not result["passes"]
        assert all(line.startswith("token ") for line in result["failures"])
        first = f"token {first_tokens[text]} of {text!r} is id "
        assert any(line.startswith(first) for line in result["failures"])
