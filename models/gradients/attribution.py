"""Attribution of a scalar, computed from the vector of a text or pair of texts, to its tokens.

The vector is an embedding, the logits of a classifier, the weights of a sparse encoder, or a
multi-vector. A scalar can also depend on several inputs of the model, such as a query and a
document, or two pairs of texts. Their tokens are then attributed together: along a path of
integrated gradients all inputs move at once, and the scores of all tokens add up to its change.

A method takes a function that maps S versions of the token vectors at a layer, `(S, L, D)`, to
scalars `(S,)`. It also takes the token vectors of the text and of a baseline at that layer,
`(L, D)` each. It returns one score per token, `(L,)`. Scores are not normalised and, except for
saliency, signed.

Sources: saliency, Simonyan et al. 2013, arXiv:1312.6034; gradient times input, Shrikumar et al.
2016, arXiv:1605.01713; SmoothGrad, Smilkov et al. 2017, arXiv:1706.03825; occlusion, Zeiler and
Fergus 2013, arXiv:1311.2901; integrated gradients, see `integration`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.gradients.inputs import DEFAULT_OPTIONS, InputRow, Method, MethodOptions, Side
from models.gradients.integration import integrate
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.attribution import Attribution
from models.manifest import SimilarityName

Array = NDArray[np.float64]
# Maps the model's vectors `(S, W)` of each input, before normalisation, to scalars `(S,)`.
TargetFunction = Callable[..., Tensor]
# Maps S versions of a text's token vectors, `(S, L, D)`, to scalars `(S,)`.
Function = Callable[[Tensor], Tensor]

# Versions of a text run through the model in chunks of at most this many tokens. A longer text runs
# one version at a time. Larger chunks need more memory and are hardly faster per token.
TOKENS_AT_ONCE = 2048


# Targets. The served vector is the model's vector, scaled to unit length if `normalize` is set.


def cosine(other: Tensor) -> TargetFunction:
    """Return a target function: the cosine similarity to `other`, shape `(W,)`."""
    return similarity("cosine", other, normalize=False)


_SIMILARITIES: Mapping[SimilarityName, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda vectors, other: F.cosine_similarity(vectors, other, dim=-1),
    "dot": lambda vectors, other: vectors @ other,
    "euclidean": lambda vectors, other: -(vectors - other).norm(dim=-1),
    "manhattan": lambda vectors, other: -(vectors - other).abs().sum(-1),
}


def similarity(name: SimilarityName, other: Tensor, normalize: bool) -> TargetFunction:
    """Return a target function: the similarity of two served vectors.

    Args:
        name: Similarity of the model.
        other: The model's other vector, shape `(W,)`, not normalised.
        normalize: Whether served vectors are scaled to unit length.
    """
    compare, other = _SIMILARITIES[name], _as_served(other, normalize)
    return lambda vectors: compare(_as_served(vectors, normalize), other)


def margin(
    name: SimilarityName, positive: Tensor, negative: Tensor, normalize: bool
) -> TargetFunction:
    """Return a target function: the similarity to `positive`, less that to `negative`.

    Args:
        name: See `similarity`.
        positive: Vector of shape `(W,)`, not normalised.
        negative: Vector of shape `(W,)`, not normalised.
        normalize: See `similarity`.
    """
    first, second = (similarity(name, other, normalize) for other in (positive, negative))
    return lambda vectors: first(vectors) - second(vectors)


def dot(other: Tensor, normalize: bool) -> TargetFunction:
    """Return a target function: the dot product of the served vector and `other`.

    Args:
        other: Vector of shape `(W,)`, as it is; `similarity` takes that of a text.
        normalize: Whether the served vector is scaled to unit length.
    """
    return lambda vectors: _as_served(vectors, normalize) @ other


def dim(index: int, normalize: bool) -> TargetFunction:
    """Return a target function: one element of the served vector.

    Args:
        index: Index of the element.
        normalize: Whether the served vector is scaled to unit length.
    """
    return lambda vectors: _as_served(vectors, normalize)[..., index]


def norm() -> TargetFunction:
    """Return a target function: the Euclidean norm of the model's vector before normalisation."""
    return lambda vectors: vectors.norm(dim=-1)


