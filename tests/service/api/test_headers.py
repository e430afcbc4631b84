"""Headers with one value: of several different ones, none is believed."""

import pytest
from starlette.testclient import TestClient

from service.api.headers import _SINGLE
from tests.serving import flat_routes

JSON = ("Content-Type", "application/json")
VALUES = {
    "X-Request-Timeout-Ms": ("60000", "50000"),
    "X-Priority": ("interactive", "bulk"),
    "Content-Type": ("application/json", "application/json; charset=utf-8"),
    "Origin": ("http://testserver", "http://other"),
    "Sec-Fetch-Site": ("none", "cross-site"),
}


@pytest.mark.parametrize("name", sorted(_SINGLE.values()))
def test_two_different_values_are_refused_in_both_orders(client: TestClient, name: str) -> None:
    first, second = VALUES.get(name, ("Bearer one", "Bearer two"))

    def post(*values: str) -> tuple[int, str]:
        headers = [(name.swapcase(), value) for value in values]
        if name != JSON[0]:
            headers.append(JSON)
        response = client.post("/encode", content=b'{"inputs": "a"}', headers=headers)
        return response.status_code, response.json().get("detail", "")

    expected = 400, f"the request has two {name} headers with different values"
    assert post(first, second) == post(second, first) == post(first, first, second) == expected
    assert post(first) == post(first, first) == (200, "")


def test_every_route_refuses_two_different_values(client: TestClient) -> None:
    headers = [("Authorization", "Bearer one"), ("Authorization", "Bearer two")]
    app = client.app
    for route in flat_routes(app.routes):  # type: ignore[attr-defined]
        for method in getattr(route, "methods", None) or ():
            response = client.request(method, route.path, headers=headers)
            assert response.status_code == 400, (method, route.path)


def test_several_content_encodings_are_one_list(client: TestClient) -> None:
    # gzip, applied twice: to decompress once would give no JSON.
    headers = [JSON, ("Content-Encoding", "gzip"), ("Content-Encoding", "gzip")]
    response = client.post("/encode", content=b"", headers=headers)
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")


def test_several_accept_headers_are_one_list(client: TestClient) -> None:
    headers = [("Accept", "application/json;q=0.5"), ("Accept", "application/octet-stream")]
    response = client.post("/encode", json={"inputs": "a"}, headers=headers)
    assert response.headers["Content-Type"] == "application/octet-stream"
