"""Routes of the native API, probes and metrics."""

from collections.abc import Mapping, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from service.api.accept import preferred_type
from service.api.auth import require_scope
from service.api.body import pointing_at, read_inputs
from service.api.chunk_schemas import ChunksResponse
from service.api.chunks import encode_chunks
from service.api.deadline import cancel_on_disconnect
from service.api.lease import lease_with_options
from service.api.metrics import FORMATS
from service.api.openapi import NATIVE_ERRORS, error_responses
from service.api.raw_route import RawRoute
from service.api.responses import (
    OCTETS,
    SeveralResults,
    encode_json,
    encode_octets,
    encode_outputs_json,
    prefers_octets,
    respond,
)
from service.api.schemas import (
    ENCODE_BODY,
    ENCODE_HEADERS,
    EncodeRequest,
    EncodeResponse,
    Health,
    OutputName,
    OutputsResponse,
    SparseResponse,
    TokensResponse,
)
from service.api.state import State
from service.inference.errors import InvalidInput
from service.inference.model.arguments import USERS, refuse_unused, refuse_with_space
from service.inference.results.quantization import Quantizer
from service.inference.results.vectors import Embeddings

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
    response_model=EncodeResponse
    | TokensResponse
    | SparseResponse
    | OutputsResponse
    | ChunksResponse,
    openapi_extra={"requestBody": ENCODE_BODY},
    responses={
        200: {"headers": ENCODE_HEADERS, "content": {OCTETS: {"schema": {"format": "binary"}}}},
        **NATIVE_ERRORS,
    },
)
async def encode(request: Request, state: State) -> Response:
    """Encode texts, or lists of token ids, into one vector each.

    With `Accept: application/octet-stream` the response body has only the vectors, as little-endian
    float32 or in `output_dtype`. The header `X-Shape` has their number and width, and `X-Dtype` the
    dtype of their numbers. The header `Server-Timing` has the duration of each stage. With
    `"output": "tokens"` the response has one vector per token, normalised only on request, with
    `"output": "sparse"` one sparse vector per input, and with `"output": "multi"` multi-vectors;
    with a list of these and `"pooled"`, all of them. These are always JSON. With `chunking` it has
    one vector per chunk of each input, only as JSON.
    """
    body = await read_inputs(request, state, EncodeRequest)
    model, options = await lease_with_options(request, state, body.model)
    outputs = body.outputs() or [model.default_output]
    _check_fields(body, outputs)
    quantizer = Quantizer("float32", body.dimensions or body.truncate_dim or model.width, None)
    if body.space is not None:
        output_dtype = None if body.output_dtype == "float32" else body.output_dtype
        refuse_with_space(output_dtype=output_dtype, chunking=body.chunking)
        quantizer = Quantizer("float32", model.space(body.space).width, None)
    if body.output_dtype != "float32":
        quantizer = model.quantizer(
            body.output_dtype,
            dimensions=body.dimensions,
            truncate_dim=body.truncate_dim,
            normalize=body.normalize,
        )
    if body.chunking is not None:
        if isinstance(body.output, list) or outputs != ["pooled"]:
            raise InvalidInput("chunking applies to the output pooled alone", pointer="/chunking")
        return await encode_chunks(
            *(request, state, model, body, body.chunking, quantizer), options
        )
    with pointing_at(body.inputs):
        work = model.encode_outputs(
            body.inputs,
            outputs,
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            truncate_dim=body.truncate_dim,
            normalize=body.normalize,
            space=body.space,
            on_overflow=body.on_overflow,
            with_offsets=bool({"tokens", "multi"} & {*outputs}),
            **options,
        )
        encoded = await cancel_on_disconnect(request, work)

    in_base64 = body.encoding == "base64"
    headers = {}
    if body.space is not None:
        headers["X-Space-Version"] = model.space(body.space).sha256[:12]
    if isinstance(body.output, list):
        results = SeveralResults([encoded[output] for output in outputs])
        serialize = partial(encode_outputs_json, model.name, encoded, in_base64, quantizer)
        return await respond(request, state, model, results, serialize, headers=headers)
    result = encoded[outputs[0]]
    if isinstance(result, Embeddings):
        headers["Vary"] = "Accept"
    if isinstance(result, Embeddings) and prefers_octets(request):
        headers["X-Shape"] = f"{len(result.vectors)},{quantizer.columns}"
        headers["X-Dtype"] = quantizer.element
        serialize = partial(encode_octets, result.vectors, quantizer)
        return await respond(request, state, model, result, serialize, OCTETS, headers)
    serialize = partial(encode_json, model.name, result, in_base64, quantizer)
    return await respond(request, state, model, result, serialize, headers=headers)


# Outputs to which a field of a request applies.
_USERS: Mapping[str, frozenset[OutputName]] = {
    **USERS,
    "encoding": frozenset({"pooled", "tokens", "multi"}),
    "output_dtype": frozenset({"pooled"}),
    "space": frozenset({"pooled"}),
}
_DEFAULTS = {field: EncodeRequest.model_fields[field].default for field in _USERS}


def _check_fields(body: EncodeRequest, outputs: Sequence[OutputName]) -> None:
    """Raise `InvalidInput` if the request sets a field that applies to none of the outputs."""
    changed = {
        field: value
        for field, default in _DEFAULTS.items()  # a set has no fixed order
        if (value := getattr(body, field)) != default
    }
    refuse_unused(_USERS, outputs, changed)


@router.get("/health", name="health", summary="Liveness")
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
    "/metrics",
    summary="Metrics for Prometheus",
    dependencies=[require_scope("metrics")],
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}},
        **error_responses(401, 403),
    },
)
async def metrics(request: Request, state: State) -> Response:
    """Return all metrics in Prometheus' text format.

    If the Accept header prefers OpenMetrics, as Prometheus' own does, the response is OpenMetrics.
    """
    content, media_type = state.metrics.exposition(preferred_type(request, FORMATS))
    return Response(content, headers={"Vary": "Accept"}, media_type=media_type)
