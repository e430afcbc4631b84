"""Gradient flow of training objectives."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.gradients.inputs import InputRow, ObjectiveName
from service.debug.child import jobs
from service.debug.flow import CosineObjective, FlowJob, FlowRequest
from service.inference.errors import InvalidInput
from tests.models.gradients.toys import toy_model
from tests.service.debug.conftest import CAT, FELINE, Json, ask, problem_of, vector


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
        ({"texts": [CAT], "objective": {"type": "dot", "vector": [1.0]}}, "objective",
         "/objective"),
    ],
)  # fmt: skip
def test_invalid_flow_request_has_code_and_pointer(
    client: TestClient, body: Json, code: str, pointer: str
) -> None:
    problem = problem_of(client, "flow", body)
    assert (problem["code"], problem["pointer"]) == (code, pointer)


def test_errors_within_flow_are_not_errors_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("internal")

    rows = [InputRow([1, 2]), InputRow([3, 4])]
    request = FlowRequest(texts=["", ""], objective=CosineObjective(type="cosine"))
    flow_job = FlowJob(request=request, rows=rows)
    monkeypatch.setattr(jobs, "flow", broken)
    with pytest.raises(ValueError, match="internal"):
        jobs._flow(toy_model(), flow_job)
    with pytest.raises(InvalidInput, match="even number of texts"):
        jobs._flow(toy_model(), replace(flow_job, rows=rows[:1]))


def test_requests_accept_exactly_the_named_objectives() -> None:
    objective = FlowRequest.model_fields["objective"].annotation
    names = {get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(objective)}
    assert names == set(get_args(ObjectiveName))
