"""Model inputs of a target: the texts of a request, as the rows that its scalar depends on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from models.gradients.inputs import InputRow, UnitKind, Units, starts_of
from service.debug.pipeline.call import Call
from service.debug.pipeline.model_kinds import TAKES_PAIRS
from service.debug.pipeline.request_fields import PromptedText, Text
from service.debug.pipeline.response import TextWord, Token
from service.debug.pipeline.texts import row_of, tokenize, tokens_of
from service.debug.pipeline.words import words_of
from service.debug.target import MaxSimTarget, ScoreTarget, Target
from service.inference.errors import InvalidInput
from service.inference.results.vectors import vector_positions
from service.inference.tokenizing.rows import TokenizedText

# JSON pointers to the texts of a request that a target depends on. Tokens and words name their text
# by its index here.
Pointers = tuple[str, str, str]
POINTERS: Pointers = ("/text", "/text_pair", "/target/versus")
# Texts that a baseline replaces: all of them, the first, or those that are compared with the first.
ReplacedTexts = Literal["both", "text", "text_pair"]


@dataclass(frozen=True)
class ModelInput:
    """A text, or a pair of texts that the model reads at once.

    Attributes:
        text: Its tokens, for display.
        row: Its tokens, as input of the reference model.
        fields: Index of each of its texts in `POINTERS`.
        pointer: JSON pointer to the field of the request that an error names.
        name: Names of the fields of all its texts, for messages.
    """

    text: TokenizedText
    row: InputRow
    fields: Sequence[int]
    pointer: str
    name: str


async def model_inputs(
    call: Call,
    target: Target,
    text: Text,
    text_pair: str | None,
    pointers: Pointers = POINTERS,
) -> list[ModelInput]:
    """Return the model inputs of a request.

    MaxSim has one input per text: the query, the document, and the document `versus`. A score with
    `versus` has two: the query with each of the documents. Other targets have one.

    Args:
        call: Call of the route.
        target: Target, which can have a third text, `versus`.
        text: First text.
        text_pair: Second text, if there is one.
        pointers: JSON pointers to the three texts.

    Raises:
        InvalidInput: `text_pair` is set and does not apply to the model, or is missing. `versus` is
            the same document. A text is invalid or too long, or has no vectors.
        TooLarge: A text has too many characters.
    """
    if text_pair is not None and call.kind not in TAKES_PAIRS:
        raise InvalidInput(
            f"{pointers[1][1:]} applies to rerankers, classifiers and multi-vector models",
            pointer=pointers[1],
        )
    match target:
        case MaxSimTarget(versus=versus):
            documents = _documents(text_pair, versus, pointers)
            return await _multi_vectors(call, text, documents, pointers)
        case ScoreTarget(versus=str(versus)):
            documents = _documents(text_pair, versus, pointers)
            return await _pairs(call, text, documents, pointers)
    if text_pair is not None:
        return await _pairs(call, text, [text_pair], pointers)
    tokenized = await tokenize(call, text, pointers[0])
    return [ModelInput(tokenized, row_of(tokenized), (0,), pointers[0], pointers[0][1:])]


def _documents(text_pair: str | None, versus: str | None, pointers: Pointers) -> list[str]:
    if text_pair is None:
        raise InvalidInput(
            "the target compares a query with documents; set text to the query and text_pair to a "
            "document",
            pointer="/text_pair",
        )
    if versus == text_pair:
        raise InvalidInput(
            f"versus must be another document than {pointers[1][1:]}: the margin of a "
            "document over itself is 0",
            pointer="/target/versus",
        )
    return [text_pair] if versus is None else [text_pair, versus]


async def _pairs(
    call: Call, text: Text, others: Sequence[str], pointers: Pointers
) -> list[ModelInput]:
    """Return the pairs of the first text with each of the other texts."""
    first, inputs = pointers[0], []
    for field, (other, own) in enumerate(zip(others, pointers[1:], strict=False), start=1):
        # A text that is valid in its first pair is valid in the second, unless it is too long.
        pair = await tokenize(call, text, first if field == 1 else own, other, own)
        name = f"the pair of {first[1:]} and {own[1:]}"
        inputs.append(ModelInput(pair, row_of(pair), (0, field), first, name))
    return inputs


async def _multi_vectors(
    call: Call, query: Text, documents: Sequence[str], pointers: Pointers
) -> list[ModelInput]:
    """Return a query and its documents, with the prompts and token rules of /score."""
    if isinstance(query, PromptedText):
        if query.prompt_name not in (None, "query"):
            raise InvalidInput(
                "the text is a query and has the prompt query; omit prompt_name",
                pointer=f"{pointers[0]}/prompt_name",
            )
        query = query.text
    roles = [(query, "query"), *((document, "document") for document in documents)]
    inputs = []
    for field, (text, prompt_name) in enumerate(roles):
        pointer = pointers[field]
        prompted = PromptedText(text=text, prompt_name=prompt_name)
        tokenized = await tokenize(call, prompted, pointer)
        positions = vector_positions(
            tokenized.row, call.model.tokenizer.rules(prompt_name)
        ).tolist()
        if not positions:
            raise InvalidInput(
                f"the {prompt_name} has no vectors: the model skips all of its tokens",
                code="no_vectors",
                pointer=pointer,
            )
        row = replace(row_of(tokenized), vector_positions=positions)
        inputs.append(ModelInput(tokenized, row, (field,), pointer, pointer[1:]))
    return inputs


def _with_starts(inputs: Sequence[ModelInput]) -> Iterator[tuple[ModelInput, int]]:
    """Return each input with the index of its first token, among the tokens of all inputs."""
    return zip(inputs, starts_of([each.row for each in inputs]), strict=True)


def _is_replaced(field: int, of: ReplacedTexts) -> bool:
    """Return whether a baseline replaces a text, given its index in `POINTERS`."""
    return of == "both" or (field == 0) == (of == "text")


def kept_tokens(inputs: Sequence[ModelInput], of: ReplacedTexts) -> list[list[int]]:
    """Return the positions of the tokens of each input that its baseline keeps.

    If a baseline replaces one of two texts, they are all tokens but those of this text.

    Raises:
        InvalidInput: The text has no tokens.
    """
    if of == "both":
        return [[] for _ in inputs]
    kept = [
        [
            position
            for position, number in enumerate(each.text.sequence_ids)
            if number is None or not _is_replaced(each.fields[number], of)
        ]
        for each in inputs
    ]
    if all(len(own) == len(each.row.ids) for own, each in zip(kept, inputs, strict=True)):
        raise InvalidInput(f"{of} has no tokens to replace", code="no_tokens", pointer="/of")
    return kept


def words_of_inputs(inputs: Sequence[ModelInput]) -> list[TextWord]:
    """Return the words of all inputs; indices of tokens count those of all inputs."""
    words: list[TextWord] = []
    for each, start in _with_starts(inputs):
        words += [
            replace(
                word,
                text=each.fields[word.text],
                tokens=[start + token for token in word.tokens],
            )
            for word in words_of(each.text)
        ]
    return words


def units_of_inputs(
    inputs: Sequence[ModelInput], words: Sequence[TextWord], kind: UnitKind, of: ReplacedTexts
) -> Units:
    """Return the words or tokens of the texts that a baseline replaces.

    Special tokens and prompts belong to none. A text that several inputs contain has each of its
    units once, with tokens in all inputs.
    """
    units: dict[tuple[int, ...], list[int]] = {}
    if kind == "words":
        for word in words:
            key = word.text, word.start, word.end
            if _is_replaced(word.text, of):
                units.setdefault(key, []).extend(word.tokens)
        return Units(kind, list(units.values()))
    for each, start in _with_starts(inputs):
        counts = Counter[int]()
        for position, number in enumerate(each.text.sequence_ids):
            if number is not None and _is_replaced(field := each.fields[number], of):
                units.setdefault((field, counts[number]), []).append(start + position)
                counts[number] += 1
    return Units(kind, list(units.values()))


def tokens_of_inputs(inputs: Sequence[ModelInput]) -> list[Token]:
    """Return the tokens of all inputs, for a response."""
    return [
        token
        for index, each in enumerate(inputs)
        for token in tokens_of(each.text, each.fields, index)
    ]
