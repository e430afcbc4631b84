"""`create_app`, which builds the ASGI application from the settings."""

import asyncio
import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from models.engines import EngineError
from models.manifest import ArtifactError
from service.api import classify, models, score, tag
from service.api.body_budget import BodyBudget
from service.api.compat import cohere, openai, rerank, tei, vllm
from service.api.errors import FrameworkError, problem
from service.api.keys import KeyRing
from service.api.metrics import Metrics
from service.api.middleware import REQUEST_ID, RequestMiddleware
from service.api.openapi import openapi
from service.api.raw_route import dispatch_table
from service.api.routes import raw_router, router
from service.api.schemas import ENCODE_HEADERS, VERSION
from service.debug import capabilities, process_state
from service.debug import routes as debug
from service.debug.pipeline.process import GradientProcess, worker_command
from service.debug.pipeline.state import DebugState
from service.inference.batching.cache import ResultCache
from service.inference.batching.runs import RunBroken
from service.inference.errors import VitrineError
from service.inference.registry.model_watch import ModelWatch
from service.inference.registry.registry import ModelRegistry
from service.inference.results.metrics import CacheMetrics
from service.inference.results.vectors import RowResults
from service.page import routes as page
from service.settings import Settings, traces_endpoint

if TYPE_CHECKING:  # imported only if traces are exported
    from service.api.tracing import Exporter

log = logging.getLogger("vitrine")

# By prefix of the path; the first match counts.
_RENDERERS = {
    **{f"{path}/": api.render_error for api in (rerank, cohere) for path in api.PATHS},
    **{f"{server.PREFIX}/": server.render_error for server in (openai, tei, vllm)},
}
_METHODS = ("GET", "POST", "DELETE")


def end_process(reason: str) -> None:
    """Log the reason and terminate the process with status 1; its supervisor restarts it."""
    log.critical("%s", reason)
    # The delay lets pending responses be sent. A normal exit would wait for the thread of a hanging
    # engine.
    asyncio.get_running_loop().call_later(0.5, os._exit, 1)


