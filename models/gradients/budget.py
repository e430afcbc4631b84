"""Cost of the gradient methods in token steps. This module does not import torch.

A token step is one token run once through the reference model. The service checks the cost of a
request before running its method.
"""

import math
from collections.abc import Callable, Iterable

from models.gradients.inputs import Method, MethodOptions, TapPoint, TokenReduction, Units

# Number of versions of a text at which each method evaluates the model, an upper limit for
# integrated gradients. The arguments are the number of tokens of the text and the method's options.
COSTS: dict[Method, Callable[[int, MethodOptions], int]] = {
    "saliency": lambda _length, _options: 1,
    "grad_x_input": lambda _length, _options: 1,
    "smoothgrad": lambda _length, options: options.samples + 1,
    "occlusion": lambda length, _options: length + 2,
    "integrated_gradients": lambda _length, options: options.max_evaluations,
}


def token_steps(method: Method, length: int, options: MethodOptions) -> int:
    """Return the maximum number of token steps of a method for a text of `length` tokens."""
    return length * COSTS[method](length, options)


# Shares of the units that are removed, or kept alone, to measure faithfulness.
SHARES = (0.05, 0.1, 0.2, 0.5)
# Number of random orders of the units that faithfulness is compared with.
RANDOM_ORDERS = 5


def removal_counts(units: int) -> dict[int, float]:
    """Return the numbers of removed units, each with its share: rounded up, without duplicates."""
    counts: dict[int, float] = {}
    for share in SHARES if units else ():
        # Without the rounding, the product can exceed an integer by a rounding error.
        counts.setdefault(math.ceil(round(share * units, 9)), share)
    return counts


def faithfulness_token_steps(length: int, units: Units) -> int:
    """Return the maximum number of token steps of a faithfulness for inputs of `length` tokens."""
    count, tokens = len(units.tokens), sum(map(len, units.tokens))
    without_each = count * length - tokens
    # Each token of a unit is in one of two texts: without the first units, or with them alone.
    points = (1 + RANDOM_ORDERS) * len(removal_counts(count)) * (2 * length - tokens)
    return length + without_each + points


def activation_shape(point: TapPoint, length: int, reduction: TokenReduction) -> tuple[int, ...]:
    """Return the shape of a step's output after a reduction, for a row of `length` tokens."""
    vector: tuple[int, ...] = () if reduction == "norm" else (point.width,)
    return (length, *vector) if point.per_token and reduction in ("none", "norm") else vector


def patch_token_steps(lengths: int, source_length: int, taps: int, patches: int) -> int:
    """Return the maximum number of token steps of patching.

    Args:
        lengths: Number of tokens of the inputs whose vectors are replaced.
        source_length: Number of tokens of the other inputs.
        taps: Number of taps.
        patches: Number of patches at each tap.
    """
    return lengths * (1 + taps * patches) + source_length


def pair_token_steps(layer_name: str, length_a: int, length_b: int, max_evaluations: int) -> int:
    """Return the maximum number of token steps of an attribution to pairs of tokens."""
    if layer_name == "output":  # one pass per text; evaluations run only pooling and heads
        return length_a + length_b
    # Each evaluation runs one version of a text for each of its tokens.
    return max_evaluations * (length_a**2 + length_b**2)


def flow_token_steps(lengths: Iterable[int]) -> int:
    """Return the cost of a gradient-flow analysis, in token steps.

    The unit is the CPU time of one token in one evaluation of integrated gradients, forward and
    backward, measured on two cores with all-MiniLM-L6-v2. Each token costs 4: one forward and one
    backward pass, and float64 statistics of the output and gradient of every operation. Each text
    costs another 150, for the gradients of all weights.

    Args:
        lengths: Number of tokens of each text.
    """
    return sum(4 * length + 150 for length in lengths)


def parity_token_steps(lengths: Iterable[int]) -> int:
    """Return the cost of a parity comparison in token steps.

    The unit is the same as in `flow_token_steps`. Each token costs 4: graph and reference model run
    twice each, once for the vectors and once for the token vectors after each layer.

    Args:
        lengths: Number of tokens of each text.
    """
    return sum(4 * length for length in lengths)
