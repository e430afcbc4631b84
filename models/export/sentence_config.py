"""The sentence-transformers config of a model: pooling, heads, prompts and maximum length.

Unsupported settings that would change the vectors raise an error with the name of the setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from models.artifact import Manifest
from models.export import classifier, masked_lm
from models.export.families import Family, jina_v3
from models.export.masked_lm import SparseConfig
from models.export.model_folder import CheckpointError, ModelFolder, join
from models.export.tokenizer_config import (
    gives_token_types,
    read_tokenizer_config,
    truncation_side,
)
from models.network.config import EncoderConfig
from models.network.pooling import POOLINGS
from models.network.sentence_encoder import HEAD_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Config of a dense layer after pooling.

    Attributes:
        folder: Subfolder with the config and weights of the layer.
        in_features: Input width of the layer.
        out_features: Output width of the layer.
        bias: Whether the layer has a bias.
        activation: Name in `models.network.sentence_encoder.HEAD_ACTIVATIONS`.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig:
    """Config of a layer norm after pooling.

    Attributes:
        folder: Subfolder with the config and weights of the norm.
        width: Width of the norm's input.
    """

    folder: str
    width: int


@dataclass(frozen=True)
class NormalizeConfig:
    """Normalisation to unit length after pooling, before other heads."""


@dataclass(frozen=True)
class TruncateConfig:
    """Truncation to the leading dimensions, after all other heads.

    Attributes:
        width: Number of dimensions to keep.
    """

    width: int


HeadConfig = DenseConfig | LayerNormConfig | NormalizeConfig | TruncateConfig


@dataclass(frozen=True, kw_only=True)
class SentenceConfig:
    """Settings of a sentence encoder.

    Attributes:
        family: `model_type` in config.json.
        transformer: Subfolder of the encoder's files; "" is the model folder itself.
        max_tokens: Maximum input length in tokens, special tokens included.
        pooling: Names of the poolings in `models.network.pooling.POOLINGS`. Their results are
            concatenated.
        include_prompt: Whether pooling includes prompt tokens.
        heads: Configs of the modules after pooling, in order, without a final `Normalize`.
        normalize: Whether vectors are normalised to unit length.
        matryoshka_dimensions: Widths of truncated row vectors that the model was trained for.
        truncation_side: Side on which inputs with too many tokens are truncated, "left" or "right".
        token_types: Whether the tokens of a pair's second text have type 1.
        labels: Label of each logit of a sequence classification model; empty for an embedding
            model.
        activation: Activation that turns logits into scores: "sigmoid", "softmax" or "identity".
        sparse: Pooling of the logits of a masked language model; None: no sparse vectors.
        lowercase: Whether texts are lowercased before tokenization.
        prompts: Texts that can be prepended to an input, by prompt name.
        default_prompt: Name of the default prompt; None: no prompt.
    """

    family: str
    transformer: str
    max_tokens: int
    pooling: tuple[str, ...]
    include_prompt: bool
    heads: tuple[HeadConfig, ...]
    normalize: bool
    matryoshka_dimensions: tuple[int, ...]
    truncation_side: str
    token_types: bool
    labels: tuple[str, ...]
    activation: str
    sparse: SparseConfig | None
    lowercase: bool
    prompts: Mapping[str, str]
    default_prompt: str | None


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Replacements for settings of a model; None keeps the model's setting.

    Prompts are added to the model's prompts, or replace prompts of the same name. `sparse` selects
    sparse vectors for a masked language model without a config of sentence-transformers.
    """

    sparse: bool = False
    max_tokens: int | None = None
    pooling: Sequence[str] | None = None
    include_prompt: bool | None = None
    normalize: bool | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None


def overrides_of(manifest: Manifest) -> Overrides:
    """Return the overrides for loading an artifact's source as the network of its graphs."""
    # An override of the pooling is an error for models that compute no embeddings.
    return Overrides(
        sparse="sparse" in manifest.outputs,
        pooling=manifest.pooling if "pooled" in manifest.outputs else None,
    )


