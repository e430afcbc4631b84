import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx2
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from models.add_layer_norm.reference import BackwardSteps, ForwardSteps
from models.artifact import Artifact, sha256
from models.export.exporter import export
from models.export.sources import resolve
from models.gradients import attribution, inputs
from models.gradients.attribution import attribute
from models.gradients.budget import COSTS
from models.gradients.inputs import Method, Row
from models.gradients.reference_model import ReferenceModel
from service.app import create_app
from service.debug import jobs, replies
from service.debug.job_types import FlowJob
from service.debug.jobs import nonfinite
from service.debug.replies import Done, JobRefused, NonFinite
from service.debug.request_models.flow import FlowRequest
from service.debug.request_models.targets import Target
from service.debug.responses import ParityResponse
from service.settings import DebugSettings, Settings
from tests.conftest import FamilyArtifact
from tests.eventually import eventually
from tests.models.gradients.toys import toy_model
from tests.models.jina_v3 import TASKS, save_with_tokenizer
from tests.service.debug.held_worker import held, held_workers
from tests.serving import flat_routes, ready_model, serving, state_of

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


def ask(client: TestClient, path: str, **body: object) -> Json:
    response = client.post(f"/debug/{path}", json=body)
    assert response.status_code == 200, response.text
    result: Json = response.json()
    return result


def vector(client: TestClient, text: str, *, normalize: bool = True) -> np.ndarray:
    result = client.post("/encode", json={"inputs": text, "normalize": normalize}).json()
    return np.array(result["embeddings"][0])


@pytest.mark.parametrize("text", [CAT, "Dogs bark loudly at night"])
def test_attribution_scores_add_up_within_the_reported_error(client: TestClient, text: str) -> None:
    result = ask(client, "attribute", text=text, target=COSINE)
    assert result["sum"] == pytest.approx(sum(result["scores"]))
    change = result["value"] - result["baseline_value"]
    complete = result["completeness"]
    assert complete["converged"]
    assert result["sum"] - change == pytest.approx(complete["delta"], abs=1e-9)
    assert abs(complete["delta"]) <= complete["error"] <= complete["allowed"] <= 0.01 * abs(change)
    assert complete["score_error"] <= complete["score_allowed"]
    assert complete["score_allowed"] == pytest.approx(0.01 * max(map(abs, result["scores"])))
    assert result["path"][0] == [0.0, result["baseline_value"]]
    assert result["path"][-1] == [1.0, result["value"]]


def test_attribution_has_one_score_per_token_with_its_offsets(client: TestClient) -> None:
    result = ask(client, "attribute", text=CAT, target=COSINE)
    offsets = [(t["start"], t["end"]) for t in result["tokens"]]
    assert offsets[0] == offsets[-1] == (None, None)
    assert [CAT[start:end] for start, end in offsets[1:-1]] == [
        "The",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
        ".",
    ]
    assert [t["token"] for t in result["tokens"]][:3] == ["[CLS]", "the", "cat"]
    assert len(result["scores"]) == len(result["tokens"])
    assert (result["warnings"], result["nonfinite"]) == ([], [])


@pytest.mark.parametrize("method", list(COSTS))
def test_attribution_of_each_method_equals_that_of_the_reference_model(
    client: TestClient, small_artifact: Artifact, method: Method
) -> None:
    result = ask(client, "attribute", text=CAT, target={"type": "dim", "index": 7}, method=method)
    ids = [101, 1996, 4937, 2938, 2006, 1996, 13523, 1012, 102]
    expected = attribute(
        ReferenceModel.open(small_artifact),
        Row(ids),
        attribution.dim(7, normalize=True),
        method=method,
        baseline=[101, *[0] * 7, 102],
    )
    np.testing.assert_allclose(result["scores"], expected.scores, atol=1e-5)
    assert result["cost"]["token_steps"] > 0


@pytest.mark.parametrize("method", list(COSTS))
def test_score_of_a_word_is_the_sum_of_those_of_its_tokens(
    client: TestClient, method: Method
) -> None:
    text = "It doesn't purr."
    result = ask(client, "attribute", text=text, target=COSINE, method=method)
    words = result["words"]
    assert [text[word["start"] : word["end"]] for word in words] == ["It", "doesn't", "purr", "."]
    assert [word["tokens"] for word in words] == [[1], [2, 3, 4], [5, 6], [7]]
    for word in words:
        total = sum(result["scores"][token] for token in word["tokens"])
        assert word["score"] == pytest.approx(total, rel=1e-9)
    special = result["scores"][0] + result["scores"][-1]
    total = sum(word["score"] for word in words) + special
    assert total == pytest.approx(result["sum"], rel=1e-6)


