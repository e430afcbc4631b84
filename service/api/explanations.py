"""Explanations of scores in requests and responses: their schemas, and the JSON that has them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from service.inference.explain.deletion import (
    MAX_TOKENS,
    TOP_N,
    Deletion,
    Deletions,
    Side,
    UnitKind,
)
from service.inference.explain.terms import Explanation, TextToken
from service.inference.model.model import Model
from service.inference.model.pair_scores import PairScores


class DeletionOptions(BaseModel):
    """Options of an explanation by deletion of words or sentences."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    by: UnitKind = Field("words", description="Units that are left out")
    of: Literal["document", "query", "both"] = Field(
        "document", description="Texts whose units are left out"
    )
    top_n: int | None = Field(
        None,
        ge=1,
        description="Number of best documents to explain; null: all in `/score`, "
        f"{TOP_N} in `/rerank`",
    )
    max_tokens: int = Field(
        MAX_TOKENS,
        ge=1,
        le=MAX_TOKENS,
        description="Maximum number of tokens of all texts that are scored for the explanations",
    )


def _tag(value: object) -> str | None:
    return "terms" if isinstance(value, bool) else "deletion" if isinstance(value, dict) else None


Explain = Annotated[
    Annotated[bool, Tag("terms")] | Annotated[DeletionOptions, Tag("deletion")],
    Discriminator(
        _tag,
        custom_error_type="explain",
        custom_error_message='Input should be true, false, or an object such as {"by": "words"}',
    ),
    Field(
        description="How to explain scores. An object: by deletion, for every kind of model. True: "
        "by the largest terms of the sum over tokens that a score is; this needs sparse vectors, "
        "multi-vectors, or mean pooling without dense heads, and not a distance as similarity"
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
    """Effect of a word or a sentence on the score."""

    start: int = Field(description="Index of its first character in the text")
    end: int = Field(description="Index after its last character")
    left_out: float | None = Field(
        description="The score less the score without it; null: without it the text has no tokens"
    )
    alone: float | None = Field(
        description="The score with it as the whole text, less that with the empty text; null: one "
        "of both texts has no tokens"
    )
    rank: int = Field(description="Place among the units of the text, by both numbers, from 1")


class TextInfo(BaseModel):
    """Effects of the units of a text on the score."""

    side: Side = Field(description="The text")
    start: int = Field(description="Index of the first character that the model reads")
    end: int = Field(
        description="Index after the last character that the model reads; texts without a unit are "
        "made of this part of the text alone"
    )
    whole: float = Field(description="The score with this part of the text")
    empty: float | None = Field(description="The score with the empty text; null: it has no tokens")
    units: list[UnitInfo] = Field(description="The units, in the order of the text")


class DeletionInfo(BaseModel):
    """Explanation of a score by deletion of words or sentences."""

    method: Literal["deletion"]
    by: UnitKind
    texts: list[TextInfo]


def options_of(explain: bool | DeletionOptions) -> bool | Deletion:
    """Return the argument `explain` of `Model.score` and `Model.rerank`."""
    return explain if isinstance(explain, bool) else Deletion(**explain.model_dump())


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
    if index in result.deletions:
        return _deletion_fields(result.deletions[index], raw=raw)
    return None


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


def _deletion_fields(deletions: Deletions, *, raw: bool) -> dict[str, object]:
    return {
        "method": "deletion",
        "by": deletions.by,
        "texts": [
            {
                "side": text.side,
                "start": text.read[0],
                "end": text.read[1],
                "whole": text.whole,
                "empty": text.empty,
                "units": [
                    {
                        "start": unit.start,
                        "end": unit.end,
                        "left_out": unit.left_out,
                        "alone": unit.alone,
                        "rank": unit.rank,
                    }
                    for unit in text.units
                ],
            }
            for text in (deletions.raw_texts if raw else deletions.texts)
        ],
    }
