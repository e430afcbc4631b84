"""Startup and shutdown of the application, whatever hosts it."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from service.api.errors import problem
from service.api.metrics import Metrics
from service.api.middleware import RequestMiddleware
from service.app import create_app
from service.settings import Settings
from tests.eventually import eventually
from tests.serving import ready_model, serving, state_of


def test_loaded_objects_are_frozen_before_the_application_becomes_ready(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("service.app.gc.freeze", lambda: calls.append("freeze"))
    app = create_app(settings, on_ready=lambda: calls.append("ready"), on_fatal=pytest.fail)
    with serving(app) as client:
        assert state_of(client).registry.is_open
        eventually(lambda: "ready" in calls)
    assert calls == ["freeze", "ready"]


@pytest.mark.slow
def test_stopped_application_frees_its_model_and_engine(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.app.gc", gc)  # in place of the test suite's
    app = create_app(settings, on_fatal=pytest.fail)
    with serving(app) as client:
        model = ready_model(client)
        parts: tuple[object, ...] = (model, model.batcher, model.engine)
        references = [weakref.ref(part) for part in parts]
        del model, parts
    del app, client
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_error_in_on_ready_is_logged_and_reported_as_fatal(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    reasons: list[str] = []

    def on_ready() -> None:
        raise RuntimeError("defect in on_ready")

    with TestClient(create_app(settings, on_ready=on_ready, on_fatal=reasons.append)):
        eventually(lambda: reasons)
    assert reasons == ["cannot start: see the traceback above"]
    assert "defect in on_ready" in caplog.text


def test_panic_of_a_library_during_the_start_is_logged_and_reported_as_fatal(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicException(BaseException):
        """As a Rust extension raises when it panics: not an Exception."""

    async def panic(*_: object, **__: object) -> None:
        raise PanicException("no such state")

    monkeypatch.setattr("service.inference.registry.memory.open_model", panic)
    reasons: list[str] = []
    with TestClient(create_app(settings, on_fatal=reasons.append)):
        eventually(lambda: reasons)
    assert reasons == ["cannot start: see the traceback above"]
    assert "no such state" in caplog.text


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_cancellation_is_answered_only_while_the_service_is_stopping(
    is_stopping: bool,
) -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise asyncio.CancelledError

    async def receive() -> dict[str, Any]:
        raise AssertionError("nothing reads the body")

    statuses: list[int] = []

    async def send(message: Any) -> None:  # noqa: ANN401 - ASGI
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    middleware = RequestMiddleware(
        app,
        dispatch_table={},
        metrics=Metrics(60.0),
        render_error=lambda _path, error, request_id: problem(error, request_id),
        hosts=(),
        slow_s=None,
        is_stopping=lambda: is_stopping,
    )
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": None}
    if is_stopping:
        await middleware(scope, receive, send)
        assert statuses == [503]
    else:
        with pytest.raises(asyncio.CancelledError):
            await middleware(scope, receive, send)
        assert statuses == []
