"""The cost of attention, in the batch former's unit: that of one token without attention."""

from collections import Counter

from models.artifact import Manifest


class AttentionCost:
    """The cost of the attention of one row in all layers.

    A layer takes 24 D^2 operations per token, and 4 D per pair of tokens of which one attends to
    the other. The latter run six times slower, so that a pair costs 6 * 4 D / (24 D^2) = 1 / D
    tokens. In layers with a window, the engines for CPUs compute few pairs beyond it.

    Args:
        manifest: Manifest of the model, which has its width and windows.
    """

    def __init__(self, manifest: Manifest) -> None:
        layers = len(manifest.windows)
        # Number of tokens in a layer's window, and the cost of a pair in all layers with it.
        self._pairs = [
            (None if window is None else 2 * window + 1, count / layers / manifest.hidden_size)
            for window, count in Counter(manifest.windows).items()
        ]

    def __call__(self, length: int) -> float:
        """Return the cost of a row, padding included.

        Args:
            length: Length of the longest row of the batch, in tokens.
        """
        return length * sum(
            cost * (length if span is None else min(length, span)) for span, cost in self._pairs
        )
