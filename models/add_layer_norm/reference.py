"""Add + norm in numpy, step by step, forward and backward: an explanation and a test oracle.

The steps are those of layer norm. RMS norm has the same steps with a mean of zero.

Every step is a named value, with its shape in a comment; D is the normalised width, and `...` are
any leading axes. All arithmetic is in the dtype of `x`, float64 or float32.

Sources: Ba et al. 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467 (RMS norm).
The backward pass applies the chain rule to one forward step at a time, in reverse.

The following published formulas are wrong, as tests/models/test_reference.py shows:

- dgamma and dbeta as sums over the features. They are sums over all leading axes, because all rows
  share gamma and beta. With as many rows as features, the wrong sum has the right shape.
- dgamma as the sum of out or of dout * out. It is the sum of dout * xhat.
- dx = gamma / sqrt(var + eps) * (1 - 1/D) * out * (1 - out). This has the form of a sigmoid's
  derivative: it depends on beta, unlike the true gradient, and ignores dout.
- dx computed for each element separately. The Jacobian is dense: its off-diagonal elements are
  -(1 + xhat_i xhat_j) / (D sigma), with sigma = sqrt(var + eps), not sqrt(var).
- gamma indexed by row. It is indexed by feature, so that equal rows have equal outputs.
- var = mean(x^2) - mean(x)^2. The subtraction cancels in float32: the row 40000, 40001, 40002,
  40003 has the variance 1.25, but the formula gives no correct digit.
- A non-zero dx for the loss sum(out), with gamma of ones. That dx is zero, because each row of the
  output has a constant sum.
- Outputs other than -1 and +1 for a row of two different features, with eps = 0, gamma of ones and
  beta of zeros.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


class ForwardSteps(NamedTuple):
    """The sum `x + residual` and the ten steps of its norm."""

    x: Array  #        (..., D)  0. x + residual
    mean: Array  #     (..., 1)  1. mean over D; zero for RMS norm
    xmu: Array  #      (..., D)  2. x - mean
    sq: Array  #       (..., D)  3. xmu^2
    var: Array  #      (..., 1)  4. mean of sq: the biased variance
    var_eps: Array  #  (..., 1)  5. var + eps
    sqrtvar: Array  #  (..., 1)  6. sqrt(var_eps)
    ivar: Array  #     (..., 1)  7. 1 / sqrtvar
    xhat: Array  #     (..., D)  8. xmu * ivar
    gammax: Array  #   (..., D)  9. gamma * xhat
    out: Array  #      (..., D) 10. gammax + beta


class Cache(NamedTuple):
    """Values of the forward pass that the backward pass needs, named as in `ForwardSteps`."""

    xhat: Array  #     (..., D)
    gamma: Array  #    (D,)
    xmu: Array  #      (..., D)
    ivar: Array  #     (..., 1)
    sqrtvar: Array  #  (..., 1)
    var: Array  #      (..., 1)
    eps: float
    mean: Array  #     (..., 1)
    x: Array  #        (..., D)
    centred: bool


class BackwardSteps(NamedTuple):
    """The twelve steps of the backward pass.

    Each field is the gradient of the loss with respect to the forward value in its name. `dxmu1`
    and `dxmu2` are the two parts of `dxmu`; `dx2` is the part of `dx` through the mean.
    """

    dbeta: Array  #     (D,)      1. sum of dout over every leading axis
    dgamma: Array  #    (D,)      2. sum of dout * xhat over every leading axis
    dxhat: Array  #     (..., D)  3. dout * gamma
    divar: Array  #     (..., 1)  4. sum of dxhat * xmu over D
    dxmu1: Array  #     (..., D)  5. dxhat * ivar: the path through xhat = xmu * ivar
    dsqrtvar: Array  #  (..., 1)  6. -divar / sqrtvar^2
    dvar: Array  #      (..., 1)  7. dsqrtvar / (2 sqrtvar)
    dsq: Array  #       (..., D)  8. dvar / D, the same for every element
    dxmu2: Array  #     (..., D)  9. 2 xmu dsq: the path through sq = xmu^2
    dxmu: Array  #      (..., D) 10. dxmu1 + dxmu2: both paths into xmu
    dmu: Array  #       (..., 1)     -sum of dxmu over D: with respect to mean
    dx2: Array  #       (..., D) 11. dmu / D, the same for every element; zero for RMS norm
    dx: Array  #        (..., D) 12. dxmu + dx2; the gradient of the residual equals it


def forward_steps(
    x: Array,
    gamma: Array,
    beta: Array,
    eps: float,
    residual: Array | None = None,
    centred: bool = True,
) -> ForwardSteps:
    """Return every step of the forward pass, `gamma * norm(x + residual) + beta`.

    Args:
        x: Input, `(..., D)`.
        gamma: Scale, `(D,)`.
        beta: Shift, `(D,)`.
        eps: Constant added to the variance.
        residual: Second input, shaped as `x`; None: no residual.
        centred: True for layer norm, False for RMS norm.

    Raises:
        ValueError: The shapes of the arguments do not match.
    """
    D = x.shape[-1]
    if gamma.shape != (D,) or beta.shape != (D,):
        raise ValueError(f"gamma is {gamma.shape} and beta {beta.shape}; both must be ({D},)")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual and x differ in shape: {residual.shape}, {x.shape}")
    total = x if residual is None else x + residual
    mean, xmu = np.zeros_like(total[..., :1]), total
    # A large mean has a rounding error, which is then the mean of the deviations. The second pass
    # subtracts it, so that the deviations of a row around 1e6 are correct to the last digits.
    for _ in range(2 * centred):
        part = xmu.mean(-1, keepdims=True)
        mean, xmu = mean + part, xmu - part
    sq = xmu**2
    var = sq.mean(-1, keepdims=True)
    var_eps = var + x.dtype.type(eps)
    sqrtvar = np.sqrt(var_eps)
    ivar = 1 / sqrtvar
    xhat = xmu * ivar
    gammax = gamma * xhat
    out = gammax + beta
    return ForwardSteps(total, mean, xmu, sq, var, var_eps, sqrtvar, ivar, xhat, gammax, out)


def forward(
    x: Array,
    gamma: Array,
    beta: Array,
    eps: float,
    residual: Array | None = None,
    centred: bool = True,
) -> tuple[Array, Cache]:
    """Return the output `(..., D)` and the cache for `backward`; see `forward_steps`."""
    steps = forward_steps(x, gamma, beta, eps, residual, centred)
    cache = Cache(
        steps.xhat,
        gamma,
        steps.xmu,
        steps.ivar,
        steps.sqrtvar,
        steps.var,
        eps,
        steps.mean,
        steps.x,
        centred,
    )
    return steps.out, cache


def backward_steps(dout: Array, cache: Cache) -> BackwardSteps:
    """Return every step of the backward pass.

    Args:
        dout: Gradient of the loss with respect to the output, `(..., D)`.
        cache: Values from `forward`.
    """
    D = dout.shape[-1]
    leading = tuple(range(dout.ndim - 1))
    dbeta = dout.sum(leading)
    dgamma = (dout * cache.xhat).sum(leading)
    dxhat = dout * cache.gamma
    divar = (dxhat * cache.xmu).sum(-1, keepdims=True)
    dxmu1 = dxhat * cache.ivar
    dsqrtvar = -divar / cache.sqrtvar**2
    dvar = dsqrtvar / (2 * cache.sqrtvar)
    dsq = np.broadcast_to(dvar / D, dout.shape)
    dxmu2 = 2 * cache.xmu * dsq
    dxmu = dxmu1 + dxmu2
    dmu = -dxmu.sum(-1, keepdims=True)
    dx2 = np.broadcast_to(dmu / D * cache.centred, dout.shape)
    dx = dxmu + dx2
    return BackwardSteps(
        dbeta, dgamma, dxhat, divar, dxmu1, dsqrtvar, dvar, dsq, dxmu2, dxmu, dmu, dx2, dx
    )


def backward(dout: Array, cache: Cache) -> tuple[Array, Array, Array]:
    """Return `(dx, dgamma, dbeta)`; see `backward_steps` for the arguments."""
    steps = backward_steps(dout, cache)
    return steps.dx, steps.dgamma, steps.dbeta


def closed_form(dout: Array, cache: Cache) -> Array:
    """Return dx `(..., D)` by the single formula of the C++ and Triton kernels.

    dx = ivar * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), with means over D. For RMS norm,
    the term mean(dxhat) is omitted.
    """
    dxhat = dout * cache.gamma
    projection = (dxhat * cache.xhat).mean(-1, keepdims=True)
    mean = dxhat.mean(-1, keepdims=True) * cache.centred
    result: Array = cache.ivar * (dxhat - mean - cache.xhat * projection)
    return result


def jacobian_form(dout: Array, cache: Cache) -> Array:
    """Return dx `(..., D)` as the product of gamma * dout and the Jacobian, D x D per row.

    dx = (gamma * dout) J / (D sigma) with J = D I - 1 - outer(xhat, xhat), sigma = sqrt(var + eps).
    I is the identity matrix, and 1 the matrix of ones. For RMS norm, the term 1 is omitted.
    """
    D = dout.shape[-1]
    outer = cache.xhat[..., :, None] * cache.xhat[..., None, :]  # (..., D, D)
    jacobian = D * np.eye(D) - cache.centred - outer  # (..., D, D)
    scaled = (dout * cache.gamma)[..., None, :]  # (..., 1, D)
    result: Array = (scaled @ jacobian)[..., 0, :] / (D * cache.sqrtvar)
    return result
