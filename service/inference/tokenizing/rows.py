"""Rows of token ids, which the model reads, prompts and tokenised texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from models.manifest import TokenRules
from models.packing import NO_ADAPTER

# Start and end of a token in its text; the end is exclusive.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one input, as passed to the model.

    Attributes:
        ids: Token ids, special tokens included.
        truncated: Whether the input had too many tokens and was truncated.
        prompt_tokens: Number of leading tokens that are not pooled: a prompt and the special tokens
            before it. 0 if there is no prompt, or the model pools it.
        adapter: Index of the adapter that has the prompt's name; `NO_ADAPTER`: none.
        offsets: Span of each token in the text, in characters; None for special tokens and prompt
            tokens. The attribute is None if offsets were not requested or the input was token ids.
        token_types: Type of each token of a pair of texts; empty: all tokens have type 0.
        unattended: Number of last tokens that no token attends to.
        continues: Whether each token continues the word of the token before it; empty: not
            requested.
        is_looked_up: Whether the row's weights are looked up, without the engine.
        words: Position of the first token of each word, or `NO_TOKEN`; empty: not requested.
        labels: Position of the token of each label; empty: the row has no labels.
    """

    ids: Sequence[int]
    truncated: bool
    prompt_tokens: int
    adapter: int = NO_ADAPTER
    offsets: Sequence[Span | None] | None = None
    token_types: Sequence[int] = ()
    unattended: int = 0
    continues: Sequence[bool] = ()
    is_looked_up: bool = False
    words: Sequence[int] = ()
    labels: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the model, and the adapter of the same name.

    Attributes:
        text: Text that is prepended to inputs.
        tokens: Number of leading tokens that are not pooled; see `Row.prompt_tokens`.
        adapter: Index of the adapter; `NO_ADAPTER`: none.
    """

    text: str
    tokens: int
    adapter: int


NO_PROMPT = Prompt("", 0, NO_ADAPTER)


@dataclass(frozen=True)
class TokenizedText:
    """A text or a pair of texts and its tokens, for display.

    Attributes:
        texts: The text, or both texts.
        row: Token ids of the text or pair.
        tokens: Spelling of each token in the vocabulary.
        spans: Span of each token in its text, in characters; None for special tokens and prompt
            tokens.
        sequence_ids: Index of each token's text, 0 or, in a pair, 1; None for special tokens and
            prompt tokens.
        baseline: Attribution baselines by name, "pad" or "mask": the token ids of the row, with
            each token of the text replaced by the token of that name. Special tokens and prompt
            tokens are kept. A name is missing if the vocabulary lacks its token.
    """

    texts: Sequence[str]
    row: Row
    tokens: Sequence[str]
    spans: Sequence[Span | None]
    sequence_ids: Sequence[int | None]
    baseline: Mapping[str, Sequence[int]]


def fill_row(row: Row, rules: TokenRules) -> Row:
    """Return the row, with filler tokens up to the minimum length of the rules."""
    missing = rules.min_tokens - len(row.ids)
    if missing <= 0:
        return row
    return replace(
        row,
        ids=[*row.ids, *[rules.filler] * missing],
        offsets=None if row.offsets is None else [*row.offsets, *[None] * missing],
        unattended=0 if rules.attends_to_filler else missing,
    )


def strip_span(text: str, start: int, end: int) -> Span:
    """Return a span of a text without the white space at its ends."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())
