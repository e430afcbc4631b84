"""The tokenizer of a model folder, prepared for serving as one self-contained file.

Settings in tokenizer_config.json are applied as in transformers. Truncation and padding are
disabled, because the service handles both.
"""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

from models.artifact import Artifact
from models.export.checkpoint import read_configs
from models.export.model_folder import CheckpointError, ModelFolder, join, source_folder
from models.export.sentence_config import SentenceConfig, overrides_of
from models.export.token_rules import add_markers
from models.export.tokenizer_config import read_tokenizer_config, tokenizer_class

Config = dict[str, Any]


def _as_bert(tokenizer: Tokenizer, config: Config) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )


def _as_roberta(tokenizer: Tokenizer, config: Config) -> None:
    prefix_space = bool(config.get("add_prefix_space", False))
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    own = json.loads(tokenizer.to_str())["post_processor"] or {}
    if own.get("type") == "RobertaProcessing":  # which also moves the offsets of tokens
        tokenizer.post_processor = processors.RobertaProcessing(
            tuple(own["sep"]),
            tuple(own["cls"]),
            trim_offsets=bool(config.get("trim_offsets", True)),
            add_prefix_space=prefix_space,
        )


def _as_xlm_roberta(tokenizer: Tokenizer, config: Config) -> None:
    scheme = "always" if config.get("add_prefix_space", True) else "never"
    tokenizer.normalizer = _charsmap(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", scheme)]
    )


def _as_albert(tokenizer: Tokenizer, config: Config) -> None:
    charsmap = _charsmap(tokenizer)
    _as_xlm_roberta(tokenizer, config)
    parts: list[normalizers.Normalizer] = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
    ]
    if not config.get("keep_accents", False):
        parts += [normalizers.NFKD(), normalizers.StripAccents()]
    if config.get("do_lower_case", True):
        parts.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence([*parts, *([charsmap] if charsmap else [])])


def _as_deberta(tokenizer: Tokenizer, config: Config) -> None:
    parts: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
        normalizers.NFC(),
        normalizers.Strip(left=False, right=True),
    ]
    if config.get("do_lower_case", False):
        parts.insert(0, normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence(parts)
    scheme = "always" if config.get("add_prefix_space", True) else "first"
    splits: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace("▁", scheme)]
    if config.get("split_by_punct", False):
        splits.insert(0, pre_tokenizers.Punctuation("isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)


# Matches of the pattern: endings of English contractions, words with the space before them, single
# digits, runs of other characters, and whitespace.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _as_qwen2(tokenizer: Tokenizer, config: Config) -> None:
    prefix_space = bool(config.get("add_prefix_space", False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False),
        ]
    )


def _as_gemma(tokenizer: Tokenizer, _: Config) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")


def _charsmap(tokenizer: Tokenizer) -> normalizers.Precompiled | None:
    """Return the SentencePiece part of the tokenizer's normaliser; None if there is none."""
    normalizer = json.loads(tokenizer.to_str())["normalizer"] or {}
    for part in normalizer.get("normalizers", [normalizer]):
        if part.get("type") == "Precompiled":
            return normalizers.Precompiled(base64.b64decode(part["precompiled_charsmap"]))
    return None


# Functions that set the normaliser and pre-tokenizer, by tokenizer class. For these classes,
# transformers takes the vocabulary and the special tokens from tokenizer.json, and the other
# settings from tokenizer_config.json.
_REBUILT: Mapping[str, Callable[[Tokenizer, Config], None]] = {
    "Albert": _as_albert,
    "Bert": _as_bert,
    "Camembert": _as_xlm_roberta,
    "DebertaV2": _as_deberta,
    "DistilBert": _as_bert,
    "Electra": _as_bert,
    "Gemma": _as_gemma,
    "MPNet": _as_bert,
    "Qwen2": _as_qwen2,
    "Roberta": _as_roberta,
    "XLMRoberta": _as_xlm_roberta,
}


def read_tokenizer(
    folder: ModelFolder, sentence_config: SentenceConfig, vocab_size: int
) -> Tokenizer:
    """Return the tokenizer of a model folder, without truncation and padding.

    Args:
        folder: Model folder with tokenizer.json.
        sentence_config: Config with the tokenizer's subfolder, the family, and the lowercase
            setting.
        vocab_size: Number of word embeddings of the model.

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
    tokenizer = _without_images(tokenizer, vocab_size)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_tokenizer_config(folder, sentence_config.transformer)
    _check_tokens(tokenizer, config, vocab_size)
    kind = tokenizer_class(config, sentence_config.family)
    if kind == "RoFormer":
        raise CheckpointError(
            f"{folder.name}: RoFormerTokenizer splits words with code that tokenizer.json does not "
            "contain (jieba); only tokenizers that tokenizer.json describes are supported"
        )
    # For ModernBERT, transformers uses tokenizer.json unchanged, whatever the tokenizer class.
    if kind in _REBUILT and sentence_config.family != "modernbert":
        _REBUILT[kind](tokenizer, config)
    if sentence_config.lowercase:
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    if sentence_config.multi:
        add_markers(tokenizer, sentence_config.multi)
    return tokenizer


def tokenizer_of_source(artifact: Artifact) -> Tokenizer:
    """Prepare the tokenizer again from an artifact's source, with truncation as in the service.

    Raises:
        ArtifactError: A file of the source cannot be read, or was changed since the export.
        CheckpointError: A file of the source is missing, invalid or unsupported.
    """
    folder, manifest = source_folder(artifact), artifact.manifest
    _, config, sentence_config = read_configs(folder, overrides_of(manifest))
    tokenizer = read_tokenizer(folder, sentence_config, config.vocab_size)
    tokenizer.enable_truncation(manifest.max_tokens, direction=manifest.truncation_side)
    return tokenizer


# Image token of Gemma 3. Text models have it in the tokenizer, but have no embedding for it.
_IMAGE_TOKENS = ("<image_soft_token>",)


def _without_images(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Return the tokenizer without image tokens outside the model's vocabulary."""
    content = json.loads(tokenizer.to_str())
    kept = [
        token
        for token in content["added_tokens"]
        if token["content"] not in _IMAGE_TOKENS or token["id"] < vocab_size
    ]
    if len(kept) == len(content["added_tokens"]):
        return tokenizer
    return Tokenizer.from_str(json.dumps({**content, "added_tokens": kept}))


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
    missing -= set(_IMAGE_TOKENS)
    if missing:
        raise CheckpointError(
            f"tokenizer_config.json adds the token {min(missing)!r}, which tokenizer.json lacks"
        )
