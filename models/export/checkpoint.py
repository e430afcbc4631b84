"""The model of a checkpoint: its configs, and the network with its weights."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from models.add_layer_norm import LayerNorm
from models.export import classifier, gliner, hybrid, logit_score, lora, masked_lm, multi_vector
from models.export.families import (
    FAMILIES,
    FAMILIES_OF_CODE,
    MAX_HEADS,
    MAX_SIZE,
    Classifier,
    Family,
    TensorPart,
    Tensors,
)
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    BASE,
    WEIGHTS,
    CheckpointError,
    ModelFolder,
    check_required,
    classes_of,
    join,
)
from models.export.modules import (
    DenseConfig,
    HeadConfig,
    LayerNormConfig,
    NormalizeConfig,
    TruncateConfig,
    read_modules,
)
from models.export.pair_template import check_without_template
from models.export.sentence_config import Overrides, SentenceConfig, read_sentence_config
from models.export.sources import SourceError, resolve
from models.export.tasks import read_length
from models.export.weights import fill
from models.manifest import Output
from models.network.config import EncoderConfig
from models.network.encoder import Encoder
from models.network.heads import DenseHead, Head, NormalizeHead, NormHead, TruncateHead
from models.network.layer import ACTIVATIONS
from models.network.sentence_encoder import SentenceEncoder

NO_OVERRIDES = Overrides()
_TYPES = get_type_hints(EncoderConfig)
# Prefixes that DataParallel and sentence-transformers add to all tensor names.
_WRAPPERS = ("module.", "0.auto_model.", "0_auto_model.", "auto_model.")
# Patterns, for all families, of tensors of task heads that a sentence encoder does not use.
_UNUSED_HEADS = (r"qa_outputs\..*",)
_CAN_BE_ZERO = ("type_vocab_size", "position_padding_id", "dropout", "norm_eps")
# Largest values of fields that are not `MAX_SIZE`: far above those of published models. Layers and
# positions can cost time and memory without tensors in the checkpoint.
_LARGEST = {
    "d_model": 2**20,
    "dropout": 1,
    "max_positions": 2**20,
    "norm_eps": 1,
    "num_heads": MAX_HEADS,
    "num_layers": 512,
}


def load(
    folder: ModelFolder | Path,
    overrides: Overrides = NO_OVERRIDES,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[SentenceEncoder, SentenceConfig]:
    """Return the model of a folder, in evaluation mode, and its sentence-transformers config.

    Args:
        folder: Model folder with config.json and safetensors weights.
        overrides: Replacements for settings in the folder.
        report: Called with a message that lists ignored tensors, if there are any.

    Raises:
        CheckpointError: A file, setting or tensor is missing, invalid or unsupported; the message
            names it.
    """
    folder = folder if isinstance(folder, ModelFolder) else ModelFolder(folder)
    files, config, sentence_config = read_configs(folder, overrides)
    # Sizes that the config claims are compared with the weights before memory is allocated.
    with folder.outline(), torch.device("meta"):
        is_named = folder.has("modules.json") or overrides.pooling is not None
        if sentence_config.outputs[0] == "pooled" and not is_named:
            network = _network_folder(folder, files.transformer)
            logit_score.check_purpose(files.config, folder.tensors(network))
            if not files.family.poolings or "pooling" not in files.config:
                check_without_template(folder, files.transformer)
        _build(files, config, sentence_config, lambda _: None)
    model = _build(files, config, sentence_config, report)
    return model.eval().requires_grad_(False), sentence_config


def _build(
    files: ModelFiles,
    config: EncoderConfig,
    sentence_config: SentenceConfig,
    report: Callable[[str], None],
) -> SentenceEncoder:
    """Return the model with its weights; see `load`."""
    folder, family, transformer = files.folder, files.family, files.transformer
    network = _network_folder(folder, transformer)
    head_tensors: dict[str, Tensor] = {}
    if sentence_config.spans:
        tensors, head_tensors = gliner.split_tensors(folder)
    else:
        tensors = folder.tensors(network)
    tensors = _plain_names(family, tensors)
    if folder.has(join(transformer, lora.CONFIG)):
        _add_updates(tensors, _plain_names(family, lora.read_updates(folder, transformer)))
    reads_pairs = sentence_config.outputs == ("logits",)
    sparse = spans = None
    try:
        encoder = Encoder(config)
        layout = _layout(family, encoder, tensors)
        if sentence_config.sparse:
            sparse = masked_lm.take_head(family, config, sentence_config.sparse, layout, tensors)
        if sentence_config.spans:
            spans = gliner.make_head(sentence_config.spans, config.d_model, head_tensors)
        model = SentenceEncoder(
            encoder,
            sentence_config.pooling,
            _heads(files, config, sentence_config, tensors),
            outputs=sentence_config.outputs,
            token_heads=_token_heads(files, config, sentence_config, tensors),
            sparse=sparse,
            spans=spans,
            pools_logits=sentence_config.pools_logits,
            skipped_id=sentence_config.skipped_id,
            has_token_types=reads_pairs and sentence_config.token_types > 1,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for name, value in family.fixed.items():
        _check_fixed(name, tensors.get(name), value(config))
    unused = fill(
        encoder,
        tensors,
        source=_origin(folder.json(join(network, "config.json"), dict, {})),
        names=partial(_family_names, layout),
        value=partial(_family_value, family, config),
        widths=config.heads.widths,
        ignored=(*family.ignored, *map(re.escape, family.fixed), *_UNUSED_HEADS),
    )
    if unused:
        report(f"Ignored tensors that do not affect vectors: {', '.join(unused)}")
    if sentence_config.outputs[0] == "pooled":
        for message in _left_out(files, unused):
            report(message)
    return model


def _origin(hyperparameters: Mapping[str, Any]) -> str:
    """Return how errors name a checkpoint with this config.json; {}: there is no config.json."""
    if not hyperparameters or classes_of(hyperparameters):
        return "the checkpoint"
    return "the checkpoint, whose config.json names no class in architectures,"


def _check_fixed(name: str, actual: Tensor | None, expected: Tensor) -> None:
    """Raise CheckpointError if a tensor differs from `expected` by more than float16 rounding."""
    if actual is None:
        return
    is_same = actual.shape == expected.shape
    if is_same and not actual.is_meta:
        is_same = torch.allclose(actual.float(), expected, atol=1e-3)
    if not is_same:
        raise CheckpointError(
            f"the checkpoint: {name} must equal the tensor of shape {tuple(expected.shape)} that "
            "the network computes instead of loading it; other values, such as those rounded to "
            "bfloat16, are not supported"
        )


def _left_out(files: ModelFiles, unused: Sequence[str]) -> Iterator[str]:
    """Yield a message for each head that an embedding model's export leaves out."""
    kind, head = masked_lm.masked_lm_class(files.config), files.family.masked_lm
    if kind and head and f"{head.dense}.weight" in unused:
        yield (
            f"config.json names {kind}: this exports embeddings, without the head for masked "
            "tokens; --sparse exports sparse vectors with it, as in SPLADE"
        )
    if hybrid.CHECKPOINT_WEIGHT in unused:
        yield (
            "The head for the weights of tokens is left out; --sparse exports sparse vectors with "
            "it, besides embeddings"
        )
    if pickles := hybrid.left_out(files.folder):
        yield pickles


