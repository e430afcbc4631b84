"""Heads of masked language models, which compute sparse vectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.export.families import Family, TensorPart
from models.export.families.family import Tensors
from models.export.model_files import ModelFiles
from models.export.model_folder import CheckpointError, check_required, first_class
from models.export.weights import fill
from models.network.config import EncoderConfig
from models.network.sparse import SparseHead

_CLASS = "ForMaskedLM"


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Pooling of the logits of a masked language model.

    Attributes:
        pooling: "max" or "sum".
        double_log: Whether the logarithm is applied twice.
        tied: Whether the word embeddings are the decoder's weight if the checkpoint has none.
    """

    pooling: str = "max"
    double_log: bool = False
    tied: bool = True


def masked_lm_class(config: Mapping[str, Any]) -> str | None:
    """Return the class that config.json names, if it is a masked language model."""
    first = first_class(config)
    return first if first.endswith(_CLASS) else None


def check_supported(files: ModelFiles) -> None:
    """Raise CheckpointError if the head of the family's masked language models is not supported."""
    name, config, head = files.config_name, files.config, files.family.masked_lm
    if head is None:
        raise CheckpointError(
            f"{name}: sparse vectors of model_type {config.get('model_type')!r} are not supported"
        )
    check_required(config, head.required, name)


def take_head(
    family: Family,
    config: EncoderConfig,
    sparse: SparseConfig,
    layout: Tensors,
    tensors: dict[str, Tensor],
) -> SparseHead:
    """Return the head that computes sparse vectors, and remove its tensors from `tensors`.

    A checkpoint without the decoder's weight shares that of the word embeddings, which stays. The
    decoder's bias can have two names. If both are present, transformers uses the decoder's own.

    Args:
        family: Family with a masked language model.
        config: Hyperparameters of the encoder.
        sparse: Pooling of the logits.
        layout: Names of the encoder's tensors.
        tensors: Tensors of the checkpoint, by name.
    """
    own = family.masked_lm
    assert own is not None  # noqa: S101 - otherwise `check_supported` raises an error
    width = config.embedding_width or config.d_model
    head = SparseHead(
        config.d_model,
        config.norms.norm(width),
        width,
        config.vocab_size,
        own.activation or config.activation,
        dense_bias=own.dense_bias,
        pooling=sparse.pooling,
        double_log=sparse.double_log,
    )
    (embeddings,) = layout["embeddings.word.weight"]
    names = {
        key: f"{getattr(own, key.split('.')[0])}.{key.split('.')[1]}" for key in head.state_dict()
    }
    if names["decoder.weight"] not in tensors and sparse.tied:
        names["decoder.weight"] = embeddings.name
    if names["decoder.bias"] not in tensors and own.decoder_bias:
        names["decoder.bias"] = own.decoder_bias
    fill(
        head,
        {name: tensors[name] for name in names.values() if name in tensors},
        lambda key: (TensorPart(names[key]),),
    )
    for name in names.values():
        if name != embeddings.name:
            del tensors[name]
    return head