# Names in `POOLINGS` of the pooling modes of sentence-transformers.
_POOLING_NAMES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Names in `POOLINGS` of the boolean fields in older sentence-transformers configs. The results of
# the enabled poolings are concatenated in this order.
_POOLING_FIELDS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}

# Possible names of the file with the settings of the Transformer module. The first existing file is
# read.
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Only supported values of settings of the Transformer module, for embedding models and for sequence
# classification models.
_OF_EMBEDDINGS: Mapping[str, Any] = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_OF_CLASSIFIERS: Mapping[str, Any] = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
_OF_SPARSE_ENCODERS: Mapping[str, Any] = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}
# Only supported values, the defaults, of other settings of the Transformer module.
_TRANSFORMER_DEFAULTS: Mapping[str, Any] = {
    "model_args": {},
    "model_kwargs": {},
    "tokenizer_args": {},
    "processor_kwargs": {},
    "processing_kwargs": {},
    "config_args": {},
    "config_kwargs": {},
    "tokenizer_name_or_path": None,
}
_TRANSFORMER_SUPPORTED = {"max_seq_length", "do_lower_case", "unpad_inputs"}
_SENTENCE_EMBEDDING = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}


# The file with the settings of the whole model.
_MODEL_CONFIG = "config_sentence_transformers.json"
# The module that pools sparse vectors.
_SPLADE = "SpladePooling"
# Type of Jina v3's custom Transformer module, which passes the task to the encoder.
_OF_JINA_V3 = "custom_st.Transformer"


def transformer_folder(folder: ModelFolder) -> str:
    """Return the subfolder with the encoder's config.json and weights.

    Raises:
        CheckpointError: modules.json is invalid or lists unsupported modules.
    """
    modules = _modules(folder)
    return modules[0][1] if modules else ""


