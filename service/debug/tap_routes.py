"""Routes that read and replace activations: outputs of steps of the forward pass."""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from models.gradients.budget import activation_shape, patch_token_steps
from models.gradients.inputs import TapPoint
from service.api.auth import require_scope
from service.api.body import read_body
from service.api.raw_route import RawRoute
from service.api.schemas import VERSION
from service.debug.access import ACCESS
from service.debug.job_types import ActivationsJob, PatchJob
from service.debug.kinds import check_target
from service.debug.model_inputs import Texts, model_inputs_of, tokens_of_inputs
from service.debug.patches import patches_of
from service.debug.replies import Opened
from service.debug.request_models.taps import ActivationsRequest, PatchRequest, TensorFormat
from service.debug.responses import (
    ActivationsCostResponse,
    ActivationsReport,
    CostResponse,
    PatchResponse,
)
from service.debug.running import (
    MAX_BODY_BYTES,
    cost_of,
    hashes_of,
    json_response,
    open_process,
    route_options,
    run,
    run_job,
)
from service.debug.state import State
from service.debug.targets import find_target
from service.debug.texts import row_of, tokenize_input, tokens_of
from service.inference.errors import InvalidInput
from service.inference.tokenizing.rows import TokenizedText

router = APIRouter(
    prefix="/debug", route_class=RawRoute, dependencies=[require_scope("debug"), *ACCESS]
)

MEDIA_TYPES: Mapping[TensorFormat, str] = {
    "safetensors": "application/vnd.safetensors",
    "npz": "application/x-npz",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/activations",
    **route_options(
        ActivationsRequest,
        ActivationsCostResponse,
        "Activations",
        content=dict.fromkeys(MEDIA_TYPES.values(), _BINARY),
        headers={
            "X-Model-Version": {
                "description": "Version of the model; absent with `dry_run`",
                "schema": {"type": "string"},
            },
            "X-Debug-Report": {
                "description": "Parity, cost, duration and warnings; absent with `dry_run`",
                "content": {"application/json": {"schema": ActivationsReport.model_json_schema()}},
            },
        },
    ),
)
async def activations(request: Request, state: State) -> Response:
    """Return outputs of steps of the forward pass, as a file of float32 tensors.

    The tensor `0/layers.1` is the output of the tap `layers.1` for text 0. The file's metadata has
    the tokens of the texts, the shapes, the hashes of the model and the versions.
    """
    body = await read_body(request, state, ActivationsRequest, MAX_BODY_BYTES)
    model, kind = await state.lease_for("activations", request, body.model)
    opened = await open_process(request, state, model)
    points = _points(opened, body.taps)
    texts = [
        await tokenize_input(state, model, kind, each, f"/texts/{index}")
        for index, each in enumerate(body.texts)
    ]
    rows = [row_of(text) for text in texts]
    cost = cost_of(state, sum(len(row.ids) for row in rows))
    size = 4 * sum(
        math.prod(activation_shape(point, len(row.ids), body.reduction))
        for row in rows
        for point in points.values()
    )
    limit = state.settings.debug.max_activation_bytes
    if size > limit:
        raise InvalidInput(
            f"the tensors have {size} bytes; the limit is {limit}: use fewer or shorter texts, "
            "fewer taps or a reduction",
            code="activation_bytes",
            pointer="/taps",
        )
    hashes = hashes_of(model)
    if body.dry_run:
        return json_response(
            ActivationsCostResponse(model=hashes, cost=cost, bytes=size, max_bytes=limit)
        )

    steps = {name: point.name for name, point in points.items()}
    metadata = {
        "vitrine": VERSION,
        "model": hashes.model_dump(),
        "torch": opened.torch,
        "device": opened.device,
        "reduction": body.reduction,
        "taps": steps,
    }
    # In a thread, because 64 texts have up to 16,384 tokens.
    file_metadata = await asyncio.to_thread(_with_tokens, metadata, texts)
    job = ActivationsJob(rows, steps, body.reduction, body.format, file_metadata, compare=rows)
    outcome = await run_job(request, state, model, job)
    report = {"cost": cost, "wall_ms": outcome.done.wall_ms}
    report |= {"parity": outcome.parity, "warnings": outcome.warnings}
    return Response(
        outcome.file,
        media_type=MEDIA_TYPES[body.format],
        headers={
            "Content-Disposition": f'attachment; filename="activations.{body.format}"',
            "X-Model-Version": model.version,
            "X-Debug-Report": ActivationsReport.model_validate(report).model_dump_json(),
        },
    )


