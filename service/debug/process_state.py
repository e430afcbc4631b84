"""`GET /debug/state` and SIGUSR1: the state of the process, for operators."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from service.api.auth import require_scope
from service.api.openapi import error_responses
from service.debug.pipeline.state import DebugState, State

router = APIRouter(prefix="/debug", dependencies=[require_scope("admin")])


class RunningBatch(BaseModel):
    """A batch that a stream runs."""

    rows: int
    tokens: int
    age_s: float


class ModelState(BaseModel):
    """A served model: its version, its queue, and its running batches."""

    name: str
    path: str
    default: bool
    version: str | None = Field(description="Null: not loaded")
    engine: str | None
    precision: str | None
    weight_bytes: int
    requests: int = Field(description="Requests in flight")
    queue_tokens: int
    oldest_s: float = Field(
        description="Longest time that a queued request has waited for its next batch, in seconds"
    )
    batches: list[RunningBatch]


class CacheState(BaseModel):
    """The cache of results."""

    bytes: int
    max_bytes: int


class GradientProcessState(BaseModel):
    """The gradient process, if it is running."""

    pid: int
    artifact: str


class ProcessState(BaseModel):
    """State of the process: models, queues, batches, cache and child process."""

    stopping: bool
    models: list[ModelState]
    closing_versions: int = Field(
        description="Replaced or unloaded versions that finish their requests"
    )
    large_bodies_bytes: int = Field(
        description="Total size of the request bodies over 64 KiB that are being read"
    )
    cache: CacheState
    gradient_process: GradientProcessState | None


@router.get(
    "/state",
    name="process_state",
    summary="State of the process",
    responses=error_responses(401, 403),
)
async def process_state(state: State) -> ProcessState:
    """Return models, queues, running batches, cache and child processes."""
    return report(state)


def report(state: DebugState) -> ProcessState:
    """Return the state of the process."""
    models = []
    for status in state.registry.statuses():
        model = status.model
        queue = None if model is None else model.batcher
        models.append(
            ModelState(
                name=status.name,
                path=str(status.path),
                default=status.is_default,
                version=None if model is None else model.version,
                engine=None if model is None else model.engine.name,
                precision=None if model is None else model.engine.precision,
                weight_bytes=status.weight_bytes,
                requests=status.leases,
                queue_tokens=0 if queue is None else queue.queued_tokens,
                oldest_s=0.0 if queue is None else queue.oldest_s,
                batches=[
                    RunningBatch(rows=rows, tokens=tokens, age_s=age_s)
                    for rows, tokens, age_s in ([] if queue is None else queue.running)
                ],
            )
        )
    pid, artifact = state.gradients.pid, state.gradients.artifact
    return ProcessState(
        stopping=state.stopping,
        models=models,
        closing_versions=state.registry.closing,
        large_bodies_bytes=state.body_budget.used,
        cache=CacheState(bytes=state.cache.size, max_bytes=state.cache.max_bytes),
        gradient_process=None
        if pid is None or artifact is None
        else GradientProcessState(pid=pid, artifact=str(artifact.path)),
    )
