"""Verdicts on implementations of add + LayerNorm, separate for forward and backward.

`judge` compares them with the float64 reference, on rows of the caller or of `draw`.

The accuracy of an implementation depends on the row: one around 40000 with a standard deviation of
1 has lost five digits before its norm is computed. So bounds scale with a row's condition, its
largest magnitude over sqrt(var + eps). Larger errors, as of a variance from squares, fail.
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
# torch's default, rounded to float32 like the attribute of a graph.
EPS = float(np.float32(1e-5))
# Number of random sign vectors along which slopes are taken. Single coordinates would cost N D
# passes.
DIRECTIONS = 8


# Distributions of rows. Each is drawn twice, for x and for the residual.

DISTRIBUTIONS: dict[Distribution, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "constant_row": lambda rng, shape: np.repeat(rng.normal(size=(shape[0], 1)), shape[1], 1),
    "large_mean": lambda rng, shape: 40000 + rng.normal(size=shape),
    "tiny_var": lambda rng, shape: 1e-4 * rng.normal(size=shape),
    "huge": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


# Bounds.


class _Exact(NamedTuple):
    """The steps in float64, and the error that the dtype of the operands allows.

    Let u be the dtype's unit roundoff and r the roundings of a sum of D numbers and a few more.
    The sum with the residual and the mean are off by r u max|x| at most. Over sqrt(var + eps) that
    is the error of xhat and, because mean(xhat^2) <= 1, the relative error of ivar. All else is
    relative. So with the condition kappa = max|x| / sqrt(var + eps), xhat_i is off by
    t (1 + |xhat_i|) at most, and ivar by t ivar, where t = r u (1 + kappa).
    """

    forward: reference.ForwardSteps
    backward: reference.BackwardSteps
    t: Array  #      (N, 1)
    reach: Array  #  (N, 1) ivar mean(|dxhat| (1 + |xhat|)): the means in dx are at most that


def _roundings(terms: int) -> float:
    """Return the roundings of a sum, which act as random ones, plus 4.

    Source: Higham and Mary 2019, doi:10.1137/18M1226312.
    """
    return float(4 + np.sqrt(terms))


def _exact(operands: Operands, dout: Array) -> _Exact:
    unit = np.finfo(operands.x.dtype).eps / 2
    (x, residual, gamma, beta, eps), wide = rounded_to(operands, dout, np.float64)
    forward = reference.forward_steps(x, gamma, beta, eps, residual)
    backward = reference.backward_steps(wide, reference.forward(x, gamma, beta, eps, residual)[1])
    kappa = np.abs(forward.x).max(-1, keepdims=True) * forward.ivar
    spread_terms = np.abs(backward.dxhat) * (1 + np.abs(forward.xhat))  # (N, D)
    reach = forward.ivar * spread_terms.mean(-1, keepdims=True)
    return _Exact(forward, backward, _roundings(x.shape[-1]) * unit * (1 + kappa), reach)


def _bounds(exact: _Exact, operands: Operands, dout: Array) -> dict[str, Array]:
    """Return the error bound of each value, in the value's shape."""
    epsilon = np.finfo(operands.x.dtype).eps
    over_rows = _roundings(len(dout)) * epsilon / 2
    size, xhat = np.abs(dout.astype(np.float64)), np.abs(exact.forward.xhat)  # (N, D)
    of_xhat = exact.t * (1 + xhat)
    # dx = ivar (dxhat - m1 - xhat m2), where |m1|, |m2| <= reach / ivar. In units of t reach: ivar
    # and rounding 1 + |xhat| each, m1 1, xhat 1 + |xhat|, m2 2 |xhat|. Plus twice t ivar |dxhat|.
    own = 2 * exact.t * exact.forward.ivar * np.abs(exact.backward.dxhat)
    dx = own + 5 * exact.t * exact.reach * (1 + xhat)
    shifted = np.abs(exact.forward.gammax) + np.abs(operands.beta)
    return {
        "out": np.abs(operands.gamma) * of_xhat + epsilon * shifted,
        "dx": dx,
        "dresidual": dx,
        "dgamma": (size * of_xhat).sum(0) + over_rows * (size * xhat).sum(0),
        "dbeta": over_rows * size.sum(0),
    }


class _Slope(NamedTuple):
    """A central difference of sum(out * dout) in float64, as one of the operands moves."""

    gradient: str  #  "dx", "dgamma" or "dbeta"
    along: Array  #   which way, in the shape of the gradient
    slope: float
    bound: float


