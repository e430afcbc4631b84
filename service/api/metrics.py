"""Prometheus metrics of the HTTP API. Label values come from the code, never from a request."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from service.inference.results.metrics import InferenceMetrics, seconds_buckets

# Media types of the formats; only OpenMetrics has exemplars.
TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text"
FORMATS = (TEXT, OPENMETRICS)


class Metrics:
    """The metrics of one application, in a separate registry.

    Args:
        longest_s: Maximum deadline of a request, in seconds; the last finite bucket bound of the
            duration histograms.

    Attributes:
        registry: Registry of all metrics.
        inference: Metrics of the model.
    """

    def __init__(self, longest_s: float) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.inference = InferenceMetrics(self.registry, longest_s)
        self.requests = Counter(
            "vitrine_requests",
            "Requests by status; 'disconnected': the client disconnected before the response; "
            "'client_deadline': status 504 because of the client's X-Request-Timeout-Ms",
            ["route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "vitrine_request_seconds",
            "Duration from the head of a request to the last byte of its response, in seconds",
            ["route"],
            buckets=seconds_buckets(longest_s),
            registry=self.registry,
        )

    def exposition(self, media_type: str = TEXT) -> tuple[bytes, str]:
        """Return all metrics in one of `FORMATS`, and their media type with its parameters."""
        if media_type == OPENMETRICS:
            content: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return content, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