def create_app(
    settings: Settings,
    on_ready: Callable[[], None] = lambda: log.info("ready"),
    on_fatal: Callable[[str], None] = end_process,
) -> FastAPI:
    """Return the ASGI application of the service.

    Args:
        settings: Settings of the service.
        on_ready: Called when the model is loaded and has passed its self-check.
        on_fatal: Called with the reason when the model cannot be loaded or the batcher has stopped
            because of a failure. It is expected to end the process.

    Raises:
        OSError: The file `auth.keys_file` cannot be read.
        ValueError: `auth.keys_file` is invalid or writable by everybody, two API keys are equal, or
            traces cannot be exported; see `open_exporter`.
    """
    exporter = open_exporter()
    metrics = Metrics(settings.limits.request_s)
    cache: ResultCache[RowResults] = ResultCache(settings.cache.max_bytes)
    metrics.registry.register(CacheMetrics(cache))
    registry = ModelRegistry(
        default=settings.models.default,
        max_bytes=settings.models.max_bytes,
        load_s=settings.models.load_s,
        metrics=metrics.inference,
        cache=cache,
        check_path=tei.check_name,
        on_stop=partial(_report_stop, on_fatal),
    )
    state = DebugState(
        settings=settings,
        metrics=metrics,
        cache=cache,
        keys=KeyRing(settings.auth.all_keys()),
        body_budget=BodyBudget(settings.limits.max_bodies_bytes),
        registry=registry,
        watch=ModelWatch(registry, settings.model_specs),
        gradients=GradientProcess(
            partial(
                worker_command,
                device=settings.debug.device,
                log=settings.server.log,
                verify=settings.models.verify,
            ),
            settings.debug,
        ),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # The model loads in the background; meanwhile /healthz returns 200 and /readyz 503.
        loading = asyncio.create_task(_load(state, on_ready, on_fatal))
        yield
        loading.cancel()
        await asyncio.wait([loading])
        await state.gradients.close()
        await state.registry.close()
        gc.unfreeze()
        if exporter is not None:
            await asyncio.to_thread(exporter.close)

    # FastAPI's documentation pages load scripts from a CDN. FastAPIOffline serves them itself.
    app = FastAPIOffline(
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        title="Vitrine",
        version=VERSION,
        summary="An inference server for Transformer encoders that explains its results.",
        lifespan=lifespan,
        # FastAPI's own telemetry would export messages of exceptions, and misses raw routes.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.vitrine = state
    app.openapi = lambda: openapi(  # type: ignore[method-assign]
        app,
        settings.limits,
        needs_keys=not state.keys.is_open,
        # Documented with the prefix /tei; GET / and POST / are two routes.
        replaced=tei.ROOT_PATHS - {"/"} if settings.server.tei_at_root else (),
    )
    routers = [
        raw_router,
        router,
        models.router,
        classify.router,
        score.router,
        tag.router,
        openai.router,
        rerank.router,
        cohere.router,
        vllm.router,
        tei.router,
        tei.model_router(),
        page.router,
    ]
    if settings.server.tei_at_root:  # first, so that POST /rerank is TEI's
        routers.insert(0, tei.root_router())
    for included in routers:
        app.include_router(included)
    app.include_router(process_state.router)
    debug_routers = debug.router, capabilities.router
    for debug_router in debug_routers:
        app.include_router(debug_router, include_in_schema=settings.debug.enabled)
    tei_paths = tei.ROOT_PATHS if settings.server.tei_at_root else frozenset()
    paths = sorted(
        {route.path for each in routers for route in each.routes if isinstance(route, APIRoute)}
    )
    # In place of FastAPI's own stack: `RequestMiddleware` handles errors, and raw routes bypass all
    # layers below it.
    handlers = {HTTPException: partial(_translate_http_exception, paths)}
    stack: ASGIApp = RequestMiddleware(
        ExceptionMiddleware(AsyncExitStackMiddleware(app.router), handlers),
        dispatch_table=dispatch_table([*routers, *debug_routers]),
        metrics=metrics,
        render_error=partial(_render_error, tei_paths),
        hosts=settings.server.hosts,
        slow_s=settings.server.slow_s if settings.server.access_log else None,
        is_stopping=lambda: state.stopping,
    )
    if exporter is not None:
        log.info("Exporting traces to %s", exporter.endpoint)
        stack = exporter.trace(stack)
    if settings.server.cors_origins:  # outermost, so that web pages can read error responses too
        stack = CORSMiddleware(
            stack,
            allow_origins=settings.server.cors_origins,
            allow_methods=("GET", "POST"),
            # Any header: clients add custom ones, such as `X-Stainless-*` of OpenAI's client.
            allow_headers=("*",),
            expose_headers=(*ENCODE_HEADERS, REQUEST_ID, "Retry-After", "X-Truncated-Inputs"),
        )
    app.middleware_stack = stack
    return app


def open_exporter() -> "Exporter | None":
    """Return the exporter of traces that OpenTelemetry's environment variables ask for, if any.

    Raises:
        ValueError: The packages of the extra `otel` are missing, or a variable is invalid.
    """
    endpoint = traces_endpoint()
    if endpoint is None:
        return None
    try:
        from service.api.tracing import Exporter
    except ModuleNotFoundError as error:
        raise ValueError(
            f"traces need the package {error.name}: run pip install '.[otel]' in the source "
            "folder, or set OTEL_SDK_DISABLED=true"
        ) from None
    return Exporter(endpoint)


async def _load(
    state: DebugState, on_ready: Callable[[], None], on_fatal: Callable[[str], None]
) -> None:
    try:
        await state.watch.open()
        # Objects loaded so far are permanent. Freezing them avoids 50 ms garbage-collection pauses.
        gc.freeze()
        on_ready()
        if state.settings.models.watch_s:
            await state.watch.run(state.settings.models.watch_s)
    except (ArtifactError, EngineError, OSError, ValueError) as error:
        on_fatal(f"cannot start: {error}")
    except asyncio.CancelledError:
        raise
    except BaseException:  # a panic of a Rust library is no Exception
        log.exception("cannot start")
        on_fatal("cannot start: see the traceback above")


def _report_stop(on_fatal: Callable[[str], None], error: BaseException) -> None:
    if not isinstance(error, TimeoutError | RunBroken):
        log.error("the batcher has a defect", exc_info=error)
    on_fatal(f"the engine has stopped: {error}")


async def _translate_http_exception(
    paths: Sequence[str], request: Request, error: Exception
) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as registered with Starlette
    headers, detail = error.headers, error.detail
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(_allowed_methods(request))}
    elif error.status_code == HTTPStatus.NOT_FOUND:
        detail = _unknown_route(paths, request.scope["path"])
    raise FrameworkError(error.status_code, detail, headers) from error


def _unknown_route(paths: Sequence[str], path: str) -> str:
    """Return the detail of the error for a path without a route.

    The base URL of a client often lacks a prefix such as /v1, or has it twice.
    """
    end = path.rstrip("/").rpartition("/")[2]
    similar = [each for each in paths if "{" not in each and each.endswith(f"/{end}")]
    if not end or not similar:
        return "unknown route; /openapi.json lists all routes"
    return f"unknown route; routes with this end: {', '.join(similar)}"


def _allowed_methods(request: Request) -> list[str]:
    """Return the allowed methods of the request's path.

    Starlette's own Allow header has only the methods of the first route with this path.
    """
    routes = request.app.routes
    allowed = [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL for route in routes
        )
    ]
    return ["HEAD", *allowed] if "GET" in allowed else allowed


def _render_error(
    tei_paths: Collection[str], path: str, error: VitrineError, request_id: str
) -> Response:
    """Return the error response in the format of the API that the path belongs to."""
    if path in tei_paths:
        return tei.render_error(error, request_id)
    renderers = (r for prefix, r in _RENDERERS.items() if f"{path}/".startswith(prefix))
    return next(renderers, problem)(error, request_id)