def read_sentence_config(
    folder: ModelFolder,
    network: str,
    family: tuple[str, Family],
    config: EncoderConfig,
    overrides: Overrides,
) -> SentenceConfig:
    """Return the sentence-transformers config of a model folder, with the overrides applied.

    Args:
        folder: Model folder.
        network: Path of the network's config.json, relative to the folder.
        family: `model_type` in config.json, and the family of the model.
        config: Hyperparameters of the encoder.
        overrides: Replacements for settings in the folder.

    Raises:
        CheckpointError: A file or a setting is invalid or unsupported; the message names it.
    """
    modules = _modules(folder)
    transformer = modules[0][1] if modules else ""
    name = next((n for n in _TRANSFORMER_CONFIGS if folder.has(join(transformer, n))), "")
    settings = folder.json(join(transformer, name), dict) if name else {}
    model_type, known = family
    hyperparameters = folder.json(network, dict)
    tokenizer = read_tokenizer_config(folder, transformer)
    sparse = _sparse(folder, modules, hyperparameters, overrides)
    classifies = len(modules) < 2 and classifier.classifies(hyperparameters)
    kind, of_kind = _kind(classifies=classifies, is_sparse=sparse is not None)
    expected = {**_TRANSFORMER_DEFAULTS, **of_kind}
    _check_defaults(settings, expected, name)
    unknown = settings.keys() - expected.keys() - _TRANSFORMER_SUPPORTED
    if unknown:
        raise CheckpointError(f"{name}: {min(unknown)} is not supported")

    if len(modules) == 1 and not classifies:
        raise CheckpointError(
            "modules.json lists only a Transformer module, which is supported for sequence "
            "classification models only; add a Pooling module"
        )
    if sparse:
        masked_lm.check_supported(hyperparameters, known, network)
        pooling: tuple[str, ...] = ()
        include_prompt = True
    elif classifies:
        pooling, include_prompt = classifier.read_pooling(hyperparameters, known, network), True
    else:
        pooling, include_prompt = _pooling(folder, modules, hyperparameters, overrides)
    for mode in pooling:
        if mode not in POOLINGS:
            raise CheckpointError(f"the pooling {mode!r} is not one of {', '.join(POOLINGS)}")
    heads = [_HEADS[module](folder, path) for module, path in modules[2:]]
    normalize = bool(heads) and isinstance(heads[-1], NormalizeConfig)
    truncate_dim = _truncate_dim(folder)
    if truncate_dim is not None:  # sentence-transformers does not normalise after truncation
        heads, normalize = [*heads, TruncateConfig(truncate_dim)], False
    of_tasks = _task_prompts(folder, network, config)
    prompts, default_prompt = _prompts(folder, kind, of_tasks, overrides)
    if classifies and (default_prompt or any(prompts.values())):
        raise CheckpointError("prompts of models for sequence classification are not supported")
    changes = overrides.pooling, overrides.normalize, overrides.include_prompt
    if (classifies or sparse) and changes != (None, None, None):
        raise CheckpointError(
            "pooling and normalisation cannot be changed, because the model computes no embeddings"
        )
    labels = classifier.read_labels(hyperparameters, network) if classifies else ()
    return SentenceConfig(
        family=model_type,
        transformer=transformer,
        max_tokens=_max_tokens(tokenizer, config, settings, overrides),
        pooling=pooling,
        include_prompt=_override(include_prompt, overrides.include_prompt),
        heads=tuple(heads[:-1] if normalize else heads),
        normalize=_override(normalize, overrides.normalize),
        matryoshka_dimensions=_matryoshka_dimensions(folder, network),
        truncation_side=truncation_side(tokenizer),
        token_types=gives_token_types(tokenizer, model_type),
        labels=labels,
        activation=_activation(folder, hyperparameters, labels),
        sparse=sparse,
        lowercase=bool(settings.get("do_lower_case")),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _kind(*, classifies: bool, is_sparse: bool) -> tuple[str, Mapping[str, Any]]:
    """Return sentence-transformers' class of a model, and its Transformer module's settings."""
    if is_sparse:
        return "SparseEncoder", _OF_SPARSE_ENCODERS
    if classifies:
        return "CrossEncoder", _OF_CLASSIFIERS
    return "SentenceTransformer", _OF_EMBEDDINGS


def _sparse(
    folder: ModelFolder,
    modules: Sequence[tuple[str, str]],
    hyperparameters: Mapping[str, Any],
    overrides: Overrides,
) -> SparseConfig | None:
    """Return the pooling of sparse vectors; None: the model gives none."""
    if modules[1:2] and modules[1][0] == _SPLADE:
        name = join(modules[1][1], "config.json")
        config = folder.json(name, dict)
        pooling = config.get("pooling_strategy", "max")
        activation = config.get("activation_function", "relu")
        if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
            raise CheckpointError(
                f"{name}: supported are the pooling_strategy max and sum, and the "
                "activation_function relu and log1p_relu"
            )
        return SparseConfig(pooling=pooling, double_log=activation == "log1p_relu")
    if not overrides.sparse:
        return None
    if modules or not masked_lm.masked_lm_class(hyperparameters):
        raise CheckpointError(
            "sparse vectors need a masked language model, such as BertForMaskedLM in config.json, "
            "without other modules of sentence-transformers"
        )
    return SparseConfig()


def _override(own: bool, override: bool | None) -> bool:
    return own if override is None else override


def _modules(folder: ModelFolder) -> list[tuple[str, str]]:
    """Return class name and path of each module in modules.json; empty if the file is missing."""
    listed = folder.json("modules.json", list, [])
    modules: list[tuple[str, str]] = []
    for module in listed:
        if not isinstance(module, dict) or not isinstance(module.get("path"), str):
            raise CheckpointError("modules.json: every module must have a type and a path")
        package, _, kind = str(module.get("type")).rpartition(".")
        is_known = package.split(".")[0] == "sentence_transformers"
        if not (is_known or (module.get("type") == _OF_JINA_V3 and _is_jina_v3(folder))):
            raise CheckpointError(
                f"modules.json names {module.get('type')}; "
                "code from outside sentence-transformers is never run"
            )
        if kind != "Dropout":  # only training uses it
            modules.append((kind, module["path"]))
    kinds = [kind for kind, _ in modules]
    has_pooling = kinds[:2] == ["Transformer", "Pooling"] and _HEADS.keys() >= {*kinds[2:]}
    is_sparse = kinds in (["Transformer", _SPLADE], ["MLMTransformer", _SPLADE])
    if kinds not in ([], ["Transformer"]) and not has_pooling and not is_sparse:
        raise CheckpointError(
            f"modules.json lists {' -> '.join(kinds)}; supported: Transformer -> {_SPLADE}, or "
            f"Transformer -> Pooling, then any of {', '.join(_HEADS)}"
        )
    return modules


def _is_jina_v3(folder: ModelFolder) -> bool:
    classes = folder.json("config.json", dict, {}).get("auto_map")
    model = classes.get("AutoModel") if isinstance(classes, dict) else None
    return str(model).startswith(jina_v3.CODE)


def _pooling(
    folder: ModelFolder,
    modules: Sequence[tuple[str, str]],
    hyperparameters: Mapping[str, Any],
    overrides: Overrides,
) -> tuple[tuple[str, ...], bool]:
    """Return the names of the poolings, and whether pooling includes prompt tokens."""
    if not modules:  # default of sentence-transformers
        architectures = hyperparameters.get("architectures")
        first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        own = "last" if first.endswith("ForCausalLM") else "mean"
        return tuple(overrides.pooling or [own]), True
    config = folder.json(join(modules[1][1], "config.json"), dict)
    include_prompt = bool(config.get("include_prompt", True))
    if overrides.pooling:
        return tuple(overrides.pooling), include_prompt
    mode = config.get("pooling_mode")
    if mode:
        modes = [str(name) for name in mode] if isinstance(mode, list) else [str(mode)]
        return tuple(_POOLING_NAMES.get(name, name) for name in modes), include_prompt
    enabled = [key for key, on in config.items() if key.startswith("pooling_mode_") and on]
    unknown = [key for key in enabled if key not in _POOLING_FIELDS]
    known = [name for key, name in _POOLING_FIELDS.items() if key in enabled]
    return tuple(unknown or known or ["mean"]), include_prompt


def _dense(folder: ModelFolder, subfolder: str) -> DenseConfig:
    name = join(subfolder, "config.json")
    config = folder.json(name, dict)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, kind = activation.rpartition(".")
    if not package.startswith("torch.nn.") or kind not in HEAD_ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {activation!r} is not one of {', '.join(HEAD_ACTIVATIONS)}"
        )
    _check_defaults(config, {**_SENTENCE_EMBEDDING, "use_residual": False}, name)
    sizes = (config.get("in_features"), config.get("out_features"))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise CheckpointError(f"{name}: in_features and out_features must be positive integers")
    return DenseConfig(
        folder=subfolder,
        in_features=int(str(sizes[0])),
        out_features=int(str(sizes[1])),
        bias=bool(config.get("bias", True)),
        activation=kind,
    )


