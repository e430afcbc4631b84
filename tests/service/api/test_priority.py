"""The header X-Priority, and keys for bulk requests."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from models.artifact import Artifact
from service.settings import Scope
from tests.serving import ready_model, served

KEYS: dict[str, tuple[Scope, ...]] = {
    "encode-key-0123456789": ("encode",),
    "bulk-key-0123456789": ("bulk",),
    "both-key-0123456789": ("encode", "bulk"),
}
ENCODE, BULK, BOTH = KEYS


@pytest.fixture(scope="module")
def client(small_artifact: Artifact) -> Iterator[TestClient]:
    keys = [{"name": key, "key": key, "scopes": scopes} for key, scopes in KEYS.items()]
    with served(small_artifact.path, auth={"keys": keys}) as client:
        yield client


@pytest.fixture
def priorities(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The priority of each request that reaches the batcher."""
    batcher, seen = ready_model(client).batcher, []
    submit = batcher.submit

    async def recorded(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the batcher's
        seen.append(options.get("priority"))
        return await submit(*arguments, **options)

    monkeypatch.setattr(batcher, "submit", recorded)
    return seen


def headers(key: str, priority: str | None) -> dict[str, str]:
    chosen = {} if priority is None else {"X-Priority": priority}
    return {"Authorization": f"Bearer {key}", **chosen}


@pytest.mark.parametrize(
    ("key", "priority", "expected"),
    [
        (ENCODE, None, "interactive"),
        (ENCODE, "interactive", "interactive"),
        (ENCODE, "bulk", "bulk"),
        (BULK, None, "bulk"),
        (BULK, "bulk", "bulk"),
        (BOTH, None, "interactive"),
        (BOTH, "bulk", "bulk"),
    ],
)
def test_priority_is_that_of_the_header_or_the_key(
    client: TestClient, priorities: list[object], key: str, priority: str | None, expected: str
) -> None:
    response = client.post("/encode", json={"inputs": "a text"}, headers=headers(key, priority))
    assert response.status_code == 200, response.text
    assert set(priorities) == {expected}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"queries": "a text", "documents": "a text"}),
        ("/rerank", {"query": "a text", "documents": ["a text"]}),
        ("/v1/embeddings", {"input": "a text", "model": "small"}),
        ("/v1/rerank", {"query": "a text", "documents": ["a text"]}),
        ("/vllm/score", {"queries": "a text", "documents": "a text"}),
        ("/tei/embed", {"inputs": "a text"}),
    ],
)
def test_every_route_passes_the_priority_on(
    client: TestClient, priorities: list[object], path: str, body: dict[str, Any]
) -> None:
    for key, priority in ((ENCODE, "bulk"), (BULK, None)):
        response = client.post(path, json=body, headers=headers(key, priority))
        assert response.status_code == 200, response.text
    assert set(priorities) == {"bulk"}


def test_key_for_bulk_requests_refuses_interactive_requests(client: TestClient) -> None:
    response = client.post("/encode", json={"inputs": "a"}, headers=headers(BULK, "interactive"))
    assert (response.status_code, response.json()["code"]) == (403, "bulk_only")


@pytest.mark.parametrize("priority", ["", "Bulk", "high", "bulk, bulk"])
def test_unknown_priority_is_refused(client: TestClient, priority: str) -> None:
    response = client.post("/encode", json={"inputs": "a"}, headers=headers(ENCODE, priority))
    assert (response.status_code, response.json()["code"]) == (400, "priority")
    assert response.json()["detail"] == "X-Priority must be interactive or bulk"
