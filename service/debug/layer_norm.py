"""`POST /debug/layernorm`: do the implementations of add + norm compute it, step by step?"""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Response
from pydantic import Field, FiniteFloat

from models.gradients.inputs import Distribution
from models.gradients.results.layer_norm import LayerNormCheck
from service.api.strict_model import StrictModel
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text, Vector
from service.debug.pipeline.response import response_model
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import row_of, tokenize


class NormOfText(StrictModel):
    """Input rows of one normalisation layer, recorded while the model encodes a text."""

    type: Literal["text"]
    text: Text
    norm: str = Field(
        max_length=64, description="Name of the normalisation layer; /debug/capabilities lists them"
    )


Rows = Annotated[list[Vector], Field(min_length=1, max_length=256)]
# Results may be NaN or infinite, which JSON represents as null.
ResultVector = Annotated[
    list[FiniteFloat | None], Field(min_length=1, max_length=16_384, fail_fast=True)
]
ResultRows = Annotated[list[ResultVector], Field(min_length=1, max_length=256)]


class Candidate(StrictModel):
    """Results of the caller's implementation, at least one; a null element is NaN or infinite."""

    out: ResultRows | None = None
    sum: ResultRows | None = Field(None, description="`x + residual`, the second output")
    dx: ResultRows | None = None
    dresidual: ResultRows | None = None
    dgamma: ResultVector | None = None
    dbeta: ResultVector | None = None


NormKind = Annotated[
    Literal["layer_norm", "rms_norm"],
    Field(description="Kind of norm; RMS norm subtracts no mean and has no `beta`"),
]


class GivenRows(StrictModel):
    """Rows given in the request."""

    type: Literal["rows"]
    kind: NormKind = "layer_norm"
    x: Rows
    residual: Rows | None = Field(None, description="Rows to add to `x`; null: no residual")
    gamma: Vector | None = Field(None, description="Scale; null: ones")
    beta: Vector | None = Field(None, description="Shift; null: zeros")
    eps: float = Field(1e-12, ge=0, le=1, description="Constant added to the variance")
    dout: Rows | None = Field(
        None, description="Gradient with respect to `out`; null: as chosen by the request's `dout`"
    )
    dsum: Rows | None = Field(
        None,
        description="Gradient with respect to `x + residual`, allowed only with `dout` and "
        "`residual`; null: zeros if `dout` is set, otherwise as chosen by the request's `dout`",
    )
    candidate: Candidate | None = Field(
        None,
        description="Results to judge instead of the service's implementations. They must be "
        "computed from these rows in the request's `dtype`",
    )


class RandomRows(StrictModel):
    """Rows drawn from a distribution."""

    type: Literal["random"]
    kind: NormKind = "layer_norm"
    distribution: Distribution = "normal"
    shape: Annotated[
        list[Annotated[int, Field(ge=1, le=4096)]],
        Field(min_length=2, max_length=2, description="Number of rows, then width of each row"),
    ]


class LayerNormRequest(ModelRequest):
    """Step-by-step check of add + norm: a residual sum, then layer norm or RMS norm."""

    source: Annotated[NormOfText | GivenRows | RandomRows, Field(discriminator="type")]
    dtype: Literal["float32", "float64"] = Field(
        "float32",
        description="Precision of the judged implementations; `steps` are always in float32",
    )
    dout: Literal["random", "ones"] = Field(
        "random",
        description="Gradient with respect to `out`, unless `source` has a `dout`. The gradient "
        "with respect to `x + residual` is random with `random`, and zero with `ones`",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of random rows and gradients")
    row: int | None = Field(
        None,
        ge=0,
        description="Index of the row whose values are returned at each step; null: no values",
    )


@dataclass(frozen=True, kw_only=True)
class LayerNormJob(Job):
    """Job: check the steps of add + norm and judge its implementations."""

    kind: Literal["layer_norm"] = "layer_norm"
    request: LayerNormRequest


LayerNormResponse = response_model("LayerNormResponse", LayerNormCheck)


async def layer_norm(body: LayerNormRequest, call: Call) -> Response:
    """Check add + norm step by step, on rows from a text, random rows or given rows."""
    rows = []
    if isinstance(body.source, NormOfText):
        rows = [row_of(await tokenize(call, body.source.text, "/source/text"))]
    cost = call.cost_of(sum(len(row.ids) for row in rows))
    job = LayerNormJob(request=body, rows=rows)
    return await call.answer(job, cost, LayerNormResponse)


ROUTE = GradientRoute(
    "layernorm", "Check of add + norm", layer_norm, LayerNormRequest, LayerNormResponse
)
