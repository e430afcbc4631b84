"""Which tokens made a number that is computed from a text's vector.

A method takes the function from tokens `(S, L, D)` at a point of the twin to the number `(S,)`, the
text's tokens there `(L, D)`, and mostly those of a baseline, and gives each token a score. Scores
are raw and signed: scaled ones could not be added up.

Sources: saliency, Simonyan et al. 2013, arXiv:1312.6034; gradient times input, Shrikumar et al.
2016, arXiv:1605.01713; SmoothGrad, Smilkov et al. 2017, arXiv:1706.03825; occlusion, Zeiler and
Fergus 2013, arXiv:1311.2901; integrated gradients, see `integration`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.gradients.budget import DEFAULTS, Settings
from models.gradients.integration import Integral, integrate
from models.gradients.twin import Row, Twin

Array = NDArray[np.float64]
# Vectors `(S, W)`, not normalised -> a number for each, `(S,)`.
Target = Callable[[Tensor], Tensor]
# Tokens `(S, L, D)` -> a number for each version, `(S,)`.
Function = Callable[[Tensor], Tensor]

# So many tokens are on their way at once: memory grows with them, speed hardly.
TOKENS_AT_ONCE = 2048


# Targets. What is served is a unit vector where `normalize` is set; `norm` alone looks before that.


def cosine(other: Tensor) -> Target:
    """Return the cosine to another vector `(W,)`."""
    return lambda vectors: F.cosine_similarity(vectors, other, dim=-1)


def margin(positive: Tensor, negative: Tensor) -> Target:
    """Return how much nearer, in cosine, to one vector `(W,)` than to another."""
    return lambda vectors: cosine(positive)(vectors) - cosine(negative)(vectors)


def dot(other: Tensor, normalize: bool) -> Target:
    """Return the product of the served vector with another `(W,)`."""
    return lambda vectors: _served(vectors, normalize) @ other


def dim(index: int, normalize: bool) -> Target:
    """Return one number of the served vector."""
    return lambda vectors: _served(vectors, normalize)[..., index]


def norm() -> Target:
    """Return the length of the vector before it is normalised."""
    return lambda vectors: vectors.norm(dim=-1)


def _served(vectors: Tensor, normalize: bool) -> Tensor:
    return F.normalize(vectors, dim=-1) if normalize else vectors


# Methods.


@dataclass(frozen=True)
class Attribution:
    """Scores of a text's tokens.

    Attributes:
        scores: One for each token, `(L,)`.
        value: The function at the text.
        baseline_value: The function at the baseline; None where the method has none.
        integral: How exact integrated gradients are; None for other methods.
    """

    scores: Array
    value: float
    baseline_value: float | None = None
    integral: Integral | None = None


Method = Callable[[Function, Tensor, Tensor, Settings], Attribution]


def saliency(function: Function, x: Tensor, _baseline: Tensor, _settings: Settings) -> Attribution:
    """Score each token by the length of its gradient: how much it matters, not which way."""
    values, gradients = value_and_gradient(function, x[None])
    return Attribution(_array(gradients[0].norm(dim=-1)), values.item())


def grad_x_input(
    function: Function, x: Tensor, _baseline: Tensor, _settings: Settings
) -> Attribution:
    """Score each token by its gradient times itself."""
    values, gradients = value_and_gradient(function, x[None])
    return Attribution(_array((gradients[0] * x).sum(-1)), values.item())


def smoothgrad(function: Function, x: Tensor, _baseline: Tensor, settings: Settings) -> Attribution:
    """Score each token by itself times its mean gradient around the text."""
    draw = torch.Generator().manual_seed(settings.seed)
    size = settings.sigma * x.square().mean().sqrt()
    total = torch.zeros_like(x)  # (L, D)
    for part in torch.arange(settings.samples).split(_versions_at_once(x)):
        # One by one, so that the noise does not depend on how many go at once.
        noise = torch.stack([torch.randn(x.shape, generator=draw, dtype=x.dtype) for _ in part])
        _, gradients = value_and_gradient(function, x + size * noise.to(x.device))
        total += gradients.sum(0)
    with torch.no_grad():
        value = function(x[None]).item()
    return Attribution(_array((total / settings.samples * x).sum(-1)), value)


def occlusion(function: Function, x: Tensor, baseline: Tensor, _settings: Settings) -> Attribution:
    """Score each token by how much the value falls when the baseline's takes its place."""
    L = len(x)
    one_replaced = torch.where(torch.eye(L, device=x.device).bool()[:, :, None], baseline, x)
    with torch.no_grad():
        value, *without = _in_chunks(function, torch.cat([x[None], one_replaced])).tolist()
        baseline_value = function(baseline[None]).item()
    return Attribution(value - np.array(without), value, baseline_value)


