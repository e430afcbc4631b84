"""The API of text-embeddings-inference (TEI), under /tei.

Contract: https://huggingface.github.io/text-embeddings-inference
"""

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from models.manifest import Manifest
from service.api.compat import tei_classify, tei_embed
from service.api.compat.tei_routes import (
    KEY,
    PREFIX,
    json_response,
    named_model,
    openapi_errors,
    route_options,
)
from service.api.compat.tei_schemas import (
    EmbedRequest,
    Predictions,
    PredictRequest,
    SparseValue,
    TEIInfo,
    TEIRank,
    TEIRerankRequest,
)
from service.api.errors import FrameworkError, Unauthorized, headers_of, status_of
from service.api.raw_route import RawRoute
from service.api.responses import JSON
from service.api.schemas import VERSION
from service.api.state import State
from service.inference.errors import (
    InferenceFailed,
    InvalidInput,
    NotReady,
    Overloaded,
    TooLarge,
    UnknownModel,
    VitrineError,
)
from service.inference.registry.model_names import NameConflict

router = APIRouter(prefix=PREFIX, route_class=RawRoute)

_HEALTH: dict[str, Any] = {
    "summary": "Readiness",
    "response_class": Response,
    "responses": openapi_errors(503),
}


@router.post(
    "",
    name="tei",
    **route_options(
        "Same as /tei/embed, /tei/embed_sparse, /tei/rerank or /tei/predict, by kind of model",
        list[list[float]] | list[list[SparseValue]] | list[TEIRank] | Predictions,
        *(EmbedRequest, TEIRerankRequest, PredictRequest),
    ),
)
@router.post("/", name="tei_slash", dependencies=[KEY], include_in_schema=False)
async def tei_root(request: Request, state: State) -> Response:
    """Encode inputs, rerank texts or classify inputs, whichever the model does."""
    if request.path_params.get("model") in _READ_ONLY:  # not a model: the path of another route
        raise FrameworkError(405, "Method Not Allowed", {"Allow": "HEAD, GET"})
    kind = _kind((await named_model(request, state)).artifact.manifest)
    return await _HANDLERS[kind](request, state)


_READ_ONLY = ("info", "ping", "health")
_HANDLERS = {
    "embedding": tei_embed.embed,
    "sparse": tei_embed.embed_sparse,
    "reranker": tei_classify.rerank,
    "classifier": tei_classify.predict,
}


def _kind(manifest: Manifest) -> str:
    if "sparse" in manifest.outputs:
        return "sparse"
    return {0: "embedding", 1: "reranker"}.get(len(manifest.labels), "classifier")


def _model_type(manifest: Manifest) -> dict[str, dict[str, Any]]:
    if {"tags", "spans"} & {*manifest.outputs}:  # TEI has no models that find entities
        return {}
    if not manifest.labels:
        pooling = "splade" if "sparse" in manifest.outputs else "+".join(manifest.pooling) or "none"
        return {"embedding": {"pooling": pooling}}
    names = {str(index): label for index, label in enumerate(manifest.labels)}
    numbers = {label: index for index, label in enumerate(manifest.labels)}
    return {_kind(manifest): {"id2label": names, "label2id": numbers}}


