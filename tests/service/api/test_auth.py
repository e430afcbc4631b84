import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx2
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.settings import ApiKey, AuthSettings, Scope
from tests.eventually import eventually
from tests.service.api.conftest import Start
from tests.serving import PATIENCE_S, flat_routes, lines_until, served, state_of, url_of

KEYS: dict[Scope, str] = {
    "encode": "encode-key-0123456789",
    "metrics": "metrics-key-0123456789",
    "debug": "debug-key-0123456789",
}
DOCS = {"/docs", "/docs/oauth2-redirect", "/static-offline-docs", "/openapi.json"}
PAGES = {"/debug", "/debug/assets/{name}"}
TEI_PROBES = {
    f"/tei{model}/{name}" for model in ("", "/{model:path}") for name in ("", "health", "ping")
}
PROBES = {"/health", "/healthz", "/readyz", "/tei", *TEI_PROBES}
PUBLIC = {f"GET {path}" for path in {"/", *DOCS, *PAGES, *PROBES}}


def api_key(scope: Scope) -> ApiKey:
    return ApiKey(name=f"the {scope} key", key=SecretStr(KEYS[scope]), scopes=(scope,))


@pytest.fixture(scope="module")
def keyed_client(small_artifact: Artifact) -> Iterator[TestClient]:
    with served(small_artifact.path, auth={"keys": list(map(api_key, KEYS))}) as client:
        yield client


def test_every_route_requires_one_scope_unless_it_is_listed_as_public(
    keyed_client: TestClient,
) -> None:
    routes = flat_routes(keyed_client.app.routes)  # type: ignore[attr-defined]
    assert {"/encode", "/info", "/metrics"} <= {route.path for route in routes}
    for route in routes:
        dependencies = route.dependencies if isinstance(route, APIRoute) else []
        names = [getattr(dependency.dependency, "__name__", "") for dependency in dependencies]
        scopes = [
            name for name in names if name in {f"require_{scope}" for scope in get_args(Scope)}
        ]
        for method in (getattr(route, "methods", None) or {"GET"}) - {"HEAD"}:
            operation = f"{method} {route.path}"
            assert len(scopes) == (0 if operation in PUBLIC else 1), operation


@pytest.mark.parametrize(
    ("path", "scope"), [("/encode", "encode"), ("/info", "encode"), ("/metrics", "metrics")]
)
def test_route_accepts_only_keys_with_its_scope(
    keyed_client: TestClient, path: str, scope: Scope
) -> None:
    def status(header: str | None) -> int:
        headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
        if path == "/encode":
            response = keyed_client.post(path, json={"inputs": "a"}, headers=headers)
        else:
            response = keyed_client.get(path, headers=headers)
        if response.status_code == 401:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        if response.status_code >= 400:
            assert response.headers["content-type"] == "application/problem+json"
        return response.status_code

    assert status(f"Bearer {KEYS[scope]}") == 200
    assert status(f"bearer  {KEYS[scope]}") == 200
    for other in KEYS.keys() - {scope}:
        assert status(f"Bearer {KEYS[other]}") == 403
    key = KEYS[scope]
    wrong = (None, "", "Bearer", "Bearer ", f"Basic {key}", f"Bearer {key}x", f"Bearer {key[:-1]}")
    for header in wrong:
        assert status(header) == 401
    assert status("Bearer ü") == 401


@pytest.mark.parametrize("name", ["X-API-Key", "api-key"])
def test_key_is_accepted_in_x_api_key_and_api_key_headers(
    keyed_client: TestClient, name: str
) -> None:
    def status(**headers: str) -> int:
        return keyed_client.get("/info", headers=headers).status_code

    assert status(**{name: KEYS["encode"]}) == 200
    assert status(**{name: KEYS["metrics"]}) == 403
    assert status(**{name: "unknown-key-0123456789"}) == 401
    # A bearer token takes precedence; another Authorization is ignored.
    assert status(**{name: KEYS["encode"], "Authorization": f"Bearer {KEYS['metrics']}"}) == 403
    assert status(**{name: KEYS["encode"], "Authorization": "Basic eDp5"}) == 200


def test_public_routes_need_no_key(keyed_client: TestClient) -> None:
    for path in ("/health", "/healthz", "/readyz", "/openapi.json"):
        assert keyed_client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["//encode", "/encode/", "/%65ncode", "/encode?x=/healthz"])
def test_alternative_spellings_of_a_path_do_not_bypass_the_key(
    keyed_client: TestClient, path: str
) -> None:
    response = keyed_client.post(
        path, json={"inputs": "a"}, headers={"Host": "x/healthz?"}, follow_redirects=False
    )
    assert response.status_code in (401, 404, 405)
    assert response.headers["content-type"] == "application/problem+json"


