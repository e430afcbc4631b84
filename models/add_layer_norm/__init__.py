"""The fused op: `layer_norm(x + residual)`, with the sum as a second result.

Registered with `torch.library`, so that autograd, `torch.compile` and `torch.export` see one
operator. Two implementations stand behind it: ATen's kernels, and Triton's on CUDA. `reference`
explains every step; `models.onnx_graph` says which nodes stand for the op in a graph.
"""

import importlib.util
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import (
    Library,
    register_autocast,
    register_autograd,
    register_fake,
)

# The library object must outlive its registrations.
_LIBRARY = Library("vitrine", "DEF")

# eps has no default: the dispatcher drops an argument equal to its default, and the exporter's
# translation would then receive none.
_LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor sum)"
)
# An op of its own: the sum would be an alias of x, which an op must not return.
_LIBRARY.define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
_LIBRARY.define(
    "layer_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? weight, float eps)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)

Implementation = Literal["aten", "triton"]

# Looked for once, and imported only where it is used.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `layer_norm(x)` over the last dimension; otherwise as `add_layer_norm`."""
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
        residual: What the sublayer read; same shape and dtype as `x`.
        weight: Scale, `(D,)`, in the dtype of `x` or float32; None means ones.
        bias: Shift, `(D,)`, in the dtype of `weight`; None means zeros.
        eps: Added to the variance.

    Returns:
        `(..., D)` in the dtype of `x`. The sum is rounded to that dtype, and the statistics are
        taken from the rounded sum in float32 (float64 for float64 input).

    Raises:
        RuntimeError: The shapes or dtypes do not fit together.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    return add_layer_norm_with_sum(x, residual, weight, bias, eps)[0]


def add_layer_norm_with_sum(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x + residual)` and `x + residual`, which pre-norm layers carry on.

    Arguments and errors are those of `add_layer_norm`.
    """
    if _is_transformed():
        _check(x, residual, weight, bias)
        total = x + residual
        return F.layer_norm(total, x.shape[-1:], weight, bias, eps), total
    y, total = torch.ops.vitrine.add_layer_norm.default(x, residual, weight, bias, eps)
    return y, total


def _is_transformed() -> bool:
    """Whether a `torch.func` transform looks on: torch lets it see through no registered op."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` through the op: the same arguments, state dict, repr and errors.

    >>> rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> LayerNorm(3)(rows)
    tensor([[-1.2247,  0.0000,  1.2247],
            [-1.2247,  0.0000,  1.2247]], grad_fn=...)

    Each row by its own mean, whatever the other rows are:

    >>> numbers = torch.arange(1.0, 13.0).view(3, 4)
    >>> numbers.mean(-1)
    tensor([ 2.5000,  6.5000, 10.5000])
    >>> LayerNorm(4, elementwise_affine=False)(numbers)
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416],
            [-1.3416, -0.4472,  0.4472,  1.3416],
            [-1.3416, -0.4472,  0.4472,  1.3416]])

    Batch norm takes the other axis, each feature over the rows:

    >>> nn.BatchNorm1d(4, affine=False)(numbers).round(decimals=4)
    tensor([[-1.2247, -1.2247, -1.2247, -1.2247],
            [ 0.0000,  0.0000,  0.0000,  0.0000],
            [ 1.2247,  1.2247,  1.2247,  1.2247]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of `input` over its last dimensions, shaped alike."""
        flat, weight, bias = _flatten(self, input)
        return layer_norm(flat, weight, bias, self.eps).view(input.shape)


class AddLayerNorm(nn.LayerNorm):
    """The residual addition and the norm behind it; a `LayerNorm` that takes two tensors."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Return `layer_norm(x + residual)`, shaped as `x`."""
        return self.with_sum(x, residual)[0]

    def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `layer_norm(x + residual)` and the sum, both shaped as `x`."""
        flat, weight, bias = _flatten(self, x)
        if flat is not x:
            if residual.shape != x.shape:
                raise RuntimeError(
                    f"residual is {tuple(residual.shape)} where x is {tuple(x.shape)}"
                )
            residual = residual.reshape(flat.shape)
        y, total = add_layer_norm_with_sum(flat, residual, weight, bias, self.eps)
        return y.view(x.shape), total.view(x.shape)


def _flatten(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`x` with the normalised dimensions as one, and weight and bias likewise."""
    shape = norm.normalized_shape
    if tuple(x.shape[-len(shape) :]) != shape:
        expected = ", ".join(map(str, ("*", *shape)))
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [{expected}], "
            f"but got input of size{list(x.shape)}"
        )
    if len(shape) == 1:
        return x, norm.weight, norm.bias
    flat = x.reshape(*x.shape[: -len(shape)], math.prod(shape))
    weight, bias = (None if p is None else p.view(-1) for p in (norm.weight, norm.bias))
    return flat, weight, bias


def implementation(x: Tensor, *, backward: bool = False) -> Implementation:
    """Return what runs the op on a tensor like `x` `(..., D)`, for reports."""
    if not x.is_cuda or x.dtype == torch.float64 or not _HAS_TRITON:
        return "aten"
    from models.add_layer_norm import triton_kernels

    widest = triton_kernels.MAX_BACKWARD_D if backward else triton_kernels.MAX_FORWARD_D
    return "triton" if x.shape[-1] <= widest else "aten"


def _fits(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether all is as it mostly is; `_check`, which says what is not, takes as long as a row."""
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
            lambda: f"residual is {residual.dtype} where x is {x.dtype}",
        )
        torch._check(
            x.dim() == residual.dim(),
            lambda: f"residual is {tuple(residual.shape)} where x is {tuple(x.shape)}",
        )
        # Size by size, not shape against shape: torch.export then learns that they are equal.
        for axis in range(x.dim()):
            torch._check(
                x.size(axis) == residual.size(axis),
                lambda: f"residual is {tuple(residual.shape)} where x is {tuple(x.shape)}",
            )
    if weight is not None and bias is not None:
        torch._check(
            weight.dtype == bias.dtype,
            lambda: f"bias is {bias.dtype} where weight is {weight.dtype}",
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            torch._check(
                parameter.dim() == 1 and parameter.size(0) == x.size(-1),
                lambda name=name, parameter=parameter: (
                    f"{name} is {tuple(parameter.shape)}, ({x.size(-1)},) is needed"
                ),
            )


# What each op does, on any device and on CUDA. ATen accumulates bfloat16 and float16 in float32.


def _aten(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not _fits(x, None, weight, bias):
        _check(x, None, weight, bias)
    return torch.native_layer_norm(x.contiguous(), [x.shape[-1]], weight, bias, eps)[0]


def _aten_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    if not _fits(x, residual, weight, bias):
        _check(x, residual, weight, bias)
    total = (x + residual).contiguous()  # (..., D)
    return torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps)[0], total


def _gradients(
    dy: Tensor, dsum: Tensor | None, total: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.closed_form` in torch, which can be differentiated again."""
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
    """ATen's backward kernel, in float32 at least: in bfloat16 it sums dweight in bfloat16 too."""
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
    with torch.cuda.device_of(x):  # a kernel is launched on the current device, whoever owns x
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
    # As torch's own autocast treats layer_norm: in float32.
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


# Autograd. What it hands to these functions is typed by torch as Any.


def _save(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
    *tensors, weight, bias, eps = inputs
    total = tensors[0] if len(tensors) == 1 else output[1]
    ctx.save_for_backward(total, weight, bias)
    ctx.eps = eps
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None = None) -> Any:  # noqa: ANN401
    """Gradients by x, weight and bias."""
    if dy is None:
        return dsum, None, None
    total, weight, bias = ctx.saved_tensors
    # The gradient's own graph is wanted: the op that has none gives way to plain torch.
    once = torch.ops.vitrine.layer_norm_backward.default
    gradients = _gradients if torch.is_grad_enabled() else once
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
    raise RuntimeError("vitrine::layer_norm_backward has no gradient; use create_graph=True")


register_autograd("vitrine::layer_norm", _backward_of_norm, setup_context=_save, lib=_LIBRARY)
register_autograd("vitrine::add_layer_norm", _backward_of_add, setup_context=_save, lib=_LIBRARY)
register_autograd("vitrine::layer_norm_backward", _backward_of_backward, lib=_LIBRARY)
