"""Prometheus metrics of inference. Label values come from the code, never from a request."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from service.inference.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
)
from service.request_trace import TRACE

STAGES = ("tokenize", "cache", "queue", "infer", "serialize")
OUTCOMES = ("done", "refused", "failed", "late", "cancelled")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_POWERS = tuple(2**i for i in range(15))


def seconds_buckets(longest_s: float) -> tuple[float, ...]:
    """Return the upper bounds of histogram buckets, in seconds; the last is `longest_s`."""
    return (*(bound for bound in _SECONDS if bound < longest_s), longest_s)


class CacheMetrics:
    """The Prometheus metrics of a cache of results.

    Args:
        registry: Prometheus registry in which the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        items = Counter(
            "vitrine_cache_items",
            "Items looked up in the cache: found there (hit), computed by another request at the "
            "same time or for an equal item of the same request (shared), or computed (miss)",
            ["result"],
            registry=registry,
        )
        self.items = {result: items.labels(result) for result in ("hit", "shared", "miss")}
        self.saved_tokens = Counter(
            "vitrine_cache_saved_tokens",
            "Tokens of items that were found in the cache or shared",
            registry=registry,
        )
        self.bytes = Gauge(
            "vitrine_cache_bytes", "Size of the results in the cache, in bytes", registry=registry
        )


class InferenceMetrics:
    """The Prometheus metrics of one model.

    Args:
        registry: Prometheus registry in which the metrics are registered.
        longest_s: Maximum deadline of a request, in seconds; the last finite bucket bound of the
            duration histograms.
    """

    def __init__(self, registry: CollectorRegistry, longest_s: float) -> None:
        buckets = seconds_buckets(longest_s)
        stage_seconds = Histogram(
            "vitrine_stage_seconds",
            "Duration of each stage of an inference request, in seconds",
            ["stage"],
            buckets=buckets,
            registry=registry,
        )
        # Looked up once, because every lookup by label takes a lock.
        self.stage_seconds = {stage: stage_seconds.labels(stage) for stage in STAGES}
        self.inputs_received = Counter(
            "vitrine_inputs_received", "Inputs received", registry=registry
        )
        inputs = Counter(
            "vitrine_inputs",
            "Finished inputs, by outcome; inputs received minus finished inputs are in flight",
            ["outcome"],
            registry=registry,
        )
        self.inputs = {outcome: inputs.labels(outcome) for outcome in OUTCOMES}
        self.batch_rows = Histogram(
            "vitrine_batch_rows", "Rows per batch", buckets=_POWERS, registry=registry
        )
        self.batch_tokens = Histogram(
            "vitrine_batch_tokens", "Tokens per batch", buckets=_POWERS, registry=registry
        )
        self.batch_seconds = Histogram(
            "vitrine_batch_seconds",
            "Duration of a batch in the engine, in seconds",
            buckets=buckets,
            registry=registry,
        )
        self.padded_tokens = Counter(
            "vitrine_padded_tokens",
            "Tokens of all batches, padding included; vitrine_batch_tokens_sum excludes it",
            registry=registry,
        )
        self.cache = CacheMetrics(registry)
        self.queue_tokens = Gauge("vitrine_queue_tokens", "Queued tokens", registry=registry)
        self.oldest_age = Gauge(
            "vitrine_oldest_queued_request_age_seconds",
            "Longest time that a queued request has waited for its next batch, in seconds",
            registry=registry,
        )
        self.model = Info("vitrine_model", "Served model", registry=registry)


def observe_stages(
    histograms: Mapping[str, Histogram], began: float, seconds: Mapping[str, float]
) -> None:
    """Record the duration of consecutive stages, also in the trace of the current request.

    Args:
        histograms: Histogram of each stage.
        began: Time at which the first stage began, by `time.perf_counter`.
        seconds: Duration of each stage, in seconds.
    """
    trace = TRACE.get()
    if trace is None:
        for stage, duration in seconds.items():
            histograms[stage].observe(duration)
        return
    ended = began
    for stage in (stage for stage in STAGES if stage in seconds):
        histograms[stage].observe(seconds[stage], trace.ids)
        ended += seconds[stage]
        trace.stages.append((stage, ended))


@contextmanager
def record_outcome(record: Callable[[str], None]) -> Iterator[None]:
    """Record the outcome of the code inside the context, as one of `OUTCOMES`."""
    try:
        yield
    except BaseException as error:
        record(_outcome(error))
        raise
    record("done")


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, DeadlineExceeded):
        return "late"
    is_refused = isinstance(error, InvalidInput | TooLarge | Overloaded | NotReady)
    return "refused" if is_refused else "failed"
