"""The layer around every request: its id, its metrics, and no error unanswered.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide from a handler that its client has gone.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ServiceError
from service.metrics import Metrics

REQUEST_ID = "X-Request-Id"
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger("vitrine")


class RequestLayer:
    """Wraps the application; see the module.

    Args:
        app: The application.
        metrics: Counts requests.
        answer: Path, error and request id to a response.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, answer: Callable[[str, ServiceError, str], ASGIApp]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID))
        scope.setdefault("state", {})["request_id"] = request_id
        status, told = "disconnected", {"request_id": request_id}

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except ClientDisconnect:
            # Counted, but not logged: it is not ours to say how often clients leave.
            log.debug("request %s: the client has gone", request_id, extra=told)
        except Exception:
            log.exception("request %s failed", request_id, extra=told)
            # Answered rather than raised again: the server would close the connection, and with
            # it the next request of whoever shares it.
            if status != "disconnected":
                raise
            error = ServiceError("the service failed; its log says why")
            answer = self._answer(scope["path"], error, request_id)
            await answer(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID_FORM.fullmatch(given):
        return given
    return uuid.uuid4().hex
