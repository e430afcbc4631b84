"""`POST /debug/vjp`: how does a gradient by the served vector reach the tokens?"""

from dataclasses import dataclass
from typing import Literal

from fastapi import Response
from pydantic import Field

from models.gradients.inputs import Reduction
from models.gradients.results.attribution import TokenGradient
from service.api.errors import Forbidden
from service.debug.pipeline.call import Call
from service.debug.pipeline.messages import Job
from service.debug.pipeline.request_fields import ModelRequest, Text, Vector
from service.debug.pipeline.response import Token, response_model
from service.debug.pipeline.route import GradientRoute
from service.debug.pipeline.texts import row_of, tokenize, tokens_of
from service.debug.target import check_width
from service.inference.errors import InvalidInput


class VjpRequest(ModelRequest):
    """Backpropagation of a gradient from the served vector to the token vectors at a layer."""

    text: Text
    cotangent: Vector = Field(description="Gradient with respect to the served vector")
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer of the token vectors; /debug/capabilities lists all layers",
    )
    reduce: Reduction = Field(
        "norm",
        description="Reduction of each token's gradient: its Euclidean norm (`norm`), its dot "
        "product with the token vector (`dot`), or no reduction (`full`)",
    )


@dataclass(frozen=True, kw_only=True)
class VjpJob(Job):
    """Job: backpropagate a gradient from the served vector to the token vectors at a layer."""

    kind: Literal["vjp"] = "vjp"
    request: VjpRequest


VjpResponse = response_model("VjpResponse", TokenGradient, tokens=Token)


async def vjp(body: VjpRequest, call: Call) -> Response:
    """Backpropagate a gradient from the served vector to the token vectors at a layer."""
    if body.reduce == "full" and not call.state.settings.debug.full_gradients:
        raise Forbidden(
            "full gradients are disabled; set VITRINE_DEBUG__FULL_GRADIENTS=true",
            code="full_gradients",
            pointer="/reduce",
        )
    text = await tokenize(call, body.text, "/text")
    check_width(call.model, body.cotangent, "/cotangent")
    if not any(body.cotangent):
        raise InvalidInput(
            "all numbers of the cotangent are zero; at least one must be nonzero",
            code="zero_cotangent",
            pointer="/cotangent",
        )
    row = row_of(text)
    cost = call.cost_of(len(row.ids))
    job = VjpJob(request=body, rows=[row])
    return await call.answer(job, cost, VjpResponse, tokens=tokens_of(text))


ROUTE = GradientRoute(
    "vjp", "Vector-Jacobian product", vjp, VjpRequest, VjpResponse, kinds=("embedding",)
)
