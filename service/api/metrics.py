"""Prometheus metrics of the HTTP API. Label values come from the code, never from a request."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder

from service.inference.metrics import InferenceMetrics, seconds_buckets


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

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and their media type.

        The format is Prometheus' text format, or OpenMetrics if the Accept header lists it. Only
        OpenMetrics has exemplars.
        """
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type