def label(index: int, versus: int | None = None) -> TargetFunction:
    """Return a target function: a label's logit, or its margin over the logit of another label.

    Args:
        index: Index of the label.
        versus: Index of the other label; None: the logit alone.
    """
    if versus is None:
        return lambda logits: logits[..., index]
    return lambda logits: logits[..., index] - logits[..., versus]


def score() -> TargetFunction:
    """Return a target function: the logit of a model with one label.

    If the function gets the logits of two inputs, it returns the margin of the first over the
    second.
    """
    return lambda logits, *versus: logits[..., 0] - sum(other[..., 0] for other in versus)


def _as_served(vectors: Tensor, normalize: bool) -> Tensor:
    return F.normalize(vectors, dim=-1) if normalize else vectors


# Methods.


Score = Callable[[Function, Tensor, Tensor, MethodOptions], Attribution]


def saliency(
    function: Function, x: Tensor, _baseline: Tensor, _options: MethodOptions
) -> Attribution:
    """Score each token by the Euclidean norm of the gradient with respect to its vector.

    Scores are never negative.
    """
    values, gradients = value_and_gradient(function, x[None])
    return Attribution(_array(gradients[0].norm(dim=-1)), values.item())


def grad_x_input(
    function: Function, x: Tensor, _baseline: Tensor, _options: MethodOptions
) -> Attribution:
    """Score each token by the dot product of its vector and the gradient with respect to it."""
    values, gradients = value_and_gradient(function, x[None])
    return Attribution(_array((gradients[0] * x).sum(-1)), values.item())


def smoothgrad(
    function: Function, x: Tensor, _baseline: Tensor, options: MethodOptions
) -> Attribution:
    """Score each token by the dot product of its vector and its mean gradient at noisy copies.

    The copies are the token vectors of the text plus Gaussian noise.
    """
    generator = torch.Generator().manual_seed(options.seed)
    noise_std = options.sigma * x.square().mean().sqrt()
    total = torch.zeros_like(x)  # (L, D)
    for part in torch.arange(options.samples).split(_versions_at_once(x)):
        # Noise is drawn for one copy at a time, so that it does not depend on the chunk size.
        noise = torch.stack(
            [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in part]
        )
        _, gradients = value_and_gradient(function, x + noise_std * noise.to(x.device))
        total += gradients.sum(0)
    with torch.no_grad():
        value = function(x[None]).item()
    return Attribution(_array((total / options.samples * x).sum(-1)), value)


def occlusion(
    function: Function, x: Tensor, baseline: Tensor, _options: MethodOptions
) -> Attribution:
    """Score each token by the decrease of the value when the token's baseline replaces it."""
    changed = (x != baseline).any(-1)  # (L,); other tokens are equal to their baseline
    is_replaced = torch.eye(len(x), device=x.device).bool()[changed]  # (R, L)
    one_replaced = torch.where(is_replaced[:, :, None], baseline, x)  # (R, L, D)
    with torch.no_grad():
        value, *without = _in_chunks(function, torch.cat([x[None], one_replaced])).tolist()
        baseline_value = function(baseline[None]).item()
    scores = np.zeros(len(x))
    scores[changed.cpu().numpy()] = value - np.array(without)
    return Attribution(scores, value, baseline_value)


def integrated_gradients(
    function: Function, x: Tensor, baseline: Tensor, options: MethodOptions
) -> Attribution:
    """Score each token by its contribution to the value's change from baseline to text."""

    def evaluate(points: Array) -> tuple[Array, Array]:
        alpha = torch.from_numpy(points).to(x)[:, None, None]  # (S, 1, 1)
        values, gradients = value_and_gradient(function, baseline + alpha * (x - baseline))
        slopes = (gradients * (x - baseline)).sum(-1)  # (S, L)
        return _array(values)[:, None], _array(slopes)[:, :, None]

    rounding = torch.finfo(x.dtype).eps
    integral = integrate(evaluate, options.tolerance, options.max_evaluations, rounding)
    ends, values = integral.path
    return Attribution(
        integral.scores[:, 0],
        integral.value_input.item(),
        integral.value_baseline.item(),
        integral.completeness,
        tuple(zip(ends.tolist(), values[:, 0].tolist(), strict=True)),
    )


