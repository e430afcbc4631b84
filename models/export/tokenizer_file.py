"""The tokenizer of a model folder, prepared for serving as one self-contained file.

It is the tokenizer that transformers builds from the folder. Truncation and padding are disabled,
because the service handles both.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from models.artifact import Artifact
from models.export.checkpoint import read_configs
from models.export.gliner_rows import check_tokenizer
from models.export.model_folder import CheckpointError, ModelFolder, join, source_folder
from models.export.sentence_config import SentenceConfig, overrides_of
from models.export.token_rules import add_markers
from models.export.tokenizer_settings import CONFIG, TOKENIZER, text_failures
from models.export.transformers_tokenizer import (
    TOKEN_FILES,
    check_random,
    load_tokenizer,
    no_file_error,
    read_tokenizer_file,
)
from models.packing import prompt_length
from models.panics import panics_as_errors

# Texts that the file must tokenise as transformers does: white space, control characters, scripts,
# emoji, punctuation, numbers, combining characters, long words, and look-alikes of special tokens.
_TEXTS = (
    "",
    " ",
    "a",
    "The cat sat on the mat.",
    "  two  spaces\tand\r\nlines\n\n\u00a0\u2003\u3000end ",
    "nul\x00 bell\x07 escape\x1b delete\x7f \u200b\u200d\ufeff\ufffd",
    "Don't stop -- \u201cquoted\u201d, (1,234.5%) #tag @name a_b-c/d [x] {y} <z> \\ | ~ ``x''",
    "ÜNÏCÖDÉ Straße İstanbul e\u0301 ﬁne \uff21\uff22 ½ ²",
    "русский текст ελληνικά Σίσυφος עברית العربية हिन्दी ไทย",
    "日本語の文章。中文字符 한국어 ｶﾀｶﾅ",
    "🎉🚀 👩\u200d💻 ❤️ 🇩🇪",
    "a" * 99,
    "b" * 101 + " " + "長" * 250,
    "[CLS] [SEP] [PAD] [MASK] [UNK] <s> </s> <pad> <mask> <unk> [cls]<S>",
)


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
        CheckpointError: The tokenizer is missing, invalid or unsupported, or does not match the
            model.
    """
    subfolder = sentence_config.transformer
    reference = load_tokenizer(folder, subfolder, sentence_config.family)
    try:
        with panics_as_errors("the tokenizers library"):
            tokenizer = _read(reference.backend_tokenizer.to_str(), reference.backend_tokenizer)
    except Exception as error:  # the class has a step in Python, as that of RoFormer (jieba)
        raise no_file_error(folder, reference) from error
    check_random(tokenizer, join(subfolder, TOKENIZER))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_tokens(tokenizer, reference, folder.name)
    _check_types(tokenizer, sentence_config, join(subfolder, TOKENIZER))
    tokenizer = _without_unused(tokenizer, folder, subfolder, vocab_size)
    _check_ids(tokenizer, vocab_size)
    if sentence_config.lowercase:
        _add_lowercase(tokenizer)
        check_random(tokenizer, join(subfolder, TOKENIZER))
    if not sentence_config.include_prompt:
        _check_prompts(tokenizer, reference, sentence_config)
    if sentence_config.spans:
        check_tokenizer(tokenizer, reference, sentence_config.spans)
    if sentence_config.multi:
        add_markers(tokenizer, sentence_config.multi)
    return tokenizer


def _check_types(tokenizer: Tokenizer, config: SentenceConfig, name: str) -> None:
    """Raise CheckpointError if a text has tokens of another type than 0, or a pair of too many."""
    letters = Tokenizer(models.WordLevel({"a": 0}, "a"))  # others may have no token for a letter
    letters.post_processor = tokenizer.post_processor
    if config.token_types > 1 and any(letters.encode("a").type_ids):
        raise CheckpointError(
            f"{name}: the post_processor gives tokens of a single text another type than 0, which "
            "is not supported"
        )
    largest = max(letters.encode("a", "a").type_ids)
    if config.labels and 1 < config.token_types <= largest:
        raise CheckpointError(
            f"{name}: the post_processor gives tokens of a pair the type {largest}; the model has "
            f"{config.token_types} types"
        )


