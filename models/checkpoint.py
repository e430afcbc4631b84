"""Strict loading of weights: a family's tensors to our modules.

Nothing is guessed: a tensor that is missing, mis-shaped or not known is refused by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.encoder import ACTIVATIONS, Encoder, EncoderConfig
from models.families import FAMILIES, Family
from models.model_folder import CheckpointError, ModelFolder, join
from models.recipe import Overrides, Recipe, read_recipe, transformer_folder
from models.sentence_encoder import DenseHead, SentenceEncoder

NO_OVERRIDES = Overrides()


def load(
    folder: ModelFolder | Path, overrides: Overrides = NO_OVERRIDES
) -> tuple[SentenceEncoder, Recipe]:
    """Return the folder's sentence encoder, in evaluation mode, and its recipe.

    Args:
        folder: Holds config.json and safetensors weights.
        overrides: Take the place of what the folder says.

    Raises:
        CheckpointError: Something is missing or not understood; the message names it.
    """
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder(folder)
    transformer = transformer_folder(folder)
    family_name, config = _read_config(folder, join(transformer, "config.json"))
    family = FAMILIES[family_name]
    recipe = read_recipe(folder, family_name, config, overrides)
    try:
        encoder = Encoder(config)
        heads = [
            DenseHead(head.in_features, head.out_features, head.bias, head.activation)
            for head in recipe.heads
        ]
        model = SentenceEncoder(encoder, recipe.pooling, heads)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    _fill(
        encoder,
        _plain_names(family, folder.tensors(transformer)),
        "the checkpoint",
        names=partial(_family_names, family),
        ignored=family.ignored,
    )
    for head, module in zip(recipe.heads, heads, strict=True):
        _fill(module, folder.tensors(head.folder), head.folder)
    return model.eval().requires_grad_(False), recipe


def _read_config(folder: ModelFolder, name: str) -> tuple[str, EncoderConfig]:
    config = folder.json(name, dict)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; these are: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for key, value in family.required.items():
        # An empty object, false and null all say "no" in these fields.
        found = config.get(key, value)
        if found != value and (found or value):
            raise CheckpointError(f"{name}: {key} is {found!r}; understood is {value!r}")
    known = {**family.defaults, **config}
    missing = sorted(theirs for theirs in family.config.values() if known.get(theirs) is None)
    if missing:
        raise CheckpointError(f"{name} lacks {', '.join(missing)}")
    values: dict[str, Any] = {ours: known[theirs] for ours, theirs in family.config.items()}
    kinds = {field.name: field.type for field in fields(EncoderConfig)}
    for ours, value in values.items():
        kind: Any = int | float if kinds[ours] is float else kinds[ours]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{name}: {family.config[ours]} is {value!r}")
    if values["activation"] not in ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {values['activation']!r} is not one of "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return model_type, EncoderConfig(**{**values, **family.constants})


def _fill(
    module: nn.Module,
    tensors: dict[str, Tensor],
    where: str,
    names: Callable[[str], tuple[str, ...]] = lambda ours: (ours,),
    ignored: Sequence[str] = (),
) -> None:
    """Give the module its tensors, each checked, and see that none is left over.

    Args:
        module: Takes every tensor of its state dict.
        tensors: Theirs, by their names; emptied.
        where: Begins every error.
        names: Our name -> theirs, which are stacked.
        ignored: Patterns of theirs that may be left over.
    """
    filled: dict[str, Tensor] = {}
    for ours, wanted in module.state_dict().items():
        theirs = names(ours)
        shape = (wanted.shape[0] // len(theirs), *wanted.shape[1:])
        for name in theirs:
            if name not in tensors:
                raise CheckpointError(f"{where} lacks the tensor {name}, {shape}")
            found = tensors[name]
            if found.shape != shape or not found.is_floating_point():
                raise CheckpointError(
                    f"{where}: {name} is {tuple(found.shape)} {found.dtype}; "
                    f"its config says {shape}, floating point"
                )
        filled[ours] = torch.cat([tensors.pop(name).float() for name in theirs])
    extra = sorted(name for name in tensors if not any(re.fullmatch(p, name) for p in ignored))
    if extra:
        raise CheckpointError(
            f"{where} has {len(extra)} tensors that are not understood: {', '.join(extra[:5])}"
        )
    module.load_state_dict(filled)


def _family_names(family: Family, ours: str) -> tuple[str, ...]:
    """Return the family's names of our tensor: `layers.3.linear1.bias` -> `encoder.layer.3...`."""
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", ours)
    template, layer = (f"layers.{{i}}.{match[2]}", match[1]) if match else (ours, "")
    theirs = family.tensors[template]
    return tuple(n.format(i=layer) for n in ([theirs] if isinstance(theirs, str) else theirs))


def _plain_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip the prefix that a task head brings, and TensorFlow's names of a norm's parameters."""
    prefix = next((p for p in family.prefixes if any(name.startswith(p) for name in tensors)), "")
    modern = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(prefix)
        for old, new in modern.items():
            bare = bare.replace(old, new)
        if bare in plain:
            raise CheckpointError(f"the checkpoint has the tensor {bare} twice, as {name} too")
        plain[bare] = tensor
    return plain
