"""CORS, and allowed host names."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from tests.serving import served

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def test_cors_is_off_by_default(client: TestClient) -> None:
    response = client.post("/encode", json={"inputs": "a"}, headers={"Origin": ORIGIN})
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.options("/encode", headers=PREFLIGHT).status_code == 405


@pytest.fixture(scope="module")
def cors_client(small_artifact: Artifact) -> Iterator[TestClient]:
    with served(small_artifact.path, server={"cors_origins": [ORIGIN]}) as client:
        yield client


def test_allowed_origin_may_send_a_key_and_read_the_headers(cors_client: TestClient) -> None:
    allowed = cors_client.options("/encode", headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
    assert allowed.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    response = cors_client.post("/encode", json={"inputs": "a"}, headers={"Origin": ORIGIN})
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
    exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-Id", "Server-Timing", "X-Shape", "Retry-After"} <= set(exposed)
    evil = {**PREFLIGHT, "Origin": "https://evil.example"}
    denied = cors_client.options("/encode", headers=evil)
    assert denied.status_code == 400
    assert "Access-Control-Allow-Origin" not in denied.headers


def test_cors_allows_the_headers_that_clients_add(cors_client: TestClient) -> None:
    names = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    headers = {**PREFLIGHT, "Access-Control-Request-Headers": names}
    allowed = cors_client.options("/v1/embeddings", headers=headers)
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Headers"] == names


def test_unknown_host_names_return_403_except_for_probes(small_artifact: Artifact) -> None:
    with served(small_artifact.path, server={"hosts": ["TESTserver"]}) as client:
        assert client.get("/info").status_code == 200
        for path, status in (("/info", 403), ("/v1/models", 403), ("/readyz", 200)):
            response = client.get(path, headers={"Host": "evil.example"})
            assert response.status_code == status
            assert "X-Request-Id" in response.headers
        for host in ("TestServer", "testserver:8000"):
            assert client.get("/info", headers={"Host": host}).status_code == 200
        refused = client.get("/info", headers={"Host": "evil.example:8000"})
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["code"] == "host"


def test_allowed_origin_can_read_errors(
    cors_client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.routes.encode_json", None)
    response = cors_client.post("/encode", json={"inputs": "a"}, headers={"Origin": ORIGIN})
    assert response.status_code == 500
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
