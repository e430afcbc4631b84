"""Strict loading of a model folder: Hugging Face and sentence-transformers files to our modules.

Nothing is guessed. A file, field, tensor or module that is not understood is refused by name.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.encoder import ACTIVATIONS, Encoder, EncoderConfig
from models.families import FAMILIES, Family
from models.pooling import POOLINGS
from models.sentence_encoder import HEAD_ACTIVATIONS, DenseHead, SentenceEncoder


class CheckpointError(Exception):
    """A model folder that cannot be loaded, and what would help."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a model folder says about its use, beyond the weights.

    Attributes:
        family: `model_type` of its config.json.
        max_tokens: Longer rows are cut.
        pooling: Names in `models.pooling.POOLINGS`, side by side.
        include_prompt: Whether pooling counts the tokens of a prompt.
        normalize: Whether its vectors have unit length.
        lowercase: Whether text is lowercased before tokenising.
        prompts: Name -> text put before the input.
        default_prompt: Name of the prompt used where none is asked for.
    """

    family: str
    max_tokens: int
    pooling: tuple[str, ...]
    include_prompt: bool
    normalize: bool
    lowercase: bool
    prompts: Mapping[str, str]
    default_prompt: str | None


@dataclass(frozen=True)
class _Modules:
    """What modules.json lists: the pooling, the dense folders, and whether Normalize ends it."""

    pooling: tuple[str, ...]
    include_prompt: bool
    heads: tuple[Path, ...]
    normalize: bool


# sentence-transformers' names, old boolean fields and new mode names alike.
_POOLING_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
    "cls": "cls",
    "max": "max",
    "mean": "mean",
}


def load(
    folder: Path,
    *,
    pooling: Sequence[str] | None = None,
    normalize: bool | None = None,
    max_tokens: int | None = None,
) -> tuple[SentenceEncoder, Recipe]:
    """Return the folder's sentence encoder, in evaluation mode, and its recipe.

    Args:
        folder: A model folder with config.json and safetensors weights.
        pooling: Takes the place of the folder's own.
        normalize: Likewise.
        max_tokens: Likewise; at most what the position table holds.

    Raises:
        CheckpointError: Something is missing or not understood; the message names it.
    """
    config = _json(folder / "config.json")
    family_name = str(config.get("model_type"))
    if family_name not in FAMILIES:
        raise CheckpointError(
            f"model_type {family_name!r} is not supported; these are: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[family_name]
    encoder_config = _encoder_config(family, config)
    modules = _read_modules(folder, pooling)
    for name in modules.pooling:
        if name not in POOLINGS:
            raise CheckpointError(f"the pooling {name!r} is not one of {', '.join(POOLINGS)}")

    encoder = Encoder(encoder_config)
    _fill(
        encoder,
        _plain_names(family, dict(_read_tensors(folder))),
        "the checkpoint",
        names=partial(_family_names, family),
        ignored=family.ignored,
    )
    heads = [_dense(head) for head in modules.heads]
    try:
        model = SentenceEncoder(encoder, modules.pooling, heads).eval().requires_grad_(False)
    except ValueError as error:
        raise CheckpointError(str(error)) from error

    settings = _json(folder / "sentence_bert_config.json", default={})
    prompts = _json(folder / "config_sentence_transformers.json", default={})
    recipe = Recipe(
        family=family_name,
        max_tokens=_max_tokens(folder, encoder_config, settings, max_tokens),
        pooling=modules.pooling,
        include_prompt=modules.include_prompt,
        normalize=modules.normalize if normalize is None else normalize,
        lowercase=bool(settings.get("do_lower_case", False)),
        prompts=dict(prompts.get("prompts") or {}),
        default_prompt=prompts.get("default_prompt_name"),
    )
    if recipe.default_prompt is not None and recipe.default_prompt not in recipe.prompts:
        raise CheckpointError(f"default_prompt_name {recipe.default_prompt!r} is not among prompts")
    return model, recipe


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the encoder, one or a set of shards.

    Raises:
        CheckpointError: There is none.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in sorted(set(_json(index)["weight_map"].values()))]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder.name} has {', '.join(pickles)} only, a pickle, which can run code when read. "
            "Save it again with safetensors: model.save_pretrained(folder)"
        )
    raise CheckpointError(f"{folder.name} has no model.safetensors")


def _encoder_config(family: Family, config: Mapping[str, Any]) -> EncoderConfig:
    for name, value in family.required.items():
        if name in config and config[name] != value and (config[name] or value):
            raise CheckpointError(f"config.json: {name} is {config[name]!r}, not {value!r}")
    known = {**family.defaults, **config}
    missing = sorted(theirs for theirs in family.config.values() if theirs not in known)
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    fields = {ours: known[theirs] for ours, theirs in family.config.items()}
    fields.update(family.constants)
    if fields["activation"] not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: activation {fields['activation']!r} is not one of "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return EncoderConfig(**fields)


def _read_modules(folder: Path, override: Sequence[str] | None) -> _Modules:
    """Read modules.json; without one, sentence-transformers' own default: mean, not normalised."""
    if not (folder / "modules.json").is_file():
        poolings = tuple(override or ["mean"])
        return _Modules(poolings, include_prompt=True, heads=(), normalize=False)
    listed = sorted(_json(folder / "modules.json"), key=lambda module: int(module["idx"]))
    kinds = [_module_kind(str(module["type"])) for module in listed]
    paths = [folder / module["path"] for module in listed]
    normalize = kinds[-1:] == ["Normalize"]
    heads = paths[2 : len(paths) - normalize]
    expected = ["Transformer", "Pooling", *["Dense"] * len(heads), *["Normalize"] * normalize]
    if kinds != expected:
        raise CheckpointError(
            f"modules.json lists {' -> '.join(kinds)}; understood is "
            "Transformer -> Pooling -> Dense (any number) -> Normalize (or not)"
        )
    if paths[0].resolve() != folder.resolve():
        raise CheckpointError(
            f"modules.json: the Transformer lies in {listed[0]['path']!r}, not ''"
        )
    config = _json(paths[1] / "config.json")
    poolings = tuple(override or _pooling_modes(config))
    return _Modules(poolings, bool(config.get("include_prompt", True)), tuple(heads), normalize)


