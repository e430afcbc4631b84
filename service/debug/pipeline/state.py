"""The state of an application with gradient routes."""

from dataclasses import dataclass, field
from itertools import product
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import Counter

from service.api.state import AppState
from service.debug.pipeline.messages import JOB_KINDS
from service.debug.pipeline.process import GradientProcess
from service.inference.results.metrics import OUTCOMES


@dataclass
class DebugState(AppState):
    """State of one application with gradient routes.

    Attributes:
        gradients: The gradient process.
        jobs: Prometheus counter of gradient jobs, by kind and outcome.
    """

    gradients: GradientProcess = field(kw_only=True)
    jobs: Counter = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Counter(
            "vitrine_debug_jobs",
            "Jobs of the gradient process, by kind and outcome",
            ["kind", "outcome"],
            registry=self.metrics.registry,
        )
        # Creates every counter at 0. Prometheus would not see an increase of a counter that first
        # appears with the value 1.
        for kind, outcome in product(JOB_KINDS, OUTCOMES):
            self.jobs.labels(kind, outcome)


async def _get_state(request: Request) -> DebugState:
    state: DebugState = request.app.state.vitrine
    return state


State = Annotated[DebugState, Depends(_get_state)]
