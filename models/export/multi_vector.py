"""Multi-vector models, such as ColBERT: one vector per token, as in sentence-transformers.

Queries and documents have rules of their own: prompts, lengths, tokens that expand a query, and
tokens without a vector. Their sources are the files of sentence-transformers 6, of PyLate up to 3
(fields of config_sentence_transformers.json) and of Stanford's ColBERT (artifact.metadata).
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models.export.families import TensorPart
from models.export.model_files import ModelFiles
from models.export.model_folder import (
    CheckpointError,
    ModelFolder,
    check_defaults,
    check_known,
    classes_of,
    join,
)
from models.export.modules import (
    MODEL_CONFIG,
    MULTI_VECTOR_MASK,
    TOKEN_POOLING,
    DenseConfig,
    read_projection,
)
from models.export.tokenizer_settings import TokenizerSettings
from models.export.weights import fill
from models.network.heads import DenseHead

# Settings of the Transformer module for multi-vectors.
SETTINGS = ("query_length", "document_length", "query_expansion")
# Fields of config_sentence_transformers.json by which sentence-transformers recognises PyLate.
_PYLATE_FIELDS = (
    *SETTINGS,
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)
_STANFORD_CLASS = "HF_ColBERT"
_STANFORD_CONFIG = "artifact.metadata"
# Tensor of the projection in a checkpoint of Stanford's ColBERT.
_STANFORD_WEIGHT = "linear.weight"
# Tokens of a query after expansion, in ColBERT.
_QUERY_TOKENS = 32
KINDS = ("query", "document")
# Settings of the pooling of tokens in a file that lacks them.
_POOLING_DEFAULTS: Mapping[str, object] = {
    "pool_factor": 1.0,
    "num_protected_tokens": 1,
    "normalize_embeddings": False,
    "tasks": ["document"],
}
# Largest settings of the pooling of tokens.
_MAX_POOL_FACTOR = 2**20
_MAX_PROTECTED = 2**20


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """Expansion of short queries with further tokens.

    Attributes:
        length: Number of tokens of a short query after expansion, special tokens included.
        truncates: Whether longer queries are truncated to this length.
        attends: Whether the tokens of the query attend to the added tokens.
        token: The added token.
    """

    length: int
    truncates: bool
    attends: bool
    token: str


@dataclass(frozen=True, kw_only=True)
class TokenPooling:
    """Pooling of the vectors of tokens.

    Attributes:
        factor: Number of vectors that are pooled into one, on average; at least 1.
        protected: Number of leading vectors that are not pooled.
        normalizes: Whether vectors are scaled to unit length afterwards.
        kinds: Kinds of text that it applies to, "query" or "document".
    """

    factor: float
    protected: int
    normalizes: bool
    kinds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MultiVectorConfig:
    """Settings of a multi-vector model.

    Attributes:
        layers: Dense layers after the encoder; None: one layer, which is part of the checkpoint.
        normalize: Whether vectors are normalised to unit length.
        query_length: Maximum number of tokens of a query; None: that of all texts.
        document_length: The same for documents.
        expansion: Expansion of queries; None: none.
        skiplist: Tokens without a vector.
        skiplist_kinds: Kinds of text that the skiplist applies to, "query" or "document".
        kept: Ids of the only tokens of documents with a vector; empty: all tokens.
        pooling: Pooling of the vectors of tokens; None: none.
        prompts: Prompts of the folder, by name.
        markers: Prefixes of prompts that the tokenizer must not split.
        is_pylate: Whether PyLate has saved the model.
    """

    layers: tuple[DenseConfig, ...] | None
    normalize: bool
    query_length: int | None
    document_length: int | None
    expansion: Expansion | None
    skiplist: tuple[str, ...]
    skiplist_kinds: tuple[str, ...]
    kept: tuple[int, ...]
    pooling: TokenPooling | None
    prompts: Mapping[str, object]
    markers: tuple[str, ...]
    is_pylate: bool


def is_stanford(files: ModelFiles) -> bool:
    """Return whether a folder without modules has a checkpoint of Stanford's ColBERT."""
    return not files.modules and _STANFORD_CLASS in classes_of(files.config)


