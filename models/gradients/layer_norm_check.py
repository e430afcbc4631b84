"""Verdicts on implementations of add + norm, separate for forward and backward pass.

Outputs and gradients are compared with the float64 reference, within the bounds of
`layer_norm_bounds`.

Some rows cannot decide whether a result is correct. The norm of a constant row is beta, which a
wrong implementation may return too. Other rows have no norm: constant rows if eps is 0, and rows
whose sum or variance overflows, or whose variance underflows. Nor can gradients be judged whose
terms overflow.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.add_layer_norm.reference import Array
from models.gradients.layer_norm_bounds import (
    Slope,
    error_bounds,
    exact_steps,
    slopes_along,
)
from models.gradients.layer_norm_implementations import IMPLEMENTATIONS, Implementation, PassOutcome
from models.gradients.layer_norm_operands import Operands, check_operands
from models.gradients.results.json_form import Phase
from models.gradients.results.layer_norm import Comparison, ImplementationVerdict, Invariant

_ALONG_XHAT = "sum(dx xhat) = ivar sum(dxhat xhat) eps / (var + eps)"


def judge(
    operands: Operands, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> tuple[ImplementationVerdict, ...]:
    """Judge the forward pass and the backward pass of each implementation.

    In float64, gradients are also compared with finite differences, for which float32 has too few
    digits. If a reference value is NaN or infinite, a finite value fails, except on rows without a
    norm.

    Args:
        operands: Operands in float32 or float64. Implementations compute in this dtype.
        implementations: Implementations, by name.

    Returns:
        Two verdicts per implementation: on its forward pass, then on its backward pass.

    Raises:
        ValueError: The shapes do not match, eps is negative or not finite, there is a dsum without
            a residual, the beta of an RMS norm is not zero, or the dtype is not float32 or float64.
    """
    operands = _round(operands)
    verdicts: list[ImplementationVerdict] = []
    with np.errstate(all="ignore"):
        standard = _standard(operands)
        for name, run in implementations.items():
            verdicts += _verdicts(standard, name, run(operands), invariants_of(run, operands))
    return tuple(verdicts)


def judge_candidate(
    operands: Operands, results: Mapping[str, Array]
) -> tuple[ImplementationVerdict, ...]:
    """Judge the outputs and gradients of an external implementation, as `judge` does.

    Invariants are not checked, because this would need another run of the implementation.

    Args:
        operands: Operands from which the results were computed, in float32 or float64.
        results: Some of the outputs and gradients, named and shaped as in `PassOutcome`.

    Returns:
        A verdict on each pass that has results.

    Raises:
        ValueError: The operands are invalid (see `judge`), or a result has an unknown name or the
            wrong shape.
    """
    operands = _round(operands)
    with np.errstate(all="ignore"):
        standard = _standard(operands)
        for name, result in results.items():
            if name not in standard.expected or result.shape != standard.expected[name].shape:
                raise ValueError(
                    f"result {name} of shape {result.shape} is invalid; allowed: out, sum, dx and "
                    "dresidual in the shape of x, dgamma and dbeta in the shape of gamma"
                )
        outputs = {n: r for n, r in results.items() if n in ("out", "sum")}
        gradients = {n: r for n, r in results.items() if n not in outputs}
        return _verdicts(standard, "candidate", PassOutcome(outputs, gradients), ())


def _round(operands: Operands) -> Operands:
    if operands.x.dtype not in (np.float32, np.float64):
        raise ValueError(f"the dtype of x is {operands.x.dtype}; it must be float32 or float64")
    return check_operands(operands, operands.x.dtype.type)


class _Standard(NamedTuple):
    """Float64 results, error bounds and directional derivatives for some operands.

    `without_norm` has the results that an implementation would return if xhat were zero everywhere.
    """

    expected: dict[str, Array]
    without_norm: dict[str, Array]
    bounds: dict[str, Array]
    slopes: Sequence[Slope]


def _standard(operands: Operands) -> _Standard:
    exact = exact_steps(operands)
    slopes = list(slopes_along(operands)) if operands.x.dtype == np.float64 else []
    zeros = np.zeros_like(operands.x)
    dx = zeros if operands.dsum is None else operands.dsum
    without_norm = {
        "out": np.broadcast_to(operands.beta, operands.x.shape),
        "dx": dx,
        "dresidual": dx,
        "dgamma": zeros[0],
    }
    bounds = error_bounds(exact, operands)
    return _Standard(exact.values(operands), without_norm, bounds, slopes)


def _verdicts(
    standard: _Standard, name: str, outcome: PassOutcome, invariants: Sequence[Invariant]
) -> tuple[ImplementationVerdict, ...]:
    halves: dict[Phase, Mapping[str, Array | None] | str] = {
        "forward": outcome.outputs,
        "backward": outcome.gradients,
    }
    return tuple(
        _verdict(standard, name, phase, values, tuple(i for i in invariants if i.phase == phase))
        for phase, values in halves.items()
        if values
    )


def _verdict(
    standard: _Standard,
    name: str,
    phase: Phase,
    values: Mapping[str, Array | None] | str,
    invariants: tuple[Invariant, ...],
) -> ImplementationVerdict:
    if isinstance(values, str):
        return ImplementationVerdict(name, phase, None, values, (), (), ())
    returned = {value: array for value, array in values.items() if array is not None}
    missing = tuple(value for value in values if value not in returned)
    comparisons = [
        _compare(value, array, standard.expected[value], standard.bounds[value])
        for value, array in returned.items()
    ]
    comparisons += _along(standard.slopes, returned)
    agrees = all(comparison.passes for comparison in comparisons)
    passes = not missing and agrees and all(invariant.passes for invariant in invariants)
    reason = _why_undecided(standard, returned) if passes else None
    return ImplementationVerdict(
        name, phase, None if reason else passes, reason, missing, tuple(comparisons), invariants
    )


def _why_undecided(standard: _Standard, returned: Mapping[str, Array]) -> str | None:
    """Return the reason why some results have no verdict; None if all have a verdict.

    There is no verdict on a result if a trivial one would pass as well: the result for xhat = 0,
    which for "out" is beta.
    """
    names = [
        name
        for name in returned
        if name in standard.without_norm
        and _compare(
            name, standard.without_norm[name], standard.expected[name], standard.bounds[name]
        ).passes
    ]
    if not names:
        return None
    return f"these rows cannot decide on {', '.join(names)}: a wrong norm would pass too"


def invariants_of(run: Implementation, operands: Operands) -> tuple[Invariant, ...]:
    """Run an implementation and return its checked invariants.

    The implementation runs with gamma of ones and beta of zeros, so that its output is xhat. A pass
    that it cannot run has no invariants.
    """
    ones, zeros = np.ones_like(operands.gamma), np.zeros_like(operands.beta)
    dxhat, D = operands.dout * operands.gamma, operands.x.shape[-1]
    plain = operands._replace(gamma=ones, beta=zeros, dout=dxhat, dsum=None)
    outputs, gradients = run(plain)
    exact = exact_steps(plain)
    t = exact.t
    _, _, _, _, var, var_eps, _, ivar, xhat, _, _ = exact.forward
    checks: list[tuple[str, Phase, Array, Array]] = []
    # These bounds follow from the bounds of xhat_i and dx_i, and from mean(xhat^2) <= 1.
    if not isinstance(outputs, str):
        wide = outputs["out"].astype(np.float64)
        if operands.centred:
            checks.append(("mean(xhat) = 0", "forward", _sum(wide) / D, 2 * t))
        spread = _sum(wide**2) / D - var / var_eps
        checks.append(("mean(xhat^2) = var / (var + eps)", "forward", spread, 4 * t * (1 + t)))
    if not isinstance(gradients, str) and gradients["dx"] is not None:
        dx, bound = gradients["dx"].astype(np.float64), 12 * D * t * exact.reach
        bound = bound + _sum(exact.underflow)
        # Uses the exact xhat, so that errors of the forward pass do not count in the backward pass.
        along = _sum(dx * xhat) - ivar * _sum(dxhat * xhat) * operands.eps / var_eps
        if operands.centred:
            checks.append(("sum(dx) = 0", "backward", _sum(dx), bound))
        checks.append((_ALONG_XHAT, "backward", along, bound))
        if (dresidual := gradients.get("dresidual")) is not None:
            apart = np.abs(dx - dresidual).max(-1, keepdims=True)
            checks.append(("dx = dresidual", "backward", apart, 0 * bound))
    return tuple(_invariant(*check) for check in checks)


def _invariant(name: str, phase: Phase, difference: Array, bound: Array) -> Invariant:
    residual = np.where(np.isfinite(bound), np.abs(difference), 0.0)  # (N, 1)
    share = _share(residual, bound)
    row = int(share.argmax())
    passes = bool(share[row, 0] <= 1)
    return Invariant(name, phase, float(residual[row, 0]), float(bound[row, 0]), row, passes)


def _sum(values: Array) -> Array:
    return values.sum(-1, keepdims=True)


def _along(slopes: Sequence[Slope], gradients: Mapping[str, Array]) -> list[Comparison]:
    comparisons = []
    for name in dict.fromkeys(s.gradient for s in slopes if s.gradient in gradients):
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
    opposite = np.isinf(expected) & np.isinf(actual) & (expected != actual)
    error = np.where(opposite, np.inf, error)
    # If the exact result exceeds the range of the dtype, these pass: infinity, NaN, and numbers
    # within 1 % of the largest number, of either sign.
    largest_number = float(np.finfo(actual.dtype).max)
    beyond = finite & (np.abs(expected) > largest_number)
    error = np.where(beyond & ~(np.abs(actual) < 0.99 * largest_number), 0.0, error)
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
        actual=float(actual[worst]),
        expected=float(expected[worst]),
        passes=bool(share[worst] <= 1),
    )


def _share(error: Array, bound: Array) -> Array:
    """Return error / bound, or 0 where the error is 0. `argmax` treats NaN as the largest."""
    return np.where(error == 0, 0.0, error / bound)
