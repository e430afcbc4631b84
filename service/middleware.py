"""The layer around every request: its id, its metrics, and no error unanswered.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide from a handler that its client has gone.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Forbidden, NotReady, ServiceError
from service.metrics import Metrics

REQUEST_ID = "X-Request-Id"
PROBES = ("/healthz", "/readyz")
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger("vitrine")


class RequestLayer:
    """Wraps the application; see the module.

    Args:
        app: The application.
        direct: What serves a method and path instead of it.
        metrics: Counts requests.
        answer: Path, error and request id to a response.
        hosts: Names that are answered to, beside probes, which come by address; none: all.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[tuple[str, str], ASGIApp],
        metrics: Metrics,
        answer: Callable[[str, ServiceError, str], ASGIApp],
        hosts: Collection[str],
    ) -> None:
        self._app = app
        self._direct = direct
        self._metrics = metrics
        self._answer = answer
        self._hosts = hosts

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> ServiceError | None:
        """Serve the request, and return the error that is left to be told."""
        request_id = scope["state"]["request_id"]
        told = {"request_id": request_id}
        try:
            if not self._is_ours(scope):
                return Forbidden("this host name is not one of VITRINE_SERVER__HOSTS", code="host")
            serve = self._direct.get((scope["method"], scope["path"]), self._app)
            await serve(scope, receive, send)
        except ServiceError as error:
            if error.status == 500:  # the client is told no more than that, so the log is
                log.error("request %s: %s", request_id, error.detail, exc_info=error, extra=told)
            return error
        except ClientDisconnect:
            # Counted, but not logged: it is not ours to say how often clients leave.
            log.debug("request %s: the client has gone", request_id, extra=told)
        except asyncio.CancelledError:  # as the server does when its time to stop is over
            return NotReady("the service is stopping")
        except Exception:
            log.exception("request %s failed", request_id, extra=told)
            # Answered rather than raised again: the server would close the connection, and with
            # it the next request of whoever shares it.
            return ServiceError("the service failed; its log says why")
        return None

    def _is_ours(self, scope: Scope) -> bool:
        if not self._hosts or scope["path"] in PROBES:
            return True
        return names_one_of(Headers(scope=scope).get("host", ""), self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or the lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID))
        scope.setdefault("state", {})["request_id"] = request_id
        status = "disconnected"

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            error = await self._run(scope, receive, send_marked)
            if error is not None and status != "disconnected":
                raise error  # too late to tell it in an answer
            if error is not None:
                await self._answer(scope["path"], error, request_id)(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)


def names_one_of(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header, with or without a port, is one of these names."""
    return host in names or host.rpartition(":")[0] in names


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID_FORM.fullmatch(given):
        return given
    return uuid.uuid4().hex
