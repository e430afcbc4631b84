"""The service on a Ray cluster: replicas on many machines, more of them as more requests come.

    serve run deploy.ray_serve:vitrine cpus=2 most_replicas=8

Settings are those of the environment in which this is called; how a server listens and ends is
Ray's. Every machine needs the service's packages, and the artifact at the same place.
"""

import asyncio

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from models.engines import self_check
from service.app import create_app, end_process
from service.logs import configure
from service.runtime import Runtime
from service.settings import Settings, from_command_line


class Arguments(BaseModel):
    """What `serve run` takes as `name=value`.

    Attributes:
        cpus: Of a replica, which keeps as many busy.
        gpus: Of a replica; 0.5 is half of one, which it shares with another replica.
        least_replicas: There are always so many.
        most_replicas: There are never more.
        requests: Under way in a replica, on average, above which more of them start.
    """

    model_config = ConfigDict(extra="forbid")

    cpus: int = Field(2, ge=1)
    gpus: float = Field(0, ge=0, le=1)
    least_replicas: int = Field(1, ge=1)
    most_replicas: int = Field(4, ge=1)
    requests: int = Field(32, ge=1)


class Replica:
    """One process of the service, healthy while its engine gives the model's vectors."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = asyncio.Event()
        self._reason = ""

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return what answers requests; Ray's name for it."""
        configure(self._settings.server.log)
        self._service = create_app(
            self._settings, on_ready=self._started.set, on_fatal=self._tell_fatal
        )
        return self._service

    def _tell_fatal(self, reason: str) -> None:
        if self._started.is_set():
            end_process(reason)  # Ray starts another one
        self._reason = reason
        self._started.set()

    async def check_health(self) -> None:
        """Wait until the model is there, and see whether its vectors are.

        Raises:
            RuntimeError: It cannot be served.
            EngineError: The engine gives other vectors.
        """
        await self._started.wait()
        if self._reason:
            raise RuntimeError(self._reason)
        runtime: Runtime = self._service.state.runtime
        await asyncio.to_thread(self_check, runtime.engine, runtime.artifact)


def vitrine(arguments: Arguments) -> Application:
    """Return what `serve run` runs.

    Raises:
        ValueError: A setting is wrong, gradients would be given to everybody, or the engine has no
            GPU.
    """
    settings = from_command_line([])
    if settings.debug.enabled and not settings.auth.all_keys():
        raise ValueError("gradients give the model away: set API keys, or debug.enabled to false")
    if settings.engine.name == "cuda" and not arguments.gpus:
        raise ValueError("Ray hides GPUs from whoever has asked for none: say gpus=1, or a part")
    # Of the machine's GPUs Ray shows a replica its own alone.
    engine = settings.engine.model_copy(update={"threads": arguments.cpus, "gpu": 0})
    model = settings.model.model_copy(update={"path": settings.model.path.resolve()})
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="vitrine",
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        # It takes as long as a batch or two, from those who wait for vectors.
        health_check_period_s=30,
        # A replica has a queue of its own, and answers 429 when that is full.
        max_ongoing_requests=100 * arguments.requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.least_replicas,
            max_replicas=arguments.most_replicas,
            target_ongoing_requests=arguments.requests,
        ),
    )
    return deployment.bind(settings.model_copy(update={"engine": engine, "model": model}))