def _heads(
    files: ModelFiles,
    config: EncoderConfig,
    sentence_config: SentenceConfig,
    tensors: dict[str, Tensor],
) -> list[Head]:
    """Return the modules after pooling, with their weights.

    The tensors of modules that are part of the checkpoint are removed from `tensors`.
    """
    family = files.family
    if sentence_config.answers:
        return [logit_score.take_head(family, sentence_config.answers, tensors)]
    if sentence_config.outputs[0] == "logits" and not sentence_config.heads and family.classifier:
        labels = len(sentence_config.labels)
        return classifier.take_heads(family.classifier, config, labels, tensors)
    heads = _filled_heads(files.folder, sentence_config.heads)
    if sentence_config.projection is None:
        return heads
    # It has no bias, so that it can follow pooling: there is one vector per row instead of many.
    own = Classifier(out=family.projection, out_bias=False)
    return [*classifier.take_heads(own, config, sentence_config.projection, tensors), *heads]


def _token_heads(
    files: ModelFiles,
    config: EncoderConfig,
    sentence_config: SentenceConfig,
    tensors: dict[str, Tensor],
) -> dict[Output, list[Head]]:
    """Return the modules after token vectors, by output; otherwise like `_heads`."""
    labels, multi = len(sentence_config.labels), sentence_config.multi
    if sentence_config.outputs[0] == "tags" and (own := files.family.token_classifier):
        return {"tags": classifier.take_heads(own, config, labels, tensors)}
    if multi and multi.layers is None:
        return {"multi": [multi_vector.take_projection(tensors)]}
    if multi:
        return {"multi": _filled_heads(files.folder, multi.layers or ())}
    return hybrid.take_heads(files.folder, sentence_config.outputs, tensors)


