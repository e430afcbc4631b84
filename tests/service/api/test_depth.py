"""Deeply nested bodies, on every route with a body: what is accepted can be written back."""

import json
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from models.artifact import Artifact
from models.json_reader import MAX_DEPTH
from tests.serving import flat_routes, served

KEY = "a-key-for-all-routes"
JSON = {"Content-Type": "application/json"}
# Valid values of fields, so that a nested value among them is reached on some of the routes.
FIELDS = {
    "inputs": '"a"',
    "input": '"a"',
    "model": '"small"',
    "query": '"a"',
    "queries": '"a"',
    "documents": '["b"]',
    "texts": '["b"]',
    "text": '"a"',
    "ids": "[1]",
    "path": '"/nowhere"',
    "target": '{"type": "norm"}',
}


def nested(brackets: str) -> str:
    """Return a value whose nesting has these brackets, from outside to inside."""
    begin = "".join('{"a":' if bracket == "{" else "[" for bracket in brackets)
    end = "".join("}" if bracket == "{" else "]" for bracket in reversed(brackets))
    return f"{begin}0{end}"


@pytest.fixture(scope="module")
def every_route(small_artifact: Artifact) -> Iterator[tuple[TestClient, list[str]]]:
    """A client with all scopes, and the paths of all routes that take a body."""
    key = {"name": "all", "key": KEY, "scopes": ["encode", "debug", "admin"]}
    names = {"{name:path}": "new", "{model:path}": "small"}
    with served(
        small_artifact.path,
        auth={"keys": [key]},
        debug={"enabled": True, "hosts": ["testserver"], "device": "cpu"},
        server={"tei_at_root": True},
    ) as client:
        paths = [
            route.path
            for route in flat_routes(client.app.routes)  # type: ignore[attr-defined]
            if "POST" in (getattr(route, "methods", None) or ())
        ]
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client, [re.sub(r"\{.*?\}", lambda match: names[match[0]], path) for path in paths]


def test_every_route_refuses_a_body_beyond_the_limit(
    every_route: tuple[TestClient, list[str]],
) -> None:
    client, paths = every_route
    assert len(paths) > 40
    for path in paths:
        for bracket in "[{":
            # The body itself is one level.
            body = f'{{"inputs": {nested(bracket * MAX_DEPTH)}}}'
            response = client.post(path, content=body, headers=JSON)
            assert response.status_code == 400, path
            assert f"the limit is {MAX_DEPTH} levels" in response.text, path
            body = f'{{"inputs": {nested(bracket * (MAX_DEPTH - 1))}}}'
            response = client.post(path, content=body, headers=JSON)
            assert response.status_code < 500, path
            assert "levels" not in response.text, path


@hypothesis_settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 10_000),
    field=st.sampled_from([*FIELDS, "unknown"]),
    brackets=st.one_of(
        st.builds("".join, st.lists(st.sampled_from("[{"), max_size=MAX_DEPTH + 2)),
        st.builds(
            lambda bracket, depth: bracket * depth, st.sampled_from("[{"), st.integers(1, 2000)
        ),
    ),
    is_closed=st.booleans(),
)
@example(place=0, field="documents", brackets="[" * 252, is_closed=True)
@example(place=0, field="unknown", brackets="{" * 100_000, is_closed=False)
@pytest.mark.slow
def test_no_nesting_is_an_internal_error(
    every_route: tuple[TestClient, list[str]],
    place: int,
    field: str,
    brackets: str,
    is_closed: bool,
) -> None:
    client, paths = every_route
    value = nested(brackets)
    members = FIELDS | {field: value if is_closed else value[: len(value) // 2]}
    path = paths[place % len(paths)]
    body = ", ".join(f'"{name}": {member}' for name, member in members.items())
    response = client.post(path, content=f"{{{body}}}", headers=JSON)
    # The served model is no reranker, and the default one cannot be replaced by nothing.
    assert response.status_code in (200, 400, 404, 413, 415, 422, 424), (path, response.text)
    if len(brackets) >= MAX_DEPTH and is_closed:
        assert response.status_code == 400


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/vllm/rerank"])
def test_accepted_fields_of_documents_are_returned(rerank_client: TestClient, path: str) -> None:
    # The body, the documents and a document are three levels.
    for brackets in ("[" * (MAX_DEPTH - 3), "{" * (MAX_DEPTH - 3), "[{" * 60, "[", ""):
        document = f'{{"text": "b", "other": {nested(brackets)}}}'
        body = f'{{"query": "a", "documents": [{document}], "return_documents": true}}'
        response = rerank_client.post(path, content=body, headers=JSON)
        assert response.status_code == 200, response.text
        assert response.json()["results"][0]["document"] == json.loads(document)