def test_target_value_equals_that_of_the_served_vectors(client: TestClient) -> None:
    cat, feline = vector(client, CAT), vector(client, FELINE)
    other = "Stock prices fell."
    expected: list[tuple[Json, float]] = [
        (COSINE, cat @ feline),
        (
            {"type": "margin", "positive": FELINE, "negative": {"text": other}},
            cat @ feline - cat @ vector(client, other),
        ),
        ({"type": "dot", "vector": [2.0] * 32}, 2 * cat.sum()),
        ({"type": "dim", "index": 5}, cat[5]),
        ({"type": "norm"}, float(np.linalg.norm(vector(client, CAT, normalize=False)))),
    ]
    for target, value in expected:
        result = ask(client, "attribute", text=CAT, target=target, method="saliency")
        assert result["value"] == pytest.approx(value, abs=2e-6)
        assert result["completeness"] is None


def test_integral_that_does_not_converge_returns_200_with_a_warning(
    debugging: Settings, artifact: Artifact
) -> None:
    hard = {"layer": "embeddings", "baseline": "zero", "max_evaluations": 17}
    model = debugging.model.model_copy(update={"path": artifact.path})
    with serving(create_app(debugging.model_copy(update={"model": model}))) as client:
        result = ask(client, "attribute", text=CAT, target=COSINE, **hard)
    assert not result["completeness"]["converged"]
    assert result["warnings"] == ["a path integral has not converged; increase max_evaluations"]


