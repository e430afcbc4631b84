"""Whether implementations of add + LayerNorm are right, forward and backward apart.

`judge` holds them against the float64 reference on given rows, or on those that `draw` gives.

How far off an implementation may be depends on the row. One around 40000 with a spread of 1 has
lost five digits before its norm begins. So bounds scale with a row's condition, its largest
magnitude over sqrt(var + eps). What is lost beyond that, as by a variance from squares, fails.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, Implementation, Operands

Phase = Literal["forward", "backward"]

MAX_ELEMENTS = 4096
# torch's default, rounded as the attribute of a graph is.
EPS = float(np.float32(1e-5))
# Of random signs, along which slopes are taken. Coordinates one by one would cost N D passes.
DIRECTIONS = 8


@dataclass(frozen=True)
class Invariant:
    """What holds on every finite row; `residual` and `bound` are those of the worst `row`."""

    name: str
    phase: Phase
    residual: float
    bound: float
    row: int
    passes: bool


@dataclass(frozen=True)
class Comparison:
    """One value of an implementation against what it should be.

    Attributes:
        value: "out", "dx", "dresidual", "dgamma" or "dbeta".
        against: "float64", or "finite differences" where slopes are compared.
        max_abs: Worst error.
        ulp: The same in units in the last place of the largest value.
        share_of_bound: Worst error as a share of its bound.
        worst_index: Where that is; of slopes, the number of the direction.
        passes: Whether the share is at most 1.
    """

    value: str
    against: str
    max_abs: float
    ulp: float
    share_of_bound: float
    worst_index: tuple[int, ...]
    passes: bool


@dataclass(frozen=True)
class Verdict:
    """One half of an implementation; `passes` is None where `not_run` says why it was not run."""

    implementation: str
    phase: Phase
    passes: bool | None
    not_run: str | None
    comparisons: tuple[Comparison, ...]
    invariants: tuple[Invariant, ...]


# Rows. Each distribution is drawn twice, for x and for the residual.

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "constant_row": lambda rng, shape: np.repeat(rng.normal(size=(shape[0], 1)), shape[1], 1),
    "large_mean": lambda rng, shape: 40000 + rng.normal(size=shape),
    "tiny_var": lambda rng, shape: 1e-4 * rng.normal(size=shape),
    "huge": lambda rng, shape: 1e15 * rng.normal(size=shape),
}


# Bounds.


class _Exact(NamedTuple):
    """The steps in float64, and how far the dtype that the numbers came in may be off.

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
    """Roundings of a sum and 4 more; those of a sum are as good as random.

    Source: Higham and Mary 2019, doi:10.1137/18M1226312.
    """
    return float(4 + np.sqrt(terms))


def _exact(operands: Operands, dout: Array) -> _Exact:
    unit = np.finfo(operands.x.dtype).eps / 2
    (x, residual, gamma, beta, eps), wide = rounded_to(operands, dout, np.float64)
    forward = reference.forward_steps(x, gamma, beta, eps, residual)
    backward = reference.backward_steps(wide, reference.forward(x, gamma, beta, eps, residual)[1])
    kappa = np.abs(forward.x).max(-1, keepdims=True) * forward.ivar
    moved = np.abs(backward.dxhat) * (1 + np.abs(forward.xhat))  # (N, D)
    reach = forward.ivar * moved.mean(-1, keepdims=True)
    return _Exact(forward, backward, _roundings(x.shape[-1]) * unit * (1 + kappa), reach)


