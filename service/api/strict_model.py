"""The base class of the models of request bodies."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Base model that rejects unknown fields and does not convert types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