def read_config(
    files: ModelFiles,
    settings: Mapping[str, Any],
    tokenizer: TokenizerSettings,
    limit: int | None,
) -> MultiVectorConfig:
    """Return the settings of a multi-vector model.

    Args:
        files: Files of the model.
        settings: Settings of the Transformer module.
        tokenizer: Settings of the tokenizer. Its mask or end token expands queries if the settings
            do not name a token.
        limit: Maximum number of tokens of all texts, in place of larger ones; None: no limit.

    Raises:
        CheckpointError: A setting is invalid or unsupported; the message names it.
    """
    folder, modules = files.folder, files.modules
    config = folder.json(MODEL_CONFIG, dict, {})
    own, prompts, markers = _of_pylate(config)
    layers: tuple[DenseConfig, ...] | None = None
    normalize = True
    if not modules:
        source = _STANFORD_CONFIG
        own, mask, markers = _of_stanford(folder)
        absent = {kind: text for kind, text in markers.items() if prompts.get(kind) is None}
        prompts = {**prompts, **absent}
    else:
        layers, normalize = read_projection(files)
        masks = [path for kind, path in modules if kind == MULTI_VECTOR_MASK]
        source = join(masks[0], "config.json") if masks else MODEL_CONFIG
        words = config.get("skiplist_words")
        mask = {"skiplist_words": list(string.punctuation) if words is None else words}
        mask = folder.json(source, dict, {}) if masks else mask
    own |= {name: settings[name] for name in SETTINGS if name in settings}
    expansion = _read_expansion(own.get("query_expansion"), tokenizer.mask_or_end_token)
    lengths = [_length(own.get(name), name) for name in ("query_length", "document_length")]
    _check_expansion(expansion, lengths[0], limit, tokenizer)
    skiplist, kinds, kept = _read_mask(mask, source)
    query_length, document_length = (
        length if length is None or limit is None else min(length, limit) for length in lengths
    )
    return MultiVectorConfig(
        layers=layers,
        normalize=normalize,
        query_length=query_length,
        document_length=document_length,
        expansion=expansion,
        skiplist=skiplist,
        skiplist_kinds=kinds,
        kept=kept,
        pooling=_read_pooling(files),
        prompts=prompts,
        markers=tuple(markers.values()),
        is_pylate=source == MODEL_CONFIG,
    )


def _of_pylate(
    config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, object], dict[str, str]]:
    """Return the settings, prompts and markers in config_sentence_transformers.json."""
    own = {
        name: config[name]
        for name in SETTINGS
        if name in config and (config[name] is not None or name == "query_expansion")
    }
    if "query_expansion" not in own and any(name in config for name in _PYLATE_FIELDS):
        attends = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
        own["query_expansion"] = None
        if config.get("do_query_expansion") is not False:
            length = own.pop("query_length", None) or _QUERY_TOKENS
            fixed = {"strategy": "fixed", "attend": bool(attends), "length": length}
            own["query_expansion"] = fixed
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise CheckpointError(f"{MODEL_CONFIG}: prompts must be a JSON object")
    markers: dict[str, str] = {}
    for kind in KINDS:
        if (name := f"{kind}_prefix") in config:
            markers[kind] = str(config[name] or "")
            rest = str(prompts.get(kind) or "").removeprefix(markers[kind])
            prompts = {**prompts, kind: markers[kind] + rest}
    return own, prompts, markers


def _of_stanford(folder: ModelFolder) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the settings, the mask's settings and the markers in artifact.metadata."""
    config = folder.json(_STANFORD_CONFIG, dict, {})
    check_defaults(config, {"similarity": "cosine"}, _STANFORD_CONFIG)
    expansion = {
        "strategy": "fixed",
        "attend": bool(config.get("attend_to_mask_tokens")),
        "length": config.get("query_maxlen") or _QUERY_TOKENS,
    }
    own = {"document_length": config.get("doc_maxlen"), "query_expansion": expansion}
    markers = {
        "query": f"{config.get('query_token_id') or '[unused0]'} ",
        "document": f"{config.get('doc_token_id') or '[unused1]'} ",
    }
    skips = config.get("mask_punctuation", True)
    return own, {"skiplist_words": list(string.punctuation) if skips else []}, markers


