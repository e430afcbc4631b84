"""`POST /debug/activations`: what are the outputs of steps of the forward pass?"""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import BaseModel, Field

from models.gradients.budget import activation_shape
from models.gradients.inputs import TapPoint, TokenReduction
from service.api.schemas import VERSION
from service.debug.pipeline.call import Call, json_response
from service.debug.pipeline.messages import Job, Opened
from service.debug.pipeline.model_kinds import READS_PAIRS
from service.debug.pipeline.request_fields import Input, ModelRequest, TextOrPair
from service.debug.pipeline.response import Cost, CostResponse, VectorParity, hashes_of
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import row_of, tokenize, tokens_of
from service.inference.errors import InvalidInput
from service.inference.tokenizing.rows import TokenizedText

TensorFormat = Literal["safetensors", "npz"]
TapNames = Annotated[
    list[Annotated[str, Field(max_length=64)]],
    Field(
        min_length=1,
        max_length=1024,
        description="Names of steps of the forward pass, or of layers, whose output is that of "
        "their last step; /debug/capabilities lists both as `taps` and `layers`",
    ),
]


class ActivationsRequest(ModelRequest):
    """Outputs of steps of the forward pass, as a file of tensors."""

    texts: Annotated[list[Input], Field(min_length=1, max_length=64)]
    taps: TapNames
    reduction: TokenReduction = Field(
        "none",
        description="Reduction over the tokens of a text: their mean, the norm of each, the first "
        "or the last one. Outputs with one vector per text stay as they are, except for `norm`",
    )
    format: TensorFormat = "safetensors"
    dry_run: bool = Field(
        False, description="Return only the cost and the size of the tensors in bytes"
    )


@dataclass(frozen=True, kw_only=True)
class ActivationsJob(Job):
    """Job: write the outputs of steps of the forward pass to a file.

    Attributes:
        taps: Name of each tensor, and the step whose output it is.
        metadata: Metadata of the file, as JSON.
    """

    kind: Literal["activations"] = "activations"
    request: ActivationsRequest
    taps: dict[str, str]
    metadata: str


class ActivationsCostResponse(CostResponse):
    """Response to a request for activations with `dry_run`."""

    bytes: int = Field(description="Size of all tensors, in bytes")
    max_bytes: int = Field(description="Maximum size of all tensors, in bytes")


class ActivationsReport(BaseModel):
    """Header `X-Debug-Report` of a response with activations, as JSON."""

    parity: VectorParity
    cost: Cost
    wall_ms: float
    warnings: list[str]


MEDIA_TYPES: Mapping[TensorFormat, str] = {
    "safetensors": "application/vnd.safetensors",
    "npz": "application/x-npz",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_HEADERS = {
    "X-Model-Version": {
        "description": "Version of the model; absent with `dry_run`",
        "schema": {"type": "string"},
    },
    "X-Debug-Report": {
        "description": "Parity, cost, duration and warnings; absent with `dry_run`",
        "content": {"application/json": {"schema": ActivationsReport.model_json_schema()}},
    },
}


async def activations(body: ActivationsRequest, call: Call) -> Response:
    """Return outputs of steps of the forward pass, as a file of float32 tensors.

    The tensor `0/layers.1` is the output of the tap `layers.1` for text 0. The file's metadata has
    the tokens of the texts, the shapes, the hashes of the model and the versions.
    """
    opened = await call.open_process()
    points = tap_points_of(opened, body.taps)
    texts = [
        await _tokenize(call, text, f"/texts/{index}") for index, text in enumerate(body.texts)
    ]
    rows = [row_of(text) for text in texts]
    cost = call.cost_of(sum(len(row.ids) for row in rows))
    size = 4 * sum(
        math.prod(activation_shape(point, len(row.ids), body.reduction))
        for row in rows
        for point in points.values()
    )
    limit = call.state.settings.debug.max_activation_bytes
    if size > limit:
        raise InvalidInput(
            f"the tensors have {size} bytes; the limit is {limit}: use fewer or shorter texts, "
            "fewer taps or a reduction",
            code="activation_bytes",
            pointer="/taps",
        )
    hashes = hashes_of(call.model)
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
    job = ActivationsJob(request=body, rows=rows, taps=steps, metadata=file_metadata)
    report, reply = await call.run(job, cost)
    return Response(
        reply.file,
        media_type=MEDIA_TYPES[body.format],
        headers={
            "Content-Disposition": f'attachment; filename="activations.{body.format}"',
            "X-Model-Version": call.model.version,
            "X-Debug-Report": ActivationsReport.model_validate(report).model_dump_json(),
        },
    )


async def _tokenize(call: Call, text: Input, pointer: str) -> TokenizedText:
    if not isinstance(text, TextOrPair) or text.text_pair is None:
        return await tokenize(call, text, pointer)
    if call.kind not in READS_PAIRS:
        raise InvalidInput(
            "text_pair applies to rerankers and classifiers, which read two texts at once",
            pointer=f"{pointer}/text_pair",
        )
    pair_pointer = f"{pointer}/text_pair"
    return await tokenize(call, text, f"{pointer}/text", text.text_pair, pair_pointer)


def _with_tokens(metadata: dict[str, Any], texts: Sequence[TokenizedText]) -> str:
    """Return the metadata of a file, with the tokens of the texts, as JSON."""
    tokens = [
        [token.model_dump() for token in tokens_of(text, (0, 1), index)]
        for index, text in enumerate(texts)
    ]
    return json.dumps({**metadata, "tokens": tokens})


def tap_points_of(
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


ROUTE = GradientRoute(
    "activations",
    "Activations",
    activations,
    ActivationsRequest,
    ActivationsCostResponse,
    success={"content": dict.fromkeys(MEDIA_TYPES.values(), _BINARY), "headers": _HEADERS},
)
