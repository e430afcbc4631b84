"""The state of the application, which route handlers receive as an argument."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.api.body_budget import BodyBudget
from service.api.deadline import deadline_of
from service.api.keys import KeyRing
from service.api.metrics import Metrics
from service.inference.batching.cache import ResultCache
from service.inference.call_options import Deadline
from service.inference.errors import NotReady
from service.inference.model.model import Model
from service.inference.registry.model_version import Lease
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.results.vectors import RowResults
from service.request_trace import TRACE
from service.settings import Settings

# Key of the leases of a request in its ASGI scope's state; the middleware releases them.
LEASES = "leases"


@dataclass
class AppState:
    """State of one application.

    Attributes:
        settings: All settings.
        metrics: All metrics.
        cache: Cache of results.
        keys: API keys.
        body_budget: Memory budget of request bodies in flight.
        registry: The served models.
        watch: Detection of changed artifacts.
        stopping: Whether the service is shutting down.
    """

    settings: Settings
    metrics: Metrics
    cache: ResultCache[RowResults]
    keys: KeyRing
    body_budget: BodyBudget
    registry: ModelRegistry
    watch: ModelWatch
    stopping: bool = False

    async def lease(self, request: Request, name: str | None = None) -> Model:
        """Return a served model, which stays loaded until the response has been sent.

        Further calls for the same model in one request return the same version.

        Args:
            request: The request.
            name: Name or alias of the model; None: the default model.

        Raises:
            Malformed: See `deadline_of`.
            VitrineError: Any error of `ModelRegistry.lease`, under the same conditions.
        """
        leases: list[Lease] = request.scope["state"].setdefault(LEASES, [])
        if leases:
            served = self.registry.resolve(name)
            for lease in leases:
                if lease.model.name == served:
                    return lease.model
        deadline = self.deadline(request)
        if (trace := TRACE.get()) is not None:
            trace.model = name, self.registry.resolve(name)
        lease = await self.registry.lease(name, deadline.remaining_s)
        leases.append(lease)
        return lease.model

    def deadline(self, request: Request) -> Deadline:
        """Return the deadline of a request, which starts with the first call; see `deadline_of`."""
        return deadline_of(request, self.settings.limits.request_s)

    def check_ready(self) -> None:
        """Raise an error if the service is not ready for new requests.

        Raises:
            NotReady: The models are loading, an engine has stopped, or the service is stopping.
        """
        self.registry.check_alive()
        if self.stopping:
            raise NotReady("the service is stopping")


def state_of(request: Request) -> AppState:
    """Return the state of the application that serves a request."""
    state: AppState = request.scope["app"].state.vitrine
    return state


async def _get_state(request: Request) -> AppState:
    return state_of(request)


State = Annotated[AppState, Depends(_get_state)]
