"""Prometheus metrics. Labels take values from the code alone, never from a request."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from starlette.requests import ClientDisconnect

from service.errors import DeadlineExceeded, NotReady, ServiceError

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STAGES = ("tokenize", "queue", "infer", "serialize")
OUTCOMES = ("done", "refused", "failed", "late", "cancelled")
JOBS = ("attribute", "pair", "flow", "layer_norm", "parity", "vjp")
_POWERS = tuple(2**i for i in range(15))


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "vitrine_requests",
            "Requests by status; 'disconnected' had no answer",
            ["route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "vitrine_request_seconds",
            "From the request's first byte to the answer's last",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        stage_seconds = Histogram(
            "vitrine_stage_seconds",
            "Time of an encode request by stage",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        # Looked up once: a look-up by label takes a lock.
        self.stage_seconds = {stage: stage_seconds.labels(stage) for stage in STAGES}
        self.inputs_received = Counter(
            "vitrine_inputs_received", "Inputs of encode requests", registry=self.registry
        )
        inputs = Counter(
            "vitrine_inputs",
            "What became of the inputs; all together, and those under way, are those received",
            ["outcome"],
            registry=self.registry,
        )
        self.inputs = {outcome: inputs.labels(outcome) for outcome in OUTCOMES}
        self.debug_jobs = Counter(
            "vitrine_debug_jobs",
            "Jobs of the gradient process",
            ["kind", "outcome"],
            registry=self.registry,
        )
        # From 0 on: a counter that is first seen at 1 has not risen, to Prometheus.
        for kind, outcome in product(JOBS, OUTCOMES):
            self.debug_jobs.labels(kind, outcome)
        self.batch_rows = Histogram(
            "vitrine_batch_rows", "Rows of a batch", buckets=_POWERS, registry=self.registry
        )
        self.batch_tokens = Histogram(
            "vitrine_batch_tokens", "Tokens of a batch", buckets=_POWERS, registry=self.registry
        )
        self.batch_seconds = Histogram(
            "vitrine_batch_seconds",
            "Time of a batch in the engine",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.padded_tokens = Counter(
            "vitrine_padded_tokens",
            "Tokens of all batches had they been padded; compare vitrine_batch_tokens_sum",
            registry=self.registry,
        )
        self.queue_tokens = Gauge(
            "vitrine_queue_tokens", "Tokens that wait for a batch", registry=self.registry
        )
        self.queue_seconds = Gauge(
            "vitrine_queue_seconds",
            "How long the oldest request has waited that nothing has been run of",
            registry=self.registry,
        )
        self.model = Info("vitrine_model", "What is served", registry=self.registry)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)


@contextmanager
def telling_outcome(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell what becomes of the work that is done meanwhile, one of `OUTCOMES`."""
    try:
        yield
    except BaseException as error:
        tell(_outcome(error))
        raise
    tell("done")


def _outcome(error: BaseException) -> str:
    if isinstance(error, ClientDisconnect | asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, DeadlineExceeded):
        return "late"
    is_refused = isinstance(error, NotReady) or (
        isinstance(error, ServiceError) and error.status < 500
    )
    return "refused" if is_refused else "failed"
