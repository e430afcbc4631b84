"""The native routes. The handler of `/encode` reads as the story of a request."""

from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from service.body import read_inputs
from service.encoding import check_dimensions, respond
from service.encoding import encode as encode_inputs
from service.errors import InvalidInput
from service.metrics import Metrics
from service.routing import DirectRoute, check_ready, problems, runtime_of, scope
from service.schemas import (
    ENCODE_BODY,
    ENCODE_HEADERS,
    VERSION,
    EncodeRequest,
    EncodeResponse,
    Health,
    Limits,
    ServiceInfo,
    TokensResponse,
)
from service.settings import Settings
from service.vectors import OCTETS, as_json, finish, prefers_octets, raw, tokens_as_json

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
    response_model=EncodeResponse | TokensResponse,
    openapi_extra={"requestBody": ENCODE_BODY},
    responses={
        200: {"headers": ENCODE_HEADERS, "content": {OCTETS: {"schema": {"format": "binary"}}}},
        **problems(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    },
)
async def encode(request: Request) -> Response:
    """Encode texts, or rows of token ids, into one vector each.

    With `Accept: application/octet-stream` the answer is the vectors alone, as little-endian
    float32, and `X-Shape` says how many of what width. `Server-Timing` tells where the time
    went. With `"output": "tokens"` there is a vector for each token, not normalised unless asked
    for, and always JSON.
    """
    asked = await read_inputs(request, EncodeRequest, "inputs")
    manifest = runtime_of(request).artifact.manifest
    if asked.output == "tokens":
        return await _encode_tokens(request, asked)
    check_dimensions(request, asked.dimensions)

    encoded = await encode_inputs(request, asked.rows(), asked.prompt_name, asked.on_overflow)

    normalize = manifest.normalize if asked.normalize is None else asked.normalize
    vectors = finish(encoded.vectors, asked.dimensions, normalize)  # (B, dimensions)
    if prefers_octets(",".join(request.headers.getlist("accept"))):
        shape = ",".join(map(str, vectors.shape))
        headers = {"Vary": "Accept", "X-Shape": shape}
        return await respond(request, encoded, partial(raw, vectors), OCTETS, headers)
    write = partial(
        as_json,
        manifest.name,
        vectors,
        tokens=[len(row.ids) for row in encoded.rows],
        truncated=[row.truncated for row in encoded.rows],
        in_base64=asked.encoding == "base64",
    )
    return await respond(request, encoded, write, headers={"Vary": "Accept"})


async def _encode_tokens(request: Request, asked: EncodeRequest) -> Response:
    """Answer with the vectors of tokens, `(L, D)` of each input."""
    if asked.dimensions is not None:
        raise InvalidInput("dimensions go with pooled vectors", pointer="/dimensions")
    encoded = await encode_inputs(
        request, asked.rows(), asked.prompt_name, asked.on_overflow, output="tokens"
    )
    write = partial(
        tokens_as_json,
        runtime_of(request).artifact.manifest.name,
        finish(encoded.vectors, None, normalize=bool(asked.normalize)),  # (T, D)
        ids=[row.ids for row in encoded.rows],
        truncated=[row.truncated for row in encoded.rows],
        offsets=encoded.spans,
        in_base64=asked.encoding == "base64",
    )
    return await respond(request, encoded, write)


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Health:
    """Answer while the process is alive, whether or not it is ready."""
    return Health()


@router.get("/readyz", summary="Can it encode?", responses=problems(503))
async def readyz(request: Request) -> Health:
    """Answer 200 once the self-check has passed, and 503 again when the service stops."""
    check_ready(request)
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
        graph_sha256=runtime.graph_sha256,
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
