"""`POST /debug/flow`: where does the gradient of a training objective vanish, explode or end?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Response
from pydantic import Field

from models.gradients.budget import flow_token_steps
from models.gradients.inputs import EmulatedPrecision
from models.gradients.results.flow import Flow
from service.api.strict_model import StrictModel
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text, Vector
from service.debug.pipeline.response import Token, response_model
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import row_of, tokenize_all, tokens_of


class CosineObjective(StrictModel):
    """Sum of the cosine similarities of all pairs of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class RankingObjective(StrictModel):
    """Multiple negatives ranking loss, with scale 20, of the pairs of texts 2i and 2i + 1."""

    type: Literal["mnrl"]


class DotObjective(StrictModel):
    """Sum of the dot products of every text's served vector with one given vector."""

    type: Literal["dot"]
    vector: Vector


class SquaredErrorObjective(StrictModel):
    """Mean squared error between served vectors and given vectors, one per text."""

    type: Literal["mse"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class CotangentObjective(StrictModel):
    """Sum of the dot products of served vectors and given vectors, one per text."""

    type: Literal["cotangent"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class FlowRequest(ModelRequest):
    """Gradient flow of a training objective, measured at every step of the model."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        CosineObjective
        | RankingObjective
        | DotObjective
        | SquaredErrorObjective
        | CotangentObjective,
        Field(discriminator="type"),
    ]
    emulate: EmulatedPrecision | None = Field(
        None,
        description="Precision to which the output of each step, and the gradient with respect to "
        "it, are rounded; null: no rounding",
    )
    loss_scale: float = Field(
        1.0,
        ge=2.0**-24,
        le=2.0**32,
        description="Factor on the objective in the backward pass; gradient norms and magnitudes "
        "in the response are divided by it",
    )

    @property
    def vectors(self) -> Sequence[Sequence[float]]:
        """Constant vectors of the objective."""
        match self.objective:
            case DotObjective(vector=vector):
                return [vector]
            case SquaredErrorObjective() | CotangentObjective():
                return self.objective.vectors
        return []


@dataclass(frozen=True, kw_only=True)
class FlowJob(Job):
    """Job: measure the gradient flow of a training objective at every step of the model."""

    kind: Literal["flow"] = "flow"
    request: FlowRequest


FlowResponse = response_model("FlowResponse", Flow, tokens=list[Token])


async def flow(body: FlowRequest, call: Call) -> Response:
    """Find where the gradient of a training objective vanishes, explodes or is not finite."""
    texts = await tokenize_all(call, body.texts)
    rows = [row_of(text) for text in texts]
    cost = call.cost_of(flow_token_steps(len(row.ids) for row in rows))
    job = FlowJob(request=body, rows=rows)
    tokens = [tokens_of(text) for text in texts]
    return await call.answer(job, cost, FlowResponse, tokens=tokens)


ROUTE = GradientRoute("flow", "Gradient flow", flow, FlowRequest, FlowResponse, ("embedding",))
