"""Strict loading of a checkpoint's weights into the network's modules.

A missing, misshaped or unexpected tensor is an error that names it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.export.families import FAMILIES, Family
from models.export.model_folder import CheckpointError, ModelFolder, join
from models.export.sentence_config import (
    Overrides,
    SentenceConfig,
    read_sentence_config,
    transformer_folder,
)
from models.network.config import EncoderConfig
from models.network.encoder import Encoder
from models.network.layer import ACTIVATIONS
from models.network.sentence_encoder import DenseHead, SentenceEncoder

NO_OVERRIDES = Overrides()


def load(
    folder: ModelFolder | Path, overrides: Overrides = NO_OVERRIDES
) -> tuple[SentenceEncoder, SentenceConfig]:
    """Return the model of a folder, in evaluation mode, and its sentence-transformers config.

    Args:
        folder: Model folder with config.json and safetensors weights.
        overrides: Replacements for settings in the folder.

    Raises:
        CheckpointError: A file, setting or tensor is missing, invalid or unsupported; the message
            names it.
    """
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder(folder)
    family, config, sentence_config = read_configs(folder, overrides)
    transformer = sentence_config.transformer
    try:
        encoder = Encoder(config)
        heads = [
            DenseHead(head.in_features, head.out_features, head.bias, head.activation)
            for head in sentence_config.heads
        ]
        model = SentenceEncoder(encoder, sentence_config.pooling, heads)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    _fill(
        encoder,
        _plain_names(family, folder.tensors(transformer)),
        "the checkpoint",
        names=partial(_family_names, family),
        ignored=family.ignored,
    )
    for head, module in zip(sentence_config.heads, heads, strict=True):
        _fill(module, folder.tensors(head.folder), head.folder)
    return model.eval().requires_grad_(False), sentence_config


def read_configs(
    folder: ModelFolder, overrides: Overrides
) -> tuple[Family, EncoderConfig, SentenceConfig]:
    """Return the family of a folder's model, and its configs.

    Raises:
        CheckpointError: A file or setting is missing, invalid or unsupported.
    """
    name = join(transformer_folder(folder), "config.json")
    family_name, config = _read_config(folder, name)
    sentence_config = read_sentence_config(folder, family_name, config, overrides)
    return FAMILIES[family_name], config, sentence_config


def _read_config(folder: ModelFolder, name: str) -> tuple[str, EncoderConfig]:
    config = folder.json(name, dict)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for key, expected in family.required.items():
        # In these fields, an empty object, false and null are equivalent.
        actual = config.get(key, expected)
        if actual != expected and (actual or expected):
            raise CheckpointError(f"{name}: {key} is {actual!r}; only {expected!r} is supported")
    settings = {**family.defaults, **config}
    missing = sorted(key for key in family.config.values() if settings.get(key) is None)
    if missing:
        raise CheckpointError(f"{name} lacks {', '.join(missing)}")
    values: dict[str, Any] = {field: settings[key] for field, key in family.config.items()}
    types = {field.name: field.type for field in fields(EncoderConfig)}
    for field, value in values.items():
        expected_type: Any = int | float if types[field] is float else types[field]
        if not isinstance(value, expected_type) or isinstance(value, bool):
            raise CheckpointError(f"{name}: {family.config[field]} has the invalid value {value!r}")
    if values["activation"] not in ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {values['activation']!r} is not one of "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return model_type, EncoderConfig(**{**values, **family.constants})


def _fill(
    module: nn.Module,
    tensors: dict[str, Tensor],
    source: str,
    names: Callable[[str], tuple[str, ...]] = lambda key: (key,),
    ignored: Sequence[str] = (),
) -> None:
    """Load checkpoint tensors into a module; a missing, misshaped or unused tensor is an error.

    Args:
        module: Module to load the tensors into.
        tensors: Tensors of the checkpoint, by name; emptied of those that are loaded.
        source: Origin of the tensors, for error messages.
        names: Returns, for a key of the module's state dict, the names of the checkpoint tensors
            that form its value, concatenated along the first axis.
        ignored: Regular expressions for the names of tensors that may remain unused.
    """
    state: dict[str, Tensor] = {}
    for key, parameter in module.state_dict().items():
        parts = names(key)
        shape = (parameter.shape[0] // len(parts), *parameter.shape[1:])
        for name in parts:
            if name not in tensors:
                raise CheckpointError(f"{source} lacks the tensor {name} of shape {shape}")
            tensor = tensors[name]
            if tensor.shape != shape or not tensor.is_floating_point():
                raise CheckpointError(
                    f"{source}: {name} is {tuple(tensor.shape)} {tensor.dtype}; "
                    f"its config requires {shape}, floating point"
                )
        state[key] = torch.cat([tensors.pop(name).float() for name in parts])
    extra = sorted(name for name in tensors if not any(re.fullmatch(p, name) for p in ignored))
    if extra:
        raise CheckpointError(
            f"{source} has unexpected tensors ({len(extra)}): {', '.join(extra[:5])}"
        )
    module.load_state_dict(state)


def _family_names(family: Family, key: str) -> tuple[str, ...]:
    """Return the names of the checkpoint tensors for a key of the encoder's state dict.

    For example, `layers.3.linear1.bias` is `encoder.layer.3.intermediate.dense.bias` in BERT.
    """
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", key)
    template, layer = (f"layers.{{i}}.{match[2]}", match[1]) if match else (key, "")
    names = family.tensors[template]
    return tuple(n.format(i=layer) for n in ([names] if isinstance(names, str) else names))


def _plain_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip the prefix of a task model, such as `bert.`, from the tensor names.

    TensorFlow's names of norm parameters, gamma and beta, become weight and bias.
    """
    prefix = next((p for p in family.prefixes if any(name.startswith(p) for name in tensors)), "")
    modern = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(prefix)
        for old, new in modern.items():
            bare = bare.replace(old, new)
        if bare in plain:
            raise CheckpointError(f"the checkpoint has the tensor {bare} twice, also as {name}")
        plain[bare] = tensor
    return plain