def _bounds(exact: _Exact, operands: Operands, dout: Array) -> dict[str, Array]:
    """How far off each value may be, in the value's shape."""
    epsilon = np.finfo(operands.x.dtype).eps
    over_rows = _roundings(len(dout)) * epsilon / 2
    size, xhat = np.abs(dout.astype(np.float64)), np.abs(exact.forward.xhat)  # (N, D)
    of_xhat = exact.t * (1 + xhat)
    # dx = ivar (dxhat - m1 - xhat m2), where |m1|, |m2| <= reach / ivar. In units of t reach: ivar
    # and rounding 1 + |xhat| each, m1 1, xhat 1 + |xhat|, m2 2 |xhat|. And twice t ivar |dxhat|.
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
    """Yield slopes of float64 operands along `DIRECTIONS`, by x, by gamma and by beta."""
    exact = _exact(operands, dout)
    bounds = _bounds(exact, operands, dout)
    # Rounding goes with 1 / step and bending with step^2.
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
            # Differences first: two sums would have too much in common.
            slope = ((ahead - behind) * dout).sum() / (2 * step)
            own = (np.abs(along) * bounds[f"d{name}"]).sum()
            yield _Slope(f"d{name}", along, float(slope), float(rounding + curved + own))


def _forward(operands: Operands) -> Array:
    x, residual, gamma, beta, eps = operands
    return reference.forward(x, gamma, beta, eps, residual)[0]


def _share(error: Array, bound: Array) -> Array:
    """Error over bound; no error is within every bound. NaN counts as the largest in `argmax`."""
    return np.where(error == 0, 0.0, error / bound)


# Judging.

_ALONG_XHAT = "sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"


def invariants_of(run: Implementation, operands: Operands, dout: Array) -> tuple[Invariant, ...]:
    """What an implementation makes of them, run without gamma and beta so that xhat comes out."""
    ones, zeros = np.ones_like(operands.gamma), np.zeros_like(operands.beta)
    plain, dxhat = operands._replace(gamma=ones, beta=zeros), dout * operands.gamma
    out, gradients = run(plain, dxhat)
    exact = _exact(plain, dxhat)
    t, D = exact.t, dout.shape[-1]
    _, _, _, _, var, var_eps, _, ivar, xhat, _, _ = exact.forward
    checks: list[tuple[str, Phase, Array, Array]] = []
    # The bounds follow from those of xhat_i and dx_i, with mean(xhat^2) <= 1.
    if not isinstance(out, str):
        mine = out.astype(np.float64)
        spread = _sum(mine**2) / D - var / var_eps
        checks += [
            ("mean(xhat) = 0", "forward", _sum(mine) / D, 2 * t),
            ("mean(xhat^2) = var / (var + eps)", "forward", spread, 4 * t * (1 + t)),
        ]
    if not isinstance(gradients, str):
        dx, bound = gradients["dx"].astype(np.float64), 12 * D * t * exact.reach
        # xhat is the exact one: a wrong forward pass is no fault of the backward pass.
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
) -> tuple[Verdict, ...]:
    """Return two verdicts on each implementation: on its forward pass and on its backward pass.

    Args:
        operands: In float32 or float64, the dtype that implementations compute in.
        dout: The gradient by the output, `(N, D)`.
        implementations: By their names.

    Returns:
        Verdicts. In float64 the gradients are held against finite differences too; float32 has too
        few digits for them. Where the reference is not finite, no implementation may be.

    Raises:
        ValueError: Shapes do not fit together, eps is out of range, or the dtype is another one.
    """
    if operands.x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x is in {operands.x.dtype}; float32 or float64 is needed")
    operands, dout = checked(operands, dout, operands.x.dtype.type)
    with np.errstate(all="ignore"):
        exact = _exact(operands, dout)
        bounds = _bounds(exact, operands, dout)
        steps = exact.backward
        wanted = {"dx": steps.dx, "dresidual": steps.dx}
        wanted |= {"dgamma": steps.dgamma, "dbeta": steps.dbeta, "out": exact.forward.out}
        slopes = list(slopes_along(operands, dout)) if operands.x.dtype == np.float64 else []
        verdicts: list[Verdict] = []
        for name, run in implementations.items():
            out, gradients = run(operands, dout)
            invariants = invariants_of(run, operands, dout)
            halves: dict[Phase, dict[str, Array] | str] = {
                "forward": out if isinstance(out, str) else {"out": out},
                "backward": gradients,
            }
            for phase, found in halves.items():
                if isinstance(found, str):
                    verdicts.append(Verdict(name, phase, None, found, (), ()))
                    continue
                comparisons = [_compare(v, found[v], wanted[v], bounds[v]) for v in found]
                if phase == "backward":
                    comparisons += _along(slopes, found)
                held = tuple(i for i in invariants if i.phase == phase)
                passes = all(c.passes for c in comparisons) and all(i.passes for i in held)
                verdicts.append(Verdict(name, phase, passes, None, tuple(comparisons), held))
    return tuple(verdicts)


