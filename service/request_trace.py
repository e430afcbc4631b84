"""The trace of the current request: its ids, for logs and metrics, and the ends of its stages."""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The trace of one request.

    Attributes:
        ids: `trace_id` and `span_id`, in hexadecimal digits.
        stages: Name of each finished stage, and the time of its end, by `time.perf_counter`.
        batched: Ids of the traces that were in a batch with this one, by span id. Ids alone: the
            traces would keep each other in memory.
    """

    ids: dict[str, str]
    stages: list[tuple[str, float]] = field(default_factory=list)
    batched: dict[str, dict[str, str]] = field(default_factory=dict)


# None: the request is not traced. A context variable, because the trace is of no concern to the
# functions between the middleware and the stages.
TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