def integrated_gradients(
    function: Function, x: Tensor, baseline: Tensor, settings: Settings
) -> Attribution:
    """Score each token by its part of the change along the line from the baseline."""

    def evaluate(places: Array) -> tuple[Array, Array]:
        alpha = torch.from_numpy(places).to(x)[:, None, None]  # (S, 1, 1)
        values, gradients = value_and_gradient(function, baseline + alpha * (x - baseline))
        slopes = (gradients * (x - baseline)).sum(-1)  # (S, L)
        return _array(values)[:, None], _array(slopes)[:, :, None]

    rounding = torch.finfo(x.dtype).eps
    integral = integrate(evaluate, settings.tolerance, settings.max_evaluations, rounding)
    return Attribution(
        integral.scores[:, 0],
        integral.value_input.item(),
        integral.value_baseline.item(),
        integral,
    )


METHODS: dict[str, Method] = {
    "saliency": saliency,
    "grad_x_input": grad_x_input,
    "smoothgrad": smoothgrad,
    "occlusion": occlusion,
    "integrated_gradients": integrated_gradients,
}


def attribute(
    twin: Twin,
    row: Row,
    target: Target,
    *,
    method: str = "integrated_gradients",
    point: str = "words",
    baseline: Sequence[int] | None = None,
    settings: Settings = DEFAULTS,
) -> Attribution:
    """Return the score of each token of a row for a target.

    Args:
        twin: Of the served graph.
        row: The text.
        target: The number to explain.
        method: A name in `METHODS`.
        point: One of `twin.points`, where the tokens are taken.
        baseline: Ids that stand for "nothing there", as many as the row has; None: zeros.
        settings: Of the method.
    """
    x = twin.tokens(point, row)  # (L, D)
    nothing = torch.zeros_like(x) if baseline is None else twin.tokens(point, row, baseline)
    return METHODS[method](
        lambda tokens: target(twin.onwards(point, tokens, row)), x, nothing, settings
    )


def vjp(twin: Twin, row: Row, cotangent: Sequence[float], point: str) -> tuple[Tensor, Tensor]:
    """Return the row's tokens at a point, and the gradient by them, both `(L, D)`.

    Args:
        twin: Of the served graph.
        row: The text.
        cotangent: The gradient by the served vector, `(W,)`.
        point: One of `twin.points`.
    """
    x = twin.tokens(point, row)  # (L, D)
    target = dot(x.new_tensor(cotangent), twin.normalize)
    _, gradient = value_and_gradient(
        lambda tokens: target(twin.onwards(point, tokens, row)), x[None]
    )
    return x, gradient[0]


def value_and_gradient(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the function's value `(S,)` and gradient `(S, L, D)` for each version in `x`."""
    values, gradients = [], []
    for part in x.split(_versions_at_once(x[0])):
        leaf = part.detach().requires_grad_()
        value = function(leaf)
        # The versions do not meet, so the gradient of the sum is that of each.
        gradients.append(torch.autograd.grad(value.sum(), leaf)[0])
        values.append(value.detach())
    return torch.cat(values), torch.cat(gradients)


def _versions_at_once(x: Tensor) -> int:
    return max(1, TOKENS_AT_ONCE // len(x))


def _in_chunks(function: Function, x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in x.split(_versions_at_once(x[0]))])


def _array(x: Tensor) -> Array:
    return x.detach().double().cpu().numpy()
