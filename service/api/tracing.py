"""OpenTelemetry traces of requests, exported with OTLP over HTTP.

No other module imports OpenTelemetry, and this one is imported only if traces are exported: it
needs the packages of the extra `otel`. OpenTelemetry's environment variables configure the export,
the sampler and the propagators.
"""

import logging
import os
import re
import threading
import time
from http import HTTPStatus

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.embedding_attributes import embedding_attributes
from service.api.middleware import PROBES
from service.api.schemas import VERSION
from service.request_trace import TRACE, RequestTrace

# Probes and scrapes come every few seconds and would hide all other traces.
_UNTRACED = (*PROBES, "/metrics")
# Names of stages that differ from those of the metrics.
_SPAN_NAMES = {"infer": "batch"}
# Other methods are `_OTHER`: the conventions allow no names that a client can choose.
_METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"}
)
# Loggers of parsers of headers. Their warnings have the content, which any client can choose.
_PARSERS = ("opentelemetry.baggage", "opentelemetry.trace")
# Bound in seconds of the last export, so that an unreachable receiver cannot delay a shutdown.
_CLOSE_S = 3.0


class Exporter:
    """Exports spans in a thread, in batches.

    While the receiver is unreachable, the last 2,048 spans are kept.

    Args:
        endpoint: URL to which spans are sent.

    Attributes:
        endpoint: The URL, without credentials.

    Raises:
        ValueError: A variable of OpenTelemetry is invalid.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = re.sub("//[^/]*@", "//", endpoint)
        for name in _PARSERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        defaults = Resource({"service.name": "vitrine", "service.version": VERSION})
        # The variables take precedence; attributes passed to `create` would override them.
        resource = Resource.create(defaults.merge(OTELResourceDetector().detect()).attributes)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint)
        try:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:  # names its argument, not the variable
            raise ValueError(f"a variable OTEL_BSP_* is invalid: {error}") from error

    def trace(self, app: ASGIApp) -> "TracingMiddleware":
        """Return the application with a server span for each request."""
        tracer = self._provider.get_tracer("vitrine", VERSION)
        return TracingMiddleware(app, tracer, has_genai_attributes=_has_opted_in())

    def close(self) -> None:
        """Export the remaining spans, for at most three seconds."""
        # A daemon thread: an export that takes longer does not keep the process alive.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


class TracingMiddleware:
    """ASGI middleware that gives each request a server span, with a child span per stage.

    A stage begins at the end of the previous one, so the stages of a successful inference request
    add up to its duration.

    Args:
        app: The application.
        tracer: Tracer of the spans.
        has_genai_attributes: Whether server spans of embedding requests have the attributes of the
            GenAI conventions too.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, *, has_genai_attributes: bool) -> None:
        self._app = app
        self._tracer = tracer
        self._has_genai_attributes = has_genai_attributes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or pass lifespan events to the application."""
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            TRACE.set(None)  # a pipelined request inherits the context of the previous one
            await self._app(scope, receive, send)
            return
        began, began_ns = time.perf_counter(), time.time_ns()
        scope.setdefault("state", {})
        span = self._tracer.start_span(
            _method(scope),
            propagate.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            start_time=began_ns,
        )
        trace = None
        if span.is_recording():
            trace = RequestTrace(_ids(span), keeps_content=self._has_genai_attributes)
        TRACE.set(trace)
        status: int | None = None

        async def send_with_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_status)
        except Exception as error:  # after the start of a response
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            ended = time.perf_counter()
            if trace is not None:
                stages = trace.stages
                if stages and stages[-1][0] == "serialize":
                    stages.append(("send", ended))
                self._add_stages(span, trace, began, began_ns)
                _describe(span, scope, status)
                span.set_attributes(embedding_attributes(trace))
                trace.body = trace.result = None  # a timer of the connection keeps the trace
            span.end(began_ns + int(1e9 * (ended - began)))

    def _add_stages(self, span: Span, trace: RequestTrace, began: float, began_ns: int) -> None:
        context = set_span_in_context(span)
        start_ns = began_ns
        for stage, ended in trace.stages:
            end_ns = began_ns + int(1e9 * (ended - began))
            name = _SPAN_NAMES.get(stage, stage)
            links = _links(trace) if stage == "infer" else []
            self._tracer.start_span(name, context, links=links, start_time=start_ns).end(end_ns)
            start_ns = end_ns


def _has_opted_in() -> bool:
    """Return whether the environment asks for the conventions of GenAI, which are not stable yet.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/
    """
    categories = os.environ.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
    return "gen_ai_latest_experimental" in map(str.strip, categories)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "HTTP"


def _ids(span: Span) -> dict[str, str]:
    context = span.get_span_context()
    return {
        "trace_id": format_trace_id(context.trace_id),
        "span_id": format_span_id(context.span_id),
    }


def _links(trace: RequestTrace) -> list[Link]:
    """Return links to the server spans of the other requests in the batches of a request."""
    sampled = TraceFlags(TraceFlags.SAMPLED)
    batched = trace.batched.copy()  # threads of the engine can add to the original
    return [
        Link(SpanContext(int(ids["trace_id"], 16), int(span_id, 16), False, sampled))
        for span_id, ids in batched.items()
        if span_id != trace.ids["span_id"]
    ]


def _describe(span: Span, scope: Scope, status: int | None) -> None:
    """Set the name, status and attributes of a server span, by the HTTP semantic conventions.

    The path of an unknown route is left out, because clients choose it.
    """
    method = _method(scope)
    span.set_attributes(
        {
            "http.request.method": "_OTHER" if method == "HTTP" else method,
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "vitrine.request_id": scope["state"]["request_id"],
        }
    )
    for side, address in (("server", scope.get("server")), ("client", scope.get("client"))):
        if address:
            span.set_attribute(f"{side}.address", address[0])
            if address[1] is not None:
                span.set_attribute(f"{side}.port", address[1])
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "url.path": scope["path"]})
    if status is None:  # the client has disconnected
        span.set_attribute("error.type", "disconnected")
        return
    span.set_attribute("http.response.status_code", status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # to a server, 4xx is no error
        span.set_attribute("error.type", str(status))
        span.set_status(StatusCode.ERROR)
