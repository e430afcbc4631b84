"""Routes of the native API, probes and metrics."""

from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from service.api.auth import require_scope
from service.api.body import pointing_at, read_inputs
from service.api.deadline import cancel_on_disconnect, deadline_s
from service.api.openapi import error_responses
from service.api.raw_route import RawRoute
from service.api.responses import (
    OCTETS,
    encode_json,
    encode_sparse_json,
    encode_tokens_json,
    prefers_octets,
    respond,
    to_bytes,
)
from service.api.schemas import (
    ENCODE_BODY,
    ENCODE_HEADERS,
    VERSION,
    AgreementInfo,
    EncodeRequest,
    EncodeResponse,
    Health,
    Limits,
    ServiceInfo,
    SparseResponse,
    TokensResponse,
)
from service.api.state import AppState, State
from service.inference.errors import InvalidInput

router = APIRouter()
raw_router = APIRouter(route_class=RawRoute)


@router.get("/", include_in_schema=False)
async def root() -> RedirectResponse:
    """Redirect browsers to the documentation."""
    return RedirectResponse("/docs")


@raw_router.post(
    "/encode",
    summary="Encode texts or token ids",
    dependencies=[require_scope("encode")],
    response_model=EncodeResponse | TokensResponse | SparseResponse,
    openapi_extra={"requestBody": ENCODE_BODY},
    responses={
        200: {"headers": ENCODE_HEADERS, "content": {OCTETS: {"schema": {"format": "binary"}}}},
        **error_responses(400, 401, 403, 408, 413, 415, 422, 429, 500, 503, 504),
    },
)
async def encode(request: Request, state: State) -> Response:
    """Encode texts, or lists of token ids, into one vector each.

    With `Accept: application/octet-stream` the response body has only the vectors, as little-endian
    float32, and the header `X-Shape` has their number and width. The header `Server-Timing` has the
    duration of each stage. With `"output": "tokens"` the response has one vector per token,
    normalised only on request, with `"output": "sparse"` one sparse vector per input, and with
    `"output": "multi"` multi-vectors; these are always JSON.
    """
    body = await read_inputs(request, state, EncodeRequest)
    timeout_s = deadline_s(request, state.settings.limits.request_s)
    model = state.ready_model()
    output = body.output or model.artifact.manifest.outputs[0]
    if output == "tokens":
        return await _encode_tokens(request, state, body, timeout_s)
    if output == "sparse":
        return await _encode_sparse(request, state, body, timeout_s)
    if output == "multi":
        return await _encode_multi(request, state, body, timeout_s)

    with pointing_at(body.inputs):
        work = model.encode(
            body.input_list(),
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            truncate_dim=body.truncate_dim,
            normalize=body.normalize,
            on_overflow=body.on_overflow,
            timeout_s=timeout_s,
        )
        result = await cancel_on_disconnect(request, work)

    if prefers_octets(",".join(request.headers.getlist("accept"))):
        shape = ",".join(map(str, result.vectors.shape))
        headers = {"Vary": "Accept", "X-Shape": shape}
        serialize = partial(to_bytes, result.vectors)
        return await respond(request, state, model, result, serialize, OCTETS, headers)
    serialize = partial(encode_json, model.name, result, body.encoding == "base64")
    return await respond(request, state, model, result, serialize, headers={"Vary": "Accept"})


async def _encode_tokens(
    request: Request, state: AppState, body: EncodeRequest, timeout_s: float
) -> Response:
    """Return a response with the token vectors `(L, D)` of each input."""
    _refuse(body, "tokens", "dimensions", "truncate_dim")
    model = state.ready_model()
    with pointing_at(body.inputs):
        work = model.encode_tokens(
            body.input_list(),
            prompt_name=body.prompt_name,
            normalize=bool(body.normalize),
            on_overflow=body.on_overflow,
            timeout_s=timeout_s,
        )
        result = await cancel_on_disconnect(request, work)
    serialize = partial(encode_tokens_json, model.name, result, body.encoding == "base64")
    return await respond(request, state, model, result, serialize)


