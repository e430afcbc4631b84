"""Prometheus metrics of inference. Label values come from the code, and are names of models."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service.inference.batching.batcher import Batcher
from service.inference.batching.cache import ResultCache
from service.inference.errors import DeadlineExceeded, InvalidInput, NotReady, Overloaded, TooLarge
from service.inference.results.vectors import Vectors
from service.inference.tokenizing.rows import Row
from service.request_trace import TRACE

STAGES = ("tokenize", "cache", "queue", "infer", "explain", "serialize")
OUTCOMES = ("done", "refused", "failed", "late", "cancelled")
RESULTS = ("loaded", "failed")
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
    """The Prometheus metrics of all models of a process.

    Args:
        registry: Prometheus registry in which the metrics are registered.
        longest_s: Maximum deadline of a request, in seconds; the last finite bucket bound of the
            duration histograms.
    """

    def __init__(self, registry: CollectorRegistry, longest_s: float) -> None:
        buckets = seconds_buckets(longest_s)
        options: dict[str, Any] = {"labelnames": ["model"], "registry": registry}
        self.stage_seconds = Histogram(
            "vitrine_stage_seconds",
            "Duration of each stage of an inference request, in seconds",
            ["model", "stage"],
            buckets=buckets,
            registry=registry,
        )
        self.inputs_received = Counter("vitrine_inputs_received", "Inputs received", **options)
        self.inputs = Counter(
            "vitrine_inputs",
            "Finished inputs, by outcome; inputs received minus finished inputs are in flight",
            ["model", "outcome"],
            registry=registry,
        )
        self.input_tokens = Histogram(
            "vitrine_input_tokens",
            "Tokens per tokenised input, special tokens included, after truncation",
            buckets=_POWERS,
            **options,
        )
        self.unknown_tokens = Counter(
            "vitrine_unknown_tokens",
            "Tokens of tokenised inputs that stand for what is not in the vocabulary",
            **options,
        )
        self.truncated_inputs = Counter(
            "vitrine_truncated_inputs", "Tokenised inputs that were truncated", **options
        )
        self.vectors = Counter(
            "vitrine_vectors",
            "Pooled vectors computed by the engine, not found in the cache",
            **options,
        )
        self.vector_norms = Counter(
            "vitrine_vector_norms",
            "Sum of the norms of the computed pooled vectors, before normalisation",
            **options,
        )
        self.compared_vectors = Counter(
            "vitrine_compared_vectors",
            "Computed pooled vectors of models that were exported with --calibrate",
            **options,
        )
        self.mean_distances = Counter(
            "vitrine_mean_vector_distances",
            "Sum of 1 - cosine of each compared vector and the mean vector of --calibrate",
            **options,
        )
        self.variants = Counter(
            "vitrine_variants",
            "Variants of texts that were scored for explanations by deletion, by outcome",
            ["model", "outcome"],
            registry=registry,
        )
        self.batch_rows = Histogram(
            "vitrine_batch_rows", "Rows per batch", buckets=_POWERS, **options
        )
        self.batch_tokens = Histogram(
            "vitrine_batch_tokens", "Tokens per batch", buckets=_POWERS, **options
        )
        self.batch_seconds = Histogram(
            "vitrine_batch_seconds",
            "Duration of a batch in the engine, in seconds",
            buckets=buckets,
            **options,
        )
        self.padded_tokens = Counter(
            "vitrine_padded_tokens",
            "Tokens of all batches, padding included; vitrine_batch_tokens_sum excludes it",
            **options,
        )
        self.queue_tokens = Gauge("vitrine_queue_tokens", "Queued tokens", **options)
        self.oldest_age = Gauge(
            "vitrine_oldest_queued_request_age_seconds",
            "Longest time that a queued request has waited for its next batch, in seconds",
            **options,
        )
        self.loaded_bytes = Gauge(
            "vitrine_model_loaded_bytes",
            "Size of the file of weights, in bytes; 0: the model is not loaded",
            **options,
        )
        self.loads = Counter(
            "vitrine_model_loads",
            "Loads of the model, by result",
            ["model", "result"],
            registry=registry,
        )
        self.unloads = Counter("vitrine_model_unloads", "Unloads of the model", **options)
        self.info = Info("vitrine_model", "Served model", **options)
        self.quality = Gauge(
            "vitrine_model_quality",
            "Quality of the served int8 graph relative to float32, measured at export",
            ["model", "measure"],
            registry=registry,
        )

    def remove(self, model: str) -> None:
        """Remove all series of a model."""
        for metric in vars(self).values():
            metric.remove_by_labels({"model": model})


class ModelMetrics:
    """The metrics of one model. Its versions, loaded one after the other, share them.

    Args:
        metrics: Metrics of all models.
        model: Name of the model.
    """

    def __init__(self, metrics: InferenceMetrics, model: str) -> None:
        # Looked up once, because every lookup by label takes a lock.
        self.stage_seconds = {stage: metrics.stage_seconds.labels(model, stage) for stage in STAGES}
        self.inputs_received = metrics.inputs_received.labels(model)
        self.inputs = {outcome: metrics.inputs.labels(model, outcome) for outcome in OUTCOMES}
        self._input_tokens = metrics.input_tokens.labels(model)
        self._unknown_tokens = metrics.unknown_tokens.labels(model)
        self._truncated_inputs = metrics.truncated_inputs.labels(model)
        self._vectors = metrics.vectors.labels(model)
        self._vector_norms = metrics.vector_norms.labels(model)
        self._compared_vectors = metrics.compared_vectors.labels(model)
        self._mean_distances = metrics.mean_distances.labels(model)
        self.variants = {outcome: metrics.variants.labels(model, outcome) for outcome in OUTCOMES}
        self.batch_rows = metrics.batch_rows.labels(model)
        self.batch_tokens = metrics.batch_tokens.labels(model)
        self.batch_seconds = metrics.batch_seconds.labels(model)
        self.padded_tokens = metrics.padded_tokens.labels(model)
        self.loaded_bytes = metrics.loaded_bytes.labels(model)
        self.loads = {result: metrics.loads.labels(model, result) for result in RESULTS}
        self.unloads = metrics.unloads.labels(model)
        self._queues: list[Batcher[Any, Any]] = []
        metrics.queue_tokens.labels(model).set_function(
            lambda: sum(queue.queued_tokens for queue in self._queues)
        )
        metrics.oldest_age.labels(model).set_function(
            lambda: max((queue.oldest_s for queue in self._queues), default=0.0)
        )
        self._model, self._info, self._quality = model, metrics.info, metrics.quality
        self._measures: set[str] = set()

    def observe_rows(self, rows: Sequence[Row], unknown_id: int | None) -> None:
        """Record lengths, unknown tokens and truncation of inputs. May be called from any thread.

        Args:
            rows: Row of each input.
            unknown_id: Id of the unknown token; None: the vocabulary has none.
        """
        unknown = truncated = 0
        for row in rows:
            self._input_tokens.observe(len(row.ids))
            truncated += row.truncated
            if unknown_id is not None:
                unknown += row.ids.count(unknown_id)
        # Both are mostly 0, and every increment takes a lock.
        if unknown:
            self._unknown_tokens.inc(unknown)
        if truncated:
            self._truncated_inputs.inc(truncated)

    def observe_vectors(self, vectors: Vectors, direction: Vectors | None) -> None:
        """Record the norms and directions of vectors. May be called from any thread.

        Args:
            vectors: Pooled vectors `(B, W)`, before normalisation.
            direction: Mean vector `(W,)` of the calibration, scaled to unit length; None: the model
                is not calibrated.
        """
        norms = np.linalg.norm(vectors, axis=1)
        self._vectors.inc(len(vectors))
        self._vector_norms.inc(float(norms.sum()))
        if direction is not None:
            cosines = vectors @ direction / np.maximum(norms, np.finfo(np.float32).tiny)
            self._compared_vectors.inc(len(vectors))
            self._mean_distances.inc(float(np.maximum(1 - cosines, 0).sum()))

    def add_queue(self, queue: Batcher[Any, Any]) -> None:
        """Include the queue of a version of the model."""
        self._queues.append(queue)

    def remove_queue(self, queue: Batcher[Any, Any]) -> None:
        """Remove the queue of a version that is closed; the metrics must not keep its engine."""
        if queue in self._queues:  # a version may be closed twice
            self._queues.remove(queue)

    def set_info(self, **labels: str) -> None:
        """Set the labels of `vitrine_model_info`, which describe the version that is served."""
        self._info.labels(self._model).info(labels)

    def set_quality(self, measures: Mapping[str, float]) -> None:
        """Set `vitrine_model_quality` of the version that is served; empty: it is not in int8."""
        for measure in self._measures - measures.keys():
            self._quality.remove(self._model, measure)
        for measure, value in measures.items():
            self._quality.labels(self._model, measure).set(value)
        self._measures = set(measures)

    def clear_info(self) -> None:
        """Remove the description and the quality of a model that is no longer served."""
        self._info.remove(self._model)
        self.set_quality({})


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
        record(outcome_of(error))
        raise
    record("done")


def outcome_of(error: BaseException) -> str:
    """Return the outcome, one of `OUTCOMES`, of inputs whose call has raised an error."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, TimeoutError | DeadlineExceeded):
        return "late"
    is_refused = isinstance(error, InvalidInput | TooLarge | Overloaded | NotReady)
    return "refused" if is_refused else "failed"
