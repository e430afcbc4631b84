"""Model inputs of a target: the texts of a request, as the rows that its scalar depends on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from models.gradients.inputs import Row, UnitKind, Units, starts_of
from service.debug.job_types import Word
from service.debug.kinds import TAKES_PAIRS, Kind
from service.debug.request_models.base import PromptedText, Text
from service.debug.request_models.targets import MaxSim, Score, Target
from service.debug.responses import Token
from service.debug.state import DebugState
from service.debug.texts import row_of, tokenize, tokenize_pair, tokens_of
from service.debug.words import words_of
from service.inference.errors import InvalidInput
from service.inference.model.model import Model
from service.inference.results.vectors import vector_positions
from service.inference.tokenizing.rows import TokenizedText


@dataclass(frozen=True)
class Texts:
    """The texts of a request that a target depends on.

    Attributes:
        text: First text.
        text_pair: Second text, if there is one.
        target: Target, which can have a third text, `versus`.
        pointers: JSON pointers to the three texts. Tokens and words name their text by its index
            here.
    """

    text: Text
    text_pair: str | None
    target: Target
    pointers: tuple[str, str, str] = ("/text", "/text_pair", "/target/versus")


@dataclass(frozen=True)
class ModelInput:
    """A text, or a pair of texts that the model reads at once.

    Attributes:
        text: Its tokens, for display.
        row: Its tokens, as input of the reference model.
        fields: Index of each of its texts in `Texts.pointers`.
        pointer: JSON pointer to the field of the request that an error names.
        name: Names of the fields of all its texts, for messages.
    """

    text: TokenizedText
    row: Row
    fields: Sequence[int]
    pointer: str
    name: str


async def model_inputs_of(
    state: DebugState, model: Model, kind: Kind, texts: Texts
) -> list[ModelInput]:
    """Return the model inputs of a request.

    MaxSim has one input per text: the query, the document, and the document `versus`. A score with
    `versus` has two: the query with each of the documents. Other targets have one.

    Raises:
        InvalidInput: `text_pair` is set and does not apply to the model, or is missing. `versus` is
            the same document. A text is invalid or too long, or has no vectors.
        TooLarge: A text has too many characters.
    """
    if texts.text_pair is not None and kind not in TAKES_PAIRS:
        pointer = texts.pointers[1]
        raise InvalidInput(
            f"{pointer[1:]} applies to rerankers, classifiers and multi-vector models",
            pointer=pointer,
        )
    match texts.target:
        case MaxSim(versus=versus):
            return await _multi_vectors(state, model, texts, _documents(texts, versus))
        case Score(versus=str(versus)):
            return await _pairs(state, model, texts, _documents(texts, versus))
    if texts.text_pair is not None:
        return await _pairs(state, model, texts, [texts.text_pair])
    pointer = texts.pointers[0]
    text = await tokenize(state, model, texts.text, pointer)
    return [ModelInput(text, row_of(text), (0,), pointer, pointer[1:])]


def _documents(texts: Texts, versus: str | None) -> list[str]:
    text_pair = texts.text_pair
    if text_pair is None:
        raise InvalidInput(
            "the target compares a query with documents; set text to the query and text_pair to a "
            "document",
            pointer="/text_pair",
        )
    if versus == text_pair:
        raise InvalidInput(
            f"versus must be another document than {texts.pointers[1][1:]}: the margin of a "
            "document over itself is 0",
            pointer="/target/versus",
        )
    return [text_pair] if versus is None else [text_pair, versus]


async def _pairs(
    state: DebugState, model: Model, texts: Texts, others: Sequence[str]
) -> list[ModelInput]:
    """Return the pairs of the first text with each of the other texts."""
    first, inputs = texts.pointers[0], []
    for field, other in enumerate(others, start=1):
        # A text that is valid in its first pair is valid in the second, unless it is too long.
        own = texts.pointers[field]
        pointers = (first, own) if field == 1 else (own, own)
        pair = await tokenize_pair(state, model, texts.text, other, pointers)
        name = f"the pair of {first[1:]} and {own[1:]}"
        inputs.append(ModelInput(pair, row_of(pair), (0, field), pointers[0], name))
    return inputs


async def _multi_vectors(
    state: DebugState, model: Model, texts: Texts, documents: Sequence[str]
) -> list[ModelInput]:
    """Return a query and its documents, with the prompts and token rules of /score."""
    query = texts.text
    if isinstance(query, PromptedText):
        if query.prompt_name not in (None, "query"):
            raise InvalidInput(
                "the text is a query and has the prompt query; omit prompt_name",
                pointer=f"{texts.pointers[0]}/prompt_name",
            )
        query = query.text
    roles = [(query, "query"), *((document, "document") for document in documents)]
    inputs = []
    for field, (text, prompt_name) in enumerate(roles):
        pointer = texts.pointers[field]
        prompted = PromptedText(text=text, prompt_name=prompt_name)
        tokenized = await tokenize(state, model, prompted, pointer)
        positions = vector_positions(tokenized.row, model.tokenizer.rules(prompt_name)).tolist()
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


def words_of_inputs(inputs: Sequence[ModelInput]) -> list[Word]:
    """Return the words of all inputs; indices of tokens count those of all inputs."""
    words: list[Word] = []
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


def units_of_inputs(inputs: Sequence[ModelInput], words: Sequence[Word], kind: UnitKind) -> Units:
    """Return the words or tokens of all texts; special tokens and prompts belong to none.

    A text that several inputs contain has each of its units once, with tokens in all inputs.
    """
    units: dict[tuple[int, ...], list[int]] = {}
    if kind == "words":
        for word in words:
            key = word.text, word.start, word.end
            units.setdefault(key, []).extend(word.tokens)
        return Units(kind, list(units.values()))
    for each, start in _with_starts(inputs):
        counts = Counter[int]()
        for position, number in enumerate(each.text.sequence_ids):
            if number is not None:
                units.setdefault((each.fields[number], counts[number]), []).append(start + position)
                counts[number] += 1
    return Units(kind, list(units.values()))


def tokens_of_inputs(inputs: Sequence[ModelInput]) -> list[Token]:
    """Return the tokens of all inputs, for a response."""
    return [
        token
        for index, each in enumerate(inputs)
        for token in tokens_of(each.text, each.fields, index)
    ]
