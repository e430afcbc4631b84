"""Add + LayerNorm under the lens: every step of the op on given rows, or on those of a text.

Steps are those of `models.add_layer_norm.reference`, in float32, each beside float64, autograd and
finite differences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.add_layer_norm import reference
from models.add_layer_norm.reference import Array
from models.gradients.layer_norm_check import (
    DIRECTIONS,
    Invariant,
    Phase,
    checked,
    invariants_of,
    rounded_to,
    slopes_along,
)
from models.gradients.layer_norm_implementations import Operands, aten
from models.gradients.twin import Row, Twin


@dataclass(frozen=True)
class Step:
    """One step of the op on given rows, in float32.

    Attributes:
        name: As in `models.add_layer_norm.reference`; "x" is the sum with the residual.
        phase: Forward or backward.
        shape: `(N, D)`, `(N, 1)` or `(D,)`.
        minimum: As `maximum`, `mean` and `rms` over finite values; NaN where there is none.
        nan: How many values are NaN.
        inf: How many are infinite.
        first_nonfinite: Index of the first NaN or infinity.
        values: Those of the chosen row; dgamma and dbeta are of all rows.
        error_float64: Worst error against the step in float64, as a share of the largest magnitude
            there; for dx, of that of dxmu1. Infinite where float32 alone is not finite.
        error_autograd: The same, of the step in float64 against torch's autograd; None for steps
            that are no gradient.
        error_finite_difference: The same, of slopes in float64 along random directions against
            central differences; dx, dgamma and dbeta have it.
    """

    name: str
    phase: Phase
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    rms: float
    nan: int
    inf: int
    first_nonfinite: tuple[int, ...] | None
    values: Array | None
    error_float64: float
    error_autograd: float | None
    error_finite_difference: float | None


@dataclass(frozen=True)
class Trace:
    """Every step of the op, and the invariants of the op as PyTorch runs it on CPU."""

    steps: tuple[Step, ...]
    invariants: tuple[Invariant, ...]


def trace(operands: Operands, dout: Array, *, row: int | None = None) -> Trace:
    """Return every step of the op in float32, forward and backward.

    Args:
        operands: Of any float dtype; they are rounded to float32 first.
        dout: The gradient by the output, `(N, D)`.
        row: Whose values are wanted; None wants none.

    Raises:
        ValueError: Shapes do not fit together, eps is out of range, or there is no such row.
    """
    operands, dout = checked(operands, dout, np.float32)
    if row is not None and not 0 <= row < len(dout):
        raise ValueError(f"there is no row {row}; there are {len(dout)}")
    with np.errstate(all="ignore"):  # NaN and infinity are what is looked for
        found = _steps(operands, dout)
        wide = rounded_to(operands, dout, np.float64)
        exact, autograd, slopes = _steps(*wide), _autograd(*wide), list(slopes_along(*wide))
        steps = []
        for name, value in found.items():
            # The terms of dx may leave nothing: gamma of ones and dout of ones do.
            scale = exact["dxmu1" if name == "dx" else name]
            error_autograd = error_slopes = None
            if name in autograd:
                error_autograd = _relative(exact[name], autograd[name], scale)
            mine = [slope for slope in slopes if slope.gradient == name]
            if mine:
                along = np.array([slope.along for slope in mine]).reshape(DIRECTIONS, -1)
                wanted = np.array([slope.slope for slope in mine])  # (DIRECTIONS,)
                # With random signs a slope is mostly as large as the root of its summed squares.
                mostly = np.linalg.norm(along * scale.ravel(), axis=1)
                error_slopes = _relative(along @ exact[name].ravel(), wanted, mostly)
            kept = None if row is None else value[row] if value.ndim == 2 else value
            error = _relative(value, exact[name], scale)
            steps.append(_step(name, value, kept, error, error_autograd, error_slopes))
        return Trace(tuple(steps), invariants_of(aten, operands, dout))


def _steps(operands: Operands, dout: Array) -> dict[str, Array]:
    x, residual, gamma, beta, eps = operands
    forward = reference.forward_steps(x, gamma, beta, eps, residual)
    _, cache = reference.forward(x, gamma, beta, eps, residual)
    return {**forward._asdict(), **reference.backward_steps(dout, cache)._asdict()}


def _autograd(operands: Operands, dout: Array) -> dict[str, Array]:
    """The gradient by every step, of the steps in plain torch."""
    rows = operands.x if operands.residual is None else operands.x + operands.residual
    x, gamma, beta = (
        torch.tensor(a).requires_grad_() for a in (rows, operands.gamma, operands.beta)
    )
    # Where two paths leave a value, each has a copy of its own, whose gradient is that path's.
    x2 = x.clone()
    mean = x2.mean(-1, keepdim=True)
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
    found = torch.autograd.grad(out, list(by.values()), torch.tensor(dout))
    return {name: gradient.numpy() for name, gradient in zip(by, found, strict=True)}


def _relative(found: Array, wanted: Array, scale: Array) -> float:
    """Worst error where `wanted` is finite, as a share of the largest of `scale` if that is not 0.

    NaN where nothing is finite.
    """
    finite = np.isfinite(wanted)
    if not finite.any():
        return float("nan")
    error = np.abs(found - wanted)[finite].max()
    largest = np.abs(scale[np.isfinite(scale)]).max(initial=0.0)
    return float("inf") if np.isnan(error) else float(error / largest if largest else error)


def _step(
    name: str,
    value: Array,
    kept: Array | None,
    error: float,
    error_autograd: float | None,
    error_slopes: float | None,
) -> Step:
    finite = np.isfinite(value)
    some = value[finite].astype(np.float64) if finite.any() else np.array([np.nan])
    away = np.argwhere(~finite)
    return Step(
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


def norm_names(twin: Twin) -> tuple[str, ...]:
    """Return the names of the norms of a twin, in the order in which they run."""
    encoder = twin.model.encoder
    layers = (f"layers.{i}.norm{k}" for i in range(len(encoder.layers)) for k in (1, 2))
    return ("embeddings", *layers, *(() if encoder.final_norm is None else ("final_norm",)))


def rows_of_layer(twin: Twin, row: Row, norm_name: str) -> Operands:
    """Return what a norm of the twin is applied to on one input, in float32.

    Args:
        twin: The model.
        row: The input, L tokens.
        norm_name: One of `norm_names`.

    Returns:
        Operands of `(L, D)`. A norm that stands alone, as the first of a pre-norm layer, has no
        residual.

    Raises:
        ValueError: The twin has no norm of this name.
    """
    names = norm_names(twin)
    if norm_name not in names:
        raise ValueError(f"there is no norm {norm_name!r}; there are {', '.join(names)}")
    with _Calls() as calls:
        twin.vector(row)
    *tensors, eps = calls.arguments[names.index(norm_name)]
    # Copies: on CPU an array would be the model's own weight.
    *rows, gamma, beta = (tensor.float().cpu().numpy().copy() for tensor in tensors)
    x, residual = (part[0] for part in rows) if len(rows) == 2 else (rows[0][0], None)
    return Operands(x, residual, gamma, beta, eps)


class _Calls(TorchDispatchMode):
    """Keeps the arguments of every call of the op. A module's hooks would miss `with_sum`."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        ops = torch.ops.vitrine
        if func in (ops.layer_norm.default, ops.add_layer_norm.default):
            self.arguments.append(args)
        return func(*args, **(kwargs or {}))
