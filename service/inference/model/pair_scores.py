"""Scores of pairs of a query and a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from models.manifest import SimilarityName
from service.inference.explain.deletion import Deletions, ShapleyValues
from service.inference.explain.notebook_html import format_number
from service.inference.explain.pictures import picture
from service.inference.explain.terms import Explanation
from service.inference.results.scores import Scores, best_first
from service.inference.results.vectors import Stages, cost_of_lengths
from service.inference.tokenizing.chunking import Chunk

# Number of best pairs in a repr.
_IN_REPR = 3


@dataclass(frozen=True)
class PairScores:
    """The score of each pair of a query and a document.

    `np.asarray` of it is `scores`. A notebook shows its explanations as coloured texts.

    Attributes:
        scores: Scores `(N,)`, in the order of the pairs.
        raw_scores: Logits of a reranker, `(N,)`; the same as `scores` for other models.
        kind: "cross_encoder": the model read both texts at once; otherwise the similarity of their
            vectors that the model declares: "cosine"; "dot"; "euclidean" or "manhattan", a negative
            distance; or "maxsim", MaxSim of multi-vectors.
        tokens: Number of tokens of each pair.
        truncated: Whether a text of each pair was truncated.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer"; and "explain",
            with all runs of variants, if requested.
        explanations: Terms of the score, by index of the pair; empty if not requested.
        deletions: Explanation of the score by deletion, by index; with `Highlights`, the best
            sentences alone, best first. Empty if not requested. A document for which the tokens did
            not suffice has none.
        shapley_values: Shapley values, by index; empty if not requested.
        best_chunks: Chunk of each document with the highest score, which is the score of the pair;
            empty without chunking.
        explanation_tokens: Number of tokens of the variants that were scored for `deletions` or
            `shapley_values`, equal ones once.
    """

    scores: Scores
    raw_scores: Scores
    kind: Literal["cross_encoder"] | SimilarityName
    tokens: Sequence[int]
    truncated: Sequence[bool]
    seconds: Stages
    explanations: Mapping[int, Explanation] = field(default_factory=dict)
    deletions: Mapping[int, Deletions] = field(default_factory=dict)
    shapley_values: Mapping[int, ShapleyValues] = field(default_factory=dict)
    best_chunks: Sequence[Chunk] = ()
    explanation_tokens: int = 0

    @property
    def size(self) -> int:
        """Cost of serialising to JSON, in numbers: a term or a unit costs as much as ten."""
        terms = sum(len(explanation.terms) for explanation in self.explanations.values())
        units = sum(each.units for each in self.deletions.values())
        units += sum(each.units for each in self.shapley_values.values())
        return self.scores.size + 10 * (terms + units)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> float:
        """Return the score of a pair."""
        return float(self.scores[index])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.scores, dtype, copy=copy)

    def __repr__(self) -> str:
        best = ", ".join(f"[{i}] {self.scores[i]:.4g}" for i in self.ranking(_IN_REPR))
        cost = cost_of_lengths(self.tokens, sum(self.truncated), self.seconds)
        return f"PairScores({len(self)} {self.kind} scores, {cost}; best: {best})"

    def _repr_html_(self) -> str | None:
        explained: dict[int, Deletions | ShapleyValues]
        explained = {**self.deletions, **self.shapley_values}
        if not explained:
            return None
        ranked = [
            (f"{place}. [{index}] {format_number(self.scores[index])}: ", explained[index])
            for place, index in enumerate(self.ranking(), 1)
            if index in explained
        ]
        return picture(repr(self), ranked)

    def ranking(self, limit: int | None = None) -> list[int]:
        """Return the indices of the pairs by their scores, best first.

        Equal pairs keep their order.

        Args:
            limit: Maximum number of indices; None: all.
        """
        # By raw scores: activations round different logits to the same score.
        return best_first(self.raw_scores, limit)
