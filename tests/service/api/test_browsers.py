"""CORS, and allowed host names."""

import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import ServerSettings, Settings
from tests.serving import serving

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


def test_allowed_origin_may_send_a_key_and_read_the_headers(settings: Settings) -> None:
    server = settings.server.model_copy(update={"cors_origins": (ORIGIN,)})
    app = create_app(settings.model_copy(update={"server": server}), on_fatal=pytest.fail)
    with serving(app) as client:
        allowed = client.options("/encode", headers=PREFLIGHT)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert allowed.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        response = client.post("/encode", json={"inputs": "a"}, headers={"Origin": ORIGIN})
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
        exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"X-Request-Id", "Server-Timing", "X-Shape", "Retry-After"} <= set(exposed)
        denied = client.options("/encode", headers={**PREFLIGHT, "Origin": "https://evil.example"})
        assert denied.status_code == 400
        assert "Access-Control-Allow-Origin" not in denied.headers


def test_cors_allows_the_headers_that_clients_add(settings: Settings) -> None:
    server = settings.server.model_copy(update={"cors_origins": (ORIGIN,)})
    names = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    with serving(create_app(settings.model_copy(update={"server": server}))) as client:
        headers = {**PREFLIGHT, "Access-Control-Request-Headers": names}
        allowed = client.options("/v1/embeddings", headers=headers)
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Headers"] == names


def test_unknown_host_names_return_403_except_for_probes(settings: Settings) -> None:
    server = ServerSettings(hosts=("TESTserver",))
    app = create_app(settings.model_copy(update={"server": server}), on_fatal=pytest.fail)
    with serving(app) as client:
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
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = settings.server.model_copy(update={"cors_origins": (ORIGIN,)})
    with serving(create_app(settings.model_copy(update={"server": server}))) as client:
        monkeypatch.setattr("service.api.routes.encode_json", None)
        response = client.post("/encode", json={"inputs": "a"}, headers={"Origin": ORIGIN})
        assert response.status_code == 500
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
