"""The gradient routes.

A handler validates the request, tokenises the texts, runs a job in the gradient process and returns
the result.
"""

import asyncio
from collections.abc import Sequence
from typing import get_args

from fastapi import APIRouter, Request, Response

from models.artifact import sha256
from models.gradients import inputs
from models.gradients.budget import (
    faithfulness_token_steps,
    flow_token_steps,
    pair_token_steps,
    parity_token_steps,
    token_steps,
)
from models.gradients.inputs import BaselineName, MethodOptions, Row, Side
from service.api.auth import require_scope
from service.api.body import read_body
from service.api.deadline import cancel_on_disconnect, within
from service.api.errors import Forbidden
from service.api.openapi import error_responses
from service.api.raw_route import RawRoute
from service.debug.access import ACCESS
from service.debug.job_types import (
    AttributeJob,
    FlowJob,
    LayerNormJob,
    NormOfRow,
    PairJob,
    ParityJob,
    VjpJob,
)
from service.debug.kinds import TAKES_PAIRS, check_target, routes_of, targets_of
from service.debug.model_inputs import (
    Texts,
    model_inputs_of,
    tokens_of_inputs,
    units_of_inputs,
    words_of_inputs,
)
from service.debug.request_models.attribution import AttributeRequest, PairRequest, VjpRequest
from service.debug.request_models.flow import Cotangent, FlowRequest, Product, SquaredError
from service.debug.request_models.layer_norm import (
    GivenRows,
    LayerNormRequest,
    NormOfText,
    RandomRows,
)
from service.debug.request_models.parity import ParityRequest
from service.debug.responses import (
    AttributeResponse,
    Capabilities,
    CostResponse,
    DebugLimits,
    FlowResponse,
    LayerNormResponse,
    PairResponse,
    ParityResponse,
    VjpResponse,
    WordSpan,
)
from service.debug.running import (
    MAX_BODY_BYTES,
    cost_of,
    hashes_of,
    json_response,
    open_process,
    route_options,
    run,
)
from service.debug.served import encode
from service.debug.state import State
from service.debug.targets import check_width, find_target
from service.debug.texts import (
    baseline_of,
    prompted,
    row_of,
    tokenize,
    tokenize_all,
    tokens_of,
)
from service.debug.words import words_of
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.tokenizing.rows import TokenizedText

router = APIRouter(
    prefix="/debug", route_class=RawRoute, dependencies=[require_scope("debug"), *ACCESS]
)


@router.post(
    "/attribute",
    **route_options(AttributeRequest, AttributeResponse | CostResponse, "Attribution to tokens"),
)
async def attribute(request: Request, state: State) -> Response:
    """Attribute a scalar, such as a similarity or a logit, to the tokens and words of a text."""
    body = await read_body(request, state, AttributeRequest, MAX_BODY_BYTES)
    model, kind = await state.lease_for("attribute", request, body.model)
    check_target(kind, model.artifact.manifest, body.target.type)
    texts = await model_inputs_of(state, model, kind, Texts(body.text, body.text_pair, body.target))
    rows = [text.row for text in texts]
    target, label = await find_target(request, state, model, body.target, rows[0])
    options = MethodOptions(
        body.tolerance, body.max_evaluations, body.samples, body.sigma, body.seed
    )
    sides = [Side(text.row, baseline_of(text.text, body.baseline, text.pointer)) for text in texts]
    length = sum(len(row.ids) for row in rows)
    steps = token_steps(body.method, length, options)
    words = await asyncio.to_thread(words_of_inputs, texts)
    units = None
    if body.faithfulness is not None:
        units = units_of_inputs(texts, words, body.faithfulness)
        steps += faithfulness_token_steps(length, len(units.tokens))
    cost = cost_of(state, steps)
    if body.dry_run:
        return json_response(CostResponse(model=hashes_of(model), cost=cost))

    job = AttributeJob(sides, words, target, body.method, body.layer, options, units, compare=rows)
    tokens = tokens_of_inputs(texts)
    return await run(
        request, state, model, job, cost, AttributeResponse, tokens=tokens, label=label
    )