def _along(slopes: Sequence[_Slope], gradients: dict[str, Array]) -> list[Comparison]:
    comparisons = []
    for name in dict.fromkeys(s.gradient for s in slopes):
        mine = [s for s in slopes if s.gradient == name]
        found = np.array([(gradients[name] * s.along).sum() for s in mine])  # (DIRECTIONS,)
        wanted, bound = np.array([s.slope for s in mine]), np.array([s.bound for s in mine])
        comparisons.append(_compare(name, found, wanted, bound, "finite differences"))
    return comparisons


def _compare(
    value: str, found: Array, wanted: Array, bound: Array, against: str = "float64"
) -> Comparison:
    finite = np.isfinite(wanted)
    error = np.where(finite | np.isfinite(found), np.abs(found - wanted), 0.0)
    error = np.where(np.isnan(error), np.inf, error)
    share = _share(error, bound)
    worst = np.unravel_index(int(share.argmax()), share.shape)
    largest = np.abs(wanted[finite]).max(initial=0.0).astype(found.dtype)
    return Comparison(
        value,
        against,
        max_abs=float(error.max()),
        ulp=float(error.max() / np.spacing(largest)),
        share_of_bound=float(share[worst]),
        worst_index=tuple(map(int, worst)),
        passes=bool(share[worst] <= 1),
    )


def draw(shape: tuple[int, int], distribution: str, seed: int = 0) -> tuple[Operands, Array]:
    """Return random operands and dout in float64.

    Args:
        shape: `(N, D)`, at most `MAX_ELEMENTS` numbers.
        distribution: A name in `DISTRIBUTIONS`.
        seed: Of the rows, gamma, beta and dout.

    Raises:
        ValueError: The shape is too large or empty, or the name is not known.
    """
    N, D = shape
    if min(shape) < 1 or N * D > MAX_ELEMENTS:
        raise ValueError(f"{N} x {D} numbers; 1 to {MAX_ELEMENTS} are taken, in rows of 1 or more")
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r} is not one of {', '.join(DISTRIBUTIONS)}")
    rng = np.random.default_rng(seed)
    x, residual = (DISTRIBUTIONS[distribution](rng, shape) for _ in range(2))
    gamma, beta = rng.normal(size=(2, D))
    return Operands(x, residual, gamma, beta, EPS), rng.normal(size=shape)


def checked(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Operands and dout in a dtype, if they fit together."""
    x, _, _, _, eps = operands
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x is {x.shape}; (N, D) is needed, with no size of 0")
    for name, value, shape in (
        ("residual", operands.residual, x.shape),
        ("dout", dout, x.shape),
        ("gamma", operands.gamma, x.shape[1:]),
        ("beta", operands.beta, x.shape[1:]),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} is {value.shape} where x is {x.shape}; {shape} is needed")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps is {eps}; a finite number, 0 or above, is needed")
    with np.errstate(over="ignore"):  # becomes an infinity, which is counted
        return rounded_to(operands, dout, dtype)


def rounded_to(operands: Operands, dout: Array, dtype: type[np.floating]) -> tuple[Operands, Array]:
    """Return operands and dout in a dtype."""
    x, residual, gamma, beta, eps = operands
    wide = None if residual is None else residual.astype(dtype)
    cast = Operands(x.astype(dtype), wide, gamma.astype(dtype), beta.astype(dtype), eps)
    return cast, dout.astype(dtype)
