"""The fused op: `layer_norm(x + residual)`, with the sum as a second result.

Registered with `torch.library`, so that autograd, `torch.compile` and `torch.export` see one
operator: `vitrine::add_layer_norm`. `models.onnx_graph` says which nodes stand for it in a graph.
"""

import torch
from torch import Tensor, nn
from torch.library import Library, register_autocast, register_autograd, register_fake

# The library object must outlive its registrations.
_LIBRARY = Library("vitrine", "DEF")

# eps has no default: the dispatcher drops an argument equal to its default, and the exporter's
# translation would then receive none.
_LIBRARY.define(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor sum)"
)


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
    y, total = torch.ops.vitrine.add_layer_norm(x, residual, weight, bias, eps)
    return y, total


class AddLayerNorm(nn.Module):
    """Holds the weight and bias of one add + norm; named as in `torch.nn.LayerNorm`."""

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.d_model = d_model
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return `layer_norm(x + residual)`; see `add_layer_norm`."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `layer_norm(x + residual)` and the sum; see `add_layer_norm_with_sum`."""
        return add_layer_norm_with_sum(x, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Return what `repr` shows between the parentheses."""
        return f"{self.d_model}, eps={self.eps}, bias={self.bias is not None}"


def _check(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    torch._check(x.is_floating_point(), lambda: f"x must be floating point, not {x.dtype}")
    torch._check(
        x.dtype == residual.dtype,
        lambda: f"residual is {residual.dtype} where x is {x.dtype}",
    )
    torch._check(
        x.dim() >= 1 and x.dim() == residual.dim(),
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


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, _eps: float
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias)
    return x.new_empty(x.shape), x.new_empty(x.shape)


register_fake("vitrine::add_layer_norm", _fake, lib=_LIBRARY)


def _aten(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Two ATen kernels. Both accumulate bfloat16 and float16 in float32."""
    _check(x, residual, weight, bias)
    total = (x + residual).contiguous()  # (..., D)
    y, _, _ = torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps)
    return y, total


_LIBRARY.impl("add_layer_norm", _aten, "CompositeExplicitAutograd")


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, float],
    output: tuple[Tensor, Tensor],
) -> None:
    _, _, weight, bias, eps = inputs
    ctx.save_for_backward(output[1], weight, bias)  # type: ignore[arg-type]  # None may be saved
    ctx.eps = eps  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor | None, dsum: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
    """The gradient in plain differentiable torch, so that it can be differentiated again.

    Statistics and sums over rows are float32: a bfloat16 accumulator loses 7 % of dweight over
    4096 rows.
    """
    if dy is None:
        return dsum, dsum, None, None, None
    total, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
    wide = torch.promote_types(total.dtype, torch.float32)
    s, g = total.to(wide), dy.to(wide)  # (..., D)

    centred = s - s.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + ctx.eps)  # type: ignore[attr-defined]
    xhat = centred * rstd  # (..., D)

    dxhat = g if weight is None else g * weight.to(wide)
    dx = rstd * (
        dxhat - dxhat.mean(-1, keepdim=True) - xhat * (dxhat * xhat).mean(-1, keepdim=True)
    )
    if dsum is not None:
        dx = dx + dsum.to(wide)
    dx = dx.to(total.dtype)

    D = total.shape[-1]
    dweight = None if weight is None else (g * xhat).reshape(-1, D).sum(0).to(weight.dtype)
    dbias = None if bias is None else g.reshape(-1, D).sum(0).to(bias.dtype)
    return dx, dx, dweight, dbias, None


register_autograd("vitrine::add_layer_norm", _backward, setup_context=_save, lib=_LIBRARY)

# As torch's own autocast treats layer_norm: in float32.
for _device in ("cpu", "cuda"):
    register_autocast("vitrine::add_layer_norm", _device, torch.float32, lib=_LIBRARY)
