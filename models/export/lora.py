"""LoRA adapters in PEFT's format, read as updates of the weights of a base model."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models.export.model_folder import CheckpointError, ModelFolder, join

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # before the names of the base model's modules
# Patterns whose search can take time exponential in the length of a name, or a high power of it:
# repeated groups, and more than three repetitions.
_SLOW_PATTERN = re.compile(r"\)[*+{]|([*+{].*){4}", re.DOTALL)
# Fields that may have any value: they are read here, or do not affect the updates.
_SUPPORTED = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
    *("revision", "runtime_config", "target_modules", "task_type", "use_rslora"),
}


def base_model(folder: ModelFolder, subfolder: str) -> tuple[str, str | None]:
    """Return the name and the revision of the base model in an adapter's config.

    Raises:
        CheckpointError: The config is missing or invalid, or has no base model.
    """
    name = join(subfolder, CONFIG)
    config = folder.json(name, dict)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise CheckpointError(
            f"{name}: base_model_name_or_path must be a non-empty string, and revision a string"
        )
    return base, revision


def read_updates(folder: ModelFolder, subfolder: str) -> dict[str, Tensor]:
    """Return the update, in float32, of each weight that an adapter changes, by weight name.

    The update is `scale * B @ A`. Source: Hu et al. 2021, arXiv:2106.09685.

    Args:
        folder: Model folder.
        subfolder: Subfolder with the adapter's config and weights.

    Raises:
        CheckpointError: The adapter is invalid or not a supported kind of LoRA; the message names
            the field or the tensor.
    """
    name = join(subfolder, CONFIG)
    config = folder.json(name, dict)
    _check(config, name)
    tensors = folder.tensors(subfolder, _WEIGHTS)
    updates: dict[str, Tensor] = {}
    for name_a in sorted(tensors):
        module, separator, rest = name_a.partition(".lora_A.weight")
        name_b = f"{module}.lora_B.weight"
        is_table = not separator
        if is_table:  # an embedding's update is stored transposed
            module, separator, rest = name_a.partition(".lora_embedding_A")
            name_b = f"{module}.lora_embedding_B"
        if not separator or rest:
            continue
        module = module.removeprefix(_PREFIX)
        pair = tensors.pop(name_a), tensors.pop(name_b, torch.empty(0))
        if not all(matrix.is_floating_point() for matrix in pair):
            raise CheckpointError(
                f"{join(subfolder, _WEIGHTS)}: {name_a} and {name_b} have the dtypes "
                f"{pair[0].dtype} and {pair[1].dtype}; floating-point dtypes are required"
            )
        a, b = (matrix.float() for matrix in pair)
        rank = _of_module(config, "rank_pattern", "r", module, name)
        if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank:
            raise CheckpointError(
                f"{join(subfolder, _WEIGHTS)}: {name_a} and {name_b} have shapes {tuple(a.shape)} "
                f"and {tuple(b.shape)}; {name} requires rank {rank:g}"
            )
        if not _is_target(config, module, is_table, name):
            raise CheckpointError(
                f"{join(subfolder, _WEIGHTS)}: PEFT ignores {name_a}, because target_modules, "
                f"exclude_modules or layers_to_transform in {name} leave out {module}; remove the "
                "tensor, or correct the field"
            )
        alpha = _of_module(config, "alpha_pattern", "lora_alpha", module, name)
        update = (b @ a) * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
        updates[f"{module}.weight"] = update.T if is_table else update
    if tensors or not updates:
        names = ", ".join(sorted(tensors)[:5]) or "no tensors"
        raise CheckpointError(
            f"{join(subfolder, _WEIGHTS)} has {names}; only LoRA's matrices A and B are supported"
        )
    return updates


def _check(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if a field selects an unsupported kind of adapter."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{name}: peft_type is {kind!r}; only 'LORA' is supported. Merge other adapters into "
            "the weights with peft's merge_and_unload, and save the model again"
        )
    # With other values of init_lora_weights, PEFT changes the base weights on loading the adapter.
    allowed = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
    for field, value in config.items():
        if field not in _SUPPORTED and value and value not in allowed.get(field, ()):
            raise CheckpointError(f"{name}: {field} is {value!r}, which is not supported")


def _of_module(
    config: Mapping[str, Any], patterns: str, default: str, module: str, name: str
) -> float:
    """Return the rank or alpha of a module, as PEFT selects it.

    Args:
        config: Content of adapter_config.json.
        patterns: Field with values by pattern. The first pattern that matches the end of the module
            name is used.
        default: Field with the value of modules that no pattern matches.
        module: Name of the module.
        name: Path of adapter_config.json, for error messages.
    """
    by_pattern = config.get(patterns) or {}
    with _reading_patterns(config, patterns, name):
        value = next(
            (v for key, v in by_pattern.items() if _match(rf"(.*\.)?({key})$", module, key)),
            config.get(default),
        )
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
        raise CheckpointError(f"{name}: {default} has the invalid value {value!r} for {module}")
    return value


def _is_target(config: Mapping[str, Any], module: str, is_table: bool, name: str) -> bool:
    """Return whether PEFT adds an adapter's update to a module.

    Args:
        config: Content of adapter_config.json.
        module: Name of the module.
        is_table: Whether the module is an embedding.
        name: Path of adapter_config.json, for error messages.
    """
    with _reading_patterns(config, "exclude_modules", name):
        excluded = config.get("exclude_modules")
        if excluded and _selects(excluded, module):
            return False
    with _reading_patterns(config, "target_modules", name):
        targets = config.get("target_modules")
        if isinstance(targets, str) and targets.lower() == "all-linear":
            return not is_table
        if not _selects(targets, module):
            return False
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    with _reading_patterns(config, "layers_pattern", name):
        own = config.get("layers_pattern") or [r"[^.]*"]
        starts = [own] if isinstance(own, str) else own
        start = r"(?:^|.*?\.)" if config.get("layers_pattern") else r".*?\."
        indices = (_match(rf"{start}{key}\.(?P<i>\d+)\.", module, key) for key in starts)
        index = next((int(match["i"]) for match in indices if match), None)
    return index in (layers if isinstance(layers, list) else [layers])


def _selects(value: Any, module: str) -> bool:  # noqa: ANN401
    """Return whether a pattern, or one of several ends of names, matches a module's name."""
    if isinstance(value, str):
        return _match(rf"(?:{value})\Z", module, value) is not None
    return any(f".{module}".endswith("." + end) for end in value)


def _match(pattern: str, module: str, key: str) -> re.Match[str] | None:
    """Return the match of a pattern, with the part `key` of the config, at a name's start."""
    if _SLOW_PATTERN.search(key):
        raise CheckpointError(f"the pattern {key!r}, which is too slow")
    return re.match(pattern, module)


@contextmanager
def _reading_patterns(config: Mapping[str, Any], field: str, name: str) -> Iterator[None]:
    """Add the field to errors of patterns, and translate errors of its value."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {field} has {error}") from None
    except (AttributeError, TypeError, re.error):
        value = config.get(field)
        raise CheckpointError(f"{name}: {field} has the invalid value {value!r}") from None
