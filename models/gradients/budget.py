"""What the methods of `attribution` and `pair` can be told, and what they cost. Torch-free.

So the service can check and tell it before anything runs.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What methods can be told; each reads its own.

    Attributes:
        tolerance: Integrated gradients: see `integration.integrate`.
        max_evaluations: Integrated gradients: see `integration.integrate`.
        samples: SmoothGrad: how many noisy copies.
        sigma: SmoothGrad: the noise's standard deviation, as a part of the tokens' own.
        seed: SmoothGrad: of the noise.
    """

    tolerance: float = 0.01
    max_evaluations: int = 256
    samples: int = 25
    sigma: float = 0.1
    seed: int = 0


DEFAULTS = Settings()

# Versions of the text that a method runs through the twin, at most.
COSTS: dict[str, Callable[[int, Settings], int]] = {
    "saliency": lambda _length, _settings: 1,
    "grad_x_input": lambda _length, _settings: 1,
    "smoothgrad": lambda _length, settings: settings.samples + 1,
    "occlusion": lambda length, _settings: length + 2,
    "integrated_gradients": lambda _length, settings: settings.max_evaluations,
}


def token_steps(method: str, length: int, settings: Settings) -> int:
    """Return how many tokens a method runs through the twin, at most, for a text of so many."""
    return length * COSTS[method](length, settings)


def pair_token_steps(point: str, length_a: int, length_b: int, max_evaluations: int) -> int:
    """Return how many tokens a matrix of token pairs runs through the twin, at most."""
    if point == "output":  # each text goes there once, and from there on no layer is run
        return length_a + length_b
    # Each evaluation moves every token of a text in a version of its own.
    return max_evaluations * (length_a**2 + length_b**2)
