"""Jobs: messages from the service to its gradient process.

The reference model's vectors of the rows in `compare` follow the reply to a job, and the service
compares them with the served vectors. This module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Discriminator, TypeAdapter

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
    TokenReduction,
    Units,
)
from service.debug.request_models.layer_norm import GivenRows, RandomRows
from service.debug.request_models.taps import TensorFormat


@dataclass(frozen=True)
class Target:
    """Scalar to attribute to tokens.

    Attributes:
        type: Kind of scalar.
        rows: Texts to compare with, as model inputs. "cosine" and "similarity": the other text.
            "margin": the positive text, then the negative text. Empty for other types.
        vector: Second factor of the dot product, `(W,)`. Only for "dot".
        index: Index of the element of the vector. "label": index of the label. "sparse": index of
            the vocabulary entry. 0 for other types than these and "dim".
        versus: Index of the label whose logit is subtracted; None: none. Only for "label".
    """

    type: TargetName
    rows: Sequence[Row] = ()
    vector: Sequence[float] = ()
    index: int = 0
    versus: int | None = None


@dataclass(frozen=True)
class Word:
    """A word of a text, made of one or more tokens.

    Attributes:
        text: Index of the text: 0, 1 for the second text of a pair, or 2 for the target's `versus`.
        start: Index of the word's first character in the text.
        end: Index after the word's last character.
        tokens: Indices of the word's tokens, in order, among those of all rows of the job.
    """

    text: int
    start: int
    end: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class AttributeJob:
    """Job: attribute a scalar to the tokens and words of one or several model inputs.

    Several are: for "maxsim", the query and each document; for "score", the pair of a query and a
    document, and the pair with the document whose score is subtracted.

    Attributes:
        sides: Model inputs and their baselines.
        words: Words of the texts.
        target: Scalar to attribute.
        method: Attribution method.
        layer: Name of the layer whose tokens are scored.
        options: Options of the method.
        units: Units of the faithfulness; None: faithfulness is not measured.
        compare: See the module.
    """

    sides: Sequence[Side]
    words: Sequence[Word]
    target: Target
    method: Method
    layer: str
    options: MethodOptions
    units: Units | None
    compare: Sequence[Row]
    kind: Literal["attribute"] = "attribute"


@dataclass(frozen=True)
class PairJob:
    """Job: attribute the similarity of texts a and b to pairs of their tokens."""

    a: Side
    b: Side
    layer: str
    tolerance: float
    max_evaluations: int
    compare: Sequence[Row]
    kind: Literal["pair"] = "pair"


@dataclass(frozen=True)
class FlowJob:
    """Job: measure the gradient flow of a training objective at every step of the model."""

    rows: Sequence[Row]
    objective: ObjectiveName
    vectors: Sequence[Sequence[float]]
    emulate: EmulatedPrecision | None
    loss_scale: float
    compare: Sequence[Row]
    kind: Literal["flow"] = "flow"


@dataclass(frozen=True)
class NormOfRow:
    """Source of rows for a LayerNorm check: the inputs of one of the model's norms for a text."""

    row: Row
    norm: str
    type: Literal["norm"] = "norm"


@dataclass(frozen=True)
class LayerNormJob:
    """Job: check the steps of add + norm and judge its implementations."""

    source: Annotated[NormOfRow | GivenRows | RandomRows, Discriminator("type")]
    dtype: Literal["float32", "float64"]
    dout: Literal["random", "ones"]
    seed: int
    row: int | None
    compare: Sequence[Row]
    kind: Literal["layer_norm"] = "layer_norm"


@dataclass(frozen=True)
class ParityJob:
    """Job: compare the served model with the reference model.

    Attributes:
        rows: Inputs that both models run on.
        vectors: Served vectors of `rows`, before normalisation, `(B, W)`.
        engine: Name of the engine that computed `vectors`.
        precision: Precision of the engine.
        files: Name, SHA-256 at startup and current SHA-256 of each file of the artifact. The
            current SHA-256 is None if the file no longer exists.
        texts: Texts of the request, prompts included, and their token ids from the served
            tokenizer.
        check_texts: Texts of the self-check, and their token ids from the served tokenizer.
        check_rows: Token ids of `check_texts`, recorded at export.
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
    """Job: backpropagate a gradient from the served vector to the token vectors at a layer."""

    row: Row
    cotangent: Sequence[float]
    layer: str
    reduce: Reduction
    compare: Sequence[Row]
    kind: Literal["vjp"] = "vjp"


@dataclass(frozen=True)
class ActivationsJob:
    """Job: write the outputs of steps of the forward pass to a file.

    Attributes:
        rows: Inputs of the model.
        taps: Name of each tensor, and the step whose output it is.
        reduction: Reduction of each output over its tokens.
        format: Format of the file.
        metadata: Metadata of the file, as JSON.
        compare: See the module.
    """

    rows: Sequence[Row]
    taps: dict[str, str]
    reduction: TokenReduction
    format: TensorFormat
    metadata: str
    compare: Sequence[Row]
    kind: Literal["activations"] = "activations"


@dataclass(frozen=True)
class PatchJob:
    """Job: replace token vectors of some inputs by those of others, and compute the scalar.

    Attributes:
        rows: Inputs whose token vectors are replaced.
        source_rows: As many inputs, from which the token vectors are.
        target: Scalar to compute.
        taps: Name of each tap, and the step at which the vectors are replaced.
        patches: Patches at each tap. A patch is a list of pairs of tokens: the index of the
            replaced one among the tokens of `rows`, and that of the other one among the tokens of
            `source_rows`.
        is_each: Whether the result has a value for each patch, and not the value of the only one.
        compare: See the module.
    """

    rows: Sequence[Row]
    source_rows: Sequence[Row]
    target: Target
    taps: dict[str, str]
    patches: Sequence[Sequence[tuple[int, int]]]
    is_each: bool
    compare: Sequence[Row]
    kind: Literal["patch"] = "patch"


Job = (
    AttributeJob | PairJob | FlowJob | LayerNormJob | ParityJob | VjpJob | ActivationsJob | PatchJob
)
KINDS: tuple[str, ...] = tuple(job.kind for job in get_args(Job))
JOB: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Discriminator("kind")])
