"""Routes that answer a question with a gradient job."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request, Response

from models.manifest import Manifest
from service.api.auth import require_scope
from service.api.body import read_body
from service.api.openapi import NATIVE_ERRORS, request_body
from service.api.raw_route import RawRoute
from service.debug.pipeline.access import ACCESS
from service.debug.pipeline.call import Call
from service.debug.pipeline.model_kinds import ALL_KINDS, ModelKind, kind_for, kind_of
from service.debug.pipeline.request_fields import ModelRequest
from service.debug.pipeline.state import State
from service.inference.errors import InvalidInput
from service.inference.explain.terms import DISTANCES

Body = TypeVar("Body", bound=ModelRequest)


@dataclass(frozen=True)
class GradientRoute(Generic[Body]):
    """A route that answers a question about a model.

    Attributes:
        name: Path of the route below /debug.
        summary: Title of the route.
        handler: Returns the response to a request. Its docstring is the description of the route.
        request: Model of the request body.
        response: Model of a successful response in JSON.
        kinds: Kinds of models that it is for.
        needs_sum: Whether the model's similarity must be a sum over pairs of tokens.
        success: Further OpenAPI fields of the successful response.
    """

    name: str
    summary: str
    handler: Callable[[Body, Call], Awaitable[Response]]
    request: type[Body]
    response: Any
    kinds: tuple[ModelKind, ...] = ALL_KINDS
    needs_sum: bool = False
    success: Mapping[str, Any] = field(default_factory=dict)

    def is_for(self, manifest: Manifest) -> bool:
        """Return whether the route is for a model."""
        is_sum = manifest.similarity not in DISTANCES
        return kind_of(manifest) in self.kinds and (is_sum or not self.needs_sum)

    def kind_for(self, manifest: Manifest) -> ModelKind:
        """Return the kind of a model, which must be one that the route is for.

        Raises:
            InvalidInput: The route is for other models.
        """
        kind = kind_for(f"/debug/{self.name}", self.kinds, manifest)
        if not self.is_for(manifest):
            raise InvalidInput(
                f"/debug/{self.name} is for cosines and dot products, which are sums over pairs of "
                f"tokens; the similarity of the model {manifest.name} is {manifest.similarity}",
                code="wrong_model",
            )
        return kind

    def add_to(self, router: APIRouter) -> None:
        """Add the route to a router."""

        async def endpoint(request: Request, state: State) -> Response:
            body = await read_body(request, state, self.request)
            model = await state.lease(request, body.model)
            kind = self.kind_for(model.artifact.manifest)
            return await self.handler(body, Call(request, state, model, kind))

        router.add_api_route(
            f"/{self.name}",
            endpoint,
            methods=["POST"],
            name=self.handler.__name__,
            summary=self.summary,
            description=inspect.getdoc(self.handler),
            response_model=self.response,
            openapi_extra=request_body(self.request),
            responses={**({200: dict(self.success)} if self.success else {}), **NATIVE_ERRORS},
        )


def gradient_router() -> APIRouter:
    """Return a router for keys with the scope `debug`, and allowed hosts."""
    return APIRouter(
        prefix="/debug", route_class=RawRoute, dependencies=[require_scope("debug"), *ACCESS]
    )
