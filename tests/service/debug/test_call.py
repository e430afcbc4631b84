"""Calls of gradient routes: cost, deadline, parity of every response, and non-finite numbers."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import Request
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.gradients.inputs import InputRow
from models.identity import identity_of
from service.api.headers import HEADERS
from service.debug.child.jobs import nonfinite
from service.debug.parity import ParityResponse
from service.debug.pipeline import call
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Completed, Done, NonFinite, encode_reply
from service.debug.pipeline.response import Cost
from service.debug.vjp import VjpJob, VjpRequest
from service.inference.errors import DeadlineExceeded
from tests.eventually import eventually
from tests.service.debug.conftest import CAT, COSINE, FELINE, Json, ask, problem_of, service_of
from tests.service.debug.held_worker import held
from tests.serving import state_of


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


def test_dry_run_returns_the_cost_and_starts_no_process(small_artifact: Artifact) -> None:
    with service_of(small_artifact) as client:
        result = ask(client, "attribute", text=CAT, target=COSINE, dry_run=True)
        assert result["cost"] == {"token_steps": 9 * 256, "limit": 131072}
        assert result.keys() == {"model", "cost"}
        result = ask(client, "attribute/pair", a=CAT, b=FELINE, dry_run=True)
        assert result["cost"]["token_steps"] == 9 + 10
        result = ask(client, "attribute/pair", a=CAT, b=FELINE, layer="words", dry_run=True)
        assert result["cost"]["token_steps"] == 128 * (9**2 + 10**2)
        assert state_of(client).gradients.pid is None


def test_flow_and_parity_cost_counts_every_traced_step(
    client: TestClient,
) -> None:
    flow = ask(client, "flow", texts=[CAT, FELINE], objective={"type": "cosine"})
    assert flow["cost"]["token_steps"] == 4 * (9 + 10) + 2 * 150
    parity = ask(client, "parity", texts=[CAT])
    assert parity["cost"]["token_steps"] == 4 * 9


def test_text_beyond_the_token_limit_of_gradients_is_refused(small_artifact: Artifact) -> None:
    with service_of(small_artifact, max_tokens=8) as client:
        problem = problem_of(client, "attribute/pair", {"a": "short", "b": CAT})
        assert (problem["code"], problem["pointer"]) == ("too_many_tokens", "/b")


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


def test_response_models_document_every_field_and_property_of_a_result() -> None:
    schema = ParityResponse.model_json_schema()
    assert {"passes", "failures", "curve"} <= schema["properties"].keys()
    assert schema["$defs"]["WeightDifference"]["properties"].keys() == {"name", "max_abs", "status"}
    for model in (schema, *schema["$defs"].values()):
        described = {"files", "failures", "status", "relative"} & model["properties"].keys()
        assert all(model["properties"][name].get("description") for name in described)
    difference = schema["$defs"]["LayerDifference"]["properties"]["relative"]
    assert [kind["type"] for kind in difference["anyOf"]] == ["number", "null"]


# Runs of jobs, with stubs of the gradient process and of the served model.


MANIFEST = SimpleNamespace(outputs=["pooled"], weights_sha256={}, files={"tokenizer.json": ""})
JOB = VjpJob(request=VjpRequest(text="", cotangent=[1.0]), rows=[InputRow([1])])


async def run_job(
    reference: NDArray[np.float32],
    receive: Callable[[], Awaitable[Any]],
    request_s: float = 300.0,
) -> Json:
    """Return the report of a job whose reference model has these vectors."""

    async def run(*_: object) -> Completed:
        return Completed(Done({}, [], True, 1.0), reference.tobytes(), b"file")

    counter = Counter("jobs", "", ["kind", "outcome"], registry=CollectorRegistry())
    limits = SimpleNamespace(request_s=request_s)
    state: Any = SimpleNamespace(
        jobs=counter,
        gradients=SimpleNamespace(run=run),
        settings=SimpleNamespace(limits=limits),
    )
    artifact = SimpleNamespace(manifest=MANIFEST)
    model: Any = SimpleNamespace(
        name="",
        version="",
        graph_sha256="",
        artifact=artifact,
        quality=None,
        engine_label="cpu",
    )
    request = Request({"type": "http", "state": {HEADERS: {}}}, receive)
    report, reply = await Call(request, state, model, "embedding").run(
        JOB, Cost(token_steps=1, limit=1)
    )
    assert reply.file == b"file"
    return report


async def never() -> None:
    await asyncio.Event().wait()


async def test_comparison_ends_when_the_client_disconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoding = asyncio.Event()

    async def encode(*_: object) -> None:
        encoding.set()
        await never()

    async def disconnect() -> dict[str, str]:
        await encoding.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr(call, "encode", encode)
    with pytest.raises(ClientDisconnect):
        async with asyncio.timeout(60):
            await run_job(np.ones((1, 2), np.float32), disconnect)


async def test_comparison_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    async def encode(*_: object) -> None:
        encoded.append(True)
        await never()

    monkeypatch.setattr(call, "encode", encode)
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(60):
            await run_job(np.ones((1, 2), np.float32), never, request_s=1e-3)
    assert encoded


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_non_finite_reference_vectors_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    served = np.ones((2, 3), np.float32)

    async def encode(*_: object) -> NDArray[np.float32]:
        return served

    monkeypatch.setattr(call, "encode", encode)
    reference = served.copy()
    report = await run_job(reference, never)
    assert (report["warnings"], report["parity"].agrees) == ([], True)
    reference[1, 2] = bad
    with np.errstate(invalid="ignore"):
        report = await run_job(reference, never)
    assert not report["parity"].agrees
    assert report["warnings"][0].startswith("the served vectors differ")
