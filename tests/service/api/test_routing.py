"""Raw routes bypass the application's layers; work is cancelled when its client disconnects."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.testclient import TestClient
from starlette.types import Message

from service.api.deadline import cancel_on_disconnect
from tests.serving import state_of


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
    metrics = state_of(client).metrics

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


def _request_of(client_leaves: asyncio.Event) -> Request:
    async def receive() -> Message:
        await client_leaves.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


async def test_work_is_cancelled_when_its_client_goes_away_and_its_task_is_not() -> None:
    leaves, events = asyncio.Event(), []

    async def work() -> None:
        leaves.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    with pytest.raises(ClientDisconnect):
        await cancel_on_disconnect(_request_of(leaves), work())
    assert events == ["cancelled"]
    await asyncio.sleep(0)  # nothing is left to be raised
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_deadline_is_not_taken_for_a_client_that_goes_away() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancel_on_disconnect(_request_of(asyncio.Event()), asyncio.sleep(60))


async def test_a_client_that_goes_away_as_the_work_ends_cancels_nothing_that_follows() -> None:
    leaves = asyncio.Event()

    async def work() -> str:
        await asyncio.sleep(0)  # by now somebody waits for the client to leave
        leaves.set()
        await asyncio.sleep(0)  # and is told
        return "done"

    assert await cancel_on_disconnect(_request_of(leaves), work()) == "done"
    await asyncio.sleep(0.01)