def slopes_along(operands: Operands, dout: Array) -> Iterator[_Slope]:
    """Yield slopes of float64 operands along `DIRECTIONS` directions by x, gamma and beta each."""
    exact = _exact(operands, dout)
    bounds = _bounds(exact, operands, dout)
    # The rounding error scales with 1 / step, the curvature error with step^2.
    step = np.cbrt(exact.t[np.isfinite(exact.t)].max(initial=np.finfo(np.float64).eps))
    rounding = (np.abs(dout) * bounds["out"]).sum() / step
    # Along signs, in units of sqrtvar, the third derivative of xhat_i is within 6 (|xhat_i| + 2).
    bending = step**2 * (np.abs(exact.backward.dxhat) * (np.abs(exact.forward.xhat) + 2)).sum()
    rng = np.random.default_rng(0)
    for name, unit, curved in (
        ("x", exact.forward.sqrtvar, bending),
        ("gamma", np.ones(1), 0.0),
        ("beta", np.ones(1), 0.0),
    ):
        at: Array = getattr(operands, name)
        for _ in range(DIRECTIONS):
            along = unit * rng.choice([-1.0, 1.0], at.shape)
            ahead, behind = (
                _forward(operands._replace(**{name: at + way * along})) for way in (step, -step)
            )
            # Subtracted before summing: a difference of two sums would cancel.
            slope = ((ahead - behind) * dout).sum() / (2 * step)
            own = (np.abs(along) * bounds[f"d{name}"]).sum()
            yield _Slope(f"d{name}", along, float(slope), float(rounding + curved + own))


def _forward(operands: Operands) -> Array:
    x, residual, gamma, beta, eps = operands
    return reference.forward(x, gamma, beta, eps, residual)[0]


def _share(error: Array, bound: Array) -> Array:
    """Return error over bound, 0 without an error. `argmax` treats NaN as the largest share."""
    return np.where(error == 0, 0.0, error / bound)


# Judging.

_ALONG_XHAT = "sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"


def invariants_of(run: Implementation, operands: Operands, dout: Array) -> tuple[Invariant, ...]:
    """Return the invariants of an implementation, run without gamma and beta to obtain xhat."""
    ones, zeros = np.ones_like(operands.gamma), np.zeros_like(operands.beta)
    plain, dxhat = operands._replace(gamma=ones, beta=zeros), dout * operands.gamma
    out, gradients = run(plain, dxhat)
    exact = _exact(plain, dxhat)
    t, D = exact.t, dout.shape[-1]
    _, _, _, _, var, var_eps, _, ivar, xhat, _, _ = exact.forward
    checks: list[tuple[str, Phase, Array, Array]] = []
    # The bounds follow from those of xhat_i and dx_i, with mean(xhat^2) <= 1.
    if not isinstance(out, str):
        wide = out.astype(np.float64)
        spread = _sum(wide**2) / D - var / var_eps
        checks += [
            ("mean(xhat) = 0", "forward", _sum(wide) / D, 2 * t),
            ("mean(xhat^2) = var / (var + eps)", "forward", spread, 4 * t * (1 + t)),
        ]
    if not isinstance(gradients, str):
        dx, bound = gradients["dx"].astype(np.float64), 12 * D * t * exact.reach
        # The exact xhat, so that errors of the forward pass do not count in the backward pass.
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
    """Return two verdicts on each implementation: on its forward pass and on its backward pass.

    Args:
        operands: Operands in float32 or float64, the dtype of the computation.
        dout: Gradient by the output, `(N, D)`.
        implementations: Implementations, by name.

    Returns:
        Verdicts. In float64 the gradients are also compared with finite differences, for which
        float32 has too few digits. A finite value fails where the reference is not finite.

    Raises:
        ValueError: The shapes do not match, eps is out of range, or the dtype is not float32 or
            float64.
    """
    if operands.x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x is {operands.x.dtype}; it must be float32 or float64")
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
                verdicts.append(
                    ImplementationVerdict(name, phase, passes, None, tuple(comparisons), identities)
                )
    return tuple(verdicts)


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
        shape: Shape of x, `(N, D)`, with at most `MAX_ELEMENTS` numbers.
        distribution: Name in `DISTRIBUTIONS`.
        seed: Random seed of the rows, gamma, beta and dout.

    Raises:
        ValueError: The shape is too large or empty, or the distribution is unknown.
    """
    N, D = shape
    if min(shape) < 1 or N * D > MAX_ELEMENTS:
        raise ValueError(f"the shape is {N} x {D}; it must have 1 to {MAX_ELEMENTS} numbers")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r} is not one of {', '.join(DISTRIBUTIONS)}")
    rng = np.random.default_rng(seed)
    x, residual = (DISTRIBUTIONS[distribution](rng, shape) for _ in range(2))
    gamma, beta = rng.normal(size=(2, D))
    return Operands(x, residual, gamma, beta, EPS), rng.normal(size=shape)


def checked(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Return operands and dout in a dtype, checked.

    Raises:
        ValueError: The shapes do not match, or eps is out of range.
    """
    x, _, _, _, eps = operands
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x is {x.shape}; it must be (N, D), with N and D at least 1")
    for name, value, shape in (
        ("residual", operands.residual, x.shape),
        ("dout", dout, x.shape),
        ("gamma", operands.gamma, x.shape[1:]),
        ("beta", operands.beta, x.shape[1:]),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} is {value.shape} and x is {x.shape}; {name} must be {shape}")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps is {eps}; it must be finite and at least 0")
    with np.errstate(over="ignore"):  # overflow gives an infinity, which is counted
        return rounded_to(operands, dout, dtype)


def rounded_to(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Return operands and dout in a dtype."""
    x, residual, gamma, beta, eps = operands
    wide = None if residual is None else residual.astype(dtype)
    cast = Operands(x.astype(dtype), wide, gamma.astype(dtype), beta.astype(dtype), eps)
    return cast, dout.astype(dtype)
