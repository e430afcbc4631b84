"""`POST /debug/attribute/pair`: which pairs of tokens make two texts similar?"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import Response
from pydantic import Field

from models.gradients.budget import pair_token_steps
from models.gradients.inputs import BaselineName
from models.gradients.results.attribution import PairAttribution
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text
from service.debug.pipeline.response import (
    CostResponse,
    Token,
    WordSpan,
    response_model,
)
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import baseline_of, row_of, tokenize, tokens_of
from service.debug.pipeline.words import words_of


class PairRequest(ModelRequest):
    """Attribution of the similarity of texts `a` and `b` to pairs of their tokens."""

    a: Text
    b: Text
    layer: str = Field(
        "output",
        max_length=64,
        description="Layer of the paired token vectors; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "zero",
        description="Baseline of the tokens: padding tokens, mask tokens or zero vectors",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Tolerance of each text's path integral: the maximum error of the sum over "
        "tokens, relative to the vector's change from baseline to text, and the maximum error of "
        "each token's contribution, relative to the largest contribution",
    )
    max_evaluations: int = Field(
        128, ge=17, le=4096, description="Maximum number of evaluations of the model per text"
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


@dataclass(frozen=True, kw_only=True)
class PairJob(Job):
    """Job: attribute the similarity of texts a and b to pairs of their tokens.

    Attributes:
        baselines: Token ids of the baselines of a and b; None: zero vectors.
    """

    kind: Literal["pair"] = "pair"
    request: PairRequest
    baselines: Sequence[Sequence[int] | None]


PairResponse = response_model(
    "PairResponse",
    PairAttribution,
    tokens_a=Token,
    tokens_b=Token,
    words_a=WordSpan,
    words_b=WordSpan,
)


async def pair(body: PairRequest, call: Call) -> Response:
    """Attribute the similarity of two texts, a cosine or dot product, to pairs of their tokens."""
    a, b = await tokenize(call, body.a, "/a"), await tokenize(call, body.b, "/b")
    baselines = [baseline_of(a, body.baseline, "/a"), baseline_of(b, body.baseline, "/b")]
    steps = pair_token_steps(body.layer, len(a.row.ids), len(b.row.ids), body.max_evaluations)
    cost = call.cost_of(steps)
    if body.dry_run:
        return call.cost_response(cost)

    job = PairJob(request=body, rows=[row_of(a), row_of(b)], baselines=baselines)
    words_a, words_b = await asyncio.to_thread(lambda: (words_of(a), words_of(b)))
    return await call.answer(
        job,
        cost,
        PairResponse,
        tokens_a=tokens_of(a),
        tokens_b=tokens_of(b),
        words_a=words_a,
        words_b=words_b,
    )


ROUTE = GradientRoute(
    "attribute/pair",
    "Attribution to pairs of tokens",
    pair,
    PairRequest,
    PairResponse | CostResponse,
    kinds=("embedding",),
    needs_sum=True,
)
