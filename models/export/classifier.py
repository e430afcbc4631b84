"""Sequence classification models: labels, activation and head, as in transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from models.export.families import Classifier, TensorPart
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    CheckpointError,
    check_required,
    class_of_torch,
    first_class,
)
from models.export.modules import MODEL_CONFIG, DenseConfig, HeadConfig
from models.export.weights import fill
from models.network.config import EncoderConfig
from models.network.heads import DenseHead, Head, NormHead

_CLASS = "ForSequenceClassification"
_MAX_LABELS = 2**16
# Pooling of a classifier that computes logits for each token, and then their mean.
LATE = "late"
# Classes of torch that sentence-transformers' files name as the activation of the logits.
_ACTIVATIONS = ("Sigmoid", "Softmax", "Identity")


def classifies(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a sequence classification model."""
    return first_class(config).endswith(_CLASS)


def read_labels(files: ModelFiles) -> tuple[str, ...]:
    """Return the labels in config.json, in the order of the logits.

    Raises:
        CheckpointError: The keys of `id2label` are not consecutive integers from 0, there are no
            labels or too many, their number is not `num_labels`, or a label is no text.
    """
    name, config = files.config_name, files.config
    labels = config.get("id2label")
    number = config.get("num_labels")
    if not labels:
        number = 2 if number is None else number  # transformers' default
        if not isinstance(number, int) or number > _MAX_LABELS:
            raise CheckpointError(
                f"{name}: num_labels has the invalid value {number!r}; the limit is {_MAX_LABELS}"
            )
        labels = {str(i): f"LABEL_{i}" for i in range(number)}
    count = len(labels) if isinstance(labels, dict) else 0
    if count > _MAX_LABELS:
        raise CheckpointError(f"{name}: id2label has {count} labels; the limit is {_MAX_LABELS}")
    if not count or {str(i) for i in range(count)} != set(labels):
        raise CheckpointError(f"{name}: the keys of id2label must be consecutive integers from 0")
    if number not in (None, count):
        raise CheckpointError(f"{name}: num_labels is {number!r}, but id2label has {count} labels")
    own = [labels[str(i)] for i in range(count)]
    for i, label in enumerate(own):
        if not isinstance(label, str | int | float):
            raise CheckpointError(f"{name}: id2label has {label!r} for {i}, which is no text")
    return tuple(map(str, own))


def labels_of_scores(heads: Sequence[HeadConfig], include_prompt: bool) -> tuple[str, ...]:
    """Return the labels of a cross-encoder in modules, which have no names there.

    Raises:
        CheckpointError: Pooling leaves out prompts.
    """
    if not include_prompt:
        raise CheckpointError("include_prompt is False; only True is supported for scores of pairs")
    last = heads[-1]
    return tuple(
        f"LABEL_{i}" for i in range(last.out_features if isinstance(last, DenseConfig) else 0)
    )


def read_activation(files: ModelFiles, labels: int, default: str | None) -> str:
    """Return the activation of the logits: "sigmoid", "softmax" or "identity".

    The activation is the one that sentence-transformers has saved. If there is none, it is the
    default or, without one, that of transformers' text classification pipeline.

    Args:
        files: Files of the model.
        labels: Number of labels.
        default: Activation if none is saved; None: that of transformers.

    Raises:
        CheckpointError: The saved activation is not supported.
    """
    config, nested = files.config, files.config.get("sentence_transformers")
    own = files.folder.json(MODEL_CONFIG, dict, {}).get("activation_fn")
    if own is None and isinstance(nested, dict) and "activation_fn" in nested:
        own = nested["activation_fn"]  # null too: sentence-transformers ignores the old name then
    elif own is None:
        own = config.get("sbert_ce_default_activation_function")
    if own is not None:
        if (kind := class_of_torch(own)) not in _ACTIVATIONS:
            raise CheckpointError(
                f"the activation {own!r} of the scores is not one of {', '.join(_ACTIVATIONS)}"
            )
        return kind.lower()
    if default is not None:
        return default
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def read_pooling(files: ModelFiles) -> str:
    """Return the pooling of the family's classifier: a name in `POOLINGS`, or `LATE`.

    Raises:
        CheckpointError: The family's classifiers are not supported, or a field of config.json has
            an unsupported value.
    """
    name, config, classifier = files.config_name, files.config, files.family.classifier
    if classifier is None:
        raise CheckpointError(f"{name}: {config['architectures'][0]} is not supported")
    check_required(config, classifier.required, name)
    default = next(iter(classifier.poolings))
    pooling = config.get(classifier.pooling_field, default)
    if not isinstance(pooling, str) or pooling not in classifier.poolings:
        raise CheckpointError(
            f"{name}: {classifier.pooling_field} has the invalid value {pooling!r}"
        )
    return classifier.poolings[pooling]


def read_skipped_id(files: ModelFiles) -> int | None:
    """Return the token id that the pooling of the family's classifier skips; None: it skips none.

    Raises:
        CheckpointError: `pad_token_id` in config.json is not an integer.
    """
    value, classifier = files.config.get("pad_token_id"), files.family.classifier
    if classifier is None or not classifier.skips_padding_ids or value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{files.config_name}: pad_token_id has the invalid value {value!r}")
    return value


def take_heads(
    classifier: Classifier,
    config: EncoderConfig,
    labels: int,
    tensors: dict[str, Tensor],
) -> list[Head]:
    """Return the modules from vectors to logits, and remove their tensors from `tensors`.

    Args:
        classifier: Head of the family's models.
        config: Hyperparameters of the encoder.
        labels: Number of labels.
        tensors: Tensors of the checkpoint, by name.
    """
    width = config.d_model
    heads: list[Head] = []
    if classifier.dense:
        dense = DenseHead(width, width, classifier.dense_bias, classifier.activation)
        _take(tensors, classifier.dense, dense.linear)
        heads.append(dense)
    if classifier.norm:
        norm = NormHead(config.norms.norm(width), width)
        _take(tensors, classifier.norm, norm.norm)
        heads.append(norm)
    out = DenseHead(width, labels, classifier.out_bias, activation="Identity")
    _take(tensors, classifier.out, out.linear)
    return [*heads, out]


def _take(tensors: dict[str, Tensor], name: str, module: nn.Module) -> None:
    """Load the tensors of a checkpoint's module, and remove them from `tensors`."""
    own = {key: tensors.pop(key) for key in [*tensors] if key.startswith(f"{name}.")}
    fill(module, own, lambda key: (TensorPart(f"{name}.{key}"),))
