"""Vector-Jacobian products."""

import numpy as np
import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.service.debug.conftest import CAT, ask, problem_of, service_of

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
    client: TestClient, small_artifact: Artifact
) -> None:
    body = {"text": CAT, "cotangent": COTANGENT, "reduce": "full"}
    assert problem_of(client, "vjp", body, status=403)["code"] == "full_gradients"
    with service_of(small_artifact, full_gradients=True) as open_client:
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
    problem = problem_of(client, "vjp", {"text": CAT, "cotangent": cotangent})
    assert (problem["code"], problem["pointer"]) == (code, "/cotangent")
