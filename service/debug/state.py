"""The state of an application with gradient routes."""

from dataclasses import dataclass, field
from itertools import product
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import Counter

from service.api.state import AppState
from service.debug.job_types import KINDS
from service.debug.kinds import Kind, kind_for
from service.debug.process import GradientProcess
from service.inference.model.model import Model
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
        for kind, outcome in product(KINDS, OUTCOMES):
            self.jobs.labels(kind, outcome)

    async def lease_for(self, route: str, request: Request, name: str | None) -> tuple[Model, Kind]:
        """Return a served model and its kind, which must be one that the route is for.

        Args:
            route: Key of `service.debug.kinds.ROUTES`.
            request: See `lease`.
            name: See `lease`.

        Raises:
            InvalidInput: The route is for other kinds of models.
            VitrineError: Any error of `lease`, under the same conditions.
        """
        model = await self.lease(request, name)
        return model, kind_for(route, model.artifact.manifest)


async def _get_state(request: Request) -> DebugState:
    state: DebugState = request.app.state.vitrine
    return state


State = Annotated[DebugState, Depends(_get_state)]
