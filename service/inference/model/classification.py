"""Labels of texts and of pairs of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from models.printable import embedded
from service.inference.explain.deletion import Deletions, ShapleyValues
from service.inference.explain.notebook_html import format_number
from service.inference.explain.pictures import picture
from service.inference.results.scores import Scores
from service.inference.results.vectors import Stages, cost_of
from service.inference.tokenizing.rows import Row

# Number of inputs in a repr.
_IN_REPR = 3


@dataclass(frozen=True)
class Classification:
    """The scores of each input.

    `np.asarray` of it is `scores`. A notebook shows its explanations as coloured texts.

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

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> dict[str, float]:
        """Return the score of each label of an input, the best first; of equal names the best."""
        order = np.argsort(-self.logits[index], kind="stable").tolist()
        best: dict[str, float] = {}
        for label in order:
            best.setdefault(self.labels[label], float(self.scores[index, label]))
        return best

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.scores, dtype, copy=copy)

    def __repr__(self) -> str:
        size = f"{len(self)} inputs, {len(self.labels)} labels"
        firsts = (next(iter(self[index].items())) for index in range(min(_IN_REPR, len(self))))
        best = ", ".join(
            f"[{index}] {embedded(label)} {score:.4g}"
            for index, (label, score) in enumerate(firsts)
        )
        return f"Classification({size}, {cost_of(self.rows, self.seconds)}; best: {best})"

    def _repr_html_(self) -> str | None:
        explained: dict[int, Deletions | ShapleyValues]
        explained = {**self.deletions, **self.shapley_values}
        if not explained:
            return None
        inputs = [
            (
                f"[{index}] {embedded(explanation.label or '')} "
                f"{format_number(explanation.texts[0].whole)}: ",
                explanation,
            )
            for index, explanation in sorted(explained.items())
        ]
        return picture(repr(self), inputs)

    def best_labels(self, limit: int | None = None) -> list[list[int]]:
        """Return the columns of the best labels of each input, best first.

        Args:
            limit: Maximum number of labels per input; None: all.
        """
        order: list[list[int]] = np.argsort(-self.logits, axis=1, kind="stable")[:, :limit].tolist()
        return order
