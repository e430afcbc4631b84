"""Rows of GLiNER models at export: the check of the tokenizer, and inputs of the self-check."""

from typing import Any

from tokenizers import Tokenizer

from models.export.gliner import CONFIG, SpanConfig
from models.export.model_folder import CheckpointError
from models.export.sources import GLINER_FOLDER
from models.manifest import SpanRules
from models.packing import first_tokens

# Words that must have the tokens that transformers gives them.
_CHECK_WORDS = ("The", "caf\u00e9", "3", ".", "\u65e5\u672c", "\u200d", "\U0001f389", "a-b", "[")
_CHECK_LABELS = ("person", "place of birth")


def check_tokenizer(tokenizer: Tokenizer, reference: Any, config: SpanConfig) -> None:  # noqa: ANN401
    """Check that the tokenizer gives words the tokens that they have in the package.

    Args:
        tokenizer: Tokenizer for the artifact.
        reference: Tokenizer of transformers.
        config: Settings of the model.

    Raises:
        CheckpointError: The marker of labels has another token id than in `CONFIG`, the tokens of
            words differ from those of transformers, or rows would lose their first tokens.
    """
    marker = config.rules.label_marker
    if tokenizer.token_to_id(marker) != config.label_id:
        raise CheckpointError(
            f"{CONFIG}: class_token_index is {config.label_id}, but the tokenizer gives {marker!r} "
            f"the id {tokenizer.token_to_id(marker)}; {GLINER_FOLDER}"
        )
    if reference.truncation_side != "right":
        raise CheckpointError(
            "the tokenizer truncates the left side, where the labels of a row are"
        )
    words = [*_prompt(config.rules), *_CHECK_WORDS]
    ids = tokenizer.encode(words, is_pretokenized=True).ids
    try:
        expected = reference(words, is_split_into_words=True, verbose=False)["input_ids"]
    except Exception as error:
        raise CheckpointError(f"the tokenizer fails on words: {error}") from error
    # The package adds the tokens for begin and end, where a tokenizer has them.
    begin, end = reference.bos_token_id, reference.eos_token_id
    if ids != expected or ids.count(config.label_id) != len(_CHECK_LABELS):
        raise CheckpointError("the tokenizer gives words other tokens than transformers' does")
    if begin not in (None, ids[0]) or end not in (None, ids[-1]):
        raise CheckpointError(
            "the tokenizer does not add its bos_token or eos_token to texts, as the package gliner "
            "does"
        )


def check_row(
    tokenizer: Tokenizer, rules: SpanRules, text: str
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Return the token ids of a text with labels, for the self-check, and positions in them.

    Returns:
        The ids, the position of each word's first token, and the position of each label's token.
    """
    prompt = _prompt(rules)
    encoding = tokenizer.encode([*prompt, *text.split()[: rules.max_words]], is_pretokenized=True)
    first = first_tokens(encoding.word_ids)
    words = tuple(position for word, position in first.items() if word >= len(prompt))
    return encoding.ids, words, tuple(first[2 * i] for i in range(len(_CHECK_LABELS)))


def least_tokens(tokenizer: Tokenizer, rules: SpanRules) -> int:
    """Return the length of the self-check's labels and one token of a text."""
    return len(tokenizer.encode(_prompt(rules), is_pretokenized=True).ids) + 1


def _prompt(rules: SpanRules) -> list[str]:
    labels = [word for label in _CHECK_LABELS for word in (rules.label_marker, label)]
    return [*labels, rules.text_marker]
