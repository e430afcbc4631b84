"""Targets: the scalars of attributions and patches, from the request to the job.

The steps for a new target are in `README.md`, Code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

from pydantic import Field

from models.gradients.inputs import InputRow
from models.manifest import Manifest
from service.api.strict_model import StrictModel
from service.debug.pipeline.call import Call
from service.debug.pipeline.model_kinds import KIND_NAMES, ModelKind
from service.debug.pipeline.request_fields import Text, Vector
from service.debug.pipeline.response import GradientResponse
from service.debug.pipeline.served_vectors import encode
from service.debug.pipeline.texts import row_of, tokenize
from service.inference.errors import InvalidInput
from service.inference.model.model import Model


class CosineTarget(StrictModel):
    """Cosine similarity of the text's vector and the vector of another text."""

    type: Literal["cosine"]
    text: Text


class SimilarityTarget(StrictModel):
    """Similarity that the model declares, of the text's vector and the vector of another text."""

    type: Literal["similarity"]
    text: Text


class MarginTarget(StrictModel):
    """Similarity to the text `positive` minus similarity to the text `negative`."""

    type: Literal["margin"]
    positive: Text
    negative: Text


class DotTarget(StrictModel):
    """Dot product of the text's served vector and a given vector."""

    type: Literal["dot"]
    vector: Vector


class DimTarget(StrictModel):
    """One element of the text's served vector."""

    type: Literal["dim"]
    index: int = Field(ge=0)


class NormTarget(StrictModel):
    """Euclidean norm of the text's vector before normalisation."""

    type: Literal["norm"]


class ScoreTarget(StrictModel):
    """Logit of a model with one label, such as a reranker, or its margin over that of `versus`."""

    type: Literal["score"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose logit is subtracted"
    )


class LabelTarget(StrictModel):
    """Logit of a label, or its margin over the logit of the label `versus`.

    Of several labels with the same name it is the one with the largest logit.
    """

    type: Literal["label"]
    label: str | None = Field(None, description="Null: the label with the largest logit")
    versus: str | None = None


class SparseTarget(StrictModel):
    """Weight of one vocabulary entry in the text's sparse vector."""

    type: Literal["sparse"]
    token: str = Field(description="Spelling of the entry in the vocabulary")


class MaxSimTarget(StrictModel):
    """MaxSim of the query `text` and the document `text_pair`, or its margin over that of `versus`.

    The texts have the prompts `query` and `document`.
    """

    type: Literal["maxsim"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose MaxSim is subtracted"
    )


Target = Annotated[
    CosineTarget
    | SimilarityTarget
    | MarginTarget
    | DotTarget
    | DimTarget
    | NormTarget
    | ScoreTarget
    | LabelTarget
    | SparseTarget
    | MaxSimTarget,
    Field(discriminator="type"),
]

# Types of the targets of each kind of model.
TARGETS: Mapping[ModelKind, tuple[str, ...]] = {
    "embedding": ("cosine", "similarity", "margin", "dot", "dim", "norm"),
    "reranker": ("score",),
    "classifier": ("label",),
    "sparse": ("sparse",),
    "multi": ("maxsim",),
}


def targets_of(kind: ModelKind, manifest: Manifest) -> list[str]:
    """Return the types of the targets of a model."""
    # The cosine would not explain the scores of a model with another similarity.
    is_cosine = manifest.similarity == "cosine"
    return [target for target in TARGETS[kind] if is_cosine or target != "cosine"]


def check_target(call: Call, target: Target) -> None:
    """Check that the model has a target.

    Raises:
        InvalidInput: It has others.
    """
    manifest = call.model.artifact.manifest
    if target.type not in (targets := targets_of(call.kind, manifest)):
        models = KIND_NAMES[call.kind]
        if target.type in TARGETS[call.kind]:
            models += f" with the similarity {manifest.similarity}"
        raise InvalidInput(
            f"{models} do not have this target; their targets: {', '.join(targets)}",
            code="wrong_target",
            pointer="/target/type",
        )


