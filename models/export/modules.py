"""Modules of sentence-transformers in a model folder: poolings, and heads after pooling.

Unsupported settings that would change the vectors raise an error with the name of the setting.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from models.export.families import MAX_SIZE, jina_v3
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    CheckpointError,
    ModelFolder,
    check_defaults,
    check_known,
    class_of_torch,
    first_class,
    join,
)
from models.export.router import read_routes
from models.network.heads import HEAD_ACTIVATIONS
from models.network.pooling import POOLINGS

# The file with the settings of the whole model.
MODEL_CONFIG = "config_sentence_transformers.json"
# The module that pools sparse vectors.
SPLADE = "SpladePooling"
# The module that computes the score of a pair from logits of tokens.
LOGIT_SCORE = "LogitScore"
# The module that selects the tokens with a multi-vector.
MULTI_VECTOR_MASK = "MultiVectorMask"
# The module that pools the vectors of tokens, after all others.
TOKEN_POOLING = "HierarchicalTokenPooling"  # noqa: S105
# Type of PyLate's module for a dense layer.
_DENSE_OF_PYLATE = "pylate.models.Dense.Dense"
# Type of Jina v3's custom Transformer module, which passes the task to the encoder.
_OF_JINA_V3 = "custom_st.Transformer"
# Type of pplx-embed's module that rounds vectors.
_QUANTIZER = "st_quantize.FlexibleQuantizer"
# Inputs and outputs of modules.
_FEATURES = ("module_input_name", "module_output_name")
_SENTENCE_EMBEDDING = dict.fromkeys(_FEATURES, "sentence_embedding")
_TOKEN_EMBEDDINGS = dict.fromkeys(_FEATURES, "token_embeddings")
# Those of the last layer of a cross-encoder in modules.
_SCORES = {**_SENTENCE_EMBEDDING, "module_output_name": "scores"}

# Names of a module's width in its config, which has no effect.
WIDTHS = ("embedding_dimension", "word_embedding_dimension")
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


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Config of a dense layer after pooling.

    Attributes:
        folder: Subfolder with the config and weights of the layer.
        in_features: Input width of the layer.
        out_features: Output width of the layer.
        bias: Whether the layer has a bias.
        activation: Name in `models.network.heads.HEAD_ACTIVATIONS`.
        residual: Whether the input is added to the output.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str
    residual: bool


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


def read_modules(folder: ModelFolder) -> list[tuple[str, str]]:
    """Return class name and path of each module in modules.json; empty if the file is missing.

    Of a Router, these are the modules of documents.

    Raises:
        CheckpointError: modules.json is invalid or lists unsupported modules.
    """
    routes = read_routes(folder)
    listed = list(routes.document) if routes else _listed_modules(folder)
    modules: list[tuple[str, str]] = []
    for name, path in listed:
        if name == _QUANTIZER:
            raise CheckpointError(
                f"modules.json names {name}, which rounds vectors to int8 and is not supported; "
                "without it in modules.json, the export gives the vectors before it: of a vector "
                "x, it returns round(127 * tanh(x))"
            )
        package, _, kind = name.rpartition(".")
        is_known = package.split(".")[0] == "sentence_transformers" or name == _DENSE_OF_PYLATE
        if not (is_known or (name == _OF_JINA_V3 and _is_jina_v3(folder))):
            raise CheckpointError(
                f"modules.json names {name}; code from outside sentence-transformers is never run"
            )
        if kind != "Dropout":  # only training uses it
            modules.append((kind, path))
    kinds = [kind for kind, _ in modules]
    has_pooling = kinds[:2] == ["Transformer", "Pooling"] and _HEADS.keys() >= {*kinds[2:]}
    is_sparse = kinds in (["Transformer", SPLADE], ["MLMTransformer", SPLADE])
    if routes and not is_sparse:
        raise CheckpointError(
            f"the Router's route document is {' -> '.join(kinds)}; supported: Transformer -> "
            f"{SPLADE}"
        )
    is_multi = _is_multi_vector(kinds) or (_is_dense_only(kinds) and is_pylate(folder))
    alone: tuple[list[str], ...] = ([], ["Transformer"], ["Transformer", LOGIT_SCORE])
    if kinds not in alone and not (has_pooling or is_sparse or is_multi):
        raise CheckpointError(
            f"modules.json lists {' -> '.join(kinds)}; supported: Transformer -> {SPLADE} or "
            f"{LOGIT_SCORE}; Transformer -> Pooling, then any of {', '.join(_HEADS)}; or "
            f"Transformer, then Dense, {MULTI_VECTOR_MASK}, Normalize and {TOKEN_POOLING} for "
            "multi-vectors"
        )
    return modules


def _listed_modules(folder: ModelFolder) -> list[tuple[str, str]]:
    """Return type and path of each module in modules.json."""
    modules: list[tuple[str, str]] = []
    names: set[object] = set()
    listed = folder.json("modules.json", list, [])
    if not listed and folder.has("modules.json"):
        raise CheckpointError(
            "modules.json lists no modules; list the model's modules, or remove the file"
        )
    for index, module in enumerate(listed):
        if not isinstance(module, dict) or not isinstance(module.get("path"), str):
            raise CheckpointError("modules.json: every module must have a type and a path")
        # sentence-transformers keeps one module of each name.
        if (name := str(module.get("name", index))) in names:
            raise CheckpointError(f"modules.json: two modules have the name {name!r}")
        names.add(name)
        modules.append((str(module.get("type")), module["path"]))
    return modules


def _is_multi_vector(kinds: Sequence[str]) -> bool:
    dense = [kind for kind in kinds[1:] if kind == "Dense"]
    kinds = list(kinds[:-1] if kinds[-1:] == [TOKEN_POOLING] else kinds)
    last = kinds[1 + len(dense) :]
    orders = [MULTI_VECTOR_MASK, "Normalize"], ["Normalize", MULTI_VECTOR_MASK], [MULTI_VECTOR_MASK]
    return kinds == ["Transformer", *dense, *last] and last in orders


def _is_dense_only(kinds: Sequence[str]) -> bool:
    return kinds[:1] == ["Transformer"] and {*kinds[1:]} == {"Dense"}


def is_pylate(folder: ModelFolder) -> bool:
    """Return whether the folder was saved by PyLate 3 or older, as sentence-transformers decides.

    These folders list neither the selection of tokens nor the normalisation in modules.json.
    """
    config = folder.json(MODEL_CONFIG, dict, {})
    kind, has_prefix = config.get("model_type"), {"query_prefix", "document_prefix"} & config.keys()
    return kind == "ColBERT" or (kind in (None, "SentenceTransformer") and bool(has_prefix))


def _is_jina_v3(folder: ModelFolder) -> bool:
    classes = folder.json("config.json", dict, {}).get("auto_map")
    model = classes.get("AutoModel") if isinstance(classes, dict) else None
    return str(model).startswith(jina_v3.CODE)


def read_pooling(files: ModelFiles, override: Sequence[str] | None) -> tuple[tuple[str, ...], bool]:
    """Return the names of the poolings, and whether pooling includes prompt tokens.

    Args:
        files: Files of the model.
        override: Names of the poolings to return instead of the folder's; None: the folder's.

    Raises:
        CheckpointError: A pooling is unknown, or does not fit the family's projection.
    """
    include_prompt = True
    if files.modules:
        config = files.folder.json(source := join(files.modules[1][1], "config.json"), dict)
        include_prompt = bool(config.get("include_prompt", True))
        own = override or _poolings(config, source)
    else:
        own = [_default_pooling(files)]
    for name in (poolings := override or own):
        if name not in POOLINGS:
            raise CheckpointError(f"the pooling {name!r} is not one of {', '.join(POOLINGS)}")
    projection = files.family.projection
    if projection and (len(poolings) > 1 or "max" in poolings):
        raise CheckpointError(
            f"the pooling {' and '.join(poolings)} of vectors that {projection!r} projects "
            "is not supported; supported: one pooling that is a weighted sum"
        )
    return tuple(poolings), include_prompt


def _default_pooling(files: ModelFiles) -> str:
    """Return the pooling for a folder without modules.json.

    It is that of the model's own code, or else of sentence-transformers.
    """
    config, poolings = files.config, files.family.poolings
    if poolings and "pooling" in config:
        own = str(config["pooling"])
        if own not in poolings:
            raise CheckpointError(
                f"{files.config_name}: pooling is {own!r}; supported: {', '.join(poolings)}"
            )
        return poolings[own]
    is_decoder = first_class(config).endswith("ForCausalLM")
    return "last" if is_decoder and config.get("is_causal", True) else "mean"


def _poolings(config: Mapping[str, Any], source: str) -> Sequence[str]:
    """Return the poolings in the config of a module, from the file `source`."""
    check_known(config, ("pooling_mode", "include_prompt", *WIDTHS, *_POOLING_FIELDS), source)
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        modes = map(str, mode if isinstance(mode, list) and mode else [mode])
        return [_POOLING_NAMES.get(name, name) for name in modes]
    return [name for key, name in _POOLING_FIELDS.items() if config.get(key)] or ["mean"]


def read_heads(files: ModelFiles) -> list[HeadConfig]:
    """Return the configs of the modules after pooling.

    Raises:
        CheckpointError: A setting of a module is invalid or unsupported.
    """
    folder, modules = files.folder, files.modules
    if not scores_pairs(files):
        return [_HEADS[module](folder, path) for module, path in modules[2:]]
    heads = [_HEADS[module](folder, path) for module, path in modules[2:-1]]
    return [*heads, _dense(folder, modules[-1][1], _SCORES)]


def scores_pairs(files: ModelFiles) -> bool:
    """Return whether the last of several modules is a dense layer for the scores of pairs."""
    if len(files.modules) < 3 or files.modules[-1][0] != "Dense":
        return False
    config = files.folder.json(join(files.modules[-1][1], "config.json"), dict)
    return config.get("module_output_name") == _SCORES["module_output_name"]


def read_projection(files: ModelFiles) -> tuple[tuple[DenseConfig, ...], bool]:
    """Return the dense layers of a multi-vector model, and whether its vectors are normalised.

    Raises:
        CheckpointError: A setting of a module is invalid or unsupported.
    """
    folder, modules = files.folder, files.modules
    layers = [_dense(folder, path, _TOKEN_EMBEDDINGS) for kind, path in modules if kind == "Dense"]
    paths = [path for kind, path in modules if kind == "Normalize"]
    for path in paths:
        name = join(path, "config.json")
        # Without the name, sentence-transformers normalises embeddings, which do not exist.
        config = {"module_input_name": "sentence_embedding", **folder.json(name, dict, {})}
        check_defaults(config, _TOKEN_EMBEDDINGS, name)
    return tuple(layers), bool(paths) or is_pylate(folder)


def _dense(
    folder: ModelFolder, subfolder: str, features: Mapping[str, str] = _SENTENCE_EMBEDDING
) -> DenseConfig:
    name = join(subfolder, "config.json")
    config = folder.json(name, dict)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = class_of_torch(activation)
    if kind not in HEAD_ACTIVATIONS:
        raise CheckpointError(
            f"{name}: the activation {activation!r} is not one of {', '.join(HEAD_ACTIVATIONS)}"
        )
    check_defaults(config, features, name)
    in_features, out_features = config.get("in_features"), config.get("out_features")
    if not (is_size(in_features) and is_size(out_features)):
        raise CheckpointError(
            f"{name}: in_features and out_features must be positive integers up to {MAX_SIZE}"
        )
    return DenseConfig(
        folder=subfolder,
        in_features=in_features,
        out_features=out_features,
        bias=bool(config.get("bias", True)),
        activation=kind,
        residual=bool(config.get("use_residual", False)),
    )


def is_size(value: object) -> TypeGuard[int]:
    """Return whether a value of a JSON file is an integer from 1 to `MAX_SIZE`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def _layer_norm(folder: ModelFolder, subfolder: str) -> LayerNormConfig:
    name = join(subfolder, "config.json")
    config = folder.json(name, dict)
    check_known(config, ("dimension",), name)
    width = config.get("dimension")
    if not is_size(width):
        raise CheckpointError(f"{name}: dimension must be a positive integer up to {MAX_SIZE}")
    return LayerNormConfig(folder=subfolder, width=width)


def read_normalize(folder: ModelFolder, subfolder: str) -> NormalizeConfig:
    """Return the config of a module that normalises embeddings.

    Raises:
        CheckpointError: The module normalises something else.
    """
    name = join(subfolder, "config.json")
    check_defaults(folder.json(name, dict, {}), _SENTENCE_EMBEDDING, name)
    return NormalizeConfig()


# Functions that read the configs of modules after pooling, by module class.
_HEADS: Mapping[str, Callable[[ModelFolder, str], HeadConfig]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": read_normalize,
}
