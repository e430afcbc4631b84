"""Labels of texts and of pairs of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.inference.explain.deletion import Deletions, ShapleyValues
from service.inference.results.scores import Scores
from service.inference.results.vectors import Stages
from service.inference.tokenizing.rows import Row


@dataclass(frozen=True)
class Classification:
    """The scores of each input.

    Attributes:
        logits: Logits `(N, C)` of N inputs and C labels.
        scores: Logits after the model's activation, `(N, C)`.
        labels: Label of each of the C columns.
        rows: Token ids of each input, and whether it was truncated.
        seconds: Duration in seconds of each stage; see `PairScores`.
        deletions: Explanation by deletion of the score of a label, by index of the input; empty if
            not requested. An input for which the tokens did not suffice has none.
        shapley_values: Shapley values of the score of a label, by index; empty if not requested.
        explanation_tokens: See `PairScores`.
    """

    logits: Scores
    scores: Scores
    labels: Sequence[str]
    rows: Sequence[Row]
    seconds: Stages
    deletions: Mapping[int, Deletions] = field(default_factory=dict)
    shapley_values: Mapping[int, ShapleyValues] = field(default_factory=dict)
    explanation_tokens: int = 0

    @property
    def size(self) -> int:
        """Cost of serialising to JSON, in numbers: a label costs as much as five, a unit as ten."""
        units = sum(each.units for each in self.deletions.values())
        units += sum(each.units for each in self.shapley_values.values())
        return 5 * self.scores.size + 10 * units

    def best_labels(self, limit: int | None = None) -> list[list[int]]:
        """Return the columns of the best labels of each input, best first.

        Args:
            limit: Maximum number of labels per input; None: all.
        """
        order: list[list[int]] = np.argsort(-self.logits, axis=1, kind="stable")[:, :limit].tolist()
        return order
