"""The fused operator: it returns `layer_norm(x + residual)` and `x + residual`.

The operator is registered with `torch.library`, so that autograd, `torch.compile` and
`torch.export` see a single node. It has two implementations: ATen kernels on any device, and Triton
kernels on CUDA.
"""

import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import (
    Library,
    register_autocast,
    register_autograd,
    register_fake,
)

# Global, because the operators are unregistered when the library object is deleted.
_LIBRARY = Library("vitrine", "DEF")

# eps has no default: the dispatcher drops arguments equal to their default, but the translation to
# ONNX needs eps.
_LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor sum)"
)
# A separate op, because without a residual the sum would be x itself, and an op must not return an
# alias of its input.
_LIBRARY.define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
_LIBRARY.define(
    "layer_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? weight, float eps)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)

Implementation = Literal["aten", "triton"]

# Checked once. Triton itself is imported on first use.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `layer_norm(x)` over the last dimension; see `add_layer_norm` for the arguments."""
    if _is_transformed():
        _check(x, None, weight, bias)
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.ops.vitrine.layer_norm.default(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return `layer_norm(x + residual)` over the last dimension.

    Args:
        x: Output of a sublayer, `(..., D)`, any float dtype.
        residual: Input of the sublayer, in the shape and dtype of `x`.
        weight: Scale, `(D,)`, in the dtype of `x` or float32; None: ones.
        bias: Shift, `(D,)`, in the dtype of `weight`; None: zeros.
        eps: Constant added to the variance.

    Returns:
        Tensor `(..., D)` in the dtype of `x`. The sum `x + residual` is rounded to that dtype; its
        mean and variance are computed from the rounded sum in float32 (float64 for float64 input).

    Raises:
        RuntimeError: The shapes or dtypes do not match.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return add_layer_norm_with_sum(x, residual, weight, bias, eps)[0]


def add_layer_norm_with_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x + residual)` and `x + residual`, both shaped as `x`.

    See `add_layer_norm` for the arguments and errors.
    """
    if _is_transformed():
        _check(x, residual, weight, bias)
        total = x + residual
        return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total
    y, total = torch.ops.vitrine.add_layer_norm.default(x, residual, weight, bias, eps)
    return y, total


def _is_transformed() -> bool:
    """Return whether a `torch.func` transform is active, which cannot trace custom ops."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def implementation(x: Tensor, *, backward: bool = False) -> Implementation:
    """Return the implementation that is used for the device, dtype and width of `x` `(..., D)`.

    Args:
        x: Input of the operator.
        backward: Whether to return that of the backward pass instead of the forward pass.
    """
    if not x.is_cuda or x.dtype == torch.float64 or not _HAS_TRITON:
        return "aten"
    from models.add_layer_norm import triton_kernels

    limit = triton_kernels.MAX_BACKWARD_D if backward else triton_kernels.MAX_FORWARD_D
    return "triton" if x.shape[-1] <= limit else "aten"


def _is_valid(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Return whether the shapes and dtypes of all inputs match.

    Fast path for the common case: `_check` raises the precise error, but takes as long as
    normalising a row.
    """
    width = x.shape[-1:]
    return (
        x.is_floating_point()
        and len(width) == 1
        and (residual is None or (residual.shape == x.shape and residual.dtype == x.dtype))
        and (weight is None or weight.shape == width)
        and (
            bias is None or (bias.shape == width and (weight is None or bias.dtype == weight.dtype))
        )
    )


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
    if weight is not None and bias is not None:
        torch._check(
            weight.dtype == bias.dtype,
            lambda: f"bias and weight differ in dtype: {bias.dtype}, {weight.dtype}",
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            torch._check(
                parameter.dim() == 1 and parameter.size(0) == x.size(-1),
                lambda name=name, parameter=parameter: (
                    f"{name} is {tuple(parameter.shape)}; it must be ({x.size(-1)},)"
                ),
            )


# Implementations for any device (`_aten*`) and for CUDA (`_cuda*`). ATen accumulates bfloat16 and
# float16 in float32.


def _aten(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not _is_valid(x, None, weight, bias):
        _check(x, None, weight, bias)
    return torch.native_layer_norm(x.contiguous(), [x.shape[-1]], weight, bias, eps)[0]


def _aten_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if not _is_valid(x, residual, weight, bias):
        _check(x, residual, weight, bias)
    total = (x + residual).contiguous()  # (..., D)
    return torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps)[0], total


def _gradients(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias by `reference.closed_form`, in differentiable functions."""
    D = total.shape[-1]
    wide = torch.promote_types(total.dtype, torch.float32)
    s, g = total.to(wide), dy.to(wide)  # (..., D)
    centred = s - s.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    xhat = centred * rstd  # (..., D)
    dxhat = g if weight is None else g * weight.to(wide)
    along = (dxhat * xhat).mean(-1, keepdim=True)
    dx = rstd * (dxhat - dxhat.mean(-1, keepdim=True) - xhat * along)
    if dsum is not None:
        dx = dx + dsum.to(wide)
    dweight = (g * xhat).reshape(-1, D).sum(0)
    return dx.to(total.dtype), dweight, g.reshape(-1, D).sum(0)


def _aten_gradients(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias, computed by ATen's kernel.

    Inputs are converted to float32 first, because the kernel sums dweight in its input's dtype.
    """
    shape = [total.shape[-1]]
    wide = torch.promote_types(total.dtype, torch.float32)
    s, g = total.to(wide).contiguous(), dy.to(wide).contiguous()  # (..., D)
    _, mean, rstd = torch.native_layer_norm(s, shape, None, None, eps)
    scale = s.new_ones(shape) if weight is None else weight.to(wide)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        g, s, shape, mean, rstd, scale, scale, [True, True, True]
    )
    if dsum is not None:
        dx = dx + dsum.to(wide)
    return dx.to(total.dtype), dweight, dbias


def _cuda(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if implementation(x) == "aten":
        return _aten(x, weight, bias, eps)
    from models.add_layer_norm import triton_kernels

    _check(x, None, weight, bias)
    with torch.cuda.device_of(x):  # Triton launches kernels on the current device, not on that of x
        return triton_kernels.forward(x, None, weight, bias, eps)[0]


def _cuda_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if implementation(x) == "aten":
        return _aten_add(x, residual, weight, bias, eps)
    from models.add_layer_norm import triton_kernels

    _check(x, residual, weight, bias)
    with torch.cuda.device_of(x):
        return triton_kernels.forward(x, residual, weight, bias, eps)


def _cuda_gradients(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if implementation(total, backward=True) == "aten":
        return _aten_gradients(dy, dsum, total, weight, eps)
    from models.add_layer_norm import triton_kernels

    with torch.cuda.device_of(total):
        return triton_kernels.backward(dy, dsum, total, weight, eps)


for _name, _anywhere, _on_cuda in (
    ("layer_norm", _aten, _cuda),
    ("add_layer_norm", _aten_add, _cuda_add),
    ("layer_norm_backward", _aten_gradients, _cuda_gradients),
):
    _LIBRARY.impl(_name, _anywhere, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    # Autocast runs these ops in float32, like torch's own layer_norm.
    for _device in ("cpu", "cuda"):
        register_autocast(f"vitrine::{_name}", _device, torch.float32, lib=_LIBRARY)


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, _eps: float) -> Tensor:
    _check(x, None, weight, bias)
    return x.new_empty(x.shape)


def _fake_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, _eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_gradients(
    _dy: Tensor, _dsum: Tensor | None, total: Tensor, _weight: Tensor | None, _eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(total.dtype, torch.float32)
    dweight, dbias = (total.new_empty(total.shape[-1:], dtype=wide) for _ in range(2))
    return total.new_empty(total.shape), dweight, dbias


register_fake("vitrine::layer_norm", _fake, lib=_LIBRARY)
register_fake("vitrine::add_layer_norm", _fake_add, lib=_LIBRARY)
register_fake("vitrine::layer_norm_backward", _fake_gradients, lib=_LIBRARY)


# Autograd. torch types the arguments of these functions as Any.


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
    *tensors, weight, bias, eps = inputs
    total = tensors[0] if len(tensors) == 1 else output[1]
    ctx.save_for_backward(total, weight, bias)
    ctx.eps = eps
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Any:  # noqa: ANN401
    """Return the gradients with respect to `x`, weight and bias; None for a missing parameter."""
    if dy is None:
        return dsum, None, None
    total, weight, bias = ctx.saved_tensors
    # The backward op is not differentiable. With create_graph=True (gradients enabled here),
    # differentiable torch functions replace it.
    backward_op = torch.ops.vitrine.layer_norm_backward.default
    gradients = _gradients if torch.is_grad_enabled() else backward_op
    dx, dweight, dbias = gradients(dy, dsum, total, weight, ctx.eps)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
    )


def _backward_of_norm(ctx: Any, dy: Tensor | None) -> Any:  # noqa: ANN401
    return (*_backward(ctx, dy), None)


def _backward_of_add(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:  # noqa: ANN401
    dx, dweight, dbias = _backward(ctx, dy, dsum)
    return dx, dx, dweight, dbias, None


def _backward_of_backward(_ctx: Any, *_: Any) -> Any:  # noqa: ANN401
    raise RuntimeError(
        "vitrine::layer_norm_backward is not differentiable; for second derivatives, compute the "
        "first ones with create_graph=True"
    )


register_autograd("vitrine::layer_norm", _backward_of_norm, setup_context=_save, lib=_LIBRARY)
register_autograd("vitrine::add_layer_norm", _backward_of_add, setup_context=_save, lib=_LIBRARY)
register_autograd("vitrine::layer_norm_backward", _backward_of_backward, lib=_LIBRARY)
