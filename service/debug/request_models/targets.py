"""Targets of attributions and patches in request bodies."""

from typing import Annotated, Literal

from pydantic import Field

from service.debug.request_models.base import StrictModel, Text, Vector


class Cosine(StrictModel):
    """Cosine similarity of the text's vector and the vector of another text."""

    type: Literal["cosine"]
    text: Text


class Similarity(StrictModel):
    """Similarity that the model declares, of the text's vector and the vector of another text."""

    type: Literal["similarity"]
    text: Text


class Margin(StrictModel):
    """Similarity to the text `positive` minus similarity to the text `negative`."""

    type: Literal["margin"]
    positive: Text
    negative: Text


class Dot(StrictModel):
    """Dot product of the text's served vector and a given vector."""

    type: Literal["dot"]
    vector: Vector


class Dim(StrictModel):
    """One element of the text's served vector."""

    type: Literal["dim"]
    index: int = Field(ge=0)


class Norm(StrictModel):
    """Euclidean norm of the text's vector before normalisation."""

    type: Literal["norm"]


class Score(StrictModel):
    """Logit of a model with one label, such as a reranker, or its margin over that of `versus`."""

    type: Literal["score"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose logit is subtracted"
    )


class Label(StrictModel):
    """Logit of a label, or its margin over the logit of the label `versus`."""

    type: Literal["label"]
    label: str | None = Field(None, description="Null: the label with the largest logit")
    versus: str | None = None


class Sparse(StrictModel):
    """Weight of one vocabulary entry in the text's sparse vector."""

    type: Literal["sparse"]
    token: str = Field(description="Spelling of the entry in the vocabulary")


class MaxSim(StrictModel):
    """MaxSim of the query `text` and the document `text_pair`, or its margin over that of `versus`.

    The texts have the prompts `query` and `document`.
    """

    type: Literal["maxsim"]
    versus: str | None = Field(
        None, description="Document in place of `text_pair`, whose MaxSim is subtracted"
    )


Target = Annotated[
    Cosine | Similarity | Margin | Dot | Dim | Norm | Score | Label | Sparse | MaxSim,
    Field(discriminator="type"),
]
