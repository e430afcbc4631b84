"""Targets of attributions: validated fields of a request, as part of a gradient job."""

from collections.abc import Sequence

from fastapi import Request

from models.gradients.inputs import Row
from service.api.deadline import cancel_on_disconnect, within
from service.debug.job_types import Target
from service.debug.request_models import targets
from service.debug.served import encode
from service.debug.state import DebugState
from service.debug.texts import row_of, tokenize
from service.inference.errors import InvalidInput
from service.inference.model.model import Model


async def find_target(
    request: Request, state: DebugState, model: Model, target: targets.Target, row: Row
) -> tuple[Target, str | None]:
    """Return the target of a job, and its label if it is the logit of one.

    Args:
        request: HTTP request, watched for disconnection of the client.
        state: State of the application.
        model: The served model.
        target: Target of the request, one that the model has.
        row: Text, or first pair of texts, of the request.

    Raises:
        InvalidInput: A text of the target is invalid (see `tokenize`). A vector, an index, a label
            or a token is not one of the model.
        TooLarge: A text of the target has too many characters.
        DeadlineExceeded: The served model has not predicted the label by the request's deadline.
        VitrineError: The served model fails to predict the label; see `Model.encode_rows`.
    """
    finding = cancel_on_disconnect(request, _target_of(state, model, target, row))
    result = await within(request, state.settings.limits.request_s, finding)
    is_label = result.type == "label"
    return result, model.artifact.manifest.labels[result.index] if is_label else None


async def _target_of(state: DebugState, model: Model, target: targets.Target, row: Row) -> Target:
    match target:
        case targets.Cosine() | targets.Similarity():
            other = await tokenize(state, model, target.text, "/target/text")
            return Target(target.type, rows=[row_of(other)])
        case targets.Margin():
            positive = await tokenize(state, model, target.positive, "/target/positive")
            negative = await tokenize(state, model, target.negative, "/target/negative")
            return Target("margin", rows=[row_of(positive), row_of(negative)])
        case targets.Dot():
            check_width(model, target.vector, "/target/vector")
            return Target("dot", vector=target.vector)
        case targets.Dim():
            return _dim(model, target)
        case targets.Norm() | targets.Score() | targets.MaxSim():
            return Target(target.type)
        case targets.Label():
            return await _label(model, target, row)
        case targets.Sparse():
            return _sparse(model, target)


def _dim(model: Model, target: targets.Dim) -> Target:
    if target.index >= model.width:
        raise InvalidInput(
            f"index {target.index} is out of range; allowed: 0 to {model.width - 1}",
            code="dimensions",
            pointer="/target/index",
        )
    return Target("dim", index=target.index)


async def _label(model: Model, target: targets.Label, row: Row) -> Target:
    if target.label is None:
        index = int((await encode(model, [row]))[0].argmax())
    else:
        index = _label_index(model, target.label, "/target/label")
    if target.versus is None:
        return Target("label", index=index)
    versus = _label_index(model, target.versus, "/target/versus")
    if versus == index:
        raise InvalidInput(
            "versus must be another label than label: the margin of a label over itself is 0",
            pointer="/target/versus",
        )
    return Target("label", index=index, versus=versus)


def _label_index(model: Model, label: str, pointer: str) -> int:
    labels = model.artifact.manifest.labels
    if label not in labels:
        raise InvalidInput(
            f"unknown label; the model's labels: {', '.join(labels)}",
            code="unknown_label",
            pointer=pointer,
        )
    return labels.index(label)


def _sparse(model: Model, target: targets.Sparse) -> Target:
    token = model.tokenizer.token_id(target.token)
    if token is None or token >= model.width:
        raise InvalidInput(
            "the vocabulary has no entry with this spelling; responses spell their tokens as the "
            "vocabulary does",
            code="unknown_token",
            pointer="/target/token",
        )
    return Target("sparse", index=token)


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
