"""Replies: messages from the gradient process to the service. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import Discriminator, Field, TypeAdapter

from models.gradients.inputs import TapPoint

# Maximum number of non-finite numbers that a reply lists.
MAX_NONFINITE = 64


@dataclass(frozen=True)
class Opened:
    """First reply of a gradient process, sent once it has loaded the reference model.

    Attributes:
        layers: Names of the layers of the reference model, each with the step that is its last.
        norms: Names of the norms of the reference model.
        device: Device of the reference model.
        torch: Version of PyTorch.
        op: Implementation of add + LayerNorm, by pass: "forward" and "backward".
        taps: Steps of the forward pass whose outputs belong to a row, in order.
    """

    layers: dict[str, str]
    norms: Sequence[str]
    device: str
    torch: str
    op: dict[str, str]
    taps: Sequence[TapPoint]
    outcome: Literal["opened"] = "opened"


@dataclass(frozen=True)
class NonFinite:
    """A NaN or infinite number in a result. It is null in JSON, which cannot represent it."""

    pointer: Annotated[str, Field(description="JSON pointer to the null in the response")]
    kind: Literal["nan", "inf", "-inf"]


@dataclass(frozen=True)
class Done:
    """Reply to a job that succeeded.

    Attributes:
        result: Result of the job, a dataclass of `models.gradients.results`, as JSON.
        nonfinite: First non-finite numbers of the result, at most `MAX_NONFINITE`.
        converged: Whether all path integrals of the result have converged. True if there are none.
        wall_ms: Duration of the job, in milliseconds.
    """

    result: dict[str, Any]
    nonfinite: Sequence[NonFinite]
    converged: bool
    wall_ms: float
    outcome: Literal["done"] = "done"


class Completed(NamedTuple):
    """Reply to a job that succeeded, and the two frames that follow it.

    The vectors are not part of the reply: JSON of the multi-vectors of 64 texts takes 0.2 s to
    parse, during which the service would encode nothing, and cannot represent NaN.

    Attributes:
        done: The reply.
        vectors: Reference model's vectors of the job's `compare` rows, before normalisation, as
            float32 in native byte order; those of multi-vectors are concatenated.
        file: File that the job wrote; empty for most jobs.
    """

    done: Done
    vectors: bytes
    file: bytes


@dataclass(frozen=True)
class Refused:
    """Reply to a job with an invalid field.

    Attributes:
        detail: Error message.
        code: Error code for the HTTP response.
        pointer: JSON pointer to the invalid field of the request.
    """

    detail: str
    code: str
    pointer: str
    outcome: Literal["refused"] = "refused"


class JobRefused(Exception):
    """A field of a job is invalid, such as a layer that the reference model does not have.

    The reply to the job is `Refused`.

    Attributes:
        code: Error code for the HTTP response.
        pointer: JSON pointer to the invalid field of the request.
    """

    def __init__(self, detail: str, code: str, pointer: str) -> None:
        super().__init__(detail)
        self.code = code
        self.pointer = pointer


@dataclass(frozen=True)
class Failed:
    """Reply if a job raised an exception, which is logged, or the model could not be loaded."""

    outcome: Literal["failed"] = "failed"


Reply = Opened | Done | Refused | Failed
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Discriminator("outcome")])


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as JSON, with arrays as lists and non-finite numbers as null."""
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