@pytest.mark.parametrize(
    "change", [lambda v: v[:, ::-1], lambda v: 1.1 * v], ids=["reversed", "scaled"]
)
def test_reference_model_that_differs_from_the_engine_returns_200_with_a_warning(
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    engine = ready_model(client).engine
    served = engine.run_outputs
    with monkeypatch.context() as patch:
        patch.setattr(engine, "run_outputs", lambda *args: [change(v) for v in served(*args)])
        result = ask(client, "attribute", text=CAT, target=COSINE, method="saliency")
    assert result["parity"]["agrees"] is False
    assert result["warnings"] == [
        "the served vectors differ from the reference model's vectors; see parity"
    ]


def test_pair_matrix_adds_up_to_the_cosine_of_the_served_vectors(client: TestClient) -> None:
    result = ask(client, "attribute/pair", a=CAT, b=FELINE)
    cosine = vector(client, CAT) @ vector(client, FELINE)
    matrix = np.array(result["matrix"])
    assert matrix.shape == (len(result["tokens_a"]), len(result["tokens_b"]))
    assert matrix.sum() == pytest.approx(cosine, abs=1e-5)
    assert result["cosine"] == pytest.approx(cosine, abs=1e-6)
    pad = ask(client, "attribute/pair", a=CAT, b=FELINE, baseline="pad")
    terms = pad["reference_terms"]
    whole = pad["sum"] + terms["a_baseline"] + terms["baseline_b"] - terms["baselines"]
    assert whole == pytest.approx(cosine, abs=1e-5)
    assert all(side["converged"] for side in pad["completeness"])


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


def steps_of(result: Json, phase: str) -> list[str]:
    return [step["name"] for step in result["steps"] if step["phase"] == phase]


def test_layernorm_lists_the_steps_of_the_op_on_the_rows_of_a_text(client: TestClient) -> None:
    source = {"type": "text", "text": CAT, "norm": "layers.1.norm2"}
    result = ask(client, "layernorm", source=source, row=1)
    assert result["passes"]
    assert tuple(steps_of(result, "forward")) == ForwardSteps._fields
    assert tuple(steps_of(result, "backward")) == BackwardSteps._fields
    assert all(step["error_float64"] < 1e-5 for step in result["steps"])
    assert len(result["steps"][0]["values"]) == 32
    assert len(result["invariants"]) >= 4
    assert all(invariant["passes"] for invariant in result["invariants"])
    verdicts = {(v["implementation"], v["phase"]): v for v in result["verdicts"]}
    assert verdicts["aten", "forward"]["passes"]
    assert verdicts["aten", "backward"]["passes"]
    assert verdicts["onnxruntime", "forward"]["passes"]
    assert verdicts["onnxruntime", "backward"]["passes"] is None
    assert "no backward pass" in verdicts["onnxruntime", "backward"]["no_verdict"]
    assert result["parity"]["cosine"] > 0.999999


@pytest.mark.parametrize(
    "distribution", ["normal", "constant_row", "large_mean", "tiny_var", "huge"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layernorm_judges_rows_of_every_distribution(
    client: TestClient, distribution: str, dtype: str
) -> None:
    source = {"type": "random", "shape": [4, 16], "distribution": distribution}
    result = ask(client, "layernorm", source=source, dtype=dtype)
    failed = {v["implementation"] for v in result["verdicts"] if v["passes"] is False}
    # onnxruntime subtracts a row's mean once.
    assert failed == (
        {"onnxruntime"} if (distribution, dtype) == ("large_mean", "float32") else set()
    )
    # Every norm of a constant row is beta.
    assert result["passes"] == (None if distribution == "constant_row" else not failed)
    (aten,) = [
        v for v in result["verdicts"] if (v["implementation"], v["phase"]) == ("aten", "backward")
    ]
    against = {comparison["against"] for comparison in aten["comparisons"]}
    assert ("finite differences" in against) == (dtype == "float64")


ROWS = {"type": "rows", "x": [[1.0, 2.0]]}


def candidate_of(x: list[float], residual: list[float], dout: list[float]) -> Json:
    """Return the results of torch's norm of one row, with gradients through both outputs."""
    leaves = [torch.tensor([row], dtype=torch.float64).requires_grad_() for row in (x, residual)]
    parameters = [torch.ones(len(x), dtype=torch.float64), torch.zeros(len(x), dtype=torch.float64)]
    leaves += [parameter.requires_grad_() for parameter in parameters]
    total = leaves[0] + leaves[1]
    out = torch.nn.functional.layer_norm(total, (len(x),), leaves[2], leaves[3], 1e-5)
    upstream = [torch.tensor([dout], dtype=torch.float64)] * 2
    gradients = torch.autograd.grad([out, total], leaves, upstream)
    names = ("dx", "dresidual", "dgamma", "dbeta")
    results = {"out": out, "sum": total, **dict(zip(names, gradients, strict=True))}
    return {name: result.detach().float().tolist() for name, result in results.items()}


def test_layernorm_judges_the_results_of_a_candidate(client: TestClient) -> None:
    x, residual, dout = [40000.0, 40001.0, 40002.0, 40003.0], [0.5, 0.0, 0.0, 0.0], [1.0, 0, 0, 2]
    right = candidate_of(x, residual, dout)
    source = {"type": "rows", "x": [x], "residual": [residual], "eps": 1e-5}
    source |= {"dout": [dout], "dsum": [dout]}
    result = ask(client, "layernorm", source={**source, "candidate": right})
    assert result["passes"] is True
    assert [(v["implementation"], v["phase"]) for v in result["verdicts"]] == [
        ("candidate", "forward"),
        ("candidate", "backward"),
    ]
    # A kernel that ignores the gradient with respect to the sum, and one that returns NaN.
    ignored = {"dx": candidate_of(x, residual, [1.0, 0, 0, 2])["dx"]}
    ignored["dx"] = [[d - g for d, g in zip(ignored["dx"][0], dout, strict=True)]]
    nan = {"out": [[None, *right["out"][0][1:]]]}
    for wrong, phase, index in ((ignored, "backward", [0, 3]), (nan, "forward", [0, 0])):
        result = ask(client, "layernorm", source={**source, "candidate": wrong})
        (verdict,) = result["verdicts"]
        assert (result["passes"], verdict["passes"], verdict["phase"]) == (False, False, phase)
        comparison = verdict["comparisons"][0]
        assert comparison["worst_index"] == index
        name, row, column = comparison["value"], *index
        assert comparison["expected"] == pytest.approx(right[name][row][column], rel=1e-6)
        assert comparison["actual"] == wrong[name][row][column]
        (failure,) = verdict["failures"]
        assert failure.startswith(f"{name}[{row}, {column}] is ")
        assert f"it should be {comparison['expected']:.9g}, so its error is " in failure


def test_layernorm_row_out_of_range_is_refused(client: TestClient) -> None:
    body = {"source": {"type": "random", "shape": [4, 16]}, "row": 4}
    problem = client.post("/debug/layernorm", json=body).json()
    assert (problem["code"], problem["pointer"]) == ("no_such_row", "/row")


@pytest.mark.slow
def test_pair_matrix_of_long_texts_has_every_token(client: TestClient) -> None:
    result = ask(client, "attribute/pair", a=f"{CAT} " * 20, b=f"{FELINE} " * 20)
    assert np.array(result["matrix"]).shape == (142, 162)
    assert abs(result["delta"]) < 1e-5


def test_layernorm_overflow_returns_nulls_and_their_pointers(
    client: TestClient,
) -> None:
    source = {"type": "rows", "x": [[3e38, -3e38, 1.0, 2.0]], "residual": [[3e38, 0.0, 0.0, 0.0]]}
    result = ask(client, "layernorm", source=source, row=0)
    assert result["steps"][0]["inf"] == 1
    assert result["steps"][0]["first_nonfinite"] == [0, 0]
    assert result["steps"][0]["values"] == [None, pytest.approx(-3e38), 1.0, 2.0]
    assert {"pointer": "/steps/0/values/0", "kind": "inf"} in result["nonfinite"]


def test_more_non_finite_numbers_than_the_limit_add_a_warning(
    client: TestClient,
) -> None:
    source = {"type": "rows", "x": [[3e38, -3e38] * 40], "residual": [[3e38, -3e38] * 40]}
    result = ask(client, "layernorm", source=source, row=0)
    assert len(result["nonfinite"]) == replies.MAX_NONFINITE
    assert result["warnings"] == [
        "nonfinite lists only the first 64 non-finite numbers; there may be more"
    ]


@pytest.mark.parametrize(
    ("source", "code", "pointer"),
    [
        ({"type": "text", "text": CAT, "norm": "layers.9.norm1"}, "unknown_norm", "/source/norm"),
        ({"type": "rows", "x": [[1.0, 2.0], [3.0]]}, "source", "/source/x"),
        ({"type": "rows", "x": [[1.0, 2.0]], "gamma": [1.0]}, "source", "/source/gamma"),
        ({"type": "random", "shape": [65, 128]}, "source", "/source/shape"),
        ({"type": "random", "shape": [4]}, "invalid", "/source/shape"),
        ({"type": "rows", "x": [[1.0]], "residual": [[1.0], [2.0]]}, "source", "/source/residual"),
        ({"type": "rows", "x": [[1.0, 2.0]], "beta": [1.0]}, "source", "/source/beta"),
        ({"type": "rows", "x": [[1.0], ["a"]]}, "invalid", "/source/x/1/0"),
        ({"type": "text", "text": CAT}, "invalid", "/source/norm"),
        ({"type": "text", "text": CAT, "norm": 5}, "invalid", "/source/norm"),
        ({"type": "text", "text": 5, "norm": "n"}, "invalid", "/source/text"),
        ({"type": "text", "text": {"text": 5}, "norm": "n"}, "invalid", "/source/text/text"),
        ({"type": "text", "text": "", "norm": "layers.0.norm1"}, "empty", "/source/text"),
        ({"type": "other"}, "invalid", "/source"),
        ({**ROWS, "dout": [[1.0]]}, "source", "/source/dout"),
        ({**ROWS, "dsum": [[1.0, 2.0]]}, "source", "/source/dsum"),
        ({**ROWS, "dout": [[1.0, 2.0]], "dsum": [[1.0, 2.0]]}, "source", "/source/dsum"),
        ({**ROWS, "candidate": {}}, "source", "/source/candidate"),
        ({**ROWS, "candidate": {"y": [[1.0, 2.0]]}}, "invalid", "/source/candidate"),
        ({**ROWS, "candidate": {"out": [[1.0]]}}, "source", "/source/candidate/out"),
        ({**ROWS, "candidate": {"dbeta": [1.0]}}, "source", "/source/candidate/dbeta"),
        ({**ROWS, "candidate": {"sum": [[1.0, 2.0]]}}, "source", "/source/candidate/sum"),
        ({**ROWS, "candidate": {"dbeta": [1.0, 2.0]}}, "source", "/source/dout"),
    ],
)
def test_invalid_layernorm_source_has_code_and_pointer(
    client: TestClient, source: Json, code: str, pointer: str
) -> None:
    response = client.post("/debug/layernorm", json={"source": source})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, code), problem
    assert problem["pointer"] == pointer


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
    assert capabilities["targets"] == ["cosine", "margin", "dot", "dim", "norm"]
    assert capabilities["baselines"] == ["pad", "mask", "zero"]
    assert (capabilities["device"], capabilities["op"]) == (
        "cpu",
        {"forward": "cpp", "backward": "cpp"},
    )


LONG = "word " * 300


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"text": ""}, "empty", "/text"),
        ({"text": 3}, "invalid", "/text"),
        ({"text": ["secret"]}, "invalid", "/text"),
        ({"text": {"secret": "secret"}}, "invalid", "/text/text"),
        ({"text": {"text": "a", "prompt_name": "secret"}}, "unknown_prompt", "/text/prompt_name"),
        ({"text": "\u200b"}, "no_tokens", "/text"),
        ({"text": LONG}, "too_long", "/text"),
        ({"text": "a" * 100_001}, "text_too_large", "/text"),
        ({"text": "a", "secret": 1}, "unknown_field", None),
        ({"target": None}, "invalid", "/target"),
        ({"target": {"type": "secret"}}, "invalid", "/target"),
        ({"target": {"type": "cosine"}}, "invalid", "/target/text"),
        ({"target": {"type": "cosine", "text": " "}}, "empty", "/target/text"),
        (
            {"target": {"type": "margin", "positive": "a", "negative": ""}},
            "empty",
            "/target/negative",
        ),
        ({"target": {"type": "dim", "index": 32}}, "dimensions", "/target/index"),
        ({"target": {"type": "dim", "index": -1}}, "invalid", "/target/index"),
        ({"target": {"type": "dot", "vector": [1.0]}}, "vector_length", "/target/vector"),
        ({"target": {"type": "norm", "secret": 1}}, "invalid", "/target"),
        ({"method": "secret"}, "invalid", "/method"),
        ({"baseline": "secret"}, "invalid", "/baseline"),
        ({"layer": "secret"}, "unknown_layer", "/layer"),
        ({"max_evaluations": 16}, "invalid", "/max_evaluations"),
        ({"text": "a " * 200, "max_evaluations": 4096}, "budget", None),
    ],
)  # fmt: skip
def test_invalid_attribution_request_has_code_and_pointer(
    client: TestClient, changes: Json, code: str, pointer: str | None
) -> None:
    response = client.post("/debug/attribute", json={"text": CAT, "target": COSINE, **changes})
    problem = response.json()
    status = 413 if code == "text_too_large" else 422
    assert (response.status_code, problem.get("code")) == (status, code), problem
    assert problem.get("pointer") == pointer
    assert "secret" not in response.text
    assert ask(client, "attribute", text=CAT, target=COSINE, dry_run=True)


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
    reply = json.loads(replies.encode_reply(Done(result, numbers, True, 1.0)))
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
    flow_job = FlowJob(rows, "cosine", [], None, 1.0, compare=[])
    monkeypatch.setattr(jobs, "flow", broken)
    with pytest.raises(ValueError, match="internal"):
        jobs._flow(toy_model(), flow_job)
    with pytest.raises(JobRefused, match="even number of texts"):
        jobs._flow(toy_model(), replace(flow_job, rows=rows[:1]))


