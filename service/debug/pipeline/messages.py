"""Messages between the service and its gradient process: jobs, and the replies to them.

Each question has a job of its own, beside its route. This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args

import orjson
from pydantic import Discriminator, Field, TypeAdapter
from pydantic_core import to_json

from models.gradients.inputs import InputRow, TapPoint
from service.debug.pipeline.request_fields import ModelRequest

JobKind = Literal[
    "attribute", "pair", "flow", "layer_norm", "parity", "vjp", "activations", "patch"
]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)

# Maximum number of non-finite numbers that a reply lists.
MAX_NONFINITE = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: the request of a question, and what only the service knows, such as token ids.

    Attributes:
        kind: Kind of the job, also in metrics.
        request: The request.
        rows: Its texts, as inputs of the reference model, whose vectors follow the reply. The
            service compares them with the served vectors.
    """

    kind: JobKind
    request: ModelRequest
    rows: Sequence[InputRow]


def encode_job(job: Job) -> bytes:
    """Return a job as JSON."""
    return to_json(job, inf_nan_mode="null")


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
        manifest_sha256: SHA-256 of the manifest of its artifact.
    """

    layers: dict[str, str]
    norms: Sequence[str]
    device: str
    torch: str
    op: dict[str, str]
    taps: Sequence[TapPoint]
    manifest_sha256: str
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
        vectors: Reference model's vectors of the job's `rows`, before normalisation, as
            float32 in native byte order; those of multi-vectors are concatenated.
        file: File that the job wrote; empty for most jobs.
    """

    done: Done
    vectors: bytes
    file: bytes


@dataclass(frozen=True)
class Refused:
    """Reply to a job with an invalid field: the fields of the `InvalidInput` that it raised."""

    detail: str
    code: str
    pointer: str | None
    outcome: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Failed:
    """Reply if a job raised an exception, which is logged, or the model could not be loaded."""

    outcome: Literal["failed"] = "failed"


Reply = Opened | Done | Refused | Failed
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Discriminator("outcome")])


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as JSON, with arrays as lists and non-finite numbers as null."""
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