@router.post(
    "/attribute/pair",
    **route_options(PairRequest, PairResponse | CostResponse, "Attribution to pairs of tokens"),
)
async def pair(request: Request, state: State) -> Response:
    """Attribute the similarity of two texts, a cosine or dot product, to pairs of their tokens."""
    body = await read_body(request, state, PairRequest, MAX_BODY_BYTES)
    model, _ = await state.lease_for("attribute/pair", request, body.model)
    a, b = await tokenize(state, model, body.a, "/a"), await tokenize(state, model, body.b, "/b")
    side_a = Side(row_of(a), baseline_of(a, body.baseline, "/a"))
    side_b = Side(row_of(b), baseline_of(b, body.baseline, "/b"))
    steps = pair_token_steps(body.layer, len(a.row.ids), len(b.row.ids), body.max_evaluations)
    cost = cost_of(state, steps)
    if body.dry_run:
        return json_response(CostResponse(model=hashes_of(model), cost=cost))

    job = PairJob(
        side_a,
        side_b,
        body.layer,
        body.tolerance,
        body.max_evaluations,
        compare=[row_of(a), row_of(b)],
    )
    words_a, words_b = await asyncio.to_thread(lambda: (_word_spans(a), _word_spans(b)))
    return await run(
        request,
        state,
        model,
        job,
        cost,
        PairResponse,
        tokens_a=tokens_of(a),
        tokens_b=tokens_of(b),
        words_a=words_a,
        words_b=words_b,
    )


@router.post("/flow", **route_options(FlowRequest, FlowResponse, "Gradient flow"))
async def flow(request: Request, state: State) -> Response:
    """Find where the gradient of a training objective vanishes, explodes or is not finite."""
    body = await read_body(request, state, FlowRequest, MAX_BODY_BYTES)
    model, _ = await state.lease_for("flow", request, body.model)
    texts = await tokenize_all(state, model, body.texts)
    cost = cost_of(state, flow_token_steps(len(text.row.ids) for text in texts))
    vectors: Sequence[Sequence[float]] = []
    match body.objective:
        case Product(vector=vector):
            vectors = [vector]
        case SquaredError() | Cotangent():
            vectors = body.objective.vectors
    rows = list(map(row_of, texts))
    job = FlowJob(rows, body.objective.type, vectors, body.emulate, body.loss_scale, compare=rows)
    tokens = [tokens_of(text) for text in texts]
    return await run(request, state, model, job, cost, FlowResponse, tokens=tokens)


@router.post(
    "/layernorm", **route_options(LayerNormRequest, LayerNormResponse, "Check of add + norm")
)
async def layer_norm(request: Request, state: State) -> Response:
    """Check add + norm step by step, on rows from a text, random rows or given rows."""
    body = await read_body(request, state, LayerNormRequest, MAX_BODY_BYTES)
    model, _ = await state.lease_for("layernorm", request, body.model)
    source: NormOfRow | GivenRows | RandomRows
    rows: list[Row] = []
    if isinstance(body.source, NormOfText):
        rows = [row_of(await tokenize(state, model, body.source.text, "/source/text"))]
        source = NormOfRow(rows[0], body.source.norm)
    else:
        source = body.source
    cost = cost_of(state, sum(len(row.ids) for row in rows))
    job = LayerNormJob(source, body.dtype, body.dout, body.seed, body.row, compare=rows)
    return await run(request, state, model, job, cost, LayerNormResponse)


