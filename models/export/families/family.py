"""Declaration of a model family: config fields, tensor names, and what is refused or ignored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.export.model_folder import CheckpointError
from models.network.config import EncoderConfig


@dataclass(frozen=True)
class Part:
    """The part `index` of `count` equal parts of a checkpoint tensor, along the first axis."""

    name: str
    index: int
    count: int


# Checkpoint tensors to concatenate along the first axis.
Names = tuple[str | Part, ...]
Tensors = Mapping[str, Names]
# Checkpoint modules, as in `Names`; a single one needs no tuple.
Modules = Mapping[str, Names | str]
Settings = Mapping[str, Any]
# Value of a parameter, from the concatenated checkpoint tensors.
Value = Callable[[Tensor, EncoderConfig], Tensor]


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Head of a family's models for sequence classification, after pooling.

    Attributes:
        dense: Name of the checkpoint's module before the logits.
        dense_bias: Whether that module has a bias.
        activation: Its activation, in `models.network.sentence_encoder.HEAD_ACTIVATIONS`.
        norm: Name of the norm after the activation; "": none.
        out: Name of the module that computes the logits.
        pooling_field: Field of config.json with the pooling, "cls" or "mean"; "": always "cls".
        required: Fields of config.json for which only this one value is supported.
    """

    dense: str
    dense_bias: bool = True
    activation: str = "Tanh"
    norm: str = ""
    out: str = "classifier"
    pooling_field: str = ""
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
        config: Name in config.json of each field of `EncoderConfig`, or several names, of which
            the first one with a value counts.
        defaults: Default values of optional fields of config.json, by their first name.
        constants: Values of `EncoderConfig` fields that transformers hard-codes.
        derived: Returns the `EncoderConfig` fields that depend on several fields of config.json.
        required: Fields of config.json for which only this one value is supported.
        layouts: Names of the checkpoint tensors for each key of the encoder's state dict; `{i}`
            stands for the index of a layer. Several: a checkpoint has those of one layout.
        values: For keys of the encoder's state dict, as regular expressions, the functions that
            return their values; other values are those of the checkpoint.
        prefixes: Prefixes that all tensor names may have, in checkpoints with a task head.
        ignored: Regular expressions for the names of tensors that a sentence encoder does not use.
        fixed: Values of tensors that a checkpoint may have and the encoder computes, by name.
        ignored_heads: More of them for each entry of `architectures` in config.json.
        classifier: Head of models for sequence classification; None: not supported.
        masked_lm: Head of masked language models; None: not supported.
        code: Names with which classes in `auto_map` of config.json begin, if the family is what
            they compute. Code in a model folder is never run.
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
    masked_lm: MaskedLM | None = None
    code: tuple[str, ...] = ()


def read_number(config: Settings, name: str, default: float) -> float:
    """Return a positive number of config.json; the default if it is absent or null.

    Raises:
        CheckpointError: The field is not a positive number.
    """
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**63:
        raise CheckpointError(f"config.json: {name} has the invalid value {value!r}")
    return value


def read_count(config: Settings, name: str, default: int) -> int:
    """Return a positive integer of config.json; the default if it is absent or null.

    Raises:
        CheckpointError: The field is not a positive integer.
    """
    number = read_number(config, name, default)
    if not isinstance(number, int):
        raise CheckpointError(f"config.json: {name} has the invalid value {number!r}")
    return number


def read_flag(config: Settings, name: str) -> bool:
    """Return a field of config.json that is true or false; False if it is absent or null.

    Raises:
        CheckpointError: The field is neither true nor false.
    """
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"config.json: {name} has the invalid value {value!r}")
    return bool(value)


def read_biases(config: Settings, fields: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the parts of a layer that have a bias.

    Args:
        config: Content of config.json.
        fields: Fields of config.json, and the parts in `models.network.layer.BIASES` that each
            gives a bias.

    Raises:
        CheckpointError: A field is neither true nor false.
    """
    with_bias = (parts for name, parts in fields.items() if read_flag(config, name))
    return frozenset(part for parts in with_bias for part in parts)


def tensors(*, weights: Mapping[str, str], modules: Modules) -> Tensors:
    """Return a layout of tensor names.

    Args:
        weights: Name of the checkpoint tensor for each key of the encoder's state dict.
        modules: Names of the checkpoint's modules for each module of the encoder, for its weight
            and, if it has one, its bias. "layers.{i}.self_attn.in_proj" has the modules of query,
            key and value, or one module with all three.
    """
    layout: dict[str, Names] = {key: (name,) for key, name in weights.items()}
    for module, sources in modules.items():
        names = (sources,) if isinstance(sources, str) else sources
        separator = "_" if module.endswith("in_proj") else "."  # torch's in_proj is no module
        for kind in ("weight", "bias"):
            layout[f"{module}{separator}{kind}"] = tuple(
                Part(f"{name.name}.{kind}", name.index, name.count)
                if isinstance(name, Part)
                else f"{name}.{kind}"
                for name in names
            )
    return layout