def _check_prompts(tokenizer: Tokenizer, reference: Any, config: SentenceConfig) -> None:  # noqa: ANN401
    """Raise CheckpointError if the end of a prompt counts otherwise in sentence-transformers."""
    added = tokenizer.get_added_tokens_decoder()
    for name, prompt in config.prompts.items():
        with text_failures(f"the tokenizer fails on the prompt {name!r}"):
            ids = tokenizer.encode(prompt).ids if prompt else []
        if not ids:
            continue
        is_special = prompt_length(ids, added) < len(ids)
        if is_special != (ids[-1] in reference.all_special_ids):
            file = TOKENIZER if is_special else CONFIG
            raise CheckpointError(
                f"the prompt {name!r} ends in {tokenizer.id_to_token(ids[-1])!r}, a special token "
                f"in {file} alone; without include_prompt, only special tokens that {CONFIG} names "
                "too are supported there"
            )


def _add_lowercase(tokenizer: Tokenizer) -> None:
    """Lowercase texts first, in place, unless a step does; as sentence-transformers."""
    own = json.loads(tokenizer.to_str())["normalizer"] or {}
    if "Lowercase" not in [step.get("type") for step in own.get("normalizers", [own])]:
        steps = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


def tokenizer_of_source(artifact: Artifact) -> Tokenizer:
    """Prepare the tokenizer again from an artifact's source, with truncation as in the service.

    Raises:
        ArtifactError: A file of the source cannot be read, or was changed since the export.
        CheckpointError: A file of the source is missing, invalid or unsupported.
    """
    folder, manifest = source_folder(artifact), artifact.manifest
    _, config, sentence_config = read_configs(folder, overrides_of(artifact))
    tokenizer = read_tokenizer(folder, sentence_config, config.vocab_size)
    tokenizer.enable_truncation(manifest.max_tokens, direction=manifest.truncation_side)
    return tokenizer


# Image token of Gemma 3. Text models have it in the tokenizer, but have no embedding for it.
_IMAGE_TOKENS = ("<image_soft_token>",)


def _without_unused(
    tokenizer: Tokenizer, folder: ModelFolder, subfolder: str, vocab_size: int
) -> Tokenizer:
    """Return the tokenizer without added tokens that the model has no embedding for.

    These are image tokens, and tokens that a class of transformers has by default. Tokens that a
    file of the folder names stay.
    """
    added = json.loads(tokenizer.to_str())["added_tokens"]
    beyond = {token["content"] for token in added if token["id"] >= vocab_size}
    if not beyond:
        return tokenizer
    own = read_tokenizer_file(folder, subfolder)
    files = [folder.json(join(subfolder, name), dict, {}) for name in (CONFIG, *TOKEN_FILES)]
    named = {*own.get_vocab(with_added_tokens=True), *_strings(files)} - {*_IMAGE_TOKENS}
    kept = [token for token in added if token["content"] not in beyond - named]
    content = {**json.loads(tokenizer.to_str()), "added_tokens": kept}
    return _read(json.dumps(content), tokenizer)


def _read(content: str, original: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the model of another one: reading the scores of Unigram rounds them.

    Args:
        content: Content of its file.
        original: The other tokenizer, with equal tokens.
    """
    tokenizer = Tokenizer.from_str(content)
    tokenizer.model = original.model
    return tokenizer


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in _strings(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in _strings(part))


def _check_ids(tokenizer: Tokenizer, vocab_size: int) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for template in (tokenizer.encode(""), tokenizer.encode("", "")):
        if len(template.tokens) != len(template.ids):
            raise CheckpointError(
                f"{TOKENIZER}: the post_processor has another number of special tokens than of "
                "their ids"
            )
        vocabulary |= dict(zip(template.tokens, template.ids, strict=True))
    token, largest = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives {token!r} the id {largest}; the model's vocabulary has only "
            f"{vocab_size} tokens"
        )


def _check_tokens(tokenizer: Tokenizer, reference: Any, name: str) -> None:  # noqa: ANN401
    """Raise CheckpointError unless the file gives fixed texts the tokens of transformers.

    The texts have every added token: alone, between words, and beside others without a space.
    """
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = [*_TEXTS, *(f"{token} a {token}b {token}{token}" for token in added)]
    pairs = [*zip(texts, reversed(texts), strict=True)][: 2 * len(_TEXTS)]
    with text_failures(f"{name}: the tokenizer fails on a text"):
        expected = reference(texts, verbose=False)["input_ids"]
        first, second = map(list, zip(*pairs, strict=True))
        expected_pairs = reference(first, second, verbose=False)["input_ids"]
        actual = [encoding.ids for encoding in tokenizer.encode_batch([*texts, *pairs])]
    for text, ours, theirs in zip(
        [*texts, *pairs], actual, [*expected, *expected_pairs], strict=True
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{name}: transformers' AutoTokenizer, with the tokenizer_class "
                f"{type(reference).__name__}, gives {text!r} other tokens than its tokenizer.json; "
                "a setting in tokenizer_config.json has an effect that no tokenizer.json can have"
            )
