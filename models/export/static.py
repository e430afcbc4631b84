"""Static models: the vector of a text is the mean of its tokens' vectors, without a network.

Two packages read such folders, and differ. Model2Vec leaves unknown tokens out of the mean, and
truncates long texts by characters first, then by tokens, as config.json says. sentence-transformers
counts unknown tokens, and truncates as tokenizer.json says.

A folder with config.json beside the table is one of Model2Vec, although it lists modules of
sentence-transformers too, and is read as by Model2Vec. A table with the name that
sentence-transformers gives it is not, whatever other config.json is there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.export.model_folder import CheckpointError, ModelFolder, join
from models.export.modules import MODEL_CONFIG, read_normalize
from models.export.router import class_name
from models.export.sentence_config import Overrides, read_prompts, read_truncate_dim
from models.export.similarity import read_similarity
from models.export.tasks import EMBEDDING
from models.export.tokenizer_settings import TOKENIZER
from models.export.transformers_tokenizer import check_random, read_tokenizer_file
from models.manifest import NO_LIMIT, SimilarityName, TokenRules

_MODULE = "StaticEmbedding"
# Name of its table.
_WEIGHT = "embedding.weight"
# Defaults of Model2Vec.
_MAX_TOKENS = 512
_NORMALIZE = False


@dataclass(frozen=True, kw_only=True)
class StaticModel:
    """A static model.

    Attributes:
        table: Vector of each token, float32 `(V, W)`. The last is zero, and belongs to the token
            that texts without tokens have.
        tokenizer: Tokenizer without special tokens, truncation and padding.
        rules: Rules for the tokens of all texts.
        truncation_side: Side on which texts with too many tokens are truncated.
        normalize: Whether vectors are normalised to unit length.
        similarity: Similarity of two vectors.
        prompts: Texts that can be prepended to an input, by prompt name.
        default_prompt: Name of the default prompt; None: no prompt.
    """

    table: Tensor
    tokenizer: Tokenizer
    rules: TokenRules
    truncation_side: str
    normalize: bool
    similarity: SimilarityName | None
    prompts: dict[str, str]
    default_prompt: str | None


def is_static(folder: ModelFolder) -> bool:
    """Return whether a model folder has a static model.

    Raises:
        CheckpointError: A JSON file is invalid.
    """
    modules = folder.json("modules.json", list, [])
    if modules:
        return _kind(modules[0]) == _MODULE
    return folder.json("config.json", dict, {}).get("model_type") == "model2vec"


def read_static(folder: ModelFolder, overrides: Overrides) -> StaticModel:
    """Return the static model of a folder.

    Raises:
        CheckpointError: A file, setting or tensor is missing, invalid or unsupported; the message
            names it.
    """
    _check_overrides(overrides)
    modules = folder.json("modules.json", list, [])
    subfolder, normalizes = _read_modules(folder, modules)
    tensors = folder.tensors(subfolder)
    is_model2vec = folder.has(join(subfolder, "config.json")) and _WEIGHT not in tensors
    tokenizer = read_tokenizer_file(folder, subfolder)
    check_random(tokenizer, join(subfolder, TOKENIZER))
    truncation = tokenizer.truncation
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.num_special_tokens_to_add(is_pair=False):  # neither package adds them
        tokenizer.post_processor = None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = _read_table(tensors, is_model2vec=is_model2vec)
    largest = max(vocabulary.values(), default=-1)
    if largest >= len(table):
        raise CheckpointError(
            f"the tokenizer has a token with the id {largest}; the table has {len(table)} vectors"
        )
    side = "right"
    if is_model2vec:
        name = join(subfolder, "config.json")
        rules, normalize = _read_model2vec(folder.json(name, dict), name, tokenizer, overrides)
        if modules and normalize != normalizes:
            raise CheckpointError(
                f"{name}: normalize is {normalize}, and modules.json "
                f"{'lists' if normalizes else 'does not list'} Normalize; they must agree"
            )
    else:
        rules, normalize = _read_truncation(truncation, overrides), normalizes
        side = truncation["direction"] if truncation else side
    if (width := read_truncate_dim(folder)) is not None:
        if normalize:  # sentence-transformers does not normalise after truncation
            raise CheckpointError(
                f"{MODEL_CONFIG}: truncate_dim with Normalize is not supported for static models"
            )
        table = table[:, :width]
    if overrides.normalize is not None:
        normalize = overrides.normalize
    prompts, default_prompt = read_prompts(folder, EMBEDDING, {}, None, overrides)
    return StaticModel(
        table=torch.cat([table, torch.zeros(1, table.shape[1])]),
        tokenizer=tokenizer,
        rules=replace(rules, min_tokens=1, filler=len(table)),
        truncation_side=side,
        normalize=normalize,
        similarity=read_similarity(folder, "pooled"),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _kind(module: object) -> str:
    return class_name(module.get("type")) if isinstance(module, dict) else ""


def _read_modules(folder: ModelFolder, modules: list[Any]) -> tuple[str, bool]:
    """Return the subfolder of the table, and whether vectors are normalised."""
    if not modules:
        return "", False
    kinds = [_kind(module) for module in modules]
    if {*kinds[1:]} - {"Normalize"}:
        raise CheckpointError(
            f"modules.json lists {' -> '.join(kinds)}; supported for static models: {_MODULE}, "
            "then Normalize"
        )
    paths = [str(module.get("path") or "") for module in modules]
    for path in paths[1:]:
        read_normalize(folder, path)
    return join(paths[0], ""), len(kinds) > 1


def _check_overrides(overrides: Overrides) -> None:
    """Raise CheckpointError if an override is for models with a network, or is invalid."""
    for option, is_set in (
        ("--pooling", overrides.pooling is not None),
        ("--include-prompt", overrides.include_prompt is not None),
        ("--sparse", overrides.sparse),
        ("--tokens", overrides.tokens is not None),
        ("--pair-template", overrides.pair_template is not None),
    ):
        if is_set:
            raise CheckpointError(f"{option} does not apply to a static model")
    if overrides.max_tokens is not None:
        _checked_limit(overrides.max_tokens, "--max-tokens")


def _read_table(tensors: Mapping[str, Tensor], *, is_model2vec: bool) -> Tensor:
    """Return the vector of each token id, float32 `(V, W)`, from the tensors of a file."""
    name = _WEIGHT if _WEIGHT in tensors else "embeddings"
    known = {name} if name == _WEIGHT else {name, "mapping", "weights"}
    if unknown := tensors.keys() - known:
        raise CheckpointError(f"the static model has an unexpected tensor: {min(unknown)}")
    if name not in tensors:
        raise CheckpointError(f"the static model lacks the tensor {name}")
    table, mapping, weights = tensors[name], tensors.get("mapping"), tensors.get("weights")
    # The mean of int8 vectors is that of the integers in Model2Vec. sentence-transformers raises.
    is_int8 = table.dtype == torch.int8 and (is_model2vec or weights is not None)
    if table.dim() != 2 or not table.numel() or not (table.is_floating_point() or is_int8):
        raise CheckpointError(
            f"{name} has shape {tuple(table.shape)} and dtype {table.dtype}; a matrix of a "
            "floating-point dtype is required, or of int8 from Model2Vec"
        )
    if mapping is not None:
        is_valid = mapping.dim() == 1 and not mapping.is_floating_point()
        ends = (int(mapping.min()), int(mapping.max())) if is_valid and mapping.numel() else (-1, 0)
        if ends[0] < 0 or ends[1] >= len(table):
            raise CheckpointError(f"mapping must have an index of {name} for each token")
        table = table[mapping.long()]
    table = table.double()
    if weights is not None:
        if weights.shape != (len(table),):
            raise CheckpointError(
                f"weights has shape {tuple(weights.shape)}; {(len(table),)} is required"
            )
        table = table * weights.double()[:, None]
    table = table.float()
    if not table.isfinite().all():
        raise CheckpointError("a vector of the static model is not finite")
    return table


def _read_model2vec(
    config: dict[str, object], name: str, tokenizer: Tokenizer, overrides: Overrides
) -> tuple[TokenRules, bool]:
    """Return the rules for tokens, and whether vectors are normalised, as in Model2Vec 0.10."""
    normalize = config.get("normalize", _NORMALIZE)
    if not isinstance(normalize, bool):
        raise CheckpointError(f"{name}: normalize has the invalid value {normalize!r}")
    unknown = _unknown_id(tokenizer)
    rules = TokenRules(max_tokens=NO_LIMIT, dropped=() if unknown is None else (unknown,))
    own = config.get("max_length", _MAX_TOKENS)
    if overrides.max_tokens is not None:
        own = overrides.max_tokens
    if own is None:
        return rules, normalize
    limit = _checked_limit(own, f"{name}: max_length")
    length = int(median(map(len, tokenizer.get_vocab(with_added_tokens=True))))
    return replace(rules, max_tokens=limit, max_chars=limit * length), normalize


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:  # Unigram
        return model["unk_id"]
    token = model.get("unk_token")
    return None if token is None else tokenizer.token_to_id(token)


def _read_truncation(truncation: dict[str, Any] | None, overrides: Overrides) -> TokenRules:
    """Return the rules of the truncation in a tokenizer.json; None: texts are not truncated."""
    limit: object = NO_LIMIT
    if truncation is not None:
        if truncation["strategy"] == "only_second":  # fails on single texts
            raise CheckpointError(f"{TOKENIZER}: the truncation strategy only_second is for pairs")
        limit = truncation["max_length"]
    if overrides.max_tokens is not None:
        limit = overrides.max_tokens
    return TokenRules(max_tokens=_checked_limit(limit, f"{TOKENIZER}: max_length"))


def _checked_limit(limit: object, name: str) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= NO_LIMIT:
        raise CheckpointError(f"{name} is {limit!r}; it must be from 1 to {NO_LIMIT}")
    return limit