def _module_kind(class_path: str) -> str:
    package, _, kind = class_path.rpartition(".")
    if not package.startswith("sentence_transformers"):
        raise CheckpointError(
            f"modules.json names {class_path}, code from outside sentence-transformers; "
            "such code is never run"
        )
    return kind


def _pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    if "pooling_mode" in config:
        given = config["pooling_mode"]
        modes = [given] if isinstance(given, str) else list(given)
    else:
        modes = [key for key in config if key.startswith("pooling_mode_") and config[key]]
        modes = sorted(modes, key=lambda key: [*_POOLING_NAMES, key].index(key)) or ["mean"]
    return tuple(_POOLING_NAMES.get(mode, mode) for mode in modes)


def _dense(folder: Path) -> DenseHead:
    config = _json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or name not in HEAD_ACTIVATIONS:
        raise CheckpointError(
            f"{folder.name}: activation {activation!r} is not one of {', '.join(HEAD_ACTIVATIONS)}"
        )
    unusual = {
        "use_residual": False,
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    }
    for key, value in unusual.items():
        if config.get(key, value) not in (value, None):
            raise CheckpointError(f"{folder.name}: {key} is {config[key]!r}, not {value!r}")
    head = DenseHead(
        int(config["in_features"]), int(config["out_features"]), bool(config["bias"]), name
    )
    _fill(head, dict(_read_tensors(folder)), folder.name)
    return head


def _max_tokens(
    folder: Path, config: EncoderConfig, settings: Mapping[str, Any], asked: int | None
) -> int:
    """The asked-for or the folder's own limit, at most what the position table holds."""
    if asked is not None:
        if not 3 <= asked <= config.max_tokens:
            raise CheckpointError(
                f"max tokens {asked} is not between 3 and {config.max_tokens}, "
                "which is what the position table holds"
            )
        return asked
    tokenizer = _json(folder / "tokenizer_config.json", default={})
    own = settings.get("max_seq_length") or tokenizer.get("model_max_length") or config.max_tokens
    return min(int(own), config.max_tokens)


def _fill(
    module: torch.nn.Module,
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
        plain[bare] = tensor
    return plain


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is not a dict
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _json(path: Path, default: Any = None) -> Any:  # noqa: ANN401 - JSON is any value
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if default is None:
            raise CheckpointError(f"{path.parent.name} has no {path.name}") from None
        return default
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error