@dataclass(frozen=True)
class ResolvedTarget:
    """The target of a job: that of the request, and what it names in the model.

    Attributes:
        target: Target of the request.
        rows: Its texts, as inputs of the reference model, in the order of its fields.
        indices: Elements of the model's vector that it names: those of `label` and `versus`, or the
            entry of `token`. Empty for other targets.
        label: Label whose logit it is, for the response; None: it is no logit of a label.
    """

    target: Target
    rows: Sequence[InputRow] = ()
    indices: Sequence[int] = ()
    label: str | None = None


class TargetResponse(GradientResponse):
    """Common fields of responses about a target."""

    label: str | None = Field(
        description="Label of the target: the predicted one if the request has none. Null for "
        "targets other than `label`"
    )


async def resolve_target(call: Call, target: Target, row: InputRow) -> ResolvedTarget:
    """Return the target of a job.

    Args:
        call: Call of the route.
        target: Target of the request, one that the model has.
        row: Text, or first pair of texts, of the request.

    Raises:
        InvalidInput: A text of the target is invalid (see `tokenize`). A vector, an index, a label
            or a token is not one of the model.
        TooLarge: A text of the target has too many characters.
        DeadlineExceeded: The served model has not predicted the label by the request's deadline.
        VitrineError: The served model fails to predict the label; see `Model.encode_rows`.
    """
    return await call.within_deadline(_resolve(call, target, row))


async def _resolve(call: Call, target: Target, row: InputRow) -> ResolvedTarget:
    model = call.model
    texts: list[tuple[Text, str]] = []
    match target:
        case CosineTarget() | SimilarityTarget():
            texts = [(target.text, "/target/text")]
        case MarginTarget():
            texts = [(target.positive, "/target/positive"), (target.negative, "/target/negative")]
        case DotTarget():
            check_width(model, target.vector, "/target/vector")
        case DimTarget():
            if target.index >= model.width:
                raise InvalidInput(
                    f"index {target.index} is out of range; allowed: 0 to {model.width - 1}",
                    code="dimensions",
                    pointer="/target/index",
                )
        case LabelTarget():
            indices = await _labels(model, target, row)
            label = model.artifact.manifest.labels[indices[0]]
            return ResolvedTarget(target, indices=indices, label=label)
        case SparseTarget():
            return ResolvedTarget(target, indices=[_entry(model, target.token)])
        case NormTarget() | ScoreTarget() | MaxSimTarget():  # of the request's own texts
            pass
        case _:
            assert_never(target)
    rows = [row_of(await tokenize(call, text, pointer)) for text, pointer in texts]
    return ResolvedTarget(target, rows)


async def _labels(model: Model, target: LabelTarget, row: InputRow) -> list[int]:
    """Return the indices of a label, or of the predicted one, and of `versus` if there is one."""
    choices = [_choices(model, target.label, "/target/label")]
    if target.versus is not None:
        choices.append(_choices(model, target.versus, "/target/versus"))
    if all(len(own) == 1 for own in choices):
        indices = [index for own in choices for index in own]
    else:
        (logits,) = await encode(model, [row])
        indices = [max(own, key=logits.__getitem__) for own in choices]
    if len({*indices}) < len(indices):
        raise InvalidInput(
            "versus must be another label than label: the margin of a label over itself is 0",
            pointer="/target/versus",
        )
    return indices


def _choices(model: Model, label: str | None, pointer: str) -> Sequence[int]:
    """Return the indices of the labels with a name; None: of all labels."""
    labels = model.artifact.manifest.labels
    if label is None:
        return range(len(labels))
    if label not in labels:
        raise InvalidInput(
            f"unknown label; the model's labels: {', '.join(labels)}",
            code="unknown_label",
            pointer=pointer,
        )
    return [index for index, name in enumerate(labels) if name == label]


def _entry(model: Model, spelling: str) -> int:
    entry = model.tokenizer.token_id(spelling)
    if entry is None or entry >= model.width:
        raise InvalidInput(
            "the vocabulary has no entry with this spelling; responses spell their tokens as the "
            "vocabulary does",
            code="unknown_token",
            pointer="/target/token",
        )
    return entry


def check_width(model: Model, vector: Sequence[float], pointer: str) -> None:
    """Check that a vector has the width of the model's vectors.

    Raises:
        InvalidInput: It has another width.
    """
    if len(vector) != model.width:
        raise InvalidInput(
            f"the vector has {len(vector)} numbers; it must have {model.width}, the model's width",
            code="vector_length",
            pointer=pointer,
        )
