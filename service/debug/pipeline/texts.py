"""Texts of a request: their tokens, as inputs of the reference model and in the response."""

import asyncio
from collections.abc import Collection, Sequence

from models.gradients.inputs import BaselineName, InputRow
from service.debug.pipeline.call import Call
from service.debug.pipeline.request_fields import Text, TextOrPair
from service.debug.pipeline.response import Token
from service.inference.errors import InvalidInput, TooLarge, VitrineError
from service.inference.model.model import Model
from service.inference.tokenizing.rows import TokenizedText


async def tokenize(
    call: Call,
    text: Text,
    pointer: str,
    text_pair: str | None = None,
    pair_pointer: str = "",
) -> TokenizedText:
    """Tokenise a text with its prompt, or a pair of texts that the model reads at once.

    Args:
        call: Call of the route.
        text: Text, or the first text of a pair.
        pointer: JSON pointer to the field of the text, for errors of the text or of the whole pair.
        text_pair: Second text of a pair; None: there is no pair.
        pair_pointer: JSON pointer to the field of the second text.

    Raises:
        InvalidInput: A text is invalid, its prompt is unknown, its weights are looked up, or text
            or pair have more tokens than `debug.max_tokens` or the model allows.
        TooLarge: A text has too many characters.
    """
    first, prompt_name = _parts(text)
    model = call.model
    try:
        tokenized = await (
            asyncio.to_thread(model.tokenizer.tokenized_text, first, prompt_name)
            if text_pair is None
            else asyncio.to_thread(model.pair_rows.tokenize, first, text_pair, prompt_name)
        )
    except (InvalidInput, TooLarge) as error:
        # The tokenizer sets index and pointer for the field `inputs` of /encode.
        is_second = text_pair is not None and error.index == 1
        error.pointer = _pointer(error, text, pair_pointer if is_second else pointer)
        error.index = None
        raise
    if tokenized.row.is_looked_up:
        raise InvalidInput(
            "texts with this prompt have no gradient: their weights are looked up in a table, "
            "without the network; choose another prompt_name",
            code="no_gradient",
            pointer=pointer,
        )
    limit, length = call.state.settings.debug.max_tokens, len(tokenized.row.ids)
    if length > limit:
        what = "text" if text_pair is None else "pair of texts"
        raise InvalidInput(
            f"the {what} has {length} tokens; the limit is {limit}",
            code="too_many_tokens",
            pointer=pointer,
        )
    return tokenized


async def tokenize_all(call: Call, texts: Sequence[Text]) -> list[TokenizedText]:
    """Tokenise the texts of the field `texts`, see `tokenize`."""
    return [await tokenize(call, text, f"/texts/{index}") for index, text in enumerate(texts)]


def _pointer(error: VitrineError, text: Text, pointer: str) -> str:
    """Return the pointer to the field at fault, given the pointer to the text."""
    if error.code != "unknown_prompt":
        return pointer
    if isinstance(text, TextOrPair):  # text and prompt_name are beside each other
        pointer = pointer.removesuffix("/text")
    return f"{pointer}/prompt_name"


def _parts(text: Text) -> tuple[str, str | None]:
    return (text, None) if isinstance(text, str) else (text.text, text.prompt_name)


def text_with_prompt(model: Model, text: Text) -> str:
    """Return a text with its prompt prepended.

    Raises:
        InvalidInput: The prompt is unknown.
    """
    return model.tokenizer.with_prompt(*_parts(text))


def row_of(text: TokenizedText) -> InputRow:
    """Return a text as input of the reference model."""
    row = text.row
    return InputRow(row.ids, row.prompt_tokens, row.adapter, row.token_types, row.unattended)


def baseline_of(
    text: TokenizedText, name: BaselineName, pointer: str, kept: Collection[int] = ()
) -> Sequence[int] | None:
    """Return the token ids of the baseline, or None for a baseline of zeros.

    Args:
        text: Text or pair of texts.
        name: Name of the baseline.
        pointer: JSON pointer to the field of the text.
        kept: Positions of tokens that the baseline keeps.

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
    ids = text.row.ids
    baseline = [
        token if position in kept else other
        for position, (token, other) in enumerate(zip(ids, text.baseline[name], strict=True))
    ]
    if baseline == list(ids) and len(kept) < len(ids):
        raise InvalidInput(
            "the token ids of the text equal those of its baseline; choose another baseline",
            code="baseline_equals_input",
            pointer=pointer,
        )
    return baseline


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
