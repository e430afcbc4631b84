"""The fused operator, which returns `norm(x + residual)` and `x + residual`.

The norm is layer norm or RMS norm, which is layer norm without the subtraction of the mean. The
operator is registered with `torch.library`, so that autograd, `torch.compile` and
`torch.export` see a single node. It has three implementations: C++ kernels on CPU (where they are
built), Triton kernels on CUDA, and torch functions anywhere else.
"""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import (
    Library,
    register_autocast,
    register_fake,
)

# Global, because the operators are unregistered when the library object is deleted.
_LIBRARY = Library("vitrine", "DEF")

# `centred` is True for layer norm and False for RMS norm. `centred` and `eps` have no defaults: the
# dispatcher drops arguments equal to their default, but the translation to ONNX needs them.
_LIBRARY.define(
    "add_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool centred)"
    " -> (Tensor y, Tensor sum)"
)
# A separate op, because without a residual the sum would be x itself, and an op must not return an
# alias of its input.
_LIBRARY.define("norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred) -> Tensor")
_LIBRARY.define(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? weight, float eps, bool centred)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)

Implementation = Literal["aten", "cpp", "triton"]

# Checked once. Triton itself is imported on first use.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _load_cpu_kernels() -> bool:
    """Load the C++ kernels for CPU, which setup.py builds; return whether they were loaded."""
    for library in Path(__file__).parent.glob("_cpu*.so"):
        try:
            torch.ops.load_library(library)
        except OSError as error:
            warnings.warn(
                f"{library.name} cannot be loaded, so the fused operator uses torch functions, "
                f"which are slower; rebuild the library for the installed torch: {error}",
                stacklevel=2,
            )
            return False
        return True
    return False


