"""Texts of an explanation, and numbers of their units, for its repr and for notebooks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from models.printable import embedded
from service.inference.explain.notebook_html import (
    Chip,
    Passage,
    explanation_html,
    format_number,
    format_signed,
)
from service.inference.tokenizing.rows import Span

# Number of units in a repr, those with the largest numbers.
_IN_REPR = 3
# Maximum number of unknown parts of a text that are named.
_NAMED = 5
# A number that is smaller than this part of the result is rounding: the result of a text depends on
# its batch, by up to a few millionths.
ROUNDING = 1e-5


class ExplainedText(Protocol):
    """A text of an explanation; see `TextEffects`."""

    @property
    def text(self) -> int:
        """Index of the text in its pair."""

    @property
    def content(self) -> str:
        """The text."""

    @property
    def read(self) -> Span:
        """Span of the text that the model reads."""

    @property
    def whole(self) -> float:
        """Result of that part."""

    @property
    def rows(self) -> Mapping[str, Sequence[Chip]]:
        """Units, by what they are; the first of them are those of the repr."""


class PicturedExplanation(Protocol):
    """An explanation by deletion or Shapley values; see `Deletions`."""

    @property
    def texts(self) -> Sequence[ExplainedText]:
        """Texts with the effects on the score."""

    @property
    def raw_texts(self) -> Sequence[ExplainedText]:
        """Texts with the effects on the logit."""

    @property
    def label(self) -> str | None:
        """Label of the score."""

    @property
    def unknown(self) -> Sequence[Sequence[Span]]:
        """Spans of each text that the model reads as the unknown token."""

    @property
    def meaning(self) -> str:
        """Meaning of a unit's number, with a place for the name of the result."""


def picture(heading: str, explanations: Sequence[tuple[str, PicturedExplanation]]) -> str:
    """Return explanations as HTML, on one scale.

    Args:
        heading: Line above all texts.
        explanations: Each explanation, and the beginning of the lines above its texts.
    """
    passages = [
        Passage(f"{title}{name}, {kind}{_limits(text, explanation)}", text.content, chips)
        for title, explanation in explanations
        for name, text in zip(_names(explanation), _texts(explanation), strict=True)
        for kind, chips in text.rows.items()
    ]
    first = explanations[0][1]
    results = [text.whole for _, explanation in explanations for text in _texts(explanation)]
    least = ROUNDING * max(map(abs, results))
    return explanation_html(heading, passages, first.meaning.format(result_name_of(first)), least)


def unknown_phrase(text: str, spans: Sequence[Span]) -> str:
    """Return which parts of a text the vocabulary lacks, the first ones if they are many."""
    parts = dict.fromkeys(_short(text[slice(*span)]) for span in spans)
    named = ", ".join(list(parts)[:_NAMED])
    others = len(parts) - _NAMED
    more = f" and {others} more" if others > 0 else ""
    return f"the vocabulary lacks {named}{more}: the model cannot tell such parts apart"


def heading_of(explanation: PicturedExplanation) -> str:
    """Return the name of the explained result, and its value."""
    label = "" if explanation.label is None else f" of {embedded(explanation.label)}"
    return f"{result_name_of(explanation)}{label} {format_number(_texts(explanation)[0].whole)}"


def summary_of(explanation: PicturedExplanation) -> str:
    """Return the repr of an explanation."""
    texts = "; ".join(map(text_summary_of, _texts(explanation)))
    return f"{type(explanation).__name__}({heading_of(explanation)}; {texts})"


def text_summary_of(text: ExplainedText) -> str:
    """Return the number of a text's units, and those with the largest numbers."""
    kind, chips = next(iter(text.rows.items()))
    largest = sorted(chips, key=lambda chip: -abs(chip.value or 0.0))[:_IN_REPR]
    named = (
        f"{embedded(repr(_short(text.content[start:end])))} {format_signed(value)}"
        for start, end, value, _ in largest
    )
    count = f"{len(chips)} {kind}"
    return f"{count}: {', '.join(named)}" if chips else count


def _short(text: str, most: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _texts(explanation: PicturedExplanation) -> Sequence[ExplainedText]:
    """Return texts with the effects on the logit of a reranker: scores near 1 hardly change."""
    return explanation.raw_texts if explanation.label is None else explanation.texts


def result_name_of(explanation: PicturedExplanation) -> str:
    """Return what is explained of the pictured texts: "score" or "logit"."""
    is_score = explanation.label is not None or explanation.texts == explanation.raw_texts
    return "score" if is_score else "logit"


def _names(explanation: PicturedExplanation) -> list[str]:
    names = ("query", "document")
    if explanation.label is not None:
        names = ("first text", "second text") if len(explanation.texts) > 1 else ("text", "text")
    return [names[text.text] for text in explanation.texts]


def _limits(text: ExplainedText, explanation: PicturedExplanation) -> str:
    """Return what the model does not read of a text, to follow its name."""
    phrases = []
    start, end = text.read
    if text.read != (0, len(text.content)):
        phrases.append(f"the model reads characters {start} to {end} of {len(text.content)}")
    if spans := explanation.unknown[text.text]:
        phrases.append(embedded(unknown_phrase(text.content, spans)))
    return "".join(f"; {phrase}" for phrase in phrases)