def _filled_heads(folder: ModelFolder, configs: Sequence[HeadConfig]) -> list[Head]:
    heads = list(map(_head, configs))
    for config, head in zip(configs, heads, strict=True):
        if isinstance(config, DenseConfig | LayerNormConfig):
            fill(head, folder.tensors(config.folder), source=config.folder)
    return heads


def _head(config: HeadConfig) -> Head:
    match config:
        case DenseConfig():
            sizes = config.in_features, config.out_features
            return DenseHead(*sizes, config.bias, config.activation, residual=config.residual)
        case LayerNormConfig():
            return NormHead(LayerNorm(config.width), config.width)
        case NormalizeConfig():
            return NormalizeHead()
        case TruncateConfig():
            return TruncateHead(config.width)


def read_configs(
    folder: ModelFolder, overrides: Overrides
) -> tuple[ModelFiles, EncoderConfig, SentenceConfig]:
    """Return the files, the encoder's config and the sentence-transformers config of a folder.

    Raises:
        CheckpointError: A file or setting is missing, invalid or unsupported.
    """
    modules = read_modules(folder)
    transformer = modules[0][1] if modules else ""
    name = join(_network_folder(folder, transformer), "config.json")
    if gliner.is_gliner(folder):
        name, values = gliner.CONFIG, gliner.read_encoder_config(folder)
        family, model_type, config = _read_config(values, name)
        config = gliner.without_limit(config)
    else:
        values = folder.json(name, dict)
        length = read_length(folder, transformer)
        family, model_type, config = _read_config(values, name, length)
    files = ModelFiles(
        folder=folder,
        modules=modules,
        config_name=name,
        config=values,
        model_type=model_type,
        family=family,
    )
    return files, config, read_sentence_config(files, config, overrides)


def _network_folder(folder: ModelFolder, transformer: str) -> str:
    """Return the subfolder of the network's config and weights.

    If the folder has an adapter but no weights of its own, locate the base model that the adapter's
    config names, and return `BASE`.
    """
    adapter = join(transformer, lora.CONFIG)
    own = (join(transformer, name) for name in (WEIGHTS, f"{WEIGHTS}.index.json"))
    if not folder.has(adapter) or any(map(folder.has, own)):
        return transformer
    if folder.base is None:
        base, revision = lora.base_model(folder, transformer)
        try:
            is_on_hub = "/" in base and not Path(base).is_dir()
            folder.base = resolve(base, revision if is_on_hub else None, is_base=True).folder
        except SourceError as error:
            raise CheckpointError(
                f"the base model in {adapter} is not available: {error}"
            ) from error
    return BASE


def _add_updates(tensors: dict[str, Tensor], updates: Mapping[str, Tensor]) -> None:
    """Add an adapter's updates to the weights with the same names, in place."""
    for name, update in updates.items():
        if name not in tensors:
            raise CheckpointError(f"the adapter updates {name}, which the base model does not have")
        if tensors[name].shape != update.shape:
            raise CheckpointError(
                f"the adapter's update of {name} has shape {tuple(update.shape)}; the base model's "
                f"weight has shape {tuple(tensors[name].shape)}"
            )
        tensors[name] = tensors[name].float() + update


def _read_config(
    config: dict[str, Any], name: str, length: int = 0
) -> tuple[Family, str, EncoderConfig]:
    """Return the family, `model_type` and encoder config of the content of config.json.

    Args:
        config: Content of the file.
        name: Name of the file, for error messages.
        length: Maximum length of a row that other files declare, in tokens; 0: none.
    """
    model_type = str(config.get("model_type"))
    family = _family(model_type, _network_classes(config))
    if config.get("model_type") is None:  # as in the original files of Jina v3
        model_type = next((n for n, known in FAMILIES.items() if known is family), model_type)
    _check_supported(config, family, name)
    for head in classes_of(config):
        own = family.ignored_heads.get(head, ())
        family = replace(family, ignored=(*family.ignored, *own))

    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    for field, names in family.config.items():
        names = (names,) if isinstance(names, str) else names
        # The first name with a non-null value, else the first that is present, else the first.
        keys[field] = max(names, key=lambda name: (config.get(name) is not None, name in config))
        values[field] = config.get(keys[field], family.defaults.get(names[0]))
    missing = sorted(keys[field] for field, value in values.items() if value is None)
    if missing:
        raise CheckpointError(f"{name} lacks {', '.join(missing)}")
    for field, value in values.items():
        kind = int | float if _TYPES[field] is float else _TYPES[field]
        is_valid = isinstance(value, kind) and not isinstance(value, bool)
        if is_valid and kind is not str:
            smallest = 0 if field in _CAN_BE_ZERO else 1
            is_valid = smallest <= value <= _LARGEST.get(field, MAX_SIZE)
        if not is_valid:
            raise CheckpointError(f"{name}: {keys[field]} has the invalid value {value!r}")
    changes = {**family.constants, **family.derived({**family.defaults, **config})}
    changes |= _positions(family, values, changes, length)
    activation = {**values, **changes}["activation"]
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {activation!r} is not one of {', '.join(sorted(ACTIVATIONS))}"
        )
    if "head_width" not in changes and values["d_model"] % values["num_heads"]:
        raise CheckpointError(
            f"{name}: {keys['d_model']} {values['d_model']} is not divisible by "
            f"{keys['num_heads']} {values['num_heads']}"
        )
    return family, model_type, EncoderConfig(**{**values, **changes})


