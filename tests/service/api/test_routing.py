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
        ("/v1/embeddings", {"input": "a", "model": "small"}),
        ("/tei/embed", {"inputs": "a"}),
    ],
)
def test_raw_routes_bypass_the_application(
    client: TestClient, path: str, body: dict[str, str]
) -> None:
    assert client.get("/healthz").status_code == 500  # the control
    assert client.post(path, json=body).status_code == 200


@pytest.mark.usefixtures("_unrouted")
def test_raw_routes_have_the_errors_and_metrics_of_other_routes(client: TestClient) -> None:
    metrics = state_of(client).metrics

    def invalid_requests() -> float:
        labels = {"route": "/encode", "status": "422"}
        return metrics.registry.get_sample_value("vitrine_requests_total", labels) or 0.0

    before = invalid_requests()
    response = client.post("/encode", json={"inputs": ["a", ""]}, headers={"X-Request-Id": "mine"})
    assert response.status_code == 422
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-Id"] == response.json()["request_id"] == "mine"
    assert response.json()["index"] == 1
    assert invalid_requests() == before + 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/encode", 405), ("POST", "/encode/", 404), ("POST", "/v1/nothing", 404)],
)
def test_paths_and_methods_beside_raw_routes_are_404_and_405(
    client: TestClient, method: str, path: str, status: int
) -> None:
    assert client.request(method, path).status_code == status


def _request_of(disconnected: asyncio.Event) -> Request:
    async def receive() -> Message:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


async def test_disconnect_cancels_the_work_and_not_its_task() -> None:
    disconnected, events = asyncio.Event(), []

    async def work() -> None:
        disconnected.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    with pytest.raises(ClientDisconnect):
        await cancel_on_disconnect(_request_of(disconnected), work())
    assert events == ["cancelled"]
    await asyncio.sleep(0)  # a pending cancellation would be raised here
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_deadline_raises_timeout_error_and_not_client_disconnect() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancel_on_disconnect(_request_of(asyncio.Event()), work())


async def test_disconnect_as_the_work_ends_does_not_cancel_what_follows() -> None:
    disconnected = asyncio.Event()

    async def work() -> str:
        await asyncio.sleep(0)  # the wait for the disconnect begins
        disconnected.set()
        await asyncio.sleep(0)  # and ends
        return "done"

    assert await cancel_on_disconnect(_request_of(disconnected), work()) == "done"
    for _ in range(10):  # callbacks of the wait run in the next turns of the event loop
        await asyncio.sleep(0)
