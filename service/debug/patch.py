"""`POST /debug/patch`: which step, at which token, makes the difference between two texts?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import Response
from pydantic import Field, Tag

from models.gradients.budget import patch_token_steps
from models.gradients.results.patching import Patching
from service.api.schemas import by_type
from service.debug.activations import TapNames, tap_points_of
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text
from service.debug.pipeline.response import CostResponse, Token, response_model
from service.debug.pipeline.route import GradientRoute
from service.debug.target import (
    ResolvedTarget,
    Target,
    TargetResponse,
    check_target,
    resolve_target,
)
from service.debug.target_inputs import POINTERS, ModelInput, model_inputs, tokens_of_inputs
from service.inference.errors import InvalidInput

PairOfPositions = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
Positions = (
    Annotated[
        Annotated[Literal["each"], Tag("each")]
        | Annotated[list[PairOfPositions], Field(min_length=1, max_length=4096), Tag("pairs")],
        by_type({str: "each", list: "pairs"}, "'each', a list of pairs of positions, or null"),
    ]
    | None
)


class PatchRequest(ModelRequest):
    """Replacement of token vectors of a text by those of another one, the source."""

    text: Text
    text_pair: str | None = Field(None, description="As in /debug/attribute")
    source: Text = Field(description="Text in place of `text`, from which the token vectors are")
    source_pair: str | None = Field(
        None, description="Text in place of `text_pair`; null: `text_pair`"
    )
    target: Target = Field(
        description="Scalar to compute; /debug/capabilities lists those of the model"
    )
    taps: TapNames
    positions: Positions = Field(
        None,
        description="Replaced tokens. Null: all at once, if both texts have as many tokens and the "
        "model attends to, pools and skips the same ones. `each`: each one alone, likewise. A list "
        "of pairs: all of these at once; a pair is an index in `tokens`, and one in "
        "`source_tokens`",
    )
    dry_run: bool = Field(False, description="Return only the cost")


@dataclass(frozen=True, kw_only=True)
class PatchJob(Job):
    """Job: replace token vectors of some inputs by those of others, and compute the scalar.

    The first half of the rows are inputs whose token vectors are replaced, and the second half as
    many inputs, from which the token vectors are.

    Attributes:
        target: Scalar to compute.
        taps: Name of each tap, and the step at which the vectors are replaced.
        patches: Patches at each tap. A patch is a list of pairs of tokens: the index of the
            replaced one among the tokens of the first half, and that of the other one among the
            tokens of the second half.
    """

    kind: Literal["patch"] = "patch"
    request: PatchRequest
    target: ResolvedTarget
    taps: dict[str, str]
    patches: Sequence[Sequence[tuple[int, int]]]


PatchResponse = response_model(
    "PatchResponse", Patching, TargetResponse, tokens=Token, source_tokens=Token
)


async def patch(body: PatchRequest, call: Call) -> Response:
    """Replace token vectors of a text by those of another one, and compute the target's scalar."""
    check_target(call, body.target)
    points = tap_points_of(await call.open_process(), body.taps, per_token=True)
    inputs = await model_inputs(call, body.target, body.text, body.text_pair)
    source_pair, pair_pointer = body.source_pair, "/source_pair"
    if source_pair is None:
        source_pair, pair_pointer = body.text_pair, POINTERS[1]
    pointers = "/source", pair_pointer, POINTERS[2]
    sources = await model_inputs(call, body.target, body.source, source_pair, pointers)
    patches = _patches(body.positions, inputs, sources)
    rows, source_rows = ([each.row for each in own] for own in (inputs, sources))
    length, source_length = (sum(len(row.ids) for row in own) for own in (rows, source_rows))
    cost = call.cost_of(patch_token_steps(length, source_length, len(points), len(patches)))
    if body.dry_run:
        return call.cost_response(cost)

    target = await resolve_target(call, body.target, rows[0])
    job = PatchJob(
        request=body,
        rows=[*rows, *source_rows],
        target=target,
        taps={name: point.name for name, point in points.items()},
        patches=patches,
    )
    return await call.answer(
        job,
        cost,
        PatchResponse,
        tokens=tokens_of_inputs(inputs),
        source_tokens=tokens_of_inputs(sources),
        label=target.label,
    )


def _patches(
    positions: Positions, inputs: Sequence[ModelInput], sources: Sequence[ModelInput]
) -> list[list[tuple[int, int]]]:
    """Return the patches of a request, each a list of pairs of positions.

    Args:
        positions: Field of the request.
        inputs: Model inputs whose token vectors are replaced.
        sources: As many model inputs, from which the token vectors are.

    Raises:
        InvalidInput: Positions are missing, and all vectors of the source would not give its value:
            two texts have different numbers of tokens, or other expanded, skipped or prompt tokens.
            A position does not exist or occurs twice, or a pair belongs to different model inputs.
    """
    if isinstance(positions, list):
        return [_pairs(positions, inputs, sources)]
    for own, other in zip(inputs, sources, strict=True):
        count, source_count = len(own.row.ids), len(other.row.ids)
        problem = None
        if count != source_count:
            problem = f"{own.name} has {count} tokens and {other.name} has {source_count}"
        elif replace(own.row, ids=(), token_types=()) != replace(other.row, ids=(), token_types=()):
            problem = (
                "the model attends to, pools or skips other tokens of "
                f"{own.name} than of {other.name}"
            )
        if problem is not None:
            raise InvalidInput(
                f"{problem}; without a list of positions, both must have equally many tokens, with "
                "the same of them attended to, pooled and skipped. Set positions to pairs: an "
                "index in tokens, and the index in source_tokens of its replacement",
                code="token_counts",
                pointer="/positions",
            )
    everything = [(index, index) for index in range(sum(len(each.row.ids) for each in inputs))]
    return [[pair] for pair in everything] if positions == "each" else [everything]


def _pairs(
    positions: Sequence[Sequence[int]],
    inputs: Sequence[ModelInput],
    sources: Sequence[ModelInput],
) -> list[tuple[int, int]]:
    owners, source_owners = (
        [number for number, each in enumerate(own) for _ in each.row.ids]
        for own in (inputs, sources)
    )
    pairs: dict[int, int] = {}
    for index, (position, source) in enumerate(positions):
        problem = None
        if position >= len(owners) or source >= len(source_owners):
            problem = f"the texts have {len(owners)} tokens and the sources {len(source_owners)}"
        elif owners[position] != source_owners[source]:
            problem = "the two tokens belong to different inputs of the model"
        elif position in pairs:
            problem = f"position {position} occurs twice"
        if problem is not None:
            raise InvalidInput(
                f"{problem}; a pair is an index in tokens and an index in source_tokens",
                code="position",
                pointer=f"/positions/{index}",
            )
        pairs[position] = source
    return list(pairs.items())


ROUTE = GradientRoute(
    "patch", "Activation patching", patch, PatchRequest, PatchResponse | CostResponse
)
