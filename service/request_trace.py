"""The trace of the current request: its ids, the ends of its stages, its body and its result."""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTrace:
    """The trace of one request.

    Attributes:
        ids: `trace_id` and `span_id`, in hexadecimal digits.
        stages: Name of each finished stage, and the time of its end, by `time.perf_counter`.
        batched: Ids of the traces that were in a batch with this one, by span id. Ids alone: the
            traces would keep each other in memory.
        keeps_content: Whether the trace has the next three, for attributes of embedding requests.
        body: The validated body; None: there is none, or it is invalid.
        model: Name or alias in the request, if any, and name of the served model; None: not known
            yet, or no served model has the name.
        result: Result of inference, from the start of its serialisation.
    """

    ids: dict[str, str]
    stages: list[tuple[str, float]] = field(default_factory=list)
    batched: dict[str, dict[str, str]] = field(default_factory=dict)
    keeps_content: bool = False
    body: object = None
    model: tuple[str | None, str] | None = None
    result: object = None


# None: the request is not traced. A context variable, because the trace is of no concern to the
# functions between the middleware and the stages.
TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)
