"""What routes share.

They are declared with a lean route class, scopes of keys and documented problems; and they ask for
the runtime, for vectors, and to be told when their client leaves.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ConnectionScope

from models.engines import Output
from service.auth import KeyRing
from service.batching import ItemFailed, Outcome, QueueFull, Stopped
from service.errors import DESCRIPTIONS, PROBLEM, InferenceFailed, NotReady, Overloaded
from service.runtime import Runtime, Wanted
from service.schemas import Problem, reference
from service.settings import Scope
from service.tokenizer import Row

Result = TypeVar("Result")

_BEARER = HTTPBearer(auto_error=False, description="An API key, where the service has any set")


class DirectRoute(APIRoute):
    """Hands its handler the request, once the dependencies of the route have let it pass.

    Those of the route alone and of the router that it was declared on, and given no more than the
    request: what the application or an including router adds does not count.

    FastAPI's and Starlette's layers take 0.2 ms a request beside a busy engine, and 9 % fewer short
    texts are answered through them.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request that the application has routed."""
        return self._handle

    async def serve(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        """Serve a request for this method and path, past the application's layers (ASGI)."""
        scope["route"] = self
        response = await self._handle(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _handle(self, request: Request) -> Response:
        for check in self._checks:
            await check(request)
        response: Response = await self.endpoint(request)
        return response

    @cached_property
    def _checks(self) -> Sequence[Callable[[Request], Coroutine[Any, Any, None]]]:
        return [given.dependency for given in self.dependencies if given.dependency is not None]


def direct(routers: Iterable[APIRouter]) -> dict[tuple[str, str], ASGIApp]:
    """Return what serves each method and path, of direct routes without parameters in the path."""
    return {
        (method, route.path): route.serve
        for router in routers
        for route in router.routes
        if isinstance(route, DirectRoute) and not route.param_convertors
        for method in route.methods or ()
    }


def problems(
    *statuses: int, shape: type[BaseModel] = Problem, media_type: str = PROBLEM
) -> dict[int | str, dict[str, Any]]:
    """Return how the API's documentation describes these errors."""
    content = {media_type: {"schema": reference(shape)}}
    return {
        status: {"description": DESCRIPTIONS[status], "content": content} for status in statuses
    }


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return how the API's documentation describes a body that the handler reads itself."""
    content = {"application/json": {"schema": reference(model)}}
    return {"requestBody": {"required": True, "content": content}}


def scope(name: Scope) -> Any:  # noqa: ANN401 - FastAPI's own type of a dependency
    """Declare that a route needs an API key with this scope, where keys are set."""

    async def require(request: Request, _documented: Any = Security(_BEARER)) -> None:  # noqa: ANN401, B008
        keys: KeyRing = request.app.state.keys
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        keys.require(key.strip() if scheme.lower() == "bearer" and key else None, name)

    require.__name__ = f"require_{name}"
    return Depends(require)


def runtime_of(request: Request) -> Runtime:
    """Return what the service runs with.

    Raises:
        NotReady: The model is being loaded, or the engine is gone.
    """
    runtime: Runtime | None = request.app.state.runtime
    if runtime is None:
        raise NotReady("the model is being loaded")
    if not runtime.batcher.is_alive:
        raise NotReady("the engine has stopped; this process ends")
    return runtime


def check_ready(request: Request) -> None:
    """Let pass where new requests are welcome.

    Raises:
        NotReady: The model is being loaded, the engine is gone, or the service is stopping.
    """
    runtime_of(request)
    if request.app.state.stopping:
        raise NotReady("the service is stopping")


async def submit(
    runtime: Runtime, rows: Sequence[Row], output: Output = "pooled"
) -> Outcome[NDArray[np.float32]]:
    """Return the vector `(W,)` of each row, or those of its tokens `(L, D)`, not normalised.

    Raises:
        Overloaded: The queue is full.
        InferenceFailed: The engine fails on one of the rows.
        NotReady: The engine has stopped.
    """
    try:
        return await runtime.batcher.submit([Wanted(row, output) for row in rows])
    except QueueFull:
        raise full(runtime) from None
    except ItemFailed as error:
        raise InferenceFailed("the engine fails on this input", index=error.index) from error
    except Stopped:
        raise NotReady("the engine has stopped; this process ends") from None


def full(runtime: Runtime) -> Overloaded:
    """Return what is told to those who find the queue full."""
    return Overloaded("the queue is full; try again later", runtime.batcher.drain_s)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what the work returns; it is cancelled if the client goes away meanwhile.

    Raises:
        ClientDisconnect: The client has gone.
    """
    # The work stays in its caller's task: one of its own would cost two turns of the event loop.
    caller = asyncio.current_task()
    assert caller is not None  # noqa: S101 - a coroutine runs in a task
    is_over = False

    def leave(_gone: asyncio.Task[None]) -> None:
        if not is_over:
            caller.cancel()

    gone = asyncio.ensure_future(_disconnected(request))
    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if gone.done():
            caller.uncancel()
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        gone.cancel()


async def _disconnected(request: Request) -> None:
    # Where the body has not been read, as that of a GET, it comes first.
    while (await request.receive())["type"] != "http.disconnect":
        pass