def _layer_norm(folder: ModelFolder, subfolder: str) -> LayerNormConfig:
    name = join(subfolder, "config.json")
    width = folder.json(name, dict).get("dimension")
    if not isinstance(width, int) or width < 1:
        raise CheckpointError(f"{name}: dimension must be a positive integer")
    return LayerNormConfig(folder=subfolder, width=width)


def _normalize(folder: ModelFolder, subfolder: str) -> NormalizeConfig:
    name = join(subfolder, "config.json")
    _check_defaults(folder.json(name, dict, {}), _SENTENCE_EMBEDDING, name)
    return NormalizeConfig()


# Functions that read the configs of modules after pooling, by module class.
_HEADS: Mapping[str, Callable[[ModelFolder, str], HeadConfig]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": _normalize,
}


def _task_prompts(folder: ModelFolder, network: str, config: EncoderConfig) -> dict[str, str]:
    """Return the prompt of each adapter's task, by adapter name."""
    if config.adapters is None:
        return {}
    instructions = folder.json(network, dict).get("task_instructions")
    texts = instructions if isinstance(instructions, dict) else {}
    for task in config.adapters.names:
        if not isinstance(texts.get(task), str):
            raise CheckpointError(f"{network}: task_instructions has no text for {task!r}")
    return {task: texts[task] for task in config.adapters.names}