_HAS_CPP = _load_cpu_kernels()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `layer_norm(x)` over the last dimension; see `add_layer_norm` for the arguments."""
    return norm(x, weight, bias, eps, True)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return `layer_norm(x + residual)` over the last dimension.

    Args:
        x: Output of a sublayer, `(..., D)`, any float dtype.
        residual: Input of the sublayer, in the shape and dtype of `x`.
        weight: Scale, `(D,)`, any float dtype; None: ones.
        bias: Shift, `(D,)`, in the dtype of `weight`; None: zeros.
        eps: Constant added to the variance.

    Returns:
        Tensor `(..., D)` in the dtype of `x`. The sum `x + residual` is rounded to that dtype; its
        mean and variance are computed from the rounded sum in float32 (float64 for float64 input).
        Where the squares of a row's deviations add up to more than float32 holds, 3.4e38, the
        result is `bias` and the gradient of `x` is 0; where a deviation itself is beyond it, they
        are NaN. `torch.nn.functional.layer_norm` gives the same, or NaN sooner.

    Raises:
        RuntimeError: The shapes, dtypes or devices of the arguments do not match.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return add_norm(x, residual, weight, bias, eps, True)[0]


def add_layer_norm_with_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x + residual)` and `x + residual`, both shaped as `x`.

    See `add_layer_norm` for the arguments and errors.
    """
    return add_norm(x, residual, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `rms_norm(x)` over the last dimension; see `add_rms_norm` for the arguments."""
    return norm(x, weight, None, eps, False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return `rms_norm(x + residual)` over the last dimension.

    Args:
        x: Output of a sublayer, `(..., D)`, any float dtype.
        residual: Input of the sublayer, in the shape and dtype of `x`.
        weight: Scale, `(D,)`, any float dtype; None: ones.
        eps: Constant added to the mean of the squares.

    Returns:
        Tensor `(..., D)` in the dtype of `x`. The sum `x + residual` is rounded to that dtype; the
        mean of its squares is computed in float32 (float64 for float64 input). Where the squares
        add up to more than float32 holds, 3.4e38, the result and the gradient of `x` are 0, as in
        `torch.nn.functional.rms_norm`.

    Raises:
        RuntimeError: The shapes, dtypes or devices of the arguments do not match.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return add_norm(x, residual, weight, None, eps, False)[0]


def add_rms_norm_with_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual`, both shaped as `x`.

    See `add_rms_norm` for the arguments and errors.
    """
    return add_norm(x, residual, weight, None, eps, False)


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    """Return `layer_norm(x)` if `centred`, else `rms_norm(x)`, with optional weight and bias."""
    if _is_transformed():
        return composite_forward(x, None, weight, bias, eps, centred)[0]
    try:
        return torch.ops.vitrine.norm.default(x, weight, bias, eps, centred)
    except RuntimeError:
        _check(x, None, weight, bias)  # the C++ kernels' error does not name the argument
        raise


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return `norm(x + residual)` and `x + residual`; see `norm` for the other arguments."""
    if _is_transformed():
        return composite_forward(x, residual, weight, bias, eps, centred)
    try:
        y, total = torch.ops.vitrine.add_norm.default(x, residual, weight, bias, eps, centred)
    except RuntimeError:
        _check(x, residual, weight, bias)  # the C++ kernels' error does not name the argument
        raise
    return y, total


def _is_transformed() -> bool:
    """Return whether forward-mode AD or a `torch.func` transform is active, outside of compilation.

    Neither can trace custom ops.
    """
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def implementation(x: Tensor, *, backward: bool = False) -> Implementation:
    """Return the implementation that is used for the device, dtype and width of `x` `(..., D)`.

    Args:
        x: Input of the operator.
        backward: Whether to return the backward pass's implementation, not the forward pass's.
    """
    if x.is_cpu and _HAS_CPP:
        return "cpp"
    if not x.is_cuda or x.dtype == torch.float64 or not _HAS_TRITON:
        return "aten"
    from models.add_layer_norm import triton_kernels

    limit = triton_kernels.MAX_BACKWARD_D if backward else triton_kernels.MAX_FORWARD_D
    return "triton" if x.shape[-1] <= limit else "aten"


def _check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    torch._check(x.is_floating_point(), lambda: f"x must be floating point, not {x.dtype}")
    torch._check(x.dim() >= 1, lambda: "x must have at least one dimension")
    if residual is not None:
        torch._check(
            x.dtype == residual.dtype,
            lambda: f"residual and x differ in dtype: {residual.dtype}, {x.dtype}",
        )
        torch._check(
            x.dim() == residual.dim(),
            lambda: f"residual and x differ in shape: {tuple(residual.shape)}, {tuple(x.shape)}",
        )
        # Compared axis by axis, so that torch.export learns that the sizes are equal.
        for axis in range(x.dim()):
            torch._check(
                x.size(axis) == residual.size(axis),
                lambda: (
                    f"residual and x differ in shape: {tuple(residual.shape)}, {tuple(x.shape)}"
                ),
            )
    for name, other in (("residual", residual), ("weight", weight), ("bias", bias)):
        if other is not None:
            torch._check(
                other.device == x.device,
                lambda name=name, other=other: (
                    f"{name} and x are on different devices: {other.device}, {x.device}"
                ),
            )
    if weight is not None and bias is not None:
        torch._check(
            weight.dtype == bias.dtype,
            lambda: f"bias and weight differ in dtype: {bias.dtype}, {weight.dtype}",
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            torch._check(
                parameter.is_floating_point(),
                lambda name=name, parameter=parameter: (
                    f"{name} must be floating point, not {parameter.dtype}"
                ),
            )
            torch._check(
                parameter.dim() == 1 and parameter.size(0) == x.size(-1),
                lambda name=name, parameter=parameter: (
                    f"{name} is {tuple(parameter.shape)}; it must be ({x.size(-1)},)"
                ),
            )


# Implementations for any device (`composite*`, `_aten*`) and for CUDA (`_cuda*`); those for CPU are
# in cpu_kernels.cpp.


def _centre(rows: Tensor) -> Tensor:
    """Return rows `(..., D)` minus their mean.

    A large mean has a rounding error, which is then the mean of the deviations. It is subtracted
    as well.
    """
    centred = rows - rows.mean(-1, keepdim=True)
    return centred - centred.mean(-1, keepdim=True)


def composite_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return `norm(x + residual)` and `x + residual`, by differentiable torch functions.

    Layer norm is computed from centred rows, because ATen computes `x * rstd - mean * rstd`, which
    loses digits where the mean is large. `centred` is True for layer norm and False for RMS norm;
    see `add_layer_norm` for the other arguments.
    """
    _check(x, residual, weight, bias)
    total = x if residual is None else x + residual  # (..., D)
    wide = torch.promote_types(total.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    rows = total.to(wide)
    if centred:
        y = F.layer_norm(_centre(rows), total.shape[-1:], weight, bias, eps)
    else:
        y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return y.to(total.dtype), total


def composite_backward(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx `(..., D)`, dweight `(D,)` and dbias `(D,)`, by differentiable torch functions.

    The formula of dx is that of `reference.closed_form`, plus `dsum`.
    """
    wide = torch.promote_types(total.dtype, torch.float32)
    g, rows = dy.to(wide), total.to(wide)  # (..., D)
    rows = _centre(rows) if centred else rows
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    xhat = rows * rstd  # (..., D)
    dxhat = g if weight is None else g * weight.to(wide)
    dx = dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)
    dx = rstd * (dx - dxhat.mean(-1, keepdim=True) if centred else dx)
    if dsum is not None:
        dx = dx + dsum.to(wide)
    flat = g.unsqueeze(0).flatten(0, -2)  # (N, D)
    dweight = (flat * xhat.unsqueeze(0).flatten(0, -2)).sum(0)
    return dx.to(total.dtype).contiguous(), dweight, flat.sum(0)


def _aten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    return composite_forward(x, None, weight, bias, eps, centred)[0].contiguous()


def _aten_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    y, total = composite_forward(x, residual, weight, bias, eps, centred)
    return y.contiguous(), total.contiguous()


def _cuda(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> Tensor:
    if implementation(x) == "aten":
        return _aten(x, weight, bias, eps, centred)
    from models.add_layer_norm import triton_kernels

    _check(x, None, weight, bias)
    with torch.cuda.device_of(x):  # Triton launches kernels on the current device, not on x's
        return triton_kernels.forward(x, None, weight, bias, eps, centred)[0]


def _cuda_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    if implementation(x) == "aten":
        return _aten_add(x, residual, weight, bias, eps, centred)
    from models.add_layer_norm import triton_kernels

    _check(x, residual, weight, bias)
    with torch.cuda.device_of(x):
        return triton_kernels.forward(x, residual, weight, bias, eps, centred)


def _cuda_gradients(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if implementation(total, backward=True) == "aten":
        return composite_backward(dy, dsum, total, weight, eps, centred)
    from models.add_layer_norm import triton_kernels

    with torch.cuda.device_of(total):
        return triton_kernels.backward(dy, dsum, total, weight, eps, centred)


for _name, _anywhere, _on_cuda in (
    ("norm", _aten, _cuda),
    ("add_norm", _aten_add, _cuda_add),
    ("norm_backward", composite_backward, _cuda_gradients),
):
    _LIBRARY.impl(_name, _anywhere, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    # On CUDA, autocast runs these ops in float32, like torch's own layer_norm.
    register_autocast(f"vitrine::{_name}", "cuda", torch.float32, lib=_LIBRARY)


def _autocast_add_on_cpu(x: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Add and normalise in the wider dtype of `x` and `residual`, like torch's functions on CPU."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ):
        y, total = torch.ops.vitrine.add_norm.default(x.to(dtype), residual.to(dtype), *others)
    return y, total


_LIBRARY.impl("add_norm", _autocast_add_on_cpu, "AutocastCPU")


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, _eps: float, _centred: bool
) -> Tensor:
    _check(x, None, weight, bias)
    return x.new_empty(x.shape)


def _fake_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    _eps: float,
    _centred: bool,
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_gradients(
    _dy: Tensor,
    _dsum: Tensor | None,
    total: Tensor,
    _weight: Tensor | None,
    _eps: float,
    _centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(total.dtype, torch.float32)
    dweight, dbias = (total.new_empty(total.shape[-1:], dtype=wide) for _ in range(2))
    return total.new_empty(total.shape), dweight, dbias


register_fake("vitrine::norm", _fake, lib=_LIBRARY)
register_fake("vitrine::add_norm", _fake_add, lib=_LIBRARY)
register_fake("vitrine::norm_backward", _fake_gradients, lib=_LIBRARY)


# Gradients, as `torch.autograd.Function`s: with `torch.library.register_autograd`, they take 15 us
# longer, half the time of a small batch's backward pass. Arguments are typed Any, as in torch.
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, eps: float, centred: bool) -> Tensor:  # noqa: ANN401
        with _below_autograd():
            y: Tensor = torch.ops.vitrine.norm.default(x, weight, bias, eps, centred)
        _save(ctx, x, weight, bias, eps, centred)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> Any:  # noqa: ANN401
        return (*_backward(ctx, dy, None), None, None)


class _AddNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, *parameters: Any) -> Any:  # noqa: ANN401
        with _below_autograd():
            y, total = torch.ops.vitrine.add_norm.default(x, residual, *parameters)
        _save(ctx, total, *parameters)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:  # noqa: ANN401
        dx, dweight, dbias = _backward(ctx, dy, dsum)
        return dx, dx, dweight, dbias, None, None


def _save(
    ctx: Any,  # noqa: ANN401
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> None:
    ctx.save_for_backward(total, weight, bias)
    ctx.constants = eps, centred
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:  # noqa: ANN401
    """Return the gradients with respect to `x`, weight and bias; None where there is none."""
    if dy is None:
        return dsum, None, None
    total, weight, bias = ctx.saved_tensors
    if torch.is_grad_enabled():  # with create_graph=True; the backward op is not differentiable
        dx, dweight, dbias = composite_backward(dy, dsum, total, weight, *ctx.constants)
    else:
        with _below_autograd():
            dx, dweight, dbias = torch.ops.vitrine.norm_backward.default(
                dy, dsum, total, weight, *ctx.constants
            )
    return dx, _cast(dweight, weight), _cast(dbias, bias)


def _cast(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient in the dtype of its parameter; None without a parameter."""
    if parameter is None:
        return None
    same = parameter.dtype == gradient.dtype  # `to` takes 3 us to check this
    return gradient if same else gradient.to(parameter.dtype)


class _NormBackwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> Any:  # noqa: ANN401
        with _below_autograd():
            return torch.ops.vitrine.norm_backward.default(*arguments)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:  # noqa: ANN401
        raise RuntimeError(
            "vitrine::norm_backward is not differentiable; for second derivatives, compute "
            "the first derivatives with create_graph=True"
        )


def _has_tangent(argument: object) -> bool:
    return isinstance(argument, Tensor) and torch._VF._unpack_dual(argument, level=0)[1] is not None


def _with_autograd(
    op: torch._ops.OpOverload, function: type[torch.autograd.Function]
) -> Callable[..., Any]:
    """Return the op's implementation for the dispatch key Autograd."""

    def call(*arguments: Any) -> Any:  # noqa: ANN401
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return function.apply(*arguments)
        if any(map(_has_tangent, arguments)):
            raise RuntimeError(
                f"{op} has no forward-mode derivative; outside of torch.compile, the functions of "
                "models.add_layer_norm have one"
            )
        with _below_autograd():
            return op(*arguments)

    return call


for _name, _function in (
    ("norm", _NormFunction),
    ("add_norm", _AddNormFunction),
    ("norm_backward", _NormBackwardFunction),
):
    _op = getattr(torch.ops.vitrine, _name).default
    _LIBRARY.impl(_name, _with_autograd(_op, _function), "Autograd")