@router.get(
    "/info",
    summary="Served model",
    dependencies=[KEY],
    response_model=TEIInfo,
    responses=openapi_errors(401, 403, 503),
)
async def tei_info(request: Request, state: State) -> Response:
    """Return the served model in the format of text-embeddings-inference."""
    model, settings = await named_model(request, state), state.settings
    manifest = model.artifact.manifest
    return json_response(
        TEIInfo(
            model_id=manifest.source,
            model_sha=manifest.revision,
            model_dtype=model.engine.precision,
            served_model_name=model.name,
            model_type=_model_type(manifest),
            max_concurrent_requests=max(1, settings.batch.max_queue_tokens // manifest.max_tokens),
            max_input_length=manifest.max_tokens,
            max_batch_tokens=model.max_cost,
            max_batch_requests=None,
            max_client_batch_size=settings.limits.max_inputs,
            auto_truncate=True,
            tokenization_workers=model.engine.threads,
            version=VERSION,
            sha=None,
            docker_label=None,
        ).model_dump()
    )


@router.get("/", name="tei_health_slash", include_in_schema=False)
@router.get("", name="tei_root", **_HEALTH)
@router.get("/ping", name="tei_ping", **_HEALTH)
@router.get("/health", **_HEALTH)
async def tei_health(request: Request, state: State) -> Response:
    """Return 200 with an empty body while the model is ready, otherwise 503."""
    state.check_ready()
    if "model" in request.path_params:
        try:
            state.registry.resolve(request.path_params["model"])
        except UnknownModel:  # this route needs no key, so it does not list the served models
            raise UnknownModel("unknown model") from None
    return Response()


for _part in (tei_embed.router, tei_classify.router):
    router.routes.extend(_part.routes)

_ROUTES = [route for route in router.routes if isinstance(route, APIRoute)]
# Names of the routes under /tei, with "" for /tei and /tei/.
_ROUTE_NAMES = frozenset(route.path.removeprefix(PREFIX).removeprefix("/") for route in _ROUTES)
# Paths of the routes in `root_router`. GET / and GET /info remain routes of the native API.
ROOT_PATHS = frozenset(
    route.path.removeprefix(PREFIX) or "/" for route in _ROUTES if route.path != f"{PREFIX}/info"
)


def check_name(name: str) -> None:
    """Check a name or alias of a model, whose routes are under /tei/{name}.

    Raises:
        NameConflict: The path /tei/{name} would be that of a route of the default model, or of a
            model whose name is the part before the last slash.
    """
    if name.rpartition("/")[2] in _ROUTE_NAMES:
        routes = ", ".join(sorted(_ROUTE_NAMES - {""}))
        raise NameConflict(
            name,
            f"the name {name!r} is ambiguous in paths under /tei: the last part of a name must not "
            f"be empty, nor be {routes}",
        )


def root_router() -> APIRouter:
    """Return the routes without the prefix /tei, for clients that drop the path of a base URL."""
    root = APIRouter(route_class=RawRoute)
    for route in _ROUTES:
        path = route.path.removeprefix(PREFIX) or "/"
        if path in ROOT_PATHS and (path != "/" or "POST" in (route.methods or ())):
            _add(root, path, route, "root")
    return root


def model_router() -> APIRouter:
    """Return the routes under /tei/{model}, where {model} is the name of a served model."""
    named = APIRouter(route_class=RawRoute)
    # A name may have slashes, so /tei/{model} matches all other paths and comes last.
    for route in sorted(_ROUTES, key=lambda route: len(route.path), reverse=True):
        if (route.path, route.methods) != (PREFIX, {"GET"}):
            _add(named, f"{PREFIX}/{{model:path}}{route.path.removeprefix(PREFIX)}", route, "model")
    return named


def _add(target: APIRouter, path: str, route: APIRoute, name: str) -> None:
    """Add a copy of a route with another path, and with a prefix to its name."""
    target.add_api_route(
        path,
        route.endpoint,
        methods=list(route.methods or ()),
        dependencies=route.dependencies,
        name=f"{name}_{route.name}",
        include_in_schema=False,
    )


def render_error(error: VitrineError, _request_id: str) -> Response:
    """Return the error in the format of text-embeddings-inference."""
    status, headers = status_of(error), headers_of(error)
    message = {
        "empty": f"Input validation error: `{_field(error)}` cannot be empty",
        "overloaded": "Model is overloaded",
        # Requests of TEI have no field `model`.
        "model_required": f"Input validation error: {error.detail}; use /tei/{{name}}",
    }.get(error.code, f"Input validation error: {error.detail}")
    match error:
        case Unauthorized():
            return Response(status_code=401, headers=headers)
        case InvalidInput(code="empty"):
            status, kind = 400, "Empty"
        case InvalidInput(code="invalid", pointer=str(pointer)):
            # A body or a field of the wrong type.
            pointer = pointer.replace("/on_overflow", "/truncation_direction")
            place = f"{pointer}: " if pointer else ""
            return Response(place + error.detail, 422, headers, "text/plain")
        case InferenceFailed() | InvalidInput(code="wrong_model"):
            status, kind, message = 424, "Backend", f"Backend error: {error.detail}"
        case InvalidInput() | TooLarge(code="text_too_large"):
            status, kind = 422, "Validation"
        case Overloaded():
            status, kind = 429, "Overloaded"
        case NotReady():
            status, kind, message = 503, "Unhealthy", "unhealthy"
        case _ if status == 500:
            status, kind, message = 500, "Backend", f"Backend error: {error.detail}"
        case _:  # in TEI, errors of the web framework, as plain text
            return Response(error.detail, status, headers, "text/plain")
    if error.index is not None:
        message += f" (at index {error.index})"
    body = orjson.dumps({"error": message, "error_type": kind})
    return Response(body, status, headers, JSON)


def _field(error: VitrineError) -> str:
    """Return TEI's name of the field that the error's pointer names."""
    field = (error.pointer or "/").split("/")[1]
    return {"ids": "ids", "query": "query", "texts": "texts", "documents": "texts"}.get(
        field, "inputs"
    )