async def _encode_sparse(
    request: Request, state: AppState, body: EncodeRequest, timeout_s: float
) -> Response:
    """Return a response with the sparse vector of each input."""
    _refuse(body, "sparse", "dimensions", "truncate_dim", "normalize")
    if body.encoding == "base64":
        raise InvalidInput(
            'the encoding base64 does not apply to the output "sparse"', pointer="/encoding"
        )
    model = state.ready_model()
    with pointing_at(body.inputs):
        work = model.encode_sparse(
            body.input_list(),
            prompt_name=body.prompt_name,
            on_overflow=body.on_overflow,
            timeout_s=timeout_s,
        )
        result = await cancel_on_disconnect(request, work)
    return await respond(
        request, state, model, result, partial(encode_sparse_json, model.name, result)
    )


async def _encode_multi(
    request: Request, state: AppState, body: EncodeRequest, timeout_s: float
) -> Response:
    """Return a response with the multi-vectors `(L', W)` of each input."""
    _refuse(body, "multi", "dimensions", "truncate_dim")
    model = state.ready_model()
    with pointing_at(body.inputs):
        work = model.encode_multi(
            body.input_list(),
            prompt_name=body.prompt_name,
            normalize=body.normalize,
            on_overflow=body.on_overflow,
            timeout_s=timeout_s,
        )
        result = await cancel_on_disconnect(request, work)
    serialize = partial(encode_tokens_json, model.name, result, body.encoding == "base64")
    return await respond(request, state, model, result, serialize)


def _refuse(body: EncodeRequest, output: str, *fields: str) -> None:
    """Raise `InvalidInput` if the request sets one of the fields, which `output` does not have."""
    for field in fields:
        if getattr(body, field) is not None:
            raise InvalidInput(
                f'{field} does not apply to the output "{output}"', pointer=f"/{field}"
            )


@router.get("/healthz", summary="Liveness")
async def healthz() -> Health:
    """Return 200 while the process is alive, whether or not the model is ready."""
    return Health()


@router.get("/readyz", summary="Readiness", responses=error_responses(503))
async def readyz(state: State) -> Health:
    """Return 200 while the model is ready; 503 during startup, shutdown and after a failure."""
    state.check_ready()
    return Health()


@router.get(
    "/info",
    summary="Served model",
    dependencies=[require_scope("encode")],
    responses=error_responses(401, 403, 503),
)
async def info(state: State) -> ServiceInfo:
    """Return the name, hashes, engine, precision, threads and limits of the served model."""
    model = state.ready_model()
    manifest, engine = model.artifact.manifest, model.engine
    return ServiceInfo(
        model=model.name,
        source=manifest.source,
        revision=manifest.revision,
        family=manifest.family,
        outputs=list(manifest.outputs),
        labels=list(manifest.labels),
        dimensions=manifest.width if {"pooled", "multi"} & {*manifest.outputs} else None,
        pooling=list(manifest.pooling),
        normalize=manifest.normalize,
        matryoshka_dimensions=list(manifest.matryoshka_dimensions),
        truncation_side=manifest.truncation_side,
        prompts=sorted(manifest.prompts),
        default_prompt=manifest.default_prompt,
        max_tokens_by_prompt={n: r.max_tokens for n, r in manifest.token_rules.items() if n},
        looked_up_prompts=[n for n, rules in manifest.token_rules.items() if rules.looks_up],
        adapters=list(manifest.adapters),
        weights_sha256=dict(manifest.weights_sha256),
        graph_sha256=model.graph_sha256,
        tokenizer_sha256=manifest.files["tokenizer.json"],
        engine=engine.name,
        precision=engine.precision,
        threads=engine.threads,
        self_check={
            output: AgreementInfo(cosine=agreement.cosine, norm=agreement.norm)
            for output, agreement in model.self_check.items()
        },
        limits=Limits(**state.settings.limits.model_dump(), max_tokens=manifest.max_tokens),
        version=VERSION,
    )


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    dependencies=[require_scope("metrics")],
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **error_responses(401, 403)},
)
async def metrics(state: State) -> Response:
    """Return all metrics in Prometheus' text format."""
    content = state.metrics.exposition()
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")
