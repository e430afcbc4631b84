"""The native routes. The handler of `/encode` reads as the story of a request."""

import asyncio
import time
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from service.body import read_encode_request
from service.errors import InvalidInput
from service.metrics import Metrics
from service.routing import DirectRoute, problems, runtime_of, scope, submit, while_connected
from service.schemas import (
    ENCODE_BODY,
    ENCODE_HEADERS,
    VERSION,
    EncodeRequest,
    EncodeResponse,
    Health,
    Limits,
    ServiceInfo,
)
from service.settings import Settings
from service.tokenizer import Row, TextTokenizer
from service.vectors import JSON, OCTETS, as_json, finish, prefers_octets, raw

# So much is tokenised, and so many numbers written, within a millisecond or two. A thread of its
# own would wait longer for its turn, where engines keep every core busy.
_INPUTS_AT_ONCE = 8
_CHARACTERS_AT_ONCE = 4000
_NUMBERS_AT_ONCE = 20_000

router = APIRouter()
direct_router = APIRouter(route_class=DirectRoute)


@router.get("/", include_in_schema=False)
async def root() -> RedirectResponse:
    """Lead whoever comes with a browser to the documentation."""
    return RedirectResponse("/docs")


@direct_router.post(
    "/encode",
    summary="Encode texts or token ids",
    dependencies=[scope("encode")],
    response_model=EncodeResponse,
    openapi_extra={"requestBody": ENCODE_BODY},
    responses={
        200: {"headers": ENCODE_HEADERS, "content": {OCTETS: {"schema": {"format": "binary"}}}},
        **problems(400, 401, 403, 413, 415, 422, 429, 500, 503),
    },
)
async def encode(request: Request) -> Response:
    """Encode texts, or rows of token ids, into one vector each.

    With `Accept: application/octet-stream` the answer is the vectors alone, as little-endian
    float32, and `X-Shape` says how many of what width. `Server-Timing` tells where the time went.
    """
    runtime = runtime_of(request)
    metrics: Metrics = request.app.state.metrics
    asked = await read_encode_request(request, request.app.state.settings.limits)
    manifest = runtime.artifact.manifest
    if asked.dimensions is not None and asked.dimensions > manifest.width:
        raise InvalidInput(
            f"the model has {manifest.width} dimensions", pointer="/dimensions", code="dimensions"
        )

    started = time.perf_counter()
    rows = await _tokenize(runtime.tokenizer, asked)
    tokenize_s = time.perf_counter() - started

    outcome = await while_connected(request, submit(runtime, rows))

    normalize = manifest.normalize if asked.normalize is None else asked.normalize
    vectors = finish(np.stack(outcome.results), asked.dimensions, normalize)  # (B, dimensions)
    stages = {"tokenize": tokenize_s, "queue": outcome.queue_s, "infer": outcome.run_s}
    for stage, seconds in stages.items():
        metrics.stage_seconds[stage].observe(seconds)
    headers = {
        "Server-Timing": ", ".join(f"{name};dur={s * 1e3:.3f}" for name, s in stages.items()),
        "Vary": "Accept",
        "X-Engine": f"{runtime.engine.name}; precision={runtime.engine.precision}",
    }

    if prefers_octets(",".join(request.headers.getlist("accept"))):
        headers["X-Shape"] = ",".join(map(str, vectors.shape))
        return Response(raw(vectors), headers=headers, media_type=OCTETS)
    write = partial(
        as_json,
        manifest.name,
        vectors,
        tokens=[len(row.ids) for row in rows],
        truncated=[row.truncated for row in rows],
        in_base64=asked.encoding == "base64",
    )
    body = write() if vectors.size <= _NUMBERS_AT_ONCE else await asyncio.to_thread(write)
    return Response(body, headers=headers, media_type=JSON)


async def _tokenize(tokenizer: TextTokenizer, asked: EncodeRequest) -> list[Row]:
    texts, ids = asked.texts_or_ids()
    if ids is not None and asked.prompt_name is not None:
        raise InvalidInput("a prompt goes with texts, not with token ids", pointer="/prompt_name")
    work = (
        partial(tokenizer.rows_of_texts, texts, asked.prompt_name, asked.on_overflow)
        if ids is None
        else partial(tokenizer.rows_of_ids, ids, asked.on_overflow)
    )
    inputs = texts if ids is None else ids
    is_short = len(inputs) <= _INPUTS_AT_ONCE and sum(map(len, inputs)) <= _CHARACTERS_AT_ONCE
    return work() if is_short else await asyncio.to_thread(work)


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Health:
    """Answer while the process is alive, whether or not it is ready."""
    return Health()


@router.get("/readyz", summary="Can it encode?", responses=problems(503))
async def readyz(request: Request) -> Health:
    """Answer 200 once the self-check has passed, and 503 again if the engine stops."""
    runtime_of(request)
    return Health()


@router.get(
    "/info",
    summary="What is served",
    dependencies=[scope("encode")],
    responses=problems(401, 403, 503),
)
async def info(request: Request) -> ServiceInfo:
    """Tell what is served: model, hashes, engine, precision, threads and limits."""
    runtime = runtime_of(request)
    settings: Settings = request.app.state.settings
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
        version=VERSION,
    )


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    dependencies=[scope("metrics")],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **problems(401, 403)},
)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    measured: Metrics = request.app.state.metrics
    return Response(measured.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")
