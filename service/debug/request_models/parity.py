"""Request body of /debug/parity."""

from typing import Annotated

from pydantic import Field

from service.debug.request_models.base import ModelRequest, Text


class ParityRequest(ModelRequest):
    """Comparison of the served graph with the reference model."""

    texts: Annotated[list[Text], Field(max_length=16)] = Field(
        [],
        description="Texts to encode with both the served model and the reference model; empty: "
        "the artifact's check inputs",
    )
