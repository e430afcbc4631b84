"""Jobs and replies, the messages between service and gradient process. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import Discriminator, Field, TypeAdapter

from models.engines import Precision
from models.gradients.inputs import (
    EmulatedPrecision,
    Method,
    MethodOptions,
    ObjectiveName,
    Reduction,
    Row,
    Side,
    TargetName,
)
from service.debug.request_models import GivenRows, RandomRows

# Maximum number of non-finite numbers that a reply lists.
MAX_NONFINITE = 64


# Jobs. The reply contains the reference model's vectors of the rows in `compare`, which the service
# compares with the served vectors.


@dataclass(frozen=True)
class Target:
    """Scalar to attribute to tokens.

    Attributes:
        type: Kind of scalar.
        rows: For "cosine", the other text; for "margin", the positive and the negative text.
        vector: For "dot", the other vector.
        index: For "dim", the index of the dimension.
    """

    type: TargetName
    rows: Sequence[Row] = ()
    vector: Sequence[float] = ()
    index: int = 0


@dataclass(frozen=True)
class AttributeJob:
    """Attribution to tokens."""

    row: Row
    target: Target
    method: Method
    layer: str
    baseline: Sequence[int] | None
    options: MethodOptions
    compare: Sequence[Row]
    kind: Literal["attribute"] = "attribute"


@dataclass(frozen=True)
class PairJob:
    """Attribution to pairs of tokens."""

    a: Side
    b: Side
    layer: str
    tolerance: float
    max_evaluations: int
    compare: Sequence[Row]
    kind: Literal["pair"] = "pair"


@dataclass(frozen=True)
class FlowJob:
    """Gradient flow."""

    rows: Sequence[Row]
    objective: ObjectiveName
    vectors: Sequence[Sequence[float]]
    emulate: EmulatedPrecision | None
    loss_scale: float
    compare: Sequence[Row]
    kind: Literal["flow"] = "flow"


@dataclass(frozen=True)
class NormOfRow:
    """Source of rows for LayerNorm checks: the inputs of a norm of the model, for one text."""

    row: Row
    norm: str
    type: Literal["norm"] = "norm"


@dataclass(frozen=True)
class LayerNormJob:
    """Check of the fused operator."""

    source: Annotated[NormOfRow | GivenRows | RandomRows, Discriminator("type")]
    dtype: Literal["float32", "float64"]
    dout: Literal["random", "ones"]
    seed: int
    row: int | None
    compare: Sequence[Row]
    kind: Literal["layer_norm"] = "layer_norm"


@dataclass(frozen=True)
class ParityJob:
    """Comparison of the served model with the reference model.

    Attributes:
        rows: Inputs of the comparison.
        vectors: Served vectors of the rows, before normalisation.
        engine: Engine that computed them.
        precision: Precision of the engine.
        files: SHA-256 of each file of the artifact: its name, that at startup, and that on disk
            now, which is None if there is no file.
        texts: Texts with their prompts, and their token ids from the served tokenizer.
        check_texts: Texts of the self-check, and their token ids from the served tokenizer.
        check_rows: Token ids of these texts at export.
    """

    rows: Sequence[Row]
    vectors: Sequence[Sequence[float]]
    engine: str
    precision: Precision
    files: Sequence[tuple[str, str, str | None]]
    texts: Sequence[tuple[str, Sequence[int]]]
    check_texts: Sequence[tuple[str, Sequence[int]]]
    check_rows: Sequence[Sequence[int]]
    compare: Sequence[Row]
    kind: Literal["parity"] = "parity"


@dataclass(frozen=True)
class VjpJob:
    """Backpropagation of a gradient from the vector to the tokens."""

    row: Row
    cotangent: Sequence[float]
    layer: str
    reduce: Reduction
    compare: Sequence[Row]
    kind: Literal["vjp"] = "vjp"


Job = AttributeJob | PairJob | FlowJob | LayerNormJob | ParityJob | VjpJob
KINDS: tuple[str, ...] = tuple(job.kind for job in get_args(Job))
JOB: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Discriminator("kind")])


# Replies.


@dataclass(frozen=True)
class Opened:
    """The gradient process has loaded the reference model.

    Attributes:
        layers: Names of the layers.
        norms: Names of the norms.
        device: Device of the reference model.
        torch: Version of PyTorch.
        op: Implementation of add + LayerNorm, by pass.
    """

    layers: Sequence[str]
    norms: Sequence[str]
    device: str
    torch: str
    op: dict[str, str]
    outcome: Literal["opened"] = "opened"


@dataclass(frozen=True)
class NonFinite:
    """A NaN or infinite number of a result. JSON cannot represent it and has null in its place."""

    pointer: Annotated[str, Field(description="JSON pointer to the null in the response")]
    kind: Literal["nan", "inf", "-inf"]


@dataclass(frozen=True)
class Done:
    """The job is done.

    Attributes:
        result: Dataclass of `models.gradients.results` as JSON.
        nonfinite: First non-finite numbers of the result, at most `MAX_NONFINITE`.
        converged: Whether all path integrals of the result have converged.
        vectors: The reference model's vectors, not normalised, of the job's `compare` rows.
        wall_ms: Duration of the job, in milliseconds.
    """

    result: dict[str, Any]
    nonfinite: Sequence[NonFinite]
    converged: bool
    vectors: Sequence[Sequence[float]]
    wall_ms: float
    outcome: Literal["done"] = "done"


@dataclass(frozen=True)
class Refused:
    """A field of the job is invalid for the reference model.

    Attributes:
        detail: Error message.
        code: Error code of the response.
        pointer: JSON pointer to the invalid field of the request.
    """

    detail: str
    code: str
    pointer: str
    outcome: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Failed:
    """The job failed, or the reference model could not be loaded. The log has the traceback."""

    outcome: Literal["failed"] = "failed"


Reply = Opened | Done | Refused | Failed
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Discriminator("outcome")])


def encode_reply(reply: Reply) -> bytes:
    """Return a reply as JSON, with arrays as lists and non-finite numbers as null."""
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
