"""Prometheus metrics of inference. Label values come from the code, never from a request."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service.inference.cache import ResultCache
from service.inference.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
)

STAGES = ("tokenize", "cache", "queue", "infer", "serialize")
OUTCOMES = ("done", "refused", "failed", "late", "cancelled")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_POWERS = tuple(2**i for i in range(15))


def seconds_buckets(longest_s: float) -> tuple[float, ...]:
    """Return the upper bounds of histogram buckets, in seconds; the last is `longest_s`."""
    return (*(bound for bound in _SECONDS if bound < longest_s), longest_s)


class CacheMetrics(Collector):
    """The Prometheus metrics of a cache of results, which are read when they are scraped.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: ResultCache[Any]) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counts = self._cache.counts
        items = CounterMetricFamily(
            "vitrine_cache_items",
            "Items looked up in the cache: found there (hit), computed by another request at the "
            "same time or for an equal item of the same request (shared), or computed (miss)",
            labels=["result"],
        )
        items.add_metric(["hit"], counts.hits)
        items.add_metric(["shared"], counts.shared)
        items.add_metric(["miss"], counts.misses)
        yield items
        yield CounterMetricFamily(
            "vitrine_cache_saved_tokens",
            "Tokens of items that were found in the cache or shared",
            value=counts.saved_tokens,
        )
        yield GaugeMetricFamily(
            "vitrine_cache_bytes",
            "Size of the results in the cache, in bytes",
            value=self._cache.size,
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
        self.queue_tokens = Gauge("vitrine_queue_tokens", "Queued tokens", registry=registry)
        self.oldest_age = Gauge(
            "vitrine_oldest_queued_request_age_seconds",
            "Longest time that a queued request has waited for its next batch, in seconds",
            registry=registry,
        )
        self.model = Info("vitrine_model", "Served model", registry=registry)


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
