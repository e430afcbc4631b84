"""Explanations of scores in requests and responses: their schemas, and the JSON that has them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from service.api.strict_model import StrictModel
from service.inference.call_options import Priority
from service.inference.errors import InvalidInput
from service.inference.explain.deletion import Deletions, ShapleyValues, TextEffects, UnitEffect
from service.inference.explain.options import (
    CHUNK_TOKENS,
    MAX_HIGHLIGHTS,
    MAX_PAIRS,
    MAX_SAMPLES,
    MAX_TOKENS,
    TOP_N,
    By,
    Deletion,
    Highlights,
    Method,
    Terms,
    UnitKind,
)
from service.inference.explain.terms import Explanation, TextToken
from service.inference.model.classification import Classification
from service.inference.model.model import Model
from service.inference.model.pair_scores import PairScores

Side = Literal["query", "document"]
_SIDES: tuple[Side, Side] = ("query", "document")
_METHODS: Mapping[type, Method] = {Deletions: "deletion", ShapleyValues: "shapley"}


class _Options(StrictModel):
    """Options of every explanation by deletion."""

    by: By | None = Field(
        None,
        description=f"Units that are left out; `chunks`: whole sentences of at most {CHUNK_TOKENS} "
        "tokens together; `auto`: sentences, or words of a text of one sentence, and the words of "
        "the best sentences; null: `auto`, or `words` with `shapley`",
    )
    method: Method = Field(
        "deletion",
        description="`deletion`: each unit left out, and alone; `shapley`: Shapley values",
    )
    samples: int | None = Field(
        None,
        ge=1,
        le=MAX_SAMPLES,
        description="Maximum number of texts for the Shapley values of a text; null: 64, or 4 per "
        "unit if that is more",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Random seed of the Shapley values")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Maximum number of tokens of all variants that are scored for explanations; "
        f"null: {MAX_TOKENS}, or with `auto` 16 times those of the explained texts, at least 4000 "
        f"and at most {MAX_TOKENS}",
    )

    priority: Priority = Field(
        "bulk",
        description="Priority of the variants that are scored for the explanations, and of few "
        "short texts, beside which they run; in requests of the priority bulk always bulk",
    )

    def option(self) -> Deletion:
        """Return the option of the Python API."""
        return Deletion(**self.model_dump())


class DeletionOptions(_Options):
    """Options of an explanation of scores by deletion of units of texts."""

    of: Literal["document", "query", "both"] = Field(
        "document", description="Texts whose units are left out"
    )
    top_n: int | None = Field(
        None,
        ge=1,
        description="Number of best documents to explain; null: all in `/score`, "
        f"{TOP_N} in `/rerank`",
    )
    pairs: int = Field(
        0,
        ge=0,
        le=MAX_PAIRS,
        description="Number of best units of each text of which each pair is left out, one of the "
        'query and one of the document, with `"of": "both"`',
    )


class TermsOptions(StrictModel):
    """Options of an explanation of scores by exact terms."""

    method: Literal["terms"]
    top_n: int | None = Field(
        None, ge=1, description="Number of best documents to explain; null: all"
    )

    def option(self) -> Terms:
        """Return the option of the Python API."""
        return Terms(top_n=self.top_n)


class LabelDeletionOptions(_Options):
    """Options of an explanation of labels by deletion of units of texts."""

    label: str | None = Field(
        None,
        description="Label whose score is explained, the best of several with this name; null: the "
        "best of each input",
    )


def _tag(value: object) -> str | None:
    if isinstance(value, dict):
        return "terms" if value.get("method") == "terms" else "deletion"
    return "bool" if isinstance(value, bool) else None


_INVALID = {
    "custom_error_type": "explain",
    "custom_error_message": 'Input should be true, false, or an object such as {"by": "words"}',
}
Explain = Annotated[
    Annotated[bool, Tag("bool")]
    | Annotated[DeletionOptions, Tag("deletion")]
    | Annotated[TermsOptions, Tag("terms")],
    Discriminator(_tag, **_INVALID),
    Field(
        description="How to explain scores. `true`, which is `{}`, or an object: by deletion, for "
        'every kind of model. `{"method": "terms"}`: by the largest terms of the sum over tokens '
        "that a score is; this needs sparse vectors, multi-vectors, or mean pooling without dense "
        "heads, and not a distance as similarity"
    ),
]
ExplainLabel = Annotated[
    Annotated[bool, Tag("bool")] | Annotated[LabelDeletionOptions, Tag("deletion")],
    Discriminator(lambda value: "deletion" if isinstance(value, dict) else _tag(value), **_INVALID),
    Field(description="How to explain the score of a label of each input; `true` is `{}`"),
]
Highlight = Annotated[
    int | None,
    Field(
        ge=1,
        le=MAX_HIGHLIGHTS,
        description="Number of best sentences of each document to return as `highlights`; "
        "excludes `explain`; null: none",
    ),
]
ExplanationTokens = Annotated[
    int | None,
    Field(
        description="Number of tokens of the variants that were scored for explanations by "
        "deletion, equal ones once"
    ),
]


class TextTokenInfo(BaseModel):
    """A token of a query or of a document."""

    id: int
    token: str = Field(description="Spelling of the token in the vocabulary")
    start: int | None = Field(
        description="Index of the token's first character in the text; null for special tokens, "
        "for tokens of a prompt, and for entries of sparse vectors"
    )
    end: int | None = Field(description="Index after the token's last character in the text")


class TermInfo(BaseModel):
    """A term of a score: the contribution of a token of the query and one of the document."""

    value: float
    query: TextTokenInfo
    document: TextTokenInfo


class TermsInfo(BaseModel):
    """The largest terms of a score, whose sum with `other` is the score."""

    method: Literal["terms"]
    terms: list[TermInfo] = Field(
        description="Terms with the largest absolute values, the largest first"
    )
    other: float = Field(description="Sum of all other terms")


class UnitInfo(BaseModel):
    """Effect of a unit of a text on the score."""

    start: int = Field(description="Index of its first character in the text")
    end: int = Field(description="Index after its last character")
    left_out: float | None = Field(
        description="The score less the score without it; null: without it the text has no tokens, "
        "or the maximum number of tokens did not suffice to measure it"
    )
    alone: float | None = Field(
        description="The score with it as the whole text, less that with the empty text; null: one "
        "of both texts has no tokens"
    )
    rank: int = Field(description="Place among the units of the list, by both numbers, from 1")


class UnitValueInfo(BaseModel):
    """Shapley value of a unit of a text."""

    start: int = Field(description="Index of its first character in the text")
    end: int = Field(description="Index after its last character")
    value: float = Field(description="Its part of `whole - empty`, which is the sum of all values")
    standard_error: float = Field(description="Standard error of the value; 0 if it is exact")
    rank: int = Field(description="Place among the units of the text by its value, from 1")


class SpanInfo(BaseModel):
    """A part of a text."""

    start: int = Field(description="Index of its first character in the text")
    end: int = Field(description="Index after its last character")


_Unknown = Annotated[
    list[SpanInfo],
    Field(
        default_factory=list,
        description="Parts of the text that the vocabulary lacks: the model reads each of them as "
        "the same unknown token; absent if there are none",
    ),
]


class _TextInfo(BaseModel):
    """A text whose units were left out."""

    side: Side | None = Field(None, description="Side of the text, for scores of pairs")
    text: int | None = Field(
        None, description="Index of the text in its input, for labels: 0, or 1 in a pair"
    )
    start: int = Field(description="Index of the first character that the model reads")
    end: int = Field(
        description="Index after the last character that the model reads; texts without a unit are "
        "made of this part of the text alone"
    )
    whole: float = Field(description="The score with this part of the text")
    by: UnitKind = Field(description="Kind of the units")
    unknown: _Unknown


class TextEffectsInfo(_TextInfo):
    """Effects of the units of a text on a score."""

    empty: float | None = Field(description="The score with the empty text; null: it has no tokens")
    units: list[UnitInfo] = Field(description="The units, in the order of the text")
    words: list[UnitInfo] = Field(
        default_factory=list, description="With `auto`: words of the best of the sentences"
    )


class TextValuesInfo(_TextInfo):
    """Shapley values of the units of a text."""

    empty: float = Field(description="The score with the empty text")
    units: list[UnitValueInfo] = Field(description="The units, in the order of the text")


class PairInfo(BaseModel):
    """Effect of a unit of the query and a unit of the document, together."""

    query: int = Field(description="Index of the unit in `units` of the query")
    document: int = Field(description="Index of the unit in `units` of the document")
    value: float = Field(
        description="The score less the scores without one of both units, plus the score without "
        "both"
    )


class OtherTextInfo(BaseModel):
    """The text of a pair whose units are not left out."""

    side: Side = Field(description="Side of the text")
    start: int = Field(description="Index of the first character that the model reads")
    end: int = Field(
        description="Index after the last character that the model reads; all variants have this "
        "part of the text alone"
    )
    unknown: _Unknown


_Other = Annotated[
    OtherTextInfo | None,
    Field(
        description="Part of the other text that the model reads, for scores of pairs; null: `of` "
        "is `both`"
    ),
]


class DeletionInfo(BaseModel):
    """Explanation of a score by deletion of units of texts."""

    method: Literal["deletion"]
    label: str | None = Field(None, description="Label whose score is explained, for classifiers")
    texts: list[TextEffectsInfo]
    other: _Other = None
    pairs: list[PairInfo] | None = Field(
        None,
        description="Effects of pairs of units, the largest first, with `pairs`; empty if "
        "`max_tokens` does not suffice",
    )


class ShapleyInfo(BaseModel):
    """Explanation of a score by Shapley values of units of texts."""

    method: Literal["shapley"]
    label: str | None = Field(None, description="Label whose score is explained, for classifiers")
    texts: list[TextValuesInfo]
    other: _Other = None


def option_of(
    explain: bool | DeletionOptions | TermsOptions, highlight: int | None
) -> bool | Deletion | Terms | Highlights:
    """Return the argument `explain` of `Model.score` and `Model.rerank`.

    Raises:
        InvalidInput: Both are given.
    """
    if highlight is not None:
        if explain:
            raise InvalidInput("highlight excludes explain", pointer="/highlight")
        return Highlights(highlight)
    return explain if isinstance(explain, bool) else explain.option()


def explanation_fields(
    model: Model, result: PairScores, index: int, *, raw: bool
) -> dict[str, object] | None:
    """Return the explanation of a score, with the fields of its schema; None: it has none.

    Args:
        model: The model.
        result: The scores.
        index: Index of the score.
        raw: Whether the score is a reranker's logit.
    """
    if index in result.explanations:
        return _terms_fields(model, result.explanations[index])
    explanation = result.deletions.get(index) or result.shapley_values.get(index)
    if explanation is None:
        return None
    texts = [
        {"side": _SIDES[fields.pop("text")], **fields}
        for fields in _text_fields(explanation, raw=raw)
    ]
    info: dict[str, object] = {"method": _METHODS[type(explanation)], "texts": texts}
    if explanation.other is not None:
        start, end = explanation.other
        other = 1 - explanation.texts[0].text
        fields = _unknown_fields(explanation, other)
        info["other"] = {"side": _SIDES[other], "start": start, "end": end, **fields}
    if isinstance(explanation, Deletions) and explanation.pairs is not None:
        info["pairs"] = explanation.pairs[raw]
    return info


def highlighted_units(result: PairScores, index: int, *, raw: bool) -> Sequence[UnitEffect] | None:
    """Return the highlights of a document, which have the fields of `UnitInfo`; None: it has none.

    Args:
        result: The scores.
        index: Index of the score.
        raw: Whether the score is a reranker's logit.
    """
    explanation = result.deletions.get(index)
    if explanation is None:
        return None
    (text,) = explanation.raw_texts if raw else explanation.texts
    return text.units


def label_fields(result: Classification, index: int, *, raw: bool) -> dict[str, object] | None:
    """Return the explanation of a label's score, with the fields of its schema; None: it has none.

    See `explanation_fields`.
    """
    explanation = result.deletions.get(index) or result.shapley_values.get(index)
    if explanation is None:
        return None
    texts = _text_fields(explanation, raw=raw)
    return {"method": _METHODS[type(explanation)], "label": explanation.label, "texts": texts}


def _terms_fields(model: Model, explanation: Explanation) -> dict[str, object]:
    def token(token: TextToken) -> dict[str, object]:
        start, end = token.span or (None, None)
        spelling = model.tokenizer.token(token.id)
        return {"id": token.id, "token": spelling, "start": start, "end": end}

    return {
        "method": "terms",
        "terms": [
            {"value": term.value, "query": token(term.query), "document": token(term.document)}
            for term in explanation.terms
        ],
        "other": explanation.other,
    }


def _text_fields(explanation: Deletions | ShapleyValues, *, raw: bool) -> list[dict[str, Any]]:
    """Return the fields of each text, with its index as `text`.

    orjson writes the units, which are dataclasses, as objects.
    """
    texts = explanation.raw_texts if raw else explanation.texts
    return [
        {
            "text": text.text,
            "start": text.read[0],
            "end": text.read[1],
            "whole": text.whole,
            "empty": text.empty,
            "by": text.by,
            **_unknown_fields(explanation, text.text),
            "units": text.units,
            **({"words": text.words} if isinstance(text, TextEffects) and text.words else {}),
        }
        for text in texts
    ]


def _unknown_fields(explanation: Deletions | ShapleyValues, text: int) -> dict[str, object]:
    unknown = explanation.unknown[text]
    return {"unknown": [{"start": start, "end": end} for start, end in unknown]} if unknown else {}
