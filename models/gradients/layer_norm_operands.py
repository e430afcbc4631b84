"""Operands of add + norm for the forward and backward pass: checks, rounding, random values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.inputs import Distribution

MAX_ELEMENTS = 4096
# PyTorch's default, rounded to float32 like the attribute `epsilon` of an ONNX node.
EPS = float(np.float32(1e-5))


class Operands(NamedTuple):
    """Operands of add + norm, which returns `out` and, with a residual, `sum`."""

    x: Array  #                (N, D)
    residual: Array | None  #  (N, D)
    gamma: Array  #            (D,)
    beta: Array  #             (D,)
    eps: float  #              added to the variance
    dout: Array  #             (N, D)  gradient with respect to out
    dsum: Array | None  #      (N, D)  gradient with respect to sum; None: zeros
    centred: bool = True  #            True: layer norm; False: RMS norm, whose beta is zero

    def forward(self) -> tuple[Array, reference.Cache]:
        """Return `out` of the numpy reference, and its cache for the backward pass."""
        return reference.forward(
            self.x, self.gamma, self.beta, self.eps, self.residual, self.centred
        )


# Distributions of rows. `draw` samples x and the residual independently.

DISTRIBUTIONS: dict[Distribution, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "constant_row": lambda rng, shape: np.repeat(rng.normal(size=(shape[0], 1)), shape[1], 1),
    "large_mean": lambda rng, shape: 40000 + rng.normal(size=shape),
    "tiny_var": lambda rng, shape: 1e-4 * rng.normal(size=shape),
    "huge": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


def draw(
    shape: tuple[int, int], distribution: Distribution, seed: int = 0, *, centred: bool = True
) -> Operands:
    """Return random operands in float64.

    Args:
        shape: Shape of x, `(N, D)`, with at most `MAX_ELEMENTS` elements.
        distribution: Distribution of x and residual, a key of `DISTRIBUTIONS`.
        seed: Random seed of the rows, gamma, beta and the gradients.
        centred: True for layer norm, False for RMS norm.

    Raises:
        ValueError: The shape has no element or more than `MAX_ELEMENTS`, or the distribution is
            unknown.
    """
    N, D = shape
    if min(shape) < 1 or N * D > MAX_ELEMENTS:
        raise ValueError(f"the shape is {N} x {D}; it must have 1 to {MAX_ELEMENTS} elements")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"unknown distribution {distribution!r}; allowed: {', '.join(DISTRIBUTIONS)}"
        )
    rng = np.random.default_rng(seed)
    x, residual = (DISTRIBUTIONS[distribution](rng, shape) for _ in range(2))
    gamma, beta = rng.normal(size=(2, D))
    operands = Operands(x, residual, gamma, beta * centred, EPS, x, None, centred)
    return with_random_gradients(operands, rng)


def with_random_gradients(operands: Operands, rng: np.random.Generator) -> Operands:
    """Return the operands with a random dout and, with a residual, a random dsum.

    Each row of dsum has about the RMS of the part of dx that comes through the norm. A far larger
    dsum would hide errors of that part.
    """
    dout = rng.normal(size=operands.x.shape)
    operands = operands._replace(dout=dout, dsum=None)
    if operands.residual is None:
        return operands
    with np.errstate(all="ignore"):
        wide = rounded_to(operands, np.float64)
        dx = reference.backward(dout, wide.forward()[1])[0]
        size = np.sqrt(np.square(dx).mean(-1, keepdims=True))  # (N, 1)
    return operands._replace(
        dsum=rng.normal(size=dx.shape) * np.where(np.isfinite(size) & (size > 0), size, 1.0)
    )


def check_operands(operands: Operands, dtype: type[np.floating]) -> Operands:
    """Check operands and return them rounded to a dtype.

    Raises:
        ValueError: x is empty or not two-dimensional, another shape does not match x, eps is
            negative or not finite, there is a dsum without a residual, or the beta of an RMS norm
            is not zero.
    """
    x, residual, gamma, beta, eps, dout, dsum, centred = operands
    if x.ndim != 2 or not x.size:
        raise ValueError(f"the shape of x is {x.shape}; it must be (N, D), with N and D at least 1")
    if dsum is not None and residual is None:
        raise ValueError("dsum needs a residual: it is the gradient with respect to x + residual")
    for name, value, shape in (
        ("residual", residual, x.shape),
        ("dout", dout, x.shape),
        ("dsum", dsum, x.shape),
        ("gamma", gamma, x.shape[1:]),
        ("beta", beta, x.shape[1:]),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(
                f"the shape of {name} is {value.shape}; for x of shape {x.shape} it must be {shape}"
            )
    if not centred and beta.any():
        raise ValueError("beta must be zeros, because RMS norm has no beta")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps is {eps}; it must be finite and at least 0")
    with np.errstate(over="ignore"):  # overflow gives infinities, which the results report
        return rounded_to(operands, dtype)


def rounded_to(operands: Operands, dtype: type[np.floating]) -> Operands:
    """Return the operands rounded to a dtype."""
    fields: dict[str, Any] = operands._asdict()
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    return Operands(**{**fields, **{name: a.astype(dtype) for name, a in arrays.items()}})
