"""The native routes. The handler of `/encode` reads as the story of a request."""

import asyncio
import time
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Request, Response

from service.auth import KeyRing
from service.batching import ItemFailed, QueueFull, Stopped
from service.body import read_encode_request
from service.errors import InferenceFailed, InvalidInput, NotReady, Overloaded
from service.metrics import Metrics
from service.runtime import Runtime
from service.schemas import (
    EncodeRequest,
    EncodeResponse,
    Health,
    Limits,
    Problem,
    ServiceInfo,
    body_schema,
)
from service.settings import Scope, Settings
from service.tokenizer import Row
from service.vectors import OCTETS, as_json, finish, raw

router = APIRouter()


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {"application/problem+json": {"schema": Problem.model_json_schema()}}
    return {status: {"content": content} for status in statuses}


def scope(name: Scope) -> Any:  # noqa: ANN401 - FastAPI's own type of a dependency
    """Declare that a route needs an API key with this scope, where keys are set."""

    def require(request: Request) -> None:
        keys: KeyRing = request.app.state.keys
        header = request.headers.get("authorization")
        keys.require(header.encode("latin-1") if header else None, name)

    require.__name__ = f"require_{name}"
    return Depends(require)


def _runtime(request: Request) -> Runtime:
    runtime: Runtime | None = request.app.state.runtime
    if runtime is None:
        raise NotReady("the model is being loaded")
    if not runtime.batcher.is_alive:
        raise NotReady("the engine has stopped; this process ends")
    return runtime


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


Serving = Annotated[Runtime, Depends(_runtime)]
Configured = Annotated[Settings, Depends(_settings)]
Measured = Annotated[Metrics, Depends(_metrics)]


@router.post(
    "/encode",
    dependencies=[scope("encode")],
    response_model=EncodeResponse,
    openapi_extra=body_schema(EncodeRequest),
    responses={
        200: {"content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}},
        **_problems(400, 401, 403, 413, 415, 422, 429, 500, 503),
    },
)
async def encode(
    request: Request, runtime: Serving, settings: Configured, metrics: Measured
) -> Response:
    """Encode texts, or rows of token ids, into one vector each.

    With `Accept: application/octet-stream` the answer is the vectors alone, as little-endian
    float32, and `X-Shape` says how many of what width. `Server-Timing` tells where the time went.
    """
    asked = await read_encode_request(request, settings.limits)
    manifest = runtime.artifact.manifest
    if asked.dimensions is not None and asked.dimensions > manifest.width:
        raise InvalidInput(
            f"the model has {manifest.width} dimensions", pointer="/dimensions", code="dimensions"
        )

    started = time.perf_counter()
    rows = await asyncio.to_thread(_tokenize, runtime, asked)
    tokenize_s = time.perf_counter() - started

    try:
        outcome = await runtime.batcher.submit(rows)
    except QueueFull:
        raise Overloaded("the queue is full; try again later") from None
    except ItemFailed as error:
        raise InferenceFailed("the engine fails on this input", index=error.index) from error
    except Stopped:
        raise NotReady("the engine has stopped") from None

    normalize = manifest.normalize if asked.normalize is None else asked.normalize
    vectors = finish(np.stack(outcome.results), asked.dimensions, normalize)  # (B, dimensions)
    stages = {"tokenize": tokenize_s, "queue": outcome.queue_s, "infer": outcome.run_s}
    for stage, seconds in stages.items():
        metrics.stage_seconds.labels(stage).observe(seconds)
    headers = {
        "Server-Timing": ", ".join(f"{name};dur={s * 1e3:.3f}" for name, s in stages.items()),
        "X-Engine": f"{runtime.engine.name}; precision={runtime.engine.precision}",
    }

    if OCTETS in request.headers.get("accept", ""):
        headers["X-Shape"] = ",".join(map(str, vectors.shape))
        return Response(raw(vectors), headers=headers, media_type=OCTETS)
    body = as_json(
        manifest.name,
        vectors,
        tokens=[len(row.ids) for row in rows],
        truncated=[row.truncated for row in rows],
        in_base64=asked.encoding == "base64",
    )
    return Response(body, headers=headers, media_type="application/json")


def _tokenize(runtime: Runtime, asked: EncodeRequest) -> list[Row]:
    inputs = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    texts = [text for text in inputs if isinstance(text, str)]
    if texts:
        return runtime.tokenizer.rows_of_texts(texts, asked.prompt_name, asked.on_overflow)
    if asked.prompt_name is not None:
        raise InvalidInput("a prompt goes with texts, not with token ids", pointer="/prompt_name")
    ids = [row for row in inputs if not isinstance(row, str)]
    return runtime.tokenizer.rows_of_ids(ids, asked.on_overflow)


@router.get("/healthz")
async def healthz() -> Health:
    """Answer while the process is alive, whether or not it is ready."""
    return Health()


@router.get("/readyz", responses=_problems(503))
async def readyz(_runtime: Serving) -> Health:
    """Answer 200 once the self-check has passed, and 503 again if the engine stops."""
    return Health()


@router.get("/info", dependencies=[scope("encode")], responses=_problems(401, 403, 503))
async def info(runtime: Serving, settings: Configured) -> ServiceInfo:
    """Tell what is served: model, hashes, engine, precision, threads and limits."""
    manifest, engine = runtime.artifact.manifest, runtime.engine
    graph = manifest.graphs[0]
    return ServiceInfo(
        model=manifest.name,
        source=manifest.source,
        revision=manifest.revision,
        family=manifest.family,
        dimensions=manifest.width,
        pooling=list(manifest.pooling),
        normalize=manifest.normalize,
        prompts=sorted(manifest.prompts),
        default_prompt=manifest.default_prompt,
        weights_sha256=dict(manifest.weights_sha256),
        graph_sha256=manifest.files[graph.file],
        tokenizer_sha256=manifest.files["tokenizer.json"],
        engine=engine.name,
        precision=engine.precision,
        threads=engine.threads,
        self_check_cosine=runtime.self_check_cosine,
        limits=Limits(**settings.limits.model_dump(), max_tokens=manifest.max_tokens),
        version=version("vitrine"),
    )


@router.get(
    "/metrics",
    dependencies=[scope("metrics")],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **_problems(401, 403)},
)
async def metrics_exposition(metrics: Measured) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")