def _read_expansion(value: object, default_token: str | None) -> Expansion | None:
    if value is None:
        return None
    known = {"strategy", "attend", "token", "length"}
    if not isinstance(value, dict) or value.keys() - known:
        raise CheckpointError(
            f"query_expansion must be a JSON object with the fields {', '.join(sorted(known))}"
        )
    if value.get("strategy") not in ("fixed", "min"):
        raise CheckpointError(
            f"query_expansion: strategy is {value.get('strategy')!r}; supported: 'fixed', 'min'"
        )
    if not isinstance(attends := value.get("attend", False), bool):
        raise CheckpointError(f"query_expansion: attend has the invalid value {attends!r}")
    token = value.get("token") or default_token
    if not isinstance(token, str):
        raise CheckpointError(
            "query_expansion names no token, and the tokenizer has neither a mask_token nor an "
            "eos_token"
        )
    length = _length(value.get("length"), "query_expansion: length")
    if length is None:
        raise CheckpointError("query_expansion has no length")
    truncates = value["strategy"] == "fixed"
    return Expansion(length=length, truncates=truncates, attends=attends, token=token)


def _check_expansion(
    expansion: Expansion | None,
    query_length: int | None,
    limit: int | None,
    tokenizer: TokenizerSettings,
) -> None:
    if expansion is None:
        return
    for name, length in (("query_length", query_length), ("the maximum input length", limit)):
        if length is not None and length < expansion.length:
            raise CheckpointError(
                f"{name} is {length} tokens; query_expansion needs at least {expansion.length}"
            )
    if tokenizer.padding_side == "left":
        raise CheckpointError(
            "the tokenizer's padding_side is 'left'; only 'right' is supported with query_expansion"
        )


def _length(value: object, name: str) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise CheckpointError(f"{name} has the invalid value {value!r}")


def _read_mask(
    config: Mapping[str, Any], source: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    """Return the skiplist, the kinds of text that it applies to, and the ids of kept tokens."""
    fields = {"skiplist_words": str, "skiplist_tasks": str, "keep_only_token_ids": int}
    check_known(config, fields, source)
    values: dict[str, tuple[Any, ...]] = {}
    for name, kind in fields.items():
        value = config.get(name)
        if name == "skiplist_tasks":
            value = ["document"] if value is None else [value] if isinstance(value, str) else value
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(f"{source}: {name} has the invalid value {value!r}")
        values[name] = tuple(value)
    _check_tasks(values["skiplist_tasks"], f"{source}: skiplist_tasks")
    return values["skiplist_words"], values["skiplist_tasks"], values["keep_only_token_ids"]


def _check_tasks(tasks: Sequence[str], name: str) -> None:
    if unknown := {*tasks} - {*KINDS}:
        raise CheckpointError(f"{name} has the unknown task {min(unknown)!r}")


def _read_pooling(files: ModelFiles) -> TokenPooling | None:
    """Return the settings of the module that pools tokens, the last; None: there is none."""
    if not files.modules or files.modules[-1][0] != TOKEN_POOLING:
        return None
    name = join(files.modules[-1][1], "config.json")
    config = files.folder.json(name, dict)
    values: dict[str, Any] = {**_POOLING_DEFAULTS, **config}
    check_known(config, _POOLING_DEFAULTS, name)
    factor, protected, normalizes, tasks = values.values()
    for field, is_valid in (
        ("pool_factor", type(factor) in (int, float) and 1 <= factor <= _MAX_POOL_FACTOR),
        ("num_protected_tokens", type(protected) is int and 0 <= protected <= _MAX_PROTECTED),
        ("normalize_embeddings", type(normalizes) is bool),
        ("tasks", isinstance(tasks, list) and all(isinstance(task, str) for task in tasks)),
    ):
        if not is_valid:
            raise CheckpointError(f"{name}: {field} has the invalid value {values[field]!r}")
    _check_tasks(tasks, f"{name}: tasks")
    return TokenPooling(
        factor=float(factor), protected=protected, normalizes=normalizes, kinds=tuple(tasks)
    )


def take_projection(tensors: dict[str, Tensor]) -> DenseHead:
    """Return the projection in a checkpoint of Stanford's ColBERT, and remove it from `tensors`.

    Raises:
        CheckpointError: The tensor is missing.
    """
    weight = tensors.pop(_STANFORD_WEIGHT, None)
    if weight is None or weight.dim() != 2 or not weight.numel():
        raise CheckpointError(f"the checkpoint lacks the matrix {_STANFORD_WEIGHT} of HF_ColBERT")
    out_features, in_features = weight.shape
    layer = DenseHead(in_features, out_features, bias=False, activation="Identity")
    fill(layer.linear, {_STANFORD_WEIGHT: weight}, lambda _: (TensorPart(_STANFORD_WEIGHT),))
    return layer