def types_of(union: object) -> set[str]:
    """The values of `type` in a discriminated union of request models."""
    return {
        get_args(model.model_fields["type"].annotation)[0] for model in get_args(get_args(union)[0])
    }


def test_requests_accept_exactly_the_named_targets_and_objectives() -> None:
    assert types_of(Target) == set(get_args(inputs.TargetName))
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


@pytest.mark.parametrize("family", ["modernbert", "gte", "albert"])
def test_gradients_of_families_with_gates_windows_and_shared_layers(
    family: str, family_artifact: FamilyArtifact, debugging: Settings
) -> None:
    model = debugging.model.model_copy(update={"path": family_artifact(family).path})
    texts = ["w7 w9 w21", "w5 w33 w8 " * 6]  # the second is longer than ModernBERT's window
    target = {"type": "cosine", "text": texts[0]}
    with serving(create_app(debugging.model_copy(update={"model": model}))) as client:
        assert ask(client, "parity", texts=texts)["failures"] == []
        for layer in ("words", "embeddings", "layers.0"):
            result = ask(client, "attribute", text=texts[1], target=target, layer=layer)
            assert result["completeness"]["converged"]
            assert result["parity"]["cosine"] > 1 - 1e-6
        assert ask(client, "attribute/pair", a=texts[0], b=texts[1])["matrix"]
        objective = {"type": "cosine"}
        for emulate in (None, "bfloat16"):
            result = ask(client, "flow", texts=texts, objective=objective, emulate=emulate)
            assert result["first_nonfinite"] is None
        norms = client.get("/debug/capabilities").json()["norms"]
        for norm in (norms[0], norms[-1]):
            source = {"type": "text", "text": texts[0], "norm": norm}
            assert ask(client, "layernorm", source=source)["passes"]


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
