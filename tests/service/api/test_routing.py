"""Raw routes bypass the application's layers; work is cancelled when its client disconnects."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Router
from starlette.testclient import TestClient
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl

from service.api.deadline import cancel_on_disconnect
from service.api.http_protocol import Cycle
from tests.eventually import HANG_S
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


Connection = tuple[Request, Callable[[], None]]


def by_message() -> Connection:
    """Return a request and a function that disconnects its client, in an ASGI message."""
    disconnected = asyncio.Event()

    async def receive() -> Message:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive), disconnected.set


def by_callback() -> Connection:
    """The same with the callback of our own HTTP protocol."""
    cycle = Cycle.__new__(Cycle)
    cycle.disconnected = False
    cycle.flow = FlowControl(asyncio.Transport())

    def disconnect() -> None:
        cycle.disconnected = True
        if cycle.on_disconnect is not None:
            cycle.on_disconnect()

    return Request({"type": "http"}, cycle.receive), disconnect  # type: ignore[arg-type]


both = pytest.mark.parametrize("connect", [by_message, by_callback])


@both
async def test_disconnect_cancels_the_work_and_not_its_task(
    connect: Callable[[], Connection],
) -> None:
    request, disconnect = connect()
    events = []

    async def work() -> None:
        disconnect()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    with pytest.raises(ClientDisconnect):
        async with asyncio.timeout(HANG_S) as bound:
            await cancel_on_disconnect(request, work())
    assert not bound.expired()
    assert events == ["cancelled"]
    await asyncio.sleep(0)  # a pending cancellation would be raised here
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_work_does_not_start_after_a_disconnect() -> None:
    request, disconnect = by_callback()
    disconnect()

    async def work() -> None:
        pytest.fail("the work has started")

    with pytest.raises(ClientDisconnect):
        await cancel_on_disconnect(request, work())


@both
async def test_deadline_raises_timeout_error_and_not_client_disconnect(
    connect: Callable[[], Connection],
) -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cancel_on_disconnect(connect()[0], work())


async def test_disconnect_as_the_work_ends_does_not_cancel_what_follows() -> None:
    request, disconnect = by_message()

    async def work() -> str:
        await asyncio.sleep(0)  # the wait for the disconnect begins
        disconnect()
        await asyncio.sleep(0)  # and ends
        return "done"

    assert await cancel_on_disconnect(request, work()) == "done"
    for _ in range(10):  # callbacks of the wait run in the next turns of the event loop
        await asyncio.sleep(0)
