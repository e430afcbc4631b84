"""Attribution to tokens and words."""

from collections.abc import Callable
from itertools import chain
from typing import get_args

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.gradients import attribution
from models.gradients.budget import COSTS
from models.gradients.inputs import BASELINE_METHODS, InputRow, Method
from models.gradients.reference_model import ReferenceModel
from service.debug.target import TARGETS, Target
from tests.conftest import FamilyArtifact
from tests.models.gradients.toys import attribute_row
from tests.service.debug.conftest import (
    CAT,
    COSINE,
    FELINE,
    Json,
    ask,
    problem_of,
    service_of,
    vector,
)
from tests.serving import ready_model


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
    expected = attribute_row(
        ReferenceModel.open(small_artifact),
        InputRow(ids),
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


@pytest.mark.parametrize("method", get_args(Method))
def test_only_methods_with_a_baseline_refuse_a_text_that_equals_it(
    client: TestClient, method: Method
) -> None:
    body = {"text": "[PAD]", "target": COSINE, "method": method}
    if method in BASELINE_METHODS:
        assert problem_of(client, "attribute", body)["code"] == "baseline_equals_input"
    else:
        assert len(ask(client, "attribute", **body)["scores"]) == 3


def test_integral_that_does_not_converge_returns_200_with_a_warning(client: TestClient) -> None:
    hard = {"layer": "embeddings", "baseline": "zero", "tolerance": 1e-6, "max_evaluations": 17}
    result = ask(client, "attribute", text=CAT, target=COSINE, **hard)
    assert not result["completeness"]["converged"]
    assert result["warnings"] == [
        "a path integral has not converged; increase max_evaluations or choose another baseline"
    ]


def test_cosine_and_similarity_are_one_target_of_a_model_with_cosines(client: TestClient) -> None:
    first, second = (
        ask(client, "attribute", text=CAT, target={**COSINE, "type": name}, method="saliency")
        for name in ("cosine", "similarity")
    )
    np.testing.assert_allclose(first["scores"], second["scores"], rtol=1e-4)
    assert first["value"] == pytest.approx(second["value"], abs=1e-6)


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


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"text": ""}, "empty", "/text"),
        ({"text": 3}, "invalid", "/text"),
        ({"text": ["secret"]}, "invalid", "/text"),
        ({"text": {"secret": "secret"}}, "invalid", "/text/text"),
        ({"text": {"text": "a", "prompt_name": "secret"}}, "unknown_prompt", "/text/prompt_name"),
        ({"text": "\u200b"}, "no_tokens", "/text"),
        ({"text": "word " * 300}, "too_long", "/text"),
        ({"text": "a" * 100_001}, "text_too_large", "/text"),
        ({"text": "a", "secret": 1}, "unknown_field", None),
        ({"target": None}, "invalid", "/target"),
        ({"target": {"type": "secret"}}, "invalid", "/target"),
        ({"target": {"type": "cosine"}}, "invalid", "/target/text"),
        ({"target": {"type": "cosine", "text": " "}}, "no_tokens", "/target/text"),
        ({"target": {"type": "margin", "positive": "a", "negative": ""}}, "empty",
         "/target/negative"),
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
    assert ask(client, "attribute", text=CAT, target=COSINE, dry_run=True)


@pytest.mark.parametrize("family", ["modernbert", "gte", "albert"])
def test_gradients_of_families_with_gates_windows_and_shared_layers(
    family: str, family_artifact: FamilyArtifact
) -> None:
    texts = ["w7 w9 w21", "w5 w33 w8 " * 6]  # the second is longer than ModernBERT's window
    target = {"type": "cosine", "text": texts[0]}
    with service_of(family_artifact(family)) as client:
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


def test_gradients_of_experts_and_choices_that_change_along_the_path(
    family_artifact: FamilyArtifact,
) -> None:
    texts = ["w7 w9 w21", "w5 w33 w8 " * 6]
    target = {"type": "cosine", "text": texts[0]}
    with service_of(family_artifact("nomic_moe")) as client:
        assert ask(client, "parity", texts=texts)["failures"] == []
        # Gradients do not have the jumps between the choices of experts in layers 1 and 3.
        for layer, converged in (("words", False), ("layers.0", False), ("output", True)):
            result = ask(client, "attribute", text=texts[1], target=target, layer=layer)
            assert result["completeness"]["converged"] is converged
            assert result["parity"]["cosine"] > 1 - 1e-6
        assert ask(client, "attribute/pair", a=texts[0], b=texts[1])["matrix"]
        for emulate in (None, "bfloat16"):
            result = ask(client, "flow", texts=texts, objective={"type": "cosine"}, emulate=emulate)
            assert result["first_nonfinite"] is None
            assert "layers.1.experts" in [step["name"] for step in result["steps"]]


def test_every_target_belongs_to_one_kind_of_model() -> None:
    classes = get_args(get_args(Target)[0])
    types = [get_args(each.model_fields["type"].annotation)[0] for each in classes]
    assert sorted(types) == sorted(chain(*TARGETS.values()))
