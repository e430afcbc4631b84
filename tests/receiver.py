"""A receiver of OpenTelemetry's protocol, OTLP over HTTP, for tests of traces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.eventually import eventually
from tests.threaded_server import in_thread


class Receiver:
    """The spans that a service has exported.

    Attributes:
        url: Value for OTEL_EXPORTER_OTLP_ENDPOINT.
        spans: All spans, in the order of their export.
        resources: Attributes of the exporting service, of each export.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.resources: list[dict[str, object]] = []

    def add(self, body: bytes) -> None:
        for exported in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(exported.resource))
            for scope in exported.scope_spans:
                self.spans += scope.spans

    def servers(self) -> list[Span]:
        """Return the server spans so far."""
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def wait(self, count: int = 1) -> list[Span]:
        """Return the server spans once there are that many."""
        eventually(lambda: len(self.servers()) >= count)
        return self.servers()

    def span_of(self, response: httpx2.Response) -> Span:
        """Return the server span of a response once it is exported."""
        request_id = response.headers["X-Request-Id"]

        def own() -> list[Span]:
            return [s for s in self.servers() if attributes(s)["vitrine.request_id"] == request_id]

        eventually(own)
        (span,) = own()
        return span

    def children(self, parent: Span) -> list[Span]:
        """Return the child spans of an exported span, by start; they are exported before it."""
        own = [span for span in self.spans if span.parent_span_id == parent.span_id]
        assert all(span.trace_id == parent.trace_id for span in own)
        return sorted(own, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


def attributes(owner: object) -> dict[str, object]:
    """Return the attributes of a span or a resource."""
    pairs: Sequence[object] = owner.attributes  # type: ignore[attr-defined]
    values = {pair.key: pair.value for pair in pairs}  # type: ignore[attr-defined]
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Yield a receiver that listens on a loopback port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            receiver.add(body)
            content = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
        yield receiver
