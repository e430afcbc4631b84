"""Access to the gradient routes."""

import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.debug.conftest import CAT, COSINE
from tests.serving import flat_routes, serving


def test_disabled_debug_routes_return_404(settings: Settings) -> None:
    with serving(create_app(settings)) as client:
        routes = [route.path for route in flat_routes(create_app(settings).routes)]
        others = ("/debug/state", "/debug/assets/{name}")
        debug = [path for path in routes if path.startswith("/debug/") and path not in others]
        assert len(debug) >= 7
        for path in debug:
            is_read = path == "/debug/capabilities"
            response = client.request("GET" if is_read else "POST", path, json={})
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
