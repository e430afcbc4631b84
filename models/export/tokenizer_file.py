"""The tokenizer of a model folder, prepared for serving as one self-contained file.

Settings in tokenizer_config.json are applied as in transformers. Truncation and padding are
disabled, because the service does both itself.
"""

import json
from typing import Any

from tokenizers import Tokenizer, normalizers

from models.artifact import Artifact
from models.export.checkpoint import read_configs
from models.export.model_folder import CheckpointError, ModelFolder, join, source_folder
from models.export.sentence_config import Overrides, SentenceConfig

# For these tokenizer classes, transformers replaces the normaliser in tokenizer.json by one that is
# built from tokenizer_config.json.
_NORMALISED_BY_CONFIG = ("Bert", "DistilBert", "Electra", "MPNet")
# Families for which transformers uses such a class if tokenizer_config.json names none.
_NORMALISED_BY_DEFAULT = ("bert", "distilbert", "electra", "mpnet", "nomic_bert")


def read_tokenizer(
    folder: ModelFolder, sentence_config: SentenceConfig, vocab_size: int
) -> Tokenizer:
    """Return the tokenizer of a model folder, without truncation and padding.

    Args:
        folder: Model folder with tokenizer.json.
        sentence_config: Config that has the tokenizer's subfolder and the lowercase setting.
        vocab_size: Vocabulary size of the model.

    Raises:
        CheckpointError: The tokenizer is missing or invalid, does not match the model or
            tokenizer_config.json, or has an unsupported setting.
    """
    name = join(sentence_config.transformer, "tokenizer.json")
    if not folder.has(name):
        raise CheckpointError(
            f"{folder.name} has no {name}; "
            "create it with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_buffer(folder.bytes(name))
    except ValueError as error:
        raise CheckpointError(f"{name} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config: dict[str, Any] = folder.json(
        join(sentence_config.transformer, "tokenizer_config.json"), dict, {}
    )
    if config.get("truncation_side", "right") != "right":
        raise CheckpointError("tokenizer_config.json: truncation_side must be 'right'")
    parts = json.loads(tokenizer.to_str())
    pre_tokenizer = parts["pre_tokenizer"] or {}
    prefix_space = pre_tokenizer.get("add_prefix_space")
    if config.get("add_prefix_space", prefix_space) != prefix_space:
        raise CheckpointError("tokenizer_config.json: add_prefix_space differs from tokenizer.json")
    _check_tokens(tokenizer, config, vocab_size)
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    by_default = not kind and sentence_config.family in _NORMALISED_BY_DEFAULT
    # Whatever class the files of ModernBERT name, transformers reads tokenizer.json as it is.
    by_class = kind in _NORMALISED_BY_CONFIG and sentence_config.family != "modernbert"
    if by_default or by_class:
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
            strip_accents=config.get("strip_accents"),
            lowercase=bool(config.get("do_lower_case", True)),
        )
    if sentence_config.lowercase:
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def tokenizer_of_source(artifact: Artifact) -> Tokenizer:
    """Return the tokenizer of an artifact's source, prepared again and truncating like the service.

    Raises:
        ArtifactError: A file of the source was changed.
        CheckpointError: See `read_tokenizer`.
    """
    folder, manifest = source_folder(artifact), artifact.manifest
    _, config, sentence_config = read_configs(folder, Overrides(pooling=manifest.pooling))
    tokenizer = read_tokenizer(folder, sentence_config, config.vocab_size)
    tokenizer.enable_truncation(manifest.max_tokens)
    return tokenizer


def _check_tokens(tokenizer: Tokenizer, config: dict[str, Any], vocab_size: int) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json gives {token!r} the id {largest}; the model's vocabulary has only "
            f"{vocab_size} tokens"
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
