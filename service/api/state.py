"""The state of the application, which route handlers receive as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from service.api.metrics import Metrics
from service.inference.cache import ResultCache
from service.inference.errors import NotReady
from service.inference.model import Model
from service.inference.results import RowResults
from service.settings import Settings

if TYPE_CHECKING:  # these modules import this one
    from service.api.auth import KeyRing
    from service.api.body import BodyBudget


@dataclass
class AppState:
    """State of one application.

    Attributes:
        settings: All settings.
        metrics: All metrics.
        cache: Cache of results.
        keys: API keys.
        body_budget: Memory budget of request bodies in flight.
        model: The served model; None while the model is loading, and after shutdown.
        stopping: Whether the service is shutting down.
    """

    settings: Settings
    metrics: Metrics
    cache: ResultCache[RowResults]
    keys: KeyRing
    body_budget: BodyBudget
    model: Model | None = None
    stopping: bool = False

    def ready_model(self) -> Model:
        """Return the served model.

        Raises:
            NotReady: The model is loading, or its engine has stopped.
        """
        if self.model is None:
            raise NotReady("the model is loading")
        if not self.model.batcher.is_alive:
            raise NotReady("the engine has stopped; this process will exit")
        return self.model

    def check_ready(self) -> None:
        """Raise an error if the service is not ready for new requests.

        Raises:
            NotReady: The model is loading, its engine has stopped, or the service is stopping.
        """
        self.ready_model()
        if self.stopping:
            raise NotReady("the service is stopping")


def state_of(request: Request) -> AppState:
    """Return the state of the application that serves a request."""
    state: AppState = request.app.state.vitrine
    return state


async def _get_state(request: Request) -> AppState:
    return state_of(request)


State = Annotated[AppState, Depends(_get_state)]
