"""Declaration of a model family: config fields, tensor names, required values, unused tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from models.export.model_folder import CheckpointError
from models.network.config import EncoderConfig

# Largest sizes in a config, so that products of them do not overflow.
MAX_SIZE = 2**24
MAX_HEADS = 2**14


@dataclass(frozen=True)
class TensorPart:
    """Part `index`, from 0, of a checkpoint tensor split into `count` equal parts along axis 0."""

    name: str
    index: int = 0
    count: int = 1


# Checkpoint tensors to concatenate along the first axis, for each key of the encoder's state dict.
Tensors = Mapping[str, tuple[TensorPart, ...]]
# Checkpoint modules of each module of the encoder, or parts of them; a single one needs no tuple.
Modules = Mapping[str, str | tuple[str | TensorPart, ...]]
Settings = Mapping[str, Any]
# Returns a parameter's value from its concatenated checkpoint tensors and the encoder's config.
Value = Callable[[Tensor, EncoderConfig], Tensor]


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Head of a family's sequence classification models, or of its token classification models.

    Its steps are pooling, an optional dense layer with an activation, an optional norm, and a
    linear layer for the logits. With the pooling "late", pooling is the last step: the mean of all
    tokens' logits. Token classification has no pooling.

    Attributes:
        dense: Checkpoint module of the dense layer; "": no dense layer.
        dense_bias: Whether the dense layer has a bias.
        activation: Name in `models.network.heads.HEAD_ACTIVATIONS`.
        norm: Checkpoint module of the norm after the activation; "": no norm.
        out: Checkpoint module of the linear layer for the logits.
        out_bias: Whether the linear layer has a bias.
        poolings: Name in `models.network.pooling.POOLINGS`, or "late", for each value of the
            pooling field. The first is the default.
        pooling_field: Field of config.json with the pooling; "": always the default.
        skips_padding_ids: Whether pooling skips tokens with config.json's `pad_token_id`, which a
            text can have too.
        required: Only supported values of config.json fields, by field; fields may be absent.
    """

    dense: str = ""
    dense_bias: bool = True
    activation: str = "Tanh"
    norm: str = ""
    out: str = "classifier"
    out_bias: bool = True
    poolings: Mapping[str, str] = field(default_factory=lambda: {"cls": "cls"})
    pooling_field: str = ""
    skips_padding_ids: bool = False
    required: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """Head of a family's masked language models.

    Attributes:
        dense: Name of the checkpoint's module that transforms the token vectors.
        dense_bias: Whether that module has a bias.
        activation: Activation after it, in `models.network.layer.ACTIVATIONS`; "": that of the
            encoder.
        norm: Name of the norm after the activation.
        decoder: Name of the module that computes the logits. Without its weight, a checkpoint
            shares that of the word embeddings.
        decoder_bias: Name of the decoder's bias; "": it has the decoder's name.
        required: Fields of config.json for which only this one value is supported.
    """

    dense: str
    dense_bias: bool = True
    activation: str = ""
    norm: str
    decoder: str
    decoder_bias: str = ""
    required: Settings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Mapping from checkpoints of one `model_type` to `Encoder`.

    Attributes:
        config: Name in config.json of each `EncoderConfig` field. Of several names, the first one
            with a non-null value is used.
        defaults: Default values of optional config.json fields. A field with several names is
            listed under the first one in `config`.
        constants: Values of `EncoderConfig` fields that transformers hard-codes.
        derived: Returns the `EncoderConfig` fields that depend on several fields of config.json.
        required: Only supported values of config.json fields, by field; fields may be absent.
        layouts: Alternative layouts, each with the checkpoint tensors of every key of the encoder's
            state dict. `{i}` stands for the index of a layer. The layout with the most tensors in
            the checkpoint is used.
        values: Functions that convert checkpoint tensors to parameter values, by regular expression
            for keys of the encoder's state dict. Other tensors are used unchanged.
        prefixes: Prefixes to strip from tensor names, as in checkpoints with a task head.
        ignored: Regular expressions for the names of tensors that a sentence encoder does not use.
        fixed: Functions that return the only supported values of optional checkpoint tensors, by
            tensor name. The encoder computes these values itself.
        ignored_heads: Additional patterns for `ignored`, by entry of `architectures` in
            config.json.
        classifier: Head of sequence classification models; None: not supported.
        token_classifier: Head of token classification models; None: not supported.
        masked_lm: Head of masked language models; None: not supported.
        poolings: Name in `models.network.pooling.POOLINGS` for each value of `pooling` in
            config.json, in a folder without modules.json; empty: the field does not exist.
        projection: Checkpoint module of embedding models that projects each token vector, without
            a bias, to `num_labels` in config.json; "": there is none.
        causal_head: Checkpoint module of a causal language model's logits, a linear layer without
            bias; "": not supported.
        code: Prefixes of the class names in `auto_map` that the family implements. Other classes
            are refused, because code in model folders is never run.
    """

    config: Mapping[str, str | tuple[str, ...]]
    defaults: Settings = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Settings], dict[str, Any]] = lambda _: {}
    required: Settings = field(default_factory=dict)
    layouts: tuple[Tensors, ...]
    values: Mapping[str, Value] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, Callable[[EncoderConfig], Tensor]] = field(default_factory=dict)
    ignored_heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classifier: Classifier | None = None
    token_classifier: Classifier | None = None
    masked_lm: MaskedLM | None = None
    poolings: Mapping[str, str] = field(default_factory=dict)
    projection: str = ""
    causal_head: str = ""
    code: tuple[str, ...] = ()


def read_number(config: Settings, name: str, default: float) -> float:
    """Return the positive number in a field of config.json; the default if it is absent or null.

    Raises:
        CheckpointError: The field is not a number from 1e-30 to 1e30.
    """
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-30 <= value <= 1e30:
        raise CheckpointError(
            f"config.json: {name} has the invalid value {value!r}; it must be a number from 1e-30 "
            "to 1e30"
        )
    return float(value)  # torch takes no integers beyond 64 bits


def read_count(config: Settings, name: str, default: int, largest: int = MAX_SIZE) -> int:
    """Return the positive integer in a field of config.json; the default if it is absent or null.

    Raises:
        CheckpointError: The field is not an integer from 1 to `largest`.
    """
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise CheckpointError(
            f"config.json: {name} has the invalid value {value!r}; it must be an integer from 1 to "
            f"{largest}"
        )
    return value


def read_flag(config: Settings, name: str) -> bool:
    """Return a boolean field of config.json; False if it is absent or null.

    Raises:
        CheckpointError: The field is not a boolean.
    """
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointError(
            f"config.json: {name} has the invalid value {value!r}; it must be true or false"
        )
    return bool(value)


def read_biases(config: Settings, fields: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the parts of a layer that have a bias.

    Args:
        config: Content of config.json.
        fields: Parts of a layer that have a bias if a boolean field of config.json is true, by
            field. The parts are names in `models.network.layer.BIASES`.

    Raises:
        CheckpointError: A field is not a boolean.
    """
    with_bias = (parts for name, parts in fields.items() if read_flag(config, name))
    return frozenset(part for parts in with_bias for part in parts)


def tensors(*, weights: Mapping[str, str], modules: Modules) -> Tensors:
    """Return a layout: the checkpoint tensors of each key of the encoder's state dict.

    Args:
        weights: Checkpoint tensor of each key that is not part of a module in `modules`.
        modules: Checkpoint modules of each module of the encoder. The layout has the weight and
            the bias of every module. "layers.{i}.self_attn.in_proj" has the modules of query, key
            and value, in this order, or one module for all three.
    """
    layout: dict[str, tuple[TensorPart, ...]] = {
        key: (TensorPart(name),) for key, name in weights.items()
    }
    for module, sources in modules.items():
        own = (sources,) if isinstance(sources, str) else sources
        parts = [TensorPart(part) if isinstance(part, str) else part for part in own]
        separator = "_" if module.endswith("in_proj") else "."  # in_proj_weight, as in torch
        for kind in ("weight", "bias"):
            layout[f"{module}{separator}{kind}"] = tuple(
                replace(part, name=f"{part.name}.{kind}") for part in parts
            )
    return layout