@router.post(
    "/patch", **route_options(PatchRequest, PatchResponse | CostResponse, "Activation patching")
)
async def patch(request: Request, state: State) -> Response:
    """Replace token vectors of a text by those of another one, and compute the target's scalar."""
    body = await read_body(request, state, PatchRequest, MAX_BODY_BYTES)
    model, kind = await state.lease_for("patch", request, body.model)
    check_target(kind, model.artifact.manifest, body.target.type)
    opened = await open_process(request, state, model)
    points = _points(opened, body.taps, per_token=True)
    inputs = await model_inputs_of(
        state, model, kind, Texts(body.text, body.text_pair, body.target)
    )
    source_pair, pair_pointer = body.source_pair, "/source_pair"
    if source_pair is None:
        source_pair, pair_pointer = body.text_pair, "/text_pair"
    pointers = "/source", pair_pointer, "/target/versus"
    sources = await model_inputs_of(
        state, model, kind, Texts(body.source, source_pair, body.target, pointers)
    )
    rows, source_rows = ([each.row for each in own] for own in (inputs, sources))
    patches = patches_of(body.positions, inputs, sources)
    length, source_length = (sum(len(row.ids) for row in own) for own in (rows, source_rows))
    cost = cost_of(state, patch_token_steps(length, source_length, len(points), len(patches)))
    if body.dry_run:
        return json_response(CostResponse(model=hashes_of(model), cost=cost))

    target, label = await find_target(request, state, model, body.target, rows[0])
    job = PatchJob(
        rows,
        source_rows,
        target,
        {name: point.name for name, point in points.items()},
        patches,
        body.positions == "each",
        compare=[*rows, *source_rows],
    )
    return await run(
        request,
        state,
        model,
        job,
        cost,
        PatchResponse,
        tokens=tokens_of_inputs(inputs),
        source_tokens=tokens_of_inputs(sources),
        label=label,
    )


def _with_tokens(metadata: dict[str, Any], texts: Sequence[TokenizedText]) -> str:
    """Return the metadata of a file, with the tokens of the texts, as JSON."""
    tokens = [
        [token.model_dump() for token in tokens_of(text, (0, 1), index)]
        for index, text in enumerate(texts)
    ]
    return json.dumps({**metadata, "tokens": tokens})


def _points(
    opened: Opened, names: Iterable[str], *, per_token: bool = False
) -> dict[str, TapPoint]:
    """Return the steps that names of steps or layers denote, by name.

    Args:
        opened: Description of the reference model.
        names: Names of steps or layers.
        per_token: Whether the steps must have a vector for each token.

    Raises:
        InvalidInput: A name is unknown, or its step has one vector for all tokens.
    """
    known = {point.name: point for point in opened.taps}
    points = {}
    for index, name in enumerate(names):
        point = known.get(opened.layers.get(name, name))
        if point is None or (per_token and not point.per_token):
            problem = "unknown tap" if point is None else "the tap has one vector for all tokens"
            allowed = ", ".join(each.name for each in opened.taps if each.per_token >= per_token)
            raise InvalidInput(
                f"{problem}; the model's layers: {', '.join(opened.layers)}; its taps"
                f"{' of tokens' if per_token else ''}: {allowed}",
                code="unknown_tap",
                pointer=f"/taps/{index}",
            )
        points[name] = point
    return points
