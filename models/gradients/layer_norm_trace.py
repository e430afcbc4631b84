"""Trace of add + norm: every step of the op, on given rows or on the rows of a text.

The steps are those of `models.add_layer_norm.reference`. Each step in float32 is compared with the
same step in float64. The float64 gradients are compared with autograd. dx, dgamma and dbeta are
also compared with finite differences.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.inputs import InputRow
from models.gradients.layer_norm_bounds import DIRECTIONS, slopes_along
from models.gradients.layer_norm_check import invariants_of
from models.gradients.layer_norm_implementations import on_cpu
from models.gradients.layer_norm_operands import Operands, check_operands, rounded_to
from models.gradients.reference_model import ReferenceModel
from models.gradients.results.layer_norm import Invariant, NormStep
from models.network.norms import AddNorm, Norm
from models.network.taps import NormTap


class Trace(NamedTuple):
    """Steps of add + norm in the NumPy reference, and invariants checked on the fused op on CPU."""

    steps: tuple[NormStep, ...]
    invariants: tuple[Invariant, ...]


def trace(operands: Operands, *, row: int | None = None) -> Trace:
    """Compute every step of the op in float32, forward and backward, and check it.

    Args:
        operands: Operands in any float dtype; they are rounded to float32. dsum is ignored: the
            steps are those of `out` and its gradients.
        row: Index of the row whose values are returned; None: no values.

    Raises:
        ValueError: The shapes do not match, there is no row with the index `row`, eps is negative
            or not finite, there is a dsum without a residual, or the beta of an RMS norm is not
            zero.
    """
    operands = check_operands(operands, np.float32)._replace(dsum=None)
    N = len(operands.x)
    if row is not None and not 0 <= row < N:
        raise ValueError(f"row is {row}; it must be 0 to {N - 1}")
    with np.errstate(all="ignore"):  # NaN and infinity are part of the result
        steps32 = _steps(operands)
        wide = rounded_to(operands, np.float64)
        exact, autograd, slopes = _steps(wide), _autograd(wide), list(slopes_along(wide))
        steps = []
        for name, value in steps32.items():
            # Errors of dx are relative to its term dxmu1, because the terms of dx can cancel, such
            # as with gamma and dout of ones.
            scale = exact["dxmu1" if name == "dx" else name]
            error_autograd = error_slopes = None
            if name in autograd:
                error_autograd = _relative(exact[name], autograd[name], scale)
            own = [slope for slope in slopes if slope.gradient == name]
            if own:
                along = np.array([slope.along for slope in own]).reshape(DIRECTIONS, -1)
                expected = np.array([slope.slope for slope in own])  # (DIRECTIONS,)
                # With random signs, the typical slope is the root of the summed squared terms.
                typical = np.linalg.norm(along * scale.ravel(), axis=1)
                error_slopes = _relative(along @ exact[name].ravel(), expected, typical)
            kept = None if row is None else value[row] if value.ndim == 2 else value
            error = _relative(value, exact[name], scale)
            steps.append(_step(name, value, kept, error, error_autograd, error_slopes))
        return Trace(tuple(steps), invariants_of(on_cpu, operands))


def _steps(operands: Operands) -> dict[str, Array]:
    x, residual, gamma, beta, eps, dout, _, centred = operands
    forward = reference.forward_steps(x, gamma, beta, eps, residual, centred)
    _, cache = operands.forward()
    return {**forward._asdict(), **reference.backward_steps(dout, cache)._asdict()}


def _autograd(operands: Operands) -> dict[str, Array]:
    """Return the gradients with respect to each step, from autograd on the steps in PyTorch."""
    rows = operands.x if operands.residual is None else operands.x + operands.residual
    x, gamma, beta = (
        torch.tensor(a).requires_grad_() for a in (rows, operands.gamma, operands.beta)
    )
    # A value that is used twice is copied for each use, so that each use has its own gradient.
    x2 = x.clone()
    mean = x2.mean(-1, keepdim=True) * operands.centred
    xmu = x - mean
    xmu1, xmu2 = xmu.clone(), xmu.clone()
    sq = xmu2.square()
    var = sq.mean(-1, keepdim=True)
    sqrtvar = (var + operands.eps).sqrt()
    ivar = sqrtvar.reciprocal()
    xhat = xmu1 * ivar
    out = gamma * xhat + beta
    by = {"dbeta": beta, "dgamma": gamma, "dxhat": xhat, "divar": ivar, "dxmu1": xmu1}
    by |= {"dsqrtvar": sqrtvar, "dvar": var, "dsq": sq, "dxmu2": xmu2, "dxmu": xmu}
    by |= {"dmu": mean, "dx2": x2, "dx": x}
    gradients = torch.autograd.grad(out, list(by.values()), torch.tensor(operands.dout))
    return {name: gradient.numpy() for name, gradient in zip(by, gradients, strict=True)}


def _relative(actual: Array, expected: Array, scale: Array) -> float:
    """Return the largest absolute error where `expected` is finite, divided by max|scale|.

    If max|scale| is 0, the error is not divided. If `expected` has no finite value, return NaN.
    """
    finite = np.isfinite(expected)
    if not finite.any():
        return float("nan")
    error = np.abs(actual - expected)[finite].max()
    largest = np.abs(scale[np.isfinite(scale)]).max(initial=0.0)
    return float("inf") if np.isnan(error) else float(error / largest if largest else error)


def _step(
    name: str,
    value: Array,
    kept: Array | None,
    error: float,
    error_autograd: float | None,
    error_slopes: float | None,
) -> NormStep:
    finite = np.isfinite(value)
    some = value[finite].astype(np.float64) if finite.any() else np.array([np.nan])
    away = np.argwhere(~finite)
    return NormStep(
        name=name,
        phase="forward" if name in reference.ForwardSteps._fields else "backward",
        shape=value.shape,
        minimum=float(some.min()),
        maximum=float(some.max()),
        mean=float(some.mean()),
        rms=float(np.sqrt(np.square(some).mean())),
        nan=int(np.isnan(value).sum()),
        inf=int(np.isinf(value).sum()),
        first_nonfinite=tuple(map(int, away[0])) if len(away) else None,
        values=kept,
        error_float64=error,
        error_autograd=error_autograd,
        error_finite_difference=error_slopes,
    )


# The norms of a model.


def norm_names(model: ReferenceModel) -> tuple[str, ...]:
    """Return the names of the model's norms, in the order of the forward pass."""
    return tuple(_norm_calls(model, InputRow([0])))


