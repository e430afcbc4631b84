"""Deployment on a Ray cluster: replicas on several machines, autoscaled with the load.

    serve run deploy.ray_serve:vitrine cpus=2 max_replicas=8
    serve run --working-dir . deploy/ray_serve.yaml

Settings come from the environment of the process that runs `serve run`, or from the file, which
also limits the time of a request. Ray handles shutdown, and sets the address if the file does not.
Every machine needs the service's packages, and the artifact at the same path.
"""

import asyncio
from contextlib import ExitStack
from typing import cast

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.engines import self_check
from service.api.state import AppState
from service.app import create_app, end_process
from service.logs import configure
from service.settings import Settings, from_command_line


class Arguments(BaseModel):
    """Arguments of `serve run`, written as `name=value`.

    Attributes:
        cpus: Number of CPUs per replica.
        gpus: Number of GPUs per replica; two replicas with 0.5 each share a GPU.
        min_replicas: Smallest number of replicas.
        max_replicas: Largest number of replicas.
        requests: Target number of concurrent requests per replica, for autoscaling.
    """

    model_config = ConfigDict(extra="forbid")

    cpus: int = Field(2, ge=1)
    gpus: float = Field(0, ge=0, le=1)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    requests: int = Field(32, ge=1)


class Replica:
    """Process of the service on a Ray cluster, healthy while its engine passes the self-check."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = asyncio.Event()
        self._reason = ""

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Ray calls this method by its name."""
        configure(self._settings.server.log)
        self._service = create_app(
            self._settings, on_ready=self._started.set, on_fatal=self._report_fatal
        )
        stack = cast(ASGIApp, self._service.middleware_stack)
        self._service.middleware_stack = _without_request_id(stack)
        return self._service

    def _report_fatal(self, reason: str) -> None:
        if self._started.is_set():
            end_process(reason)  # Ray starts a new replica
        self._reason = reason
        self._started.set()

    async def check_health(self) -> None:
        """Wait until the models are ready, then run the self-check of loaded models again.

        Raises:
            RuntimeError: The service failed to start.
            EngineError: An engine fails the self-check.
        """
        await self._started.wait()
        if self._reason:
            raise RuntimeError(self._reason)
        state: AppState = self._service.state.vitrine
        with ExitStack() as leases:
            loaded = state.registry.leases_of_loaded_models()
            for model in [leases.enter_context(lease) for lease in loaded]:
                await asyncio.to_thread(self_check, model.engine, model.artifact)


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Return an application whose responses lack X-Request-Id: Ray's proxy adds that header."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [own for own in message["headers"] if own[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without_id)

    return run


def vitrine(arguments: Arguments) -> Application:
    """Return the application for `serve run`.

    Raises:
        ValueError: A setting is invalid, the gradient routes are enabled without API keys, or the
            engine is "cuda" and `gpus` is 0.
    """
    settings = from_command_line([])
    if settings.debug.enabled and not settings.auth.all_keys():
        raise ValueError("gradients reveal the model: set API keys, or set debug.enabled to false")
    if settings.engine.name == "cuda" and not arguments.gpus:
        raise ValueError(
            "the engine cuda needs a GPU per replica: pass gpus=1 or a fraction such as gpus=0.5"
        )
    # Ray shows a replica only its own GPUs, so the index is 0.
    engine = settings.engine.model_copy(update={"threads": arguments.cpus, "gpu": 0})
    # Replicas run in other directories.
    model = settings.model.model_copy(update={"path": settings.model.path.resolve()})
    models = settings.models.model_copy(
        update={
            "folder": settings.models.folder and settings.models.folder.resolve(),
            "verify": settings.models.verify and settings.models.verify.resolve(),
            "served": tuple(
                served.model_copy(update={"path": served.path.resolve()})
                for served in settings.models.served
            ),
        }
    )
    keys_file = settings.auth.keys_file
    auth = settings.auth.model_copy(update={"keys_file": keys_file and keys_file.resolve()})
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="vitrine",
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        # Not more often, because each health check delays requests by one or two batches.
        health_check_period_s=30,
        # A high limit, because each replica queues requests itself and returns 429 if the queue is
        # full.
        max_ongoing_requests=100 * arguments.requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.requests,
        ),
    )
    changes = {"engine": engine, "model": model, "models": models, "auth": auth}
    return deployment.bind(settings.model_copy(update=changes))