@router.post(
    "/parity", **route_options(ParityRequest, ParityResponse, "Parity with the reference model")
)
async def parity(request: Request, state: State) -> Response:
    """Compare the served model with the reference model, and list the differences."""
    body = await read_body(request, state, ParityRequest, MAX_BODY_BYTES)
    model, _ = await state.lease_for("parity", request, body.model)
    tokenized = await tokenize_all(state, model, body.texts)
    rows = [row_of(text) for text in tokenized] or [
        Row(ids, adapter=adapter)
        for ids, adapter in zip(model.check.rows, model.check.adapters, strict=True)
    ]
    cost = cost_of(state, parity_token_steps(len(row.ids) for row in rows))
    check_ids = await asyncio.to_thread(model.tokenizer.ids, model.check.texts)
    files = await asyncio.to_thread(_files, model)
    encoding = cancel_on_disconnect(request, encode(model, rows))
    served = await within(request, state.settings.limits.request_s, encoding)
    job = ParityJob(
        rows,
        vectors=served.tolist(),
        engine=model.engine.name,
        precision=model.engine.precision,
        files=files,
        texts=[
            (prompted(model, text), row.ids) for text, row in zip(body.texts, rows, strict=False)
        ],
        check_texts=list(zip(model.check.texts, check_ids, strict=True)),
        check_rows=model.check.rows[: len(check_ids)],
        compare=rows,
    )
    return await run(request, state, model, job, cost, ParityResponse, served)


@router.post("/vjp", **route_options(VjpRequest, VjpResponse, "Vector-Jacobian product"))
async def vjp(request: Request, state: State) -> Response:
    """Backpropagate a gradient from the served vector to the token vectors at a layer."""
    body = await read_body(request, state, VjpRequest, MAX_BODY_BYTES)
    model, _ = await state.lease_for("vjp", request, body.model)
    if body.reduce == "full" and not state.settings.debug.full_gradients:
        raise Forbidden(
            "full gradients are disabled; set VITRINE_DEBUG__FULL_GRADIENTS=true",
            code="full_gradients",
            pointer="/reduce",
        )
    text = await tokenize(state, model, body.text, "/text")
    check_width(model, body.cotangent, "/cotangent")
    if not any(body.cotangent):
        raise InvalidInput(
            "all numbers of the cotangent are zero; at least one must be nonzero",
            code="zero_cotangent",
            pointer="/cotangent",
        )
    cost = cost_of(state, len(text.row.ids))
    row = row_of(text)
    job = VjpJob(row, body.cotangent, body.layer, body.reduce, compare=[row])
    return await run(request, state, model, job, cost, VjpResponse, tokens=tokens_of(text))


@router.get(
    "/capabilities",
    summary="Capabilities of the gradient routes",
    response_model=Capabilities,
    responses=error_responses(401, 403, 404, 422, 429, 503),
)
async def capabilities(request: Request, state: State) -> Response:
    """Return the allowed field values, limits and device of the gradient routes."""
    settings = state.settings.debug
    name = request.query_params.get("model")
    model, kind = await state.lease_for("capabilities", request, name)
    opened = await open_process(request, state, model)
    manifest = model.artifact.manifest
    return json_response(
        Capabilities(
            model=hashes_of(model),
            kind=kind,
            similarity=manifest.similarity,
            routes=routes_of(kind, manifest),
            layers=list(opened.layers),
            norms=list(opened.norms),
            taps=[point.name for point in opened.taps],
            methods=list(get_args(inputs.Method)),
            targets=targets_of(kind, manifest),
            labels=list(manifest.labels),
            text_pairs=kind in TAKES_PAIRS,
            baselines=list(get_args(BaselineName)),
            objectives=list(get_args(inputs.ObjectiveName)),
            distributions=list(get_args(inputs.Distribution)),
            device=opened.device,
            torch=opened.torch,
            op=opened.op,
            limits=DebugLimits.model_validate(settings, from_attributes=True),
        )
    )


def _word_spans(text: TokenizedText) -> list[WordSpan]:
    return [
        WordSpan(start=word.start, end=word.end, tokens=list(word.tokens))
        for word in words_of(text)
    ]


def _files(model: Model) -> list[tuple[str, str, str | None]]:
    """Return the name, SHA-256 at startup and current SHA-256 of each file of the artifact.

    The current SHA-256 is None if the file no longer exists.
    """
    paths = {name: model.artifact.path / name for name in model.files}
    return [
        (name, at_start, sha256(paths[name]) if paths[name].is_file() else None)
        for name, at_start in model.files.items()
    ]
