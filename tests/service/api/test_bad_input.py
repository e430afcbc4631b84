import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.api.schemas import REFERENCED
from tests.serving import served

JSON = {"Content-Type": "application/json"}


def assert_still_works(client: TestClient) -> None:
    assert client.post("/encode", json={"inputs": "fine"}).status_code == 200


MALFORMED = {
    "nothing": b"",
    "NaN": b'{"inputs": NaN}',
    "Infinity": b'{"inputs": "a", "dimensions": Infinity}',
    "an overflowing number": b'{"inputs": "a", "dimensions": 1e999}',
    "an escaped lone surrogate": b'{"inputs": "\\ud800"}',
    "a raw lone surrogate": b'{"inputs": "\xed\xa0\x80"}',
    "a surrogate in a key": b'{"inputs": "a", "\\udfff": 1}',
    "invalid UTF-8": b'{"inputs": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"inputs": "a"}',
    "an integer of a megabyte": b'{"inputs": [[' + b"9" * 2**20 + b"]]}",
    "UTF-16": '{"inputs": "a"}'.encode("utf-16"),
    "deep lists": b'{"inputs": ' + b"[" * 100_000,
    "deep objects": b'{"inputs": ' + b'{"a":' * 3_000,
    "a PNG": b"\x89PNG\r\n\x1a\n" + bytes(200),
    "half an object": b'{"inputs": "a"',
    "two objects": b'{"inputs": "a"} {}',
    "a key twice": b'{"inputs": "a", "inputs": "b"}',
    "a key twice, once escaped": b'{"inputs": "a", "\\u0069nputs": "b"}',
    "a key twice, deep down": b'{"inputs": {"a": 1, "a": 1}}',
    "a raw NUL": b'{"inputs": "a\x00"}',
}