METHODS: dict[Method, Score] = {
    "saliency": saliency,
    "grad_x_input": grad_x_input,
    "smoothgrad": smoothgrad,
    "occlusion": occlusion,
    "integrated_gradients": integrated_gradients,
}


def attribute(
    model: ReferenceModel,
    sides: Sequence[Side],
    target: TargetFunction,
    *,
    method: Method = "integrated_gradients",
    layer_name: str = "words",
    options: MethodOptions = DEFAULT_OPTIONS,
) -> Attribution:
    """Attribute a scalar of several rows to the tokens of all of them, concatenated.

    Args:
        model: Reference model of the served graph.
        sides: Rows and their baselines.
        target: Scalar to attribute, as a function of the vectors of each row.
        method: Attribution method, a key of `METHODS`.
        layer_name: Layer whose tokens are scored, one of `model.layer_names`.
        options: Options of the method.
    """
    rows = [side.row for side in sides]
    lengths = [len(row.ids) for row in rows]

    def function(tokens: Tensor) -> Tensor:
        parts = zip(tokens.split(lengths, dim=1), rows, strict=True)
        return target(*(model.continue_from(layer_name, part, row) for part, row in parts))

    x = [model.tokens(layer_name, row) for row in rows]  # (L, D) each
    baselines = [
        baseline_tokens(model, layer_name, side, tokens)
        for tokens, side in zip(x, sides, strict=True)
    ]
    return METHODS[method](function, torch.cat(x), torch.cat(baselines), options)


def baseline_tokens(model: ReferenceModel, layer_name: str, side: Side, tokens: Tensor) -> Tensor:
    """Return the token vectors of a side's baseline at a layer, `(L, D)`.

    Args:
        model: Reference model of the served graph.
        layer_name: Layer of the token vectors, one of `model.layer_names`.
        side: Input of the model, and its baseline.
        tokens: Token vectors of the input at the layer, `(L, D)`.
    """
    baseline = (
        torch.zeros_like(tokens)
        if side.baseline is None
        else model.tokens(layer_name, side.row, side.baseline)
    )
    kept = list(side.kept)
    baseline[kept] = tokens[kept]
    return baseline


def vjp(
    model: ReferenceModel, row: InputRow, cotangent: Sequence[float], layer_name: str
) -> tuple[Tensor, Tensor]:
    """Backpropagate a gradient from the served vector to the row's token vectors at a layer.

    Args:
        model: Reference model of the served graph.
        row: Input of the model.
        cotangent: Gradient with respect to the served vector, `(W,)`.
        layer_name: Layer of the token vectors, one of `model.layer_names`.

    Returns:
        Token vectors at the layer, and the gradient with respect to them, `(L, D)` each.
    """
    x = model.tokens(layer_name, row)  # (L, D)
    target = dot(x.new_tensor(cotangent), model.normalize)
    _, gradient = value_and_gradient(
        lambda tokens: target(model.continue_from(layer_name, tokens, row)), x[None]
    )
    return x, gradient[0]


def value_and_gradient(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values `(S,)` and gradients `(S, L, D)` of a function at S versions `x` of a text."""
    values, gradients = [], []
    for part in x.split(_versions_at_once(x[0])):
        leaf = part.detach().requires_grad_()
        value = function(leaf)
        # Versions are independent, so the gradient of the sum contains each version's gradient.
        gradients.append(torch.autograd.grad(value.sum(), leaf)[0])
        values.append(value.detach())
    return torch.cat(values), torch.cat(gradients)


def _versions_at_once(x: Tensor) -> int:
    return max(1, TOKENS_AT_ONCE // len(x))


def _in_chunks(function: Function, x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in x.split(_versions_at_once(x[0]))])


def _array(x: Tensor) -> Array:
    return x.detach().double().cpu().numpy()
