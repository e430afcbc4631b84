"""Weights of queries in inference-free sparse models, and the rules for the tokens of queries.

The vector of a query has the weight of each token that occurs in it, without special tokens, as in
`SparseStaticEmbedding` of sentence-transformers.
"""

from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.export.model_folder import CheckpointError, ModelFolder, check_known, join
from models.export.sentence_config import SentenceConfig
from models.export.tokenizer_file import read_tokenizer
from models.export.tokenizer_settings import TokenizerSettings
from models.export.transformers_tokenizer import read_settings
from models.manifest import NO_LIMIT, TokenRules

_MAX_WEIGHT = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class QueryTable:
    """Weights of queries.

    Attributes:
        weights: Weight of each vocabulary entry, float32 `(V,)`.
        rules: Token rules by prompt name: "query", "document", and "" for all other texts.
    """

    weights: Tensor
    rules: dict[str, TokenRules]


def read_query_table(
    folder: ModelFolder, config: SentenceConfig, tokenizer: Tokenizer, vocab_size: int
) -> QueryTable | None:
    """Return the weights of queries; None if queries pass through the network.

    Args:
        folder: Model folder.
        config: Config of the model, with the routes of queries and documents.
        tokenizer: Tokenizer of documents, from `read_tokenizer`.
        vocab_size: Number of vocabulary entries of the network, V.

    Raises:
        CheckpointError: The weights are missing or do not match the vocabulary, or queries have
            another tokenizer than documents.
    """
    if config.routes is None:
        return None
    routes = config.routes
    settings = read_settings(folder, routes.query, config.family)
    _check_tokenizer(folder, config, routes.query, settings, tokenizer, vocab_size)
    weights = _read_weights(folder, routes.query, tokenizer, vocab_size)
    if weights.shape != (vocab_size,) or not weights.is_floating_point():
        raise CheckpointError(
            f"{routes.query}: the weights of queries have shape {tuple(weights.shape)} and dtype "
            f"{weights.dtype}; the model's vocabulary requires shape {(vocab_size,)} and a "
            "floating-point dtype"
        )
    weights = weights.float()
    if not weights.isfinite().all():
        raise CheckpointError(f"{routes.query}: a weight of queries is not finite")
    query = TokenRules(max_tokens=_max_tokens(settings, routes.query), looks_up=True)
    document = TokenRules(max_tokens=config.max_tokens)
    rules = {"query": query, "document": document}
    return QueryTable(weights, {**rules, "": rules[routes.default]})


def _check_tokenizer(
    folder: ModelFolder,
    config: SentenceConfig,
    query: str,
    settings: TokenizerSettings,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> None:
    """Raise CheckpointError if queries have another tokenizer than documents.

    Args:
        folder: Model folder.
        config: Config of the model.
        query: Subfolder of the module of queries.
        settings: Settings of its tokenizer.
        tokenizer: Tokenizer of documents.
        vocab_size: Number of vocabulary entries of the network.
    """
    of_queries = replace(config, transformer=query, lowercase=False)
    own = read_tokenizer(folder, of_queries, vocab_size)
    of_documents = tokenizer.to_str(), config.truncation_side
    if (own.to_str(), settings.truncation_side) != of_documents:
        raise CheckpointError(
            f"the tokenizers in {query} and {config.transformer} differ; queries and "
            "documents must have the same tokenizer"
        )


def _max_tokens(settings: TokenizerSettings, subfolder: str) -> int:
    own = settings.max_length
    if own is None:
        return NO_LIMIT
    if not isinstance(own, int) or own < 1:
        raise CheckpointError(f"{subfolder}: model_max_length has the invalid value {own!r}")
    return min(own, NO_LIMIT)


def _read_weights(
    folder: ModelFolder, subfolder: str, tokenizer: Tokenizer, vocab_size: int
) -> Tensor:
    config = folder.json(name := join(subfolder, "config.json"), dict, {})
    check_known(config, ("frozen", "path"), name)
    path = config.get("path")
    if isinstance(path, str) and path.endswith(".json"):
        return _read_json(folder, path, tokenizer, vocab_size)
    tensors = folder.tensors(subfolder)
    if tensors.keys() != {"weight"}:
        raise CheckpointError(
            f"{subfolder} has the tensors {', '.join(sorted(tensors))}; it must have one, weight"
        )
    return tensors["weight"]


def _read_json(folder: ModelFolder, name: str, tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """Return the weights in a JSON object, by token; tokens that it lacks have the weight 0."""
    weights = torch.zeros(vocab_size)
    for token, weight in folder.json(name, dict).items():
        index = tokenizer.token_to_id(token)
        if index is None or not isinstance(weight, int | float) or abs(weight) > _MAX_WEIGHT:
            raise CheckpointError(
                f"{name}: {token!r} is not in the vocabulary, or its weight is not a number of "
                "float32"
            )
        weights[index] = weight
    return weights