def _prompts(
    folder: ModelFolder, kind: str, of_tasks: Mapping[str, str], overrides: Overrides
) -> tuple[dict[str, str], str | None]:
    """Return the prompts, by name, and the name of the default prompt.

    As in sentence-transformers, the prompts "query" and "document" always exist.
    """
    name = _MODEL_CONFIG
    config = folder.json(name, dict, {})
    _check_defaults(config, {"model_type": kind}, name)
    own = config.get("prompts") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{name}: prompts must be a JSON object")
    prompts = {"query": "", "document": ""}
    for key, text in {**of_tasks, **own, **(overrides.prompts or {})}.items():
        if not isinstance(text, str | None):
            raise CheckpointError(f"{name}: the prompt {key!r} is not a string")
        prompts[key] = text or ""
    default = overrides.default_prompt or config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"the default prompt {default!r} is not among the prompts: {', '.join(prompts)}"
        )
    return prompts, None if default is None else str(default)


def _activation(folder: ModelFolder, config: Mapping[str, Any], labels: Sequence[str]) -> str:
    own = folder.json(_MODEL_CONFIG, dict, {}).get("activation_fn")
    return classifier.read_activation(config, own, len(labels)) if labels else "identity"


def _truncate_dim(folder: ModelFolder) -> int | None:
    value = folder.json(_MODEL_CONFIG, dict, {}).get("truncate_dim")
    if value is not None and not _is_positive(value):
        raise CheckpointError(f"{_MODEL_CONFIG}: truncate_dim has the invalid value {value!r}")
    return value


def _matryoshka_dimensions(folder: ModelFolder, network: str) -> tuple[int, ...]:
    value = folder.json(network, dict).get("matryoshka_dimensions") or []
    if not isinstance(value, list) or not all(map(_is_positive, value)):
        raise CheckpointError(f"{network}: matryoshka_dimensions has the invalid value {value!r}")
    return tuple(sorted(value))


def _is_positive(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _max_tokens(
    tokenizer: Mapping[str, Any],
    config: EncoderConfig,
    settings: Mapping[str, object],
    overrides: Overrides,
) -> int:
    """Return the maximum input length in tokens, from the override or the folder's settings.

    The folder's setting is capped at the encoder's maximum.
    """
    own = next(
        (
            limit
            for limit in (
                settings.get("max_seq_length"),
                tokenizer.get("model_max_length"),
                tokenizer.get("max_len"),
            )
            if limit is not None
        ),
        config.max_tokens,
    )
    # transformers writes 1e30 for "no limit", as a float or an integer.
    if isinstance(own, float) and own.is_integer():
        own = int(own)
    limit = overrides.max_tokens
    if limit is None:
        limit = min(own, config.max_tokens) if isinstance(own, int) else 0
    # The shortest useful row has one token between two special tokens.
    if not 3 <= limit <= config.max_tokens:
        raise CheckpointError(
            f"the maximum input length is {own if overrides.max_tokens is None else limit} tokens; "
            f"it must be between 3 and the model's {config.max_tokens} positions"
        )
    return limit


def _check_defaults(
    config: Mapping[str, object], defaults: Mapping[str, object], source: str
) -> None:
    """Raise CheckpointError unless each field is absent, null or equal to its default."""
    for name, value in defaults.items():
        if config.get(name, value) not in (value, None):
            raise CheckpointError(
                f"{source}: {name} is {config[name]!r}; only {value!r} is supported"
            )