def test_keys_are_not_logged(keyed_client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for key in KEYS.values():
        keyed_client.post(
            "/encode", json={"inputs": "a"}, headers={"Authorization": f"Bearer {key}"}
        )
    settings = state_of(keyed_client).settings
    output = caplog.text + repr(settings) + str(settings.model_dump())
    assert not any(key in output for key in KEYS.values())


def key_file(folder: Path, mode: int = 0o600, key: str = KEYS["encode"]) -> Path:
    file = folder / "keys.json"
    file.write_text(json.dumps([{"name": "app", "key": key}]))
    file.chmod(mode)
    return file


def test_keys_of_the_environment_and_of_the_file_are_combined(tmp_path: Path) -> None:
    auth = AuthSettings(keys=(api_key("metrics"),), keys_file=key_file(tmp_path))
    assert [key.name for key in auth.all_keys()] == ["the metrics key", "app"]
    assert auth.all_keys()[1].scopes == ("encode",)


def test_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert [key.name for key in AuthSettings(keys_file=file).all_keys()] == ["app"]


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_key_file_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    auth = AuthSettings(keys_file=key_file(tmp_path, mode))
    with pytest.raises(ValueError, match=r"keys.json is writable by others; run chmod o-w"):
        auth.all_keys()


# Kubernetes mounts secrets with mode 0644, Docker with 0444.
@pytest.mark.parametrize("mode", [0o400, 0o440, 0o444, 0o644])
def test_key_file_mounted_as_a_secret_is_read(tmp_path: Path, mode: int) -> None:
    assert AuthSettings(keys_file=key_file(tmp_path, mode)).all_keys()


def entry(**fields: object) -> str:
    """A key file with one key."""
    return json.dumps([{"name": "app", "key": KEYS["encode"], **fields}])


TWICE = f'[{{"name": "a", "key": "{KEYS["encode"]}", "name": "b"}}]'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[{]", "auth.keys_file: .*keys.json: .*Invalid JSON: Expecting"),
        (TWICE, "auth.keys_file: .*keys.json: .*Invalid JSON: an object has a duplicate key"),
        ("{}", "keys.json: keys: Input should be a list"),
        ("[1]", "keys.json: 0: Input should be an"),
        ("[]", "auth.keys_file: .*keys.json has no API key"),
        (entry(scopes=[]), "keys.json: 0.scopes: must not be em"),
        (entry(key=""), "keys.json: 0.key: .*at least 16 printable ASCII"),
        (entry(key="canary"), "keys.json: 0.key: .*at least 16 printable ASCII"),
        (entry(key="canary-with-a-newline\n"), "keys.json: 0.key: .*at least 16 printable ASCII"),
        (entry(key="canary-mit-Umlaut-ü"), "keys.json: 0.key: .*at least 16 printable ASCII"),
    ],
)
def test_invalid_key_file_is_refused_without_repeating_a_key(
    tmp_path: Path, content: str, problem: str
) -> None:
    file = key_file(tmp_path)
    file.write_text(content)
    with pytest.raises(ValueError, match=problem) as error:
        AuthSettings(keys_file=file).all_keys()
    assert "canary" not in str(error.value)


def test_key_file_without_a_key_is_valid_beside_other_keys(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    file.write_text("[]")
    assert AuthSettings(keys=(api_key("encode"),), keys_file=file).all_keys()


def test_old_and_new_key_of_a_client_may_have_its_name(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    (old,) = json.loads(file.read_text())
    file.write_text(json.dumps([old, {**old, "key": KEYS["debug"]}]))
    assert [key.name for key in AuthSettings(keys_file=file).all_keys()] == ["app", "app"]


def test_duplicate_key_is_refused(tmp_path: Path) -> None:
    auth = AuthSettings(keys=(api_key("encode"),), keys_file=key_file(tmp_path))
    with pytest.raises(ValueError, match="two API keys are equal"):
        auth.all_keys()


@pytest.mark.slow
def test_sighup_reads_the_key_file_again_and_keeps_the_keys_if_it_is_invalid(
    start: Start, tmp_path: Path
) -> None:
    file = key_file(tmp_path)
    with start(VITRINE_AUTH__KEYS_FILE=str(file)) as started:
        url = url_of(started)

        def statuses() -> list[int]:
            """Return the status with the key of the first file, and with that of the second."""
            headers = [{"X-API-Key": KEYS[scope]} for scope in ("encode", "debug")]
            responses = (
                httpx2.get(f"{url}/info", headers=own, timeout=PATIENCE_S) for own in headers
            )
            return [response.status_code for response in responses]

        assert statuses() == [200, 401]
        key_file(tmp_path, key=KEYS["debug"])
        os.kill(started.pid, signal.SIGHUP)
        eventually(lambda: statuses() == [401, 200])
        file.write_text("[]")
        os.kill(started.pid, signal.SIGHUP)
        lines_until(
            started, f"the API keys stay as they were: auth.keys_file: {file} has no API key"
        )
        assert statuses() == [401, 200]
