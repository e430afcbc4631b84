"""The tokenizer of a model folder as one file that needs nothing beside it.

What tokenizer_config.json changes is built in, as transformers would; truncation and padding are
taken out, for the service does both.
"""

import json
from typing import Any

from tokenizers import Tokenizer, normalizers

from models.model_folder import CheckpointError, ModelFolder, join
from models.recipe import Recipe

# For these classes transformers makes the normaliser from the config, whatever the file says.
_NORMALISED_BY_CONFIG = ("Bert", "DistilBert", "MPNet")


def read_tokenizer(folder: ModelFolder, recipe: Recipe, vocab_size: int) -> Tokenizer:
    """Return the folder's tokenizer.

    Args:
        folder: Holds tokenizer.json.
        recipe: Says where, and whether text is lowercased first.
        vocab_size: Of the model; every id must be below it.

    Raises:
        CheckpointError: There is none, it does not fit the model, or a setting is not understood.
    """
    name = join(recipe.transformer, "tokenizer.json")
    if not folder.has(name):
        raise CheckpointError(
            f"{folder.name} has no {name}; "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        )
    try:
        tokenizer = Tokenizer.from_buffer(folder.bytes(name))
    except ValueError as error:
        raise CheckpointError(f"{name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config: dict[str, Any] = folder.json(
        join(recipe.transformer, "tokenizer_config.json"), dict, {}
    )
    if config.get("truncation_side", "right") != "right":
        raise CheckpointError("tokenizer_config.json: truncation_side is not 'right'")
    parts = json.loads(tokenizer.to_str())
    pre_tokenizer = parts["pre_tokenizer"] or {}
    prefix_space = pre_tokenizer.get("add_prefix_space")
    if config.get("add_prefix_space", prefix_space) != prefix_space:
        raise CheckpointError(
            "tokenizer_config.json: add_prefix_space is not what tokenizer.json says"
        )
    _check_tokens(tokenizer, config, vocab_size)
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    if kind in _NORMALISED_BY_CONFIG:
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
            strip_accents=config.get("strip_accents"),
            lowercase=bool(config.get("do_lower_case", True)),
        )
    if recipe.lowercase:
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def _check_tokens(tokenizer: Tokenizer, config: dict[str, Any], vocab_size: int) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json gives {token!r} the id {largest}; the model has {vocab_size} tokens"
        )
    added = config.get("added_tokens_decoder")
    contents = [
        str(entry["content"])
        for entry in (added.values() if isinstance(added, dict) else [])
        if isinstance(entry, dict) and "content" in entry
    ]
    known = json.loads(tokenizer.to_str())["added_tokens"]
    missing = set(contents) - {entry["content"] for entry in known} - vocabulary.keys()
    if missing:
        raise CheckpointError(
            f"tokenizer_config.json adds the token {min(missing)!r}, which tokenizer.json lacks"
        )