def norm_operands(model: ReferenceModel, row: InputRow, norm_name: str) -> Operands:
    """Return the inputs of one of the model's norms for a row, in float32, and a dout of ones.

    Args:
        model: Reference model.
        row: Input of the model, L tokens.
        norm_name: Name of the norm, one of `norm_names`.

    Returns:
        Operands with x of shape `(L, D)`, without dsum. The residual is None for a norm without
        addition, such as the first norm of a pre-norm layer.

    Raises:
        ValueError: The model has no norm of this name.
    """
    calls = _norm_calls(model, row)
    if norm_name not in calls:
        raise ValueError(f"unknown norm {norm_name!r}; norms: {', '.join(calls)}")
    norm, x, residual = calls[norm_name]
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    return Operands(
        _copy(x[0]),
        None if residual is None else _copy(residual[0]),
        _copy(norm.weight),
        np.zeros(x.shape[-1], np.float32) if bias is None else _copy(bias),
        float(np.finfo(np.float32).eps) if norm.eps is None else norm.eps,
        dout=np.ones(x[0].shape, np.float32),
        dsum=None,
        centred=isinstance(norm, nn.LayerNorm),
    )


def _norm_calls(
    model: ReferenceModel, row: InputRow
) -> dict[str, tuple[Norm | AddNorm, Tensor, Tensor | None]]:
    tap = NormTap()
    model.vectors(row, tap)
    return tap.calls


def _copy(x: Tensor) -> Array:
    """Return a float32 copy. Without the copy, arrays on CPU would share the model's memory."""
    return x.detach().float().cpu().numpy().copy()
