"""Verdicts on implementations of add + LayerNorm, separate for forward and backward pass.

`judge` compares implementations with the float64 reference, on given rows or on random rows from
`draw`.

Bounds are a few rounding errors of the result, whatever the row's mean: the deviations of a row
from its mean are exact in float32 if the mean's own rounding error is subtracted too. An
implementation that does not do so fails on rows with a large mean, as does one that computes the
variance as mean(x^2) - mean(x)^2.

Some rows cannot decide. The norm of a constant row is beta, which a wrong norm may return too. A
constant row without eps, and a row whose variance overflows, have no norm.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.inputs import Distribution
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, Implementation, Operands
from models.gradients.results import Comparison, ImplementationVerdict, Invariant, Phase

MAX_ELEMENTS = 4096
# PyTorch's default, rounded to float32 like the attribute `epsilon` of an ONNX node.
EPS = float(np.float32(1e-5))
# Number of random sign vectors along which directional derivatives are taken. Derivatives along
# every coordinate would cost N D forward passes.
DIRECTIONS = 8


# Distributions of rows. `draw` samples x and the residual independently.

DISTRIBUTIONS: dict[Distribution, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "constant_row": lambda rng, shape: np.repeat(rng.normal(size=(shape[0], 1)), shape[1], 1),
    "large_mean": lambda rng, shape: 40000 + rng.normal(size=shape),
    "tiny_var": lambda rng, shape: 1e-4 * rng.normal(size=shape),
    "huge": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


# Bounds.


class _Exact(NamedTuple):
    """The steps in float64, and quantities for error bounds in the dtype of the operands.

    The steps start from the sum of x and residual as rounded to the dtype. Let u be the dtype's
    unit roundoff, and r the number of rounding errors of a sum of D numbers, plus a few for other
    operations. With t = r u, the error of xhat_i is at most t (1 + |xhat_i|), and, because
    mean(xhat^2) <= 1, the error of ivar is at most t ivar. t is infinite for rows without a norm,
    and NaN for rows with NaN or infinity, whose results must be NaN.
    """

    forward: reference.ForwardSteps
    backward: reference.BackwardSteps
    t: Array  #            (N, 1)
    reach: Array  #        (N, 1) ivar mean(|dxhat| (1 + |xhat|)), a bound of the means in dx
    is_constant: Array  #  (N, 1)


def _roundings(terms: int) -> float:
    """Return the effective number of rounding errors of a sum, plus 4 for other operations.

    Independent rounding errors of n terms add up to about sqrt(n) of them.

    Source: Higham and Mary 2019, doi:10.1137/18M1226312.
    """
    return float(4 + np.sqrt(terms))


def _exact(operands: Operands, dout: Array) -> _Exact:
    limits = np.finfo(operands.x.dtype)
    rounded = operands.x if operands.residual is None else operands.x + operands.residual
    (_, _, gamma, beta, eps), wide = rounded_to(operands, dout, np.float64)
    total = rounded.astype(np.float64)
    forward = reference.forward_steps(total, gamma, beta, eps)
    backward = reference.backward_steps(wide, reference.forward(total, gamma, beta, eps)[1])
    spread_terms = np.abs(backward.dxhat) * (1 + np.abs(forward.xhat))  # (N, D)
    reach = forward.ivar * spread_terms.mean(-1, keepdims=True)
    is_constant = np.ptp(rounded, axis=-1, keepdims=True) == 0
    is_finite = np.isfinite(total).all(-1, keepdims=True)
    overflows = is_finite & (_sum(forward.sq) >= float(limits.max))
    t = np.where(is_finite, _roundings(total.shape[-1]) * limits.eps / 2, np.nan)
    t = np.where(overflows | (is_constant & (operands.x.dtype.type(eps) == 0)), np.inf, t)
    return _Exact(forward, backward, t, reach, is_constant)


def _bounds(exact: _Exact, operands: Operands, dout: Array) -> dict[str, Array]:
    """Return the error bounds of output and gradients, each in the shape of its array.

    A bound is infinite where a row without a norm takes part.
    """
    epsilon = np.finfo(operands.x.dtype).eps
    over_rows = _roundings(len(dout)) * epsilon / 2
    size, xhat = np.abs(dout.astype(np.float64)), np.abs(exact.forward.xhat)  # (N, D)
    of_xhat = exact.t * (1 + xhat)
    # dx = ivar (dxhat - m1 - xhat m2), where m1 = mean(dxhat), m2 = mean(dxhat xhat) and
    # |m1|, |m2| <= reach / ivar. Errors in units of t reach: 1 + |xhat| from ivar, 1 + |xhat| from
    # rounding, 1 from m1, 1 + |xhat| from xhat, 2 |xhat| from m2. The term ivar dxhat adds
    # 2 t ivar |dxhat|.
    own = 2 * exact.t * exact.forward.ivar * np.abs(exact.backward.dxhat)
    dx = own + 5 * exact.t * exact.reach * (1 + xhat)
    shifted = np.abs(exact.forward.gammax) + np.abs(operands.beta)
    bounds = {
        "out": np.abs(operands.gamma) * of_xhat + epsilon * shifted,
        "dx": dx,
        "dresidual": dx,
        "dgamma": (size * of_xhat).sum(0) + over_rows * (size * xhat).sum(0),
    }
    has_no_norm = np.isinf(exact.t)
    for name, bound in bounds.items():
        where = has_no_norm if bound.ndim == 2 else has_no_norm.any()
        bounds[name] = np.where(where, np.inf, bound)
    return {**bounds, "dbeta": over_rows * size.sum(0)}


class _Slope(NamedTuple):
    """Directional derivative of sum(out * dout), by a central difference in float64."""

    gradient: str  #  "dx", "dgamma" or "dbeta"
    along: Array  #   direction, in the shape of the gradient
    slope: float  #   the directional derivative
    bound: float  #   error bound of `slope`


def slopes_along(operands: Operands, dout: Array) -> Iterator[_Slope]:
    """Yield directional derivatives, `DIRECTIONS` each with respect to x, gamma and beta.

    Args:
        operands: Operands in float64.
        dout: Gradient with respect to the output, `(N, D)`.
    """
    exact = _exact(operands, dout)
    # Elements are rounded again when they are moved, relative to their own size.
    kappa = np.abs(exact.forward.x).max(-1, keepdims=True) * exact.forward.ivar
    exact = exact._replace(t=exact.t * (1 + kappa))
    bounds = _bounds(exact, operands, dout)
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
    ):
        at: Array = getattr(operands, name)
        for _ in range(DIRECTIONS):
            along = unit * rng.choice([-1.0, 1.0], at.shape)
            ahead, behind = (
                _forward(operands._replace(**{name: at + way * along})) for way in (step, -step)
            )
            # Subtract before summing: a difference of two sums would lose digits by cancellation.
            slope = ((ahead - behind) * dout).sum() / (2 * step)
            own = (np.abs(along) * bounds[f"d{name}"]).sum()
            yield _Slope(f"d{name}", along, float(slope), float(rounding + truncated + own))


def _forward(operands: Operands) -> Array:
    x, residual, gamma, beta, eps = operands
    return reference.forward(x, gamma, beta, eps, residual)[0]


def _share(error: Array, bound: Array) -> Array:
    """Return error / bound, or 0 where the error is 0. `argmax` treats NaN as the largest."""
    return np.where(error == 0, 0.0, error / bound)


# Judging.

_ALONG_XHAT = "sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"


def invariants_of(run: Implementation, operands: Operands, dout: Array) -> tuple[Invariant, ...]:
    """Check the invariants of an implementation.

    The implementation runs with gamma of ones and beta of zeros, so that its output is xhat.
    """
    ones, zeros = np.ones_like(operands.gamma), np.zeros_like(operands.beta)
    plain, dxhat = operands._replace(gamma=ones, beta=zeros), dout * operands.gamma
    out, gradients = run(plain, dxhat)
    exact = _exact(plain, dxhat)
    t, D = exact.t, dout.shape[-1]
    _, _, _, _, var, var_eps, _, ivar, xhat, _, _ = exact.forward
    checks: list[tuple[str, Phase, Array, Array]] = []
    # These bounds follow from the bounds of xhat_i and dx_i, and from mean(xhat^2) <= 1.
    if not isinstance(out, str):
        wide = out.astype(np.float64)
        spread = _sum(wide**2) / D - var / var_eps
        checks += [
            ("mean(xhat) = 0", "forward", _sum(wide) / D, 2 * t),
            ("mean(xhat^2) = var / (var + eps)", "forward", spread, 4 * t * (1 + t)),
        ]
    if not isinstance(gradients, str):
        dx, bound = gradients["dx"].astype(np.float64), 12 * D * t * exact.reach
        # The exact xhat: errors of the forward pass must not count for the backward pass.
        along = _sum(dx * xhat) - ivar * _sum(dxhat * xhat) * operands.eps / var_eps
        checks += [
            ("sum(dx) = 0", "backward", _sum(dx), bound),
            (_ALONG_XHAT, "backward", along, bound),
        ]
        if "dresidual" in gradients:
            apart = np.abs(dx - gradients["dresidual"]).max(-1, keepdims=True)
            checks.append(("dx = dresidual", "backward", apart, 0 * bound))
    return tuple(_invariant(*check) for check in checks)


def _invariant(name: str, phase: Phase, difference: Array, bound: Array) -> Invariant:
    residual = np.where(np.isfinite(bound), np.abs(difference), 0.0)  # (N, 1)
    share = _share(residual, bound)
    row = int(share.argmax())
    passes = bool(share[row, 0] <= 1)
    return Invariant(name, phase, float(residual[row, 0]), float(bound[row, 0]), row, passes)


def _sum(values: Array) -> Array:
    total: Array = values.sum(-1, keepdims=True)
    return total


def judge(
    operands: Operands, dout: Array, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> tuple[ImplementationVerdict, ...]:
    """Judge the forward pass and the backward pass of each implementation.

    In float64, gradients are also compared with finite differences, for which float32 has too few
    digits. A finite value fails if the reference value is not finite.

    Args:
        operands: Operands in float32 or float64. Implementations compute in this dtype.
        dout: Gradient with respect to the output, `(N, D)`.
        implementations: Implementations, by name.

    Returns:
        Two verdicts per implementation: on its forward pass, then on its backward pass.

    Raises:
        ValueError: The shapes do not match, eps is negative or not finite, or the dtype is not
            float32 or float64.
    """
    if operands.x.dtype not in (np.float32, np.float64):
        raise ValueError(f"the dtype of x is {operands.x.dtype}; it must be float32 or float64")
    operands, dout = checked(operands, dout, operands.x.dtype.type)
    with np.errstate(all="ignore"):
        exact = _exact(operands, dout)
        bounds = _bounds(exact, operands, dout)
        steps = exact.backward
        expected = {"dx": steps.dx, "dresidual": steps.dx}
        expected |= {"dgamma": steps.dgamma, "dbeta": steps.dbeta, "out": exact.forward.out}
        slopes = list(slopes_along(operands, dout)) if operands.x.dtype == np.float64 else []
        verdicts: list[ImplementationVerdict] = []
        for name, run in implementations.items():
            out, gradients = run(operands, dout)
            invariants = invariants_of(run, operands, dout)
            halves: dict[Phase, dict[str, Array] | str] = {
                "forward": out if isinstance(out, str) else {"out": out},
                "backward": gradients,
            }
            for phase, actual in halves.items():
                if isinstance(actual, str):
                    verdicts.append(ImplementationVerdict(name, phase, None, actual, (), ()))
                    continue
                comparisons = [_compare(v, actual[v], expected[v], bounds[v]) for v in actual]
                if phase == "backward":
                    comparisons += _along(slopes, actual)
                identities = tuple(i for i in invariants if i.phase == phase)
                passes = all(c.passes for c in comparisons) and all(i.passes for i in identities)
                reason = _undecided(exact, phase) if passes else None
                verdicts.append(
                    ImplementationVerdict(
                        name,
                        phase,
                        None if reason else passes,
                        reason,
                        tuple(comparisons),
                        identities,
                    )
                )
    return tuple(verdicts)


def _undecided(exact: _Exact, phase: Phase) -> str | None:
    """Return why no row can show that a pass is right; None if one can."""
    has_no_norm = np.isinf(exact.t)
    if has_no_norm.all():
        return "not decidable: each row is constant without eps, or its variance overflows"
    if phase == "forward" and np.logical_or(has_no_norm, exact.is_constant).all():
        return "not decidable: the norm of a constant row is beta, whatever the norm"
    return None


def _along(slopes: Sequence[_Slope], gradients: dict[str, Array]) -> list[Comparison]:
    comparisons = []
    for name in dict.fromkeys(s.gradient for s in slopes):
        own = [s for s in slopes if s.gradient == name]
        actual = np.array([(gradients[name] * s.along).sum() for s in own])  # (DIRECTIONS,)
        expected, bound = np.array([s.slope for s in own]), np.array([s.bound for s in own])
        comparisons.append(_compare(name, actual, expected, bound, "finite differences"))
    return comparisons


def _compare(
    value: str, actual: Array, expected: Array, bound: Array, against: str = "float64"
) -> Comparison:
    finite = np.isfinite(expected)
    error = np.where(finite | np.isfinite(actual), np.abs(actual - expected), 0.0)
    error = np.where(np.isnan(error), np.inf, error)
    error = np.where(np.isposinf(bound), 0.0, error)
    share = _share(error, bound)
    worst = np.unravel_index(int(share.argmax()), share.shape)
    largest = np.abs(expected[finite]).max(initial=0.0).astype(actual.dtype)
    return Comparison(
        value,
        against,
        max_abs=float(error.max()),
        ulp=float(error.max() / np.spacing(largest)),
        share_of_bound=float(share[worst]),
        worst_index=tuple(map(int, worst)),
        passes=bool(share[worst] <= 1),
    )


def draw(
    shape: tuple[int, int], distribution: Distribution, seed: int = 0
) -> tuple[Operands, Array]:
    """Return random operands and dout in float64.

    Args:
        shape: Shape of x, `(N, D)`, with at most `MAX_ELEMENTS` elements.
        distribution: Distribution of x and residual, a key of `DISTRIBUTIONS`.
        seed: Random seed of the rows, gamma, beta and dout.

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
    return Operands(x, residual, gamma, beta, EPS), rng.normal(size=shape)


def checked(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Check operands and dout, and return them rounded to a dtype.

    Raises:
        ValueError: The shapes do not match, or eps is negative or not finite.
    """
    x, _, _, _, eps = operands
    if x.ndim != 2 or not x.size:
        raise ValueError(f"the shape of x is {x.shape}; it must be (N, D), with N and D at least 1")
    for name, value, shape in (
        ("residual", operands.residual, x.shape),
        ("dout", dout, x.shape),
        ("gamma", operands.gamma, x.shape[1:]),
        ("beta", operands.beta, x.shape[1:]),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(
                f"the shape of {name} is {value.shape}; for x of shape {x.shape} it must be {shape}"
            )
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps is {eps}; it must be finite and at least 0")
    with np.errstate(over="ignore"):  # overflow gives infinities, which the results report
        return rounded_to(operands, dout, dtype)


def rounded_to(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Return operands and dout rounded to a dtype."""
    x, residual, gamma, beta, eps = operands
    cast_residual = None if residual is None else residual.astype(dtype)
    cast = Operands(x.astype(dtype), cast_residual, gamma.astype(dtype), beta.astype(dtype), eps)
    return cast, dout.astype(dtype)
