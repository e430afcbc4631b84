"""Scores of models for sequence classification: activations of logits, in float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.inference.tokenizer import Row

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Classification:
    """The scores of each input.

    Attributes:
        logits: Logits `(N, C)`, in the order of the inputs and of the model's labels.
        scores: Logits after the model's activation, `(N, C)`.
        labels: Label of each of the C columns.
        rows: Token ids and truncation of each input.
        seconds: Duration in seconds of each stage: "tokenize", "queue" and "infer".
    """

    logits: Scores
    scores: Scores
    labels: Sequence[str]
    rows: Sequence[Row]
    seconds: Mapping[str, float]

    @property
    def size(self) -> int:
        """Size in JSON, in numbers: a label and its score take as long to serialise as five."""
        return 5 * self.scores.size


def _sigmoid(logits: Scores) -> Scores:
    # The argument of exp is never positive, so that it cannot overflow.
    decayed = np.exp(-np.abs(logits))
    scores: Scores = np.where(logits >= 0, 1.0, decayed) / (1 + decayed)
    return scores


def _softmax(logits: Scores) -> Scores:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores: Scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    return scores


# By their names in `models.artifact.Manifest`.
ACTIVATIONS: Mapping[str, Callable[[Scores], Scores]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "identity": lambda logits: logits,
}