INVALID = {
    "a list": (b'["a"]', None),
    "no inputs": (b"{}", None),
    "null inputs": (b'{"inputs": null}', None),
    "a number": (b'{"inputs": 5}', None),
    "an empty list": (b'{"inputs": []}', None),
    "an empty text": (b'{"inputs": ""}', 0),
    "an empty text among texts": (b'{"inputs": ["a", ""]}', 1),
    "a number among texts": (b'{"inputs": ["a", "b", 3]}', 2),
    "null among texts": (b'{"inputs": ["a", null]}', 1),
    "ids among texts": (b'{"inputs": ["a", [1, 2]]}', 1),
    "a text among ids": (b'{"inputs": [[1, 2], "a"]}', 1),
    "an empty row of ids": (b'{"inputs": [[1], []]}', 1),
    "a negative id": (b'{"inputs": [[1], [2, -1]]}', 1),
    "an id beyond the vocabulary": (b'{"inputs": [[1], [30522]]}', 1),
    "an id of 2^31": (b'{"inputs": [[2147483648]]}', 0),
    "an id of 2^63": (b'{"inputs": [[9223372036854775808]]}', 0),
    "an id of 300 digits": (b'{"inputs": [[' + b"9" * 300 + b"]]}", 0),
    "a row that is no list of rows": (b'{"inputs": [1, -5]}', None),
    "booleans for ids": (b'{"inputs": [[true, false]]}', 0),
    "floats for ids": (b'{"inputs": [[1.5]]}', 0),
    "many floats for ids": (b'{"inputs": [' + b"[1.5]," * 2_000 + b"[1]]}", 0),
    "too many inputs": (b'{"inputs": [' + b'"a",' * 2_048 + b'"a"]}', None),
    "an unknown field": (b'{"inputs": "a", "truncate": true}', None),
    "an unknown prompt": (b'{"inputs": "a", "prompt_name": "nope"}', None),
    "an empty prompt": (b'{"inputs": "a", "prompt_name": ""}', None),
    "no dimensions": (b'{"inputs": "a", "dimensions": 0}', None),
    "negative dimensions": (b'{"inputs": "a", "dimensions": -1}', None),
    "too many dimensions": (b'{"inputs": "a", "dimensions": 385}', None),
    "true dimensions": (b'{"inputs": "a", "dimensions": true}', None),
    "dimensions in words": (b'{"inputs": "a", "dimensions": "64"}', None),
    "another encoding": (b'{"inputs": "a", "encoding": "int8"}', None),
    "another overflow": (b'{"inputs": "a", "on_overflow": "ignore"}', None),
    "a number to normalise": (b'{"inputs": "a", "normalize": 1}', None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_json_returns_400(client: TestClient, name: str) -> None:
    response = client.post("/encode", content=MALFORMED[name], headers=JSON)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == "malformed"
    assert len(response.content) < 1_000
    assert_still_works(client)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_value_returns_422_with_its_index(client: TestClient, name: str) -> None:
    body, index = INVALID[name]
    response = client.post("/encode", content=body, headers=JSON)
    problem = response.json()
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert (problem["status"], problem["title"]) == (422, "Unprocessable Content")
    assert problem.get("index") == index
    assert problem["request_id"] == response.headers["X-Request-Id"]
    if index is not None:
        is_one_text = isinstance(orjson.loads(body)["inputs"], str)
        assert problem["pointer"].startswith("/inputs" if is_one_text else f"/inputs/{index}")
        assert not is_one_text or problem["pointer"] == "/inputs"
    assert len(response.content) < 1_000
    assert_still_works(client)


def unbounded_lists(schema: object, path: str = "") -> Iterator[str]:
    """Yield the path of each list in a schema of pydantic that is validated beyond an error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and not ("max_length" in schema or schema.get("fail_fast")):
            yield path
        for name, part in schema.items():
            yield from unbounded_lists(part, f"{path}/{name}")
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from unbounded_lists(part, path)


@pytest.mark.parametrize("body", REFERENCED.values())
def test_long_list_of_invalid_values_has_one_error(body: type[BaseModel]) -> None:
    # Two million errors, of a body of 4 MiB, took 18 s and 2.8 GB.
    schema: Any = body.__pydantic_core_schema__
    assert list(unbounded_lists(schema)) == []


def test_thousands_of_unknown_fields_are_not_listed(client: TestClient) -> None:
    fields = {f"field {index}": 0 for index in range(10_001)}
    response = client.post("/encode", json={"inputs": "a", "chunking": fields})
    assert (response.status_code, response.json()["code"]) == (422, "invalid")
    assert response.json()["detail"].startswith("too many unknown fields; see /docs for the allow")


def test_errors_do_not_repeat_content_of_the_request(client: TestClient) -> None:
    canary = "canary-5f3a"
    fields = [
        {"inputs": "a", canary: canary},
        {"inputs": "a", "prompt_name": canary},
        {"inputs": "a", "encoding": canary},
        {"inputs": [canary, ""]},
        {"inputs": {canary: canary}},
        {"inputs": [canary], "dimensions": canary},
    ]
    for body in fields:
        response = client.post("/encode", json=body)
        assert response.status_code == 422
        assert canary not in response.text


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "image/png"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {},
        {**JSON, "Content-Encoding": "br"},
        {**JSON, "Content-Encoding": "gzip, gzip"},
        {**JSON, "Content-Encoding": "identity, br"},
    ],
)
def test_unsupported_content_type_or_encoding_returns_415(
    client: TestClient, headers: dict[str, str]
) -> None:
    response = client.post("/encode", content=b'{"inputs": "a"}', headers=headers)
    assert (response.status_code, response.json()["code"]) == (415, "unsupported_media_type")
    assert_still_works(client)


def test_content_type_with_a_charset_is_accepted(client: TestClient) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/encode", content=b'{"inputs": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize("letters", ["a", "!", "日", "é", "ab "])
def test_text_of_a_megabyte_returns_413_with_its_index(client: TestClient, letters: str) -> None:
    response = client.post("/encode", json={"inputs": ["fine", letters * 2**20]})
    assert (response.status_code, response.json()["code"]) == (413, "text_too_large")
    assert response.json()["index"] == 1
    assert_still_works(client)


def test_body_over_the_limit_returns_413_with_and_without_content_length(
    small_artifact: Artifact,
) -> None:
    debug = {"enabled": True, "hosts": ["testserver"]}
    with served(small_artifact.path, limits={"max_body_bytes": 1_000}, debug=debug) as client:
        body = json.dumps({"inputs": ["word"] * 500}).encode()
        chunks = (body[i : i + 100] for i in range(0, len(body), 100))
        for path, content in (("/encode", body), ("/encode", chunks), ("/debug/flow", body)):
            response = client.post(path, content=content, headers=JSON)
            assert (response.status_code, response.json()["code"]) == (413, "too_large")
        assert_still_works(client)


def test_unknown_routes_and_methods_return_problems(client: TestClient) -> None:
    for response in (client.get("/nothing/here"), client.post("/encode/", json={"inputs": "a"})):
        assert (response.status_code, response.json()["code"]) == (404, "not_found")
    response = client.get("/encode")
    assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed")
    assert response.headers["Allow"] == "POST"
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "routes"),
    [
        ("/embed", "/tei/embed, /v1/embed, /v2/embed"),  # TEI's, without the prefix
        ("/embeddings", "/v1/embeddings"),  # a base URL of OpenAI's client without /v1
        ("/v1/v2/rerank", "/rerank, /tei/rerank, /v1/rerank, /v2/rerank, /vllm/rerank"),
        ("/v1/embeddings/", "/v1/embeddings"),
    ],
)
def test_unknown_route_names_the_routes_with_the_same_end(
    client: TestClient, path: str, routes: str
) -> None:
    answer = client.post(path, json={"input": "a"})
    assert answer.status_code == 404
    detail = f"unknown route; routes with this end: {routes}"
    assert detail in answer.json().get("detail", "") + str(answer.json().get("error", ""))


def test_unknown_route_without_a_similar_one_is_told_where_all_routes_are(
    client: TestClient,
) -> None:
    answer = client.get("/nothing/here").json()
    assert answer["detail"] == "unknown route; /openapi.json lists all routes"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/tei", "HEAD, GET, POST"),
        ("/tei/embed", "POST"),
        ("/healthz", "HEAD, GET"),
        ("/v1/models/x", "HEAD, GET"),
    ],
)
def test_405_lists_all_methods_of_the_path(client: TestClient, path: str, allowed: str) -> None:
    response = client.delete(path)
    assert response.status_code == 405
    assert response.headers["Allow"] == allowed


@pytest.mark.parametrize("path", ["/healthz", "/info", "/metrics", "/v1/models", "/tei", "/docs"])
def test_head_is_supported_by_all_get_routes(client: TestClient, path: str) -> None:
    response = client.head(path)
    assert response.status_code == 200
    assert response.headers.get("content-type") == client.get(path).headers.get("content-type")
