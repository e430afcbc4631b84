"""Texts of gradient requests: their tokens, model inputs and attribution baselines."""

import asyncio
from collections.abc import Sequence

from models.gradients.inputs import BaselineName, Row
from service.debug.kinds import READS_PAIRS, Kind
from service.debug.request_models.base import Input, Text, TextOrPair
from service.debug.responses import Token
from service.debug.state import DebugState
from service.inference.errors import InvalidInput, TooLarge, VitrineError
from service.inference.model.model import Model
from service.inference.tokenizing.rows import TokenizedText


async def tokenize(state: DebugState, model: Model, text: Text, pointer: str) -> TokenizedText:
    """Tokenise a text, with its prompt.

    Raises:
        InvalidInput: The text is invalid, its prompt is unknown, its weights are looked up, or it
            has more tokens than `debug.max_tokens` or the model allows.
        TooLarge: The text has too many characters.
    """
    try:
        tokenized = await asyncio.to_thread(model.tokenizer.tokenized_text, *_parts(text))
    except (InvalidInput, TooLarge) as error:
        # The tokenizer sets index and pointer for the field `inputs` of /encode.
        error.index, error.pointer = None, _pointer(error, text, pointer)
        raise
    if tokenized.row.is_looked_up:
        raise InvalidInput(
            "texts with this prompt have no gradient: their weights are looked up in a table, "
            "without the network; choose another prompt_name",
            code="no_gradient",
            pointer=pointer,
        )
    _check_length(state, tokenized, pointer)
    return tokenized


async def tokenize_input(
    state: DebugState, model: Model, kind: Kind, text: Input, pointer: str
) -> TokenizedText:
    """Tokenise a text, or a pair of texts that the model reads at once.

    Raises:
        InvalidInput: See `tokenize`; or `text_pair` is set, and the model does not read pairs.
        TooLarge: A text has too many characters.
    """
    if not isinstance(text, TextOrPair) or text.text_pair is None:
        return await tokenize(state, model, text, pointer)
    if kind not in READS_PAIRS:
        raise InvalidInput(
            "text_pair applies to rerankers and classifiers, which read two texts at once",
            pointer=f"{pointer}/text_pair",
        )
    pointers = f"{pointer}/text", f"{pointer}/text_pair"
    return await tokenize_pair(state, model, text, text.text_pair, pointers)


async def tokenize_pair(
    state: DebugState, model: Model, text: Text, other: str, pointers: tuple[str, str]
) -> TokenizedText:
    """Tokenise two texts that the model reads at once, the first with its prompt.

    Args:
        state: State of the application.
        model: The model that reads them.
        text: First text.
        other: Second text.
        pointers: JSON pointers to the fields of both texts, for errors. Errors of the whole pair
            have the first.

    Raises:
        InvalidInput: See `tokenize`.
        TooLarge: A text has too many characters.
    """
    first, prompt_name = _parts(text)
    try:
        tokenized = await asyncio.to_thread(
            model.tokenizer.tokenized_pair, first, other, prompt_name
        )
    except (InvalidInput, TooLarge) as error:
        error.index, error.pointer = None, _pointer(error, text, pointers[error.index or 0])
        raise
    _check_length(state, tokenized, pointers[0])
    return tokenized


async def tokenize_all(
    state: DebugState, model: Model, texts: Sequence[Text]
) -> list[TokenizedText]:
    """Tokenise the texts of the field `texts`, see `tokenize`."""
    return [
        await tokenize(state, model, text, f"/texts/{index}") for index, text in enumerate(texts)
    ]


def _pointer(error: VitrineError, text: Text, pointer: str) -> str:
    """Return the pointer to the field at fault, given the pointer to the text."""
    if error.code != "unknown_prompt":
        return pointer
    if isinstance(text, TextOrPair):  # text and prompt_name are beside each other
        pointer = pointer.removesuffix("/text")
    return f"{pointer}/prompt_name"


def _check_length(state: DebugState, tokenized: TokenizedText, pointer: str) -> None:
    limit, length = state.settings.debug.max_tokens, len(tokenized.row.ids)
    if length > limit:
        what = "pair of texts" if 1 in tokenized.sequence_ids else "text"
        raise InvalidInput(
            f"the {what} has {length} tokens; the limit is {limit}",
            code="too_many_tokens",
            pointer=pointer,
        )


def _parts(text: Text) -> tuple[str, str | None]:
    return (text, None) if isinstance(text, str) else (text.text, text.prompt_name)


def prompted(model: Model, text: Text) -> str:
    """Return a text with its prompt prepended.

    Raises:
        InvalidInput: The prompt is unknown.
    """
    return model.tokenizer.prompted(*_parts(text))


def row_of(text: TokenizedText) -> Row:
    """Return a text as input of the reference model."""
    row = text.row
    return Row(row.ids, row.prompt_tokens, row.adapter, row.token_types, row.unattended)


def baseline_of(text: TokenizedText, name: BaselineName, pointer: str) -> Sequence[int] | None:
    """Return the token ids of the baseline, or None for a baseline of zeros.

    Raises:
        InvalidInput: The tokenizer has no token for the baseline, or the token ids of the text and
            of its baseline are equal.
    """
    if name == "zero":
        return None
    if name not in text.baseline:
        raise InvalidInput(
            f"the model's tokenizer has no {name} token; choose another baseline",
            code="no_baseline",
            pointer="/baseline",
        )
    if text.baseline[name] == text.row.ids:
        raise InvalidInput(
            "the token ids of the text equal those of its baseline; choose another baseline",
            code="baseline_equals_input",
            pointer=pointer,
        )
    return text.baseline[name]


def tokens_of(
    text: TokenizedText, fields: Sequence[int] = (0,), model_input: int = 0
) -> list[Token]:
    """Return the tokens of a text, or of a pair of texts, for a response.

    Args:
        text: Text or pair of texts.
        fields: Index of each of its texts in the request.
        model_input: Index of the model input that the text or pair is.
    """
    columns = zip(text.tokens, text.spans, text.sequence_ids, strict=True)
    return [
        Token(
            token=token,
            start=span and span[0],
            end=span and span[1],
            text=None if index is None else fields[index],
            input=model_input,
        )
        for token, span, index in columns
    ]
