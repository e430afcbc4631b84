"""The middleware around every request: request id, metrics, access log and error responses.

Plain ASGI: Starlette's BaseHTTPMiddleware would hide disconnects from handlers.
"""

import asyncio
import errno
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.panics import panics_as_errors
from service.api.deadline import CLIENT_DEADLINE
from service.api.errors import Forbidden, Malformed, status_of
from service.api.headers import HEADERS, read_headers
from service.api.http_protocol import PROTOCOL_ERROR
from service.api.metrics import Metrics
from service.api.state import LEASES
from service.inference.errors import DeadlineExceeded, NotReady, VitrineError
from service.request_trace import TRACE

REQUEST_ID = "X-Request-Id"
PROBES = ("/health", "/healthz", "/readyz")
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")

log = logging.getLogger("vitrine")
access = logging.getLogger("vitrine.access")


class RequestMiddleware:
    """ASGI middleware around the application; see the module docstring.

    Args:
        app: The application.
        dispatch_table: Routes that are called directly instead of through `app`, by method and
            path; see `raw_route.dispatch_table`.
        metrics: Metrics of the HTTP API.
        render_error: Returns the error response for a path, an error and a request id.
        hosts: Host names accepted in the Host header; empty: all. Probes are exempt, because
            Kubernetes sends them to IP addresses.
        slow_s: Duration in seconds above which the access log marks a request as slow; None: no
            access log.
        is_stopping: Returns whether the service is shutting down.
    """

    def __init__(
        self,
        app: ASGIApp,
        dispatch_table: Mapping[tuple[str, str], ASGIApp],
        metrics: Metrics,
        render_error: Callable[[str, VitrineError, str], ASGIApp],
        hosts: Collection[str],
        slow_s: float | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._app = app
        self._dispatch_table = dispatch_table
        # Looked up once, because every lookup by label takes a lock.
        self._requests = cache(metrics.requests.labels)
        self._seconds = cache(metrics.request_seconds.labels)
        self._render_error = render_error
        self._hosts = hosts
        self._slow_s = slow_s
        self._is_stopping = is_stopping

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, ambiguous: str | None
    ) -> VitrineError | None:
        """Serve the request; return the error to render as its response, if any."""
        request_id = scope["state"]["request_id"]
        fields = {"request_id": request_id}
        protocol_error: VitrineError | None = scope["state"].get(PROTOCOL_ERROR)
        if protocol_error is not None:
            return protocol_error
        try:
            self._check_head(scope, ambiguous)
            serve = self._dispatch_table.get((scope["method"], scope["path"]), self._app)
            with panics_as_errors("a library"):
                await serve(scope, receive, send)
        except VitrineError as error:
            if status_of(error) == 500:  # the response omits the cause
                log.error("request %s: %s", request_id, error.detail, exc_info=error, extra=fields)
            return error
        except ClientDisconnect:
            # Logged at level DEBUG, because clients can disconnect arbitrarily often. The metrics
            # count the request.
            log.debug("request %s: the client disconnected", request_id, extra=fields)
        except asyncio.CancelledError:
            # At the end of the grace period, the server cancels the remaining requests, which then
            # get a 503 response. Any other cancellation must propagate.
            if not self._is_stopping():
                raise
            return NotReady("the service is stopping")
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                log.error("request %s failed: no free file descriptor", request_id, extra=fields)
                return NotReady("the service has no free file descriptor", code="no_descriptor")
            log.exception("request %s failed", request_id, extra=fields)
            # Not re-raised: the server would close the connection, which a proxy may use for other
            # clients too.
            return VitrineError("internal error; see the log of the service")
        return None

    async def _respond(
        self, error: VitrineError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send an error response, and log the errors of the protocol."""
        request_id = scope["state"]["request_id"]
        if error is scope["state"].get(PROTOCOL_ERROR):
            client, fields = _client(scope), {"request_id": request_id}
            log.warning("request %s from %s: %s", request_id, client, error, extra=fields)
        await self._render_error(scope["path"], error, request_id)(scope, receive, send)

    def _check_head(self, scope: Scope, ambiguous: str | None) -> None:
        if ambiguous is not None:
            raise Malformed(f"the request has two {ambiguous} headers with different values")
        if self._hosts and scope["path"] not in PROBES:
            host = scope["state"][HEADERS].get("host", "")
            if not host_matches(host, self._hosts):
                raise Forbidden("the host name is not in VITRINE_SERVER__HOSTS", code="host")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass lifespan events to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers, ambiguous = read_headers(scope["headers"])
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {}).update({HEADERS: headers, "request_id": request_id})
        received, method = scope, scope["method"]
        if method == "HEAD":  # served as GET; the server omits the body
            scope = {**scope, "method": "GET"}
        status = "disconnected"
        error: VitrineError | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self._is_stopping():  # the next request is for another replica
                    headers.append((b"connection", b"close"))
                message["headers"] = headers  # those of the response may be sent again
            await send(message)

        try:
            error = await self._run(scope, receive, send_with_id, ambiguous)
            if error is not None and status != "disconnected":
                raise error  # the response has started, so no error response can be sent
            if error is not None:
                await self._respond(error, scope, receive, send_with_id)
        finally:
            for lease in scope["state"].pop(LEASES, ()):  # the server keeps the scope for longer
                lease.release()
            seconds = time.perf_counter() - started
            received["route"] = scope.get("route")  # of HEAD too, for the trace
            route = getattr(scope.get("route"), "path", "none")
            is_client_deadline = isinstance(error, DeadlineExceeded) and scope["state"].get(
                CLIENT_DEADLINE
            )
            label = "client_deadline" if is_client_deadline else status
            self._requests(route, label).inc()
            trace = TRACE.get()
            self._seconds(route).observe(seconds, None if trace is None else trace.ids)
            if self._slow_s is not None:
                is_slow = seconds > self._slow_s
                _log_access(scope, method, route, status, seconds, error, is_slow=is_slow)


def host_matches(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header, with or without its port, is in `names` (lower case)."""
    host = host.lower()
    return host in names or host.rpartition(":")[0] in names


def _log_access(
    scope: Scope,
    method: str,
    route: str,
    status: str,
    seconds: float,
    error: VitrineError | None,
    *,
    is_slow: bool,
) -> None:
    # The route's template is logged instead of the path, which the client chooses.
    fields = {
        "request_id": scope["state"]["request_id"],
        "client": _client(scope),
        "api_key": scope["state"].get("api_key"),
        "code": None if error is None else error.code,
        "slow": is_slow or None,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    access.info(
        "%s %s %s %.1f ms %s",
        method,
        route,
        status,
        1e3 * seconds,
        " ".join(f"{name}={value}" for name, value in known.items()),
        extra={
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round(1e3 * seconds, 3),
            **known,
        },
    )


def _client(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "unknown"


def _request_id(header: str | None) -> str:
    if header is not None and _REQUEST_ID_FORM.fullmatch(header):
        return header
    return f"{random.getrandbits(128):032x}"  # an id, not a secret; uuid4 is a system call
