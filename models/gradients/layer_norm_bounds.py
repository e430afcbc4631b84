"""Error bounds of add + norm: the largest errors of a correct implementation against float64.

A bound is a few rounding errors of the largest terms and does not depend on the row's mean:
deviations from the mean are accurate in float32 if the mean's own rounding error is subtracted as
well. On rows with a large mean, an implementation without this second subtraction exceeds the
bounds. So does an implementation that computes the variance as mean(x^2) - mean(x)^2.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.layer_norm_operands import Operands, rounded_to

# Number of random sign vectors along which directional derivatives are taken. Derivatives along
# every coordinate of x would cost 2 * N * D forward passes.
DIRECTIONS = 8


class Exact(NamedTuple):
    """The steps in float64, and quantities for error bounds in the dtype of the operands.

    The steps start from the sum of x and residual, rounded to the dtype. Let u be the dtype's unit
    roundoff, and r the number of rounding errors of a sum of D numbers, plus a few for other
    operations. With t = r u, the error of xhat_i is at most t (1 + |xhat_i|). The error of ivar is
    at most t ivar, because mean(xhat^2) <= 1.

    t is infinite for rows without a norm: the sum of `x` or `sq` overflows the dtype, or `var_eps`
    is below the smallest normal number of the dtype. t is NaN for rows with NaN or infinity. These
    rows have no tolerance: their results must equal the float64 results.
    """

    forward: reference.ForwardSteps
    backward: reference.BackwardSteps
    t: Array  #            (N, 1)
    reach: Array  #        (N, 1) ivar mean(|dxhat| (1 + |xhat|)), a bound of the means in dx;
    #                             infinite if the terms of a backward step overflow the dtype
    underflow: Array  #    (N, D) error of dx if factors of its terms underflow

    def values(self, operands: Operands) -> dict[str, Array]:
        """Return the float64 outputs and gradients, named as in `PassOutcome`."""
        dx = self.backward.dx if operands.dsum is None else self.backward.dx + operands.dsum
        return {
            "out": self.forward.out,
            "sum": self.forward.x,
            "dx": dx,
            "dresidual": dx,
            "dgamma": self.backward.dgamma,
            "dbeta": self.backward.dbeta,
        }


def _roundings(terms: int) -> float:
    """Return the effective number of rounding errors of a sum of `terms` numbers.

    n independent rounding errors add up to about sqrt(n) of them. Errors of equal terms can add up
    to more, hence `2 * sqrt(terms)`. Another 4 are added for other operations.

    Source: Higham and Mary 2019, doi:10.1137/18M1226312.
    """
    return float(4 + 2 * np.sqrt(terms))


def exact_steps(operands: Operands) -> Exact:
    """Return the float64 steps of operands in float32 or float64; see `Exact`."""
    limits = np.finfo(operands.x.dtype)
    rounded = operands.x if operands.residual is None else operands.x + operands.residual
    wide = rounded_to(operands, np.float64)
    total = rounded.astype(np.float64)
    arguments = total, wide.gamma, wide.beta, wide.eps, None, wide.centred
    forward = reference.forward_steps(*arguments)
    backward = reference.backward_steps(wide.dout, reference.forward(*arguments)[1])
    spread_terms = np.abs(backward.dxhat) * (1 + np.abs(forward.xhat))  # (N, D)
    reach = forward.ivar * spread_terms.mean(-1, keepdims=True)
    for terms in (*backward[2:], backward.dxhat * forward.xmu):
        overflows = np.abs(terms).sum(-1, keepdims=True) >= float(limits.max)
        reach = np.where(overflows, np.inf, reach)
    is_constant = (np.ptp(rounded, axis=-1, keepdims=True) == 0) & operands.centred
    is_finite = np.isfinite(total).all(-1, keepdims=True)
    sums = [np.abs(terms).sum(-1, keepdims=True) for terms in (total, forward.sq)]
    overflows = np.fmax(*sums) >= float(limits.max)
    underflows = np.where(is_constant, wide.eps, forward.var_eps) < float(limits.tiny)
    t = np.where(is_finite, _roundings(total.shape[-1]) * limits.eps / 2, np.nan)
    t = np.where(is_finite & (overflows | underflows), np.inf, t)
    underflow = limits.tiny * (1 + forward.ivar + np.abs(forward.xmu))
    return Exact(forward, backward, t, reach, underflow)


def error_bounds(exact: Exact, operands: Operands) -> dict[str, Array]:
    """Return the error bound of every output and gradient, by name, in the shape of the array.

    Elements that depend on the norm of a row without a norm (see `Exact`) have infinite bounds, and
    so have gradients that are sums of terms whose absolute values overflow the dtype together.
    """
    limits = np.finfo(operands.x.dtype)
    over_rows = (4 + len(operands.dout)) * limits.eps / 2  # for sums over rows in any order
    size = np.abs(operands.dout.astype(np.float64))  # (N, D)
    xhat = np.abs(exact.forward.xhat)  # (N, D)
    of_xhat = exact.t * (1 + xhat)
    # dx = ivar (dxhat - m1 - xhat m2) + dsum, where m1 = mean(dxhat), m2 = mean(dxhat xhat) and
    # |m1|, |m2| <= reach / ivar. Errors in units of t reach: 1 + |xhat| from ivar, 1 + |xhat| from
    # rounding, 1 from m1, 1 + |xhat| from xhat, 2 |xhat| from m2. The term ivar dxhat adds
    # 2 t ivar |dxhat|. The addition of dsum adds one rounding error of the result.
    own = 2 * exact.t * exact.forward.ivar * np.abs(exact.backward.dxhat)
    dx = own + 5 * exact.t * exact.reach * (1 + xhat)
    values = exact.values(operands)
    if operands.dsum is not None:
        dx = dx + limits.eps * np.abs(values["dx"])
    shifted = np.abs(exact.forward.gammax) + np.abs(operands.beta)
    # Without tolerance, a row with infinity adds nothing: in RMS norm its other xhat are 0.
    of_rows = np.where(np.isnan(exact.t), 0.0, size * of_xhat)
    bounds = {
        "out": np.abs(operands.gamma) * of_xhat + limits.eps * shifted + limits.tiny,
        "dx": dx + exact.underflow,
        "dresidual": dx + exact.underflow,
        "dgamma": of_rows.sum(0) + over_rows * (size * xhat).sum(0) + limits.tiny,
    }
    # The bound of "sum" is 0: x + residual is correctly rounded, and the float64 steps start from
    # this rounded sum.
    bounds |= {"sum": np.zeros_like(exact.forward.x), "dbeta": over_rows * size.sum(0)}
    has_no_norm = np.isinf(exact.t)
    overflows = has_no_norm | np.isinf(exact.reach)
    for name, where in {
        "out": has_no_norm,
        "dx": overflows,
        "dresidual": overflows,
        "dgamma": has_no_norm.any() | ((size * xhat).sum(0) >= float(limits.max)),
        "dbeta": size.sum(0) >= float(limits.max),
    }.items():
        bounds[name] = np.where(where, np.inf, bounds[name])
    return bounds


class Slope(NamedTuple):
    """Directional derivative of sum(out * dout) + sum(sum * dsum), by a central difference."""

    gradient: str  #  "dx", "dgamma" or "dbeta"
    along: Array  #   direction, in the shape of the gradient
    slope: float  #   the directional derivative
    bound: float  #   error bound of `slope`


def slopes_along(operands: Operands) -> Iterator[Slope]:
    """Yield directional derivatives, `DIRECTIONS` each with respect to x, gamma and beta.

    RMS norm has no beta, hence no derivatives with respect to it.

    Args:
        operands: Operands in float64.
    """
    dout, exact = operands.dout, exact_steps(operands)
    # Shifting an element of x by a step rounds it again, with an error relative to its magnitude.
    kappa = np.abs(exact.forward.x).max(-1, keepdims=True) * exact.forward.ivar
    exact = exact._replace(t=exact.t * (1 + kappa))
    bounds = error_bounds(exact, operands)
    # The difference of a row without a norm says nothing, not even with a dout of 0: NaN times 0.
    decides = np.isfinite(exact.t).all()
    # The rounding error scales with 1 / step, the truncation error with step^2.
    step = np.cbrt(exact.t[np.isfinite(exact.t)].max(initial=np.finfo(np.float64).eps))
    rounding = (np.abs(dout) * bounds["out"]).sum() / step
    # Along a sign vector times sqrtvar, the third derivative of xhat_i is at most 6 (|xhat_i| + 2).
    truncation = step**2 * (np.abs(exact.backward.dxhat) * (np.abs(exact.forward.xhat) + 2)).sum()
    rng = np.random.default_rng(0)
    for name, unit, truncated in (
        ("x", exact.forward.sqrtvar, truncation),
        ("gamma", np.ones(1), 0.0),
        ("beta", np.ones(1), 0.0),
    )[: 3 if operands.centred else 2]:
        at: Array = getattr(operands, name)
        for _ in range(DIRECTIONS):
            along = unit * rng.choice([-1.0, 1.0], at.shape)
            ahead, behind = (
                operands._replace(**{name: at + way * along}).forward()[0] for way in (step, -step)
            )
            # Subtract before summing: a difference of two sums would lose digits by cancellation.
            slope = ((ahead - behind) * dout).sum() / (2 * step)
            if name == "x" and operands.dsum is not None:
                slope += (along * operands.dsum).sum()
            own = (np.abs(along) * bounds[f"d{name}"]).sum()
            bound = rounding + truncated + own if decides else np.inf
            yield Slope(f"d{name}", along, float(slope), float(bound))
