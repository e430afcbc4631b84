"""Cost of the gradient methods in token steps, tokens run through the model. Torch-free.

The service checks the cost before running a method.
"""

from collections.abc import Callable, Iterable

from models.gradients.inputs import Method, MethodOptions

# Maximum number of versions of the text that a method runs through the model.
COSTS: dict[Method, Callable[[int, MethodOptions], int]] = {
    "saliency": lambda _length, _options: 1,
    "grad_x_input": lambda _length, _options: 1,
    "smoothgrad": lambda _length, options: options.samples + 1,
    "occlusion": lambda length, _options: length + 2,
    "integrated_gradients": lambda _length, options: options.max_evaluations,
}


def token_steps(method: Method, length: int, options: MethodOptions) -> int:
    """Return the maximum number of token steps of a method for a text."""
    return length * COSTS[method](length, options)


def pair_token_steps(layer_name: str, length_a: int, length_b: int, max_evaluations: int) -> int:
    """Return the maximum number of token steps of a matrix of token pairs."""
    if layer_name == "output":  # one pass per text; no layer runs after it
        return length_a + length_b
    # Each evaluation runs one version of the text per token.
    return max_evaluations * (length_a**2 + length_b**2)


def flow_token_steps(lengths: Iterable[int]) -> int:
    """Return the cost of a gradient flow in token steps.

    Measured on two cores with all-MiniLM-L6-v2, relative to the CPU time of one token in integrated
    gradients. A token costs 4: one forward and backward pass, and the measurement of every step's
    output and gradient in float64. A text costs 150, for the gradients of all weights.

    Args:
        lengths: Number of tokens of each text.
    """
    return sum(4 * length + 150 for length in lengths)


def parity_token_steps(lengths: Iterable[int]) -> int:
    """Return the cost of a parity comparison in token steps.

    Measured as in `flow_token_steps`. A token runs through both models, layer by layer.

    Args:
        lengths: Number of tokens of each text.
    """
    return sum(4 * length for length in lengths)
