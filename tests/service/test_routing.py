"""Direct routes: their requests go past the application's layers, and the others do not."""

import pytest
from starlette.routing import Router
from starlette.testclient import TestClient

from service.metrics import Metrics


@pytest.fixture
def _unrouted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Router, "__call__", refuse)


@pytest.mark.usefixtures("_unrouted")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/encode", {"inputs": "a"}),
        ("/v1/embeddings", {"input": "a", "model": "sentence-transformers/all-MiniLM-L6-v2"}),
        ("/tei/embed", {"inputs": "a"}),
    ],
)
def test_vectors_do_not_come_through_the_application_s_layers(
    client: TestClient, path: str, body: dict[str, str]
) -> None:
    assert client.get("/healthz").status_code == 500  # the control
    assert client.post(path, json=body).status_code == 200


@pytest.mark.usefixtures("_unrouted")
def test_errors_and_metrics_of_direct_routes_are_those_of_all_routes(client: TestClient) -> None:
    metrics: Metrics = client.app.state.metrics  # type: ignore[attr-defined]

    def refused() -> float:
        told = {"route": "/encode", "status": "422"}
        return metrics.registry.get_sample_value("vitrine_requests_total", told) or 0.0

    before = refused()
    answer = client.post("/encode", json={"inputs": ["a", ""]}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Request-Id"] == answer.json()["request_id"] == "mine"
    assert answer.json()["index"] == 1
    assert refused() == before + 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/encode", 405), ("POST", "/encode/", 404), ("POST", "/v1/nothing", 404)],
)
def test_what_is_next_to_a_direct_route_is_refused_as_ever(
    client: TestClient, method: str, path: str, status: int
) -> None:
    assert client.request(method, path).status_code == status
