"""Request body of /debug/flow."""

from typing import Annotated, Literal

from pydantic import Field

from models.gradients.inputs import EmulatedPrecision
from service.debug.request_models.base import ModelRequest, StrictModel, Text, Vector


class Cosines(StrictModel):
    """Sum of the cosine similarities of all pairs of texts 2i and 2i + 1."""

    type: Literal["cosine"]


class Ranking(StrictModel):
    """Multiple negatives ranking loss, with scale 20, of the pairs of texts 2i and 2i + 1."""

    type: Literal["mnrl"]


class Product(StrictModel):
    """Sum of the dot products of every text's served vector with one given vector."""

    type: Literal["dot"]
    vector: Vector


class SquaredError(StrictModel):
    """Mean squared error between served vectors and given vectors, one per text."""

    type: Literal["mse"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class Cotangent(StrictModel):
    """Sum of the dot products of served vectors and given vectors, one per text."""

    type: Literal["cotangent"]
    vectors: Annotated[list[Vector], Field(min_length=1, max_length=16)]


class FlowRequest(ModelRequest):
    """Gradient flow of a training objective, measured at every step of the model."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=16)]
    objective: Annotated[
        Cosines | Ranking | Product | SquaredError | Cotangent, Field(discriminator="type")
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