def _positions(
    family: Family, values: Mapping[str, Any], changes: Mapping[str, Any], length: int
) -> dict[str, Any]:
    """Return the field `max_positions` if rows may be longer than config.json says.

    As in sentence-transformers, they may in a model without a table of positions, up to the number
    that the family derives, beyond which the network cannot compute it. T5's config.json has none.
    """
    if changes.get("position_embeddings", True) or family.fixed or "max_positions" not in values:
        return {}
    longest = max(values["max_positions"], min(length, _LARGEST["max_positions"]))
    return {"max_positions": min(longest, changes.get("max_positions", longest))}


def _family(model_type: str, classes: Sequence[str]) -> Family:
    """Return the family of the classes in `auto_map` or, if they have none, of the `model_type`."""
    names = [*classes, *(path.rpartition(".")[2] for path in classes)]
    for start, family in FAMILIES_OF_CODE.items():
        if any(name.startswith(start) for name in names):
            return family
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _check_supported(config: dict[str, Any], family: Family, name: str) -> None:
    """Raise CheckpointError if config.json selects a variant that the family does not support."""
    check_required(config, family.required, name)
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{name} has a quantization_config; export the model from its unquantized weights"
        )
    for path in _network_classes(config):
        if not path.rpartition(".")[2].startswith(family.code):
            raise CheckpointError(
                f"{name}: auto_map names {path}, but code of models is never run, and the model "
                f"can differ from the built-in {config.get('model_type')!r} model"
            )


def _network_classes(config: dict[str, Any]) -> list[str]:
    """Return the paths in `auto_map` of the classes of the network and its config."""
    code = config.get("auto_map") or {}
    classes = code if isinstance(code, dict) else {"AutoModel": code}
    return [
        str(path)
        for name, path in classes.items()
        if name == "AutoConfig" or name.startswith("AutoModel")
    ]


def _family_names(layout: Tensors, key: str) -> tuple[TensorPart, ...]:
    """Return the checkpoint tensors for a key of the encoder's state dict.

    For example, `layers.3.linear1.bias` is `encoder.layer.3.intermediate.dense.bias` in BERT.
    """
    layer = key.split(".")[1]
    return tuple(replace(n, name=n.name.format(i=layer)) for n in layout[_template(key)])


def _template(key: str) -> str:
    """Return a key of the encoder's state dict with its layer index replaced by `{i}`."""
    return re.sub(r"^layers\.\d+", "layers.{i}", key)


def _family_value(family: Family, config: EncoderConfig, key: str, tensor: Tensor) -> Tensor:
    """Return the value of a key of the encoder's state dict, from its checkpoint tensors."""
    for pattern, value in family.values.items():
        if re.fullmatch(pattern, key):
            return value(tensor, config)
    return tensor


def _layout(family: Family, encoder: Encoder, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the layout with the most tensors in the checkpoint.

    Only layouts that cover all keys of the encoder's state dict are considered.
    """
    keys = encoder.state_dict().keys()

    def count_tensors(layout: Tensors) -> int:
        return sum(n.name in tensors for key in keys for n in _family_names(layout, key))

    complete = (
        layout for layout in family.layouts if {_template(key) for key in keys} <= layout.keys()
    )
    return max(complete, key=count_tensors)


def _plain_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with standard names.

    Prefixes of wrappers and task models, such as `bert.`, are removed. `LayerNorm.gamma` and
    `LayerNorm.beta`, TensorFlow's names, become `LayerNorm.weight` and `LayerNorm.bias`.
    """
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    prefix = next((p for p in family.prefixes if any(name.startswith(p) for name in tensors)), "")
    modern = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    plain: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(prefix)
        for old, new in modern.items():
            bare = bare.replace(old, new)
        if bare in plain:
            raise CheckpointError(
                f"the tensors {sources[bare]} and {name} of the checkpoint are both {bare}"
            )
        plain[bare], sources[bare] = tensor, name
    return plain
