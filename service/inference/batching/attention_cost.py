"""The cost of attention in a batch."""

from collections import Counter
from collections.abc import Sequence


class AttentionCost:
    """The cost of attention for one row, over all layers, in tokens.

    A layer takes 24 D^2 operations per token, plus 4 D operations per pair of a token and a token
    that it attends to. Operations on pairs run six times slower, so a pair costs
    6 * 4 D / (24 D^2) = 1 / D tokens. In layers with an attention window, onnxruntime computes few
    pairs outside the window.

    Args:
        windows: Maximum distance between two tokens that attend to each other, for each layer;
            None: no limit.
        hidden_size: Width of a token vector, D.
        padding_cost: Further cost of a position of the padded batch, in tokens.
    """

    def __init__(
        self, windows: Sequence[int | None], hidden_size: int, padding_cost: float
    ) -> None:
        self._padding_cost = padding_cost
        # Each window's size in tokens, and the cost of a pair over all layers with this window.
        self._pairs = [
            (None if window is None else 2 * window + 1, count / len(windows) / hidden_size)
            for window, count in Counter(windows).items()
        ]

    def __call__(self, length: int) -> float:
        """Return the cost of attention for one row of a batch, in tokens.

        Args:
            length: Padded length of the row in tokens, which is the length of the batch's longest
                row.
        """
        return length * sum(
            [cost * (length if span is None else min(length, span)) for span, cost in self._pairs],
            self._padding_cost,
        )
