"""`create_app`: settings to an ASGI application."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from models.artifact import ArtifactError
from models.engines import EngineError
from service.auth import KeyRing
from service.backlog import Backlog
from service.batching import RunBroken
from service.compat import openai, tei, tei_schemas
from service.debug import page
from service.debug import routes as debug
from service.debug.process import GradientProcess, worker_command
from service.debug.requests import BODIES
from service.encoding import TIMEOUT
from service.errors import FrameworkError, ServiceError, problem
from service.metrics import Metrics
from service.middleware import REQUEST_ID, RequestLayer
from service.routes import direct_router, router
from service.routing import direct
from service.runtime import open_runtime
from service.schemas import ENCODE_HEADERS, VERSION, EncodeRequest, openapi
from service.settings import Settings

log = logging.getLogger("vitrine")

_WORDS = {f"{server.PREFIX}/": server.error for server in (openai, tei)}


def end_process(reason: str) -> None:
    """Say why, and end the process, for its supervisor to start a new one."""
    log.critical("%s", reason)
    # Soon, so that callers get the answers that are on their way; and at once then, because an
    # engine's thread that hangs would keep a normal exit waiting.
    asyncio.get_running_loop().call_later(0.5, os._exit, 1)


def create_app(
    settings: Settings,
    on_ready: Callable[[], None] = lambda: log.info("ready"),
    on_fatal: Callable[[str], None] = end_process,
) -> FastAPI:
    """Return the service.

    Args:
        settings: All of them.
        on_ready: Told when the self-check has passed.
        on_fatal: Told the reason when the service cannot start or its engine hangs.

    Raises:
        ValueError: The API keys cannot be read.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Loaded beside the server, so that /healthz answers and /readyz says 503 meanwhile.
        loading = asyncio.create_task(_load(app, on_ready, on_fatal))
        yield
        loading.cancel()
        await asyncio.wait([loading])
        await app.state.gradients.close()
        if app.state.runtime is not None:
            await app.state.runtime.batcher.close()

    # FastAPI's own pages load their scripts from another host, which a server may not reach.
    app = FastAPIOffline(
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        title="Vitrine",
        version=VERSION,
        summary="Serves a Transformer encoder over HTTP.",
        lifespan=lifespan,
        exception_handlers={HTTPException: _as_ours},
    )
    bodies = (EncodeRequest, *openai.BODIES, *tei_schemas.BODIES, *BODIES)
    app.openapi = lambda: openapi(app, bodies)  # type: ignore[method-assign]
    app.state.settings = settings
    app.state.metrics = metrics
    app.state.keys = KeyRing(settings.auth.all_keys())
    # Four of the largest bodies are tokenised in some seconds.
    app.state.tokenizer_backlog = Backlog(4 * settings.limits.max_body_bytes)
    app.state.runtime = None
    app.state.stopping = False
    app.state.gradients = GradientProcess(
        worker_command(settings.model.path, settings.debug.device, settings.server.log),
        settings.debug,
    )
    routers = (direct_router, router, openai.router, tei.router, debug.router, page.router)
    for included in routers:
        app.include_router(included)
    app.add_middleware(
        RequestLayer,
        direct=direct(routers),
        metrics=metrics,
        answer=_in_words,
        hosts=settings.server.hosts,
    )
    if settings.server.cors_origins:  # outermost, so that a page may read every error
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.cors_origins,
            allow_methods=("GET", "POST"),
            # Without the first a page could not bring its key.
            allow_headers=("Authorization", "Content-Type", REQUEST_ID, TIMEOUT),
            expose_headers=(*ENCODE_HEADERS, "Retry-After", "X-Truncated-Inputs"),
        )
    return app


async def _load(
    app: FastAPI, on_ready: Callable[[], None], on_fatal: Callable[[str], None]
) -> None:
    try:
        app.state.runtime = await open_runtime(
            app.state.settings,
            app.state.metrics,
            on_stop=lambda error: _tell_stopped(error, on_fatal),
        )
    except (ArtifactError, EngineError) as error:
        on_fatal(f"cannot start: {error}")
    except Exception:
        log.exception("cannot start")
        on_fatal("cannot start: see the traceback above")
        raise
    else:
        on_ready()


def _tell_stopped(error: BaseException, on_fatal: Callable[[str], None]) -> None:
    if not isinstance(error, TimeoutError | RunBroken):
        log.error("the batcher has a defect", exc_info=error)
    on_fatal(f"the engine has stopped: {error}")


async def _as_ours(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what Starlette promises a handler
    raise FrameworkError(error.status_code, error.detail, error.headers) from error


def _in_words(path: str, error: ServiceError, request_id: str) -> Response:
    """Return the error in the words of the server that a route stands in for, or in our own."""
    words = next((w for prefix, w in _WORDS.items() if f"{path}/".startswith(prefix)), problem)
    return words(error, request_id)
