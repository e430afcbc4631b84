"""Layer norm and RMS norm as torch modules that call the custom operators of `op`."""

import math

import torch
from torch import Tensor, nn

from models.add_layer_norm.op import (
    add_layer_norm_with_sum,
    add_rms_norm_with_sum,
    layer_norm,
    rms_norm,
)


class LayerNorm(nn.LayerNorm):
    """Replacement for `torch.nn.LayerNorm` with the same arguments, state dict, repr and errors.

    >>> import torch
    >>> rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> LayerNorm(3)(rows)
    tensor([[-1.2247,  0.0000,  1.2247],
            [-1.2247,  0.0000,  1.2247]], grad_fn=...)

    Each row is normalised by its own mean and variance, independently of other rows:

    >>> numbers = torch.arange(1.0, 13.0).view(3, 4)
    >>> numbers.mean(-1)
    tensor([ 2.5000,  6.5000, 10.5000])
    >>> LayerNorm(4, elementwise_affine=False)(numbers)
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416],
            [-1.3416, -0.4472,  0.4472,  1.3416],
            [-1.3416, -0.4472,  0.4472,  1.3416]])

    Batch norm normalises each feature (column) by its mean and variance over all rows instead:

    >>> nn.BatchNorm1d(4, affine=False)(numbers).round(decimals=4)
    tensor([[-1.2247, -1.2247, -1.2247, -1.2247],
            [ 0.0000,  0.0000,  0.0000,  0.0000],
            [ 1.2247,  1.2247,  1.2247,  1.2247]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` normalised over its last dimensions, those in `normalized_shape`."""
        flat, weight, bias = _flatten(self, input)
        return layer_norm(flat, weight, bias, self.eps).view(input.shape)


class AddLayerNorm(nn.LayerNorm):
    """Residual addition and layer norm as one module: `layer_norm(x + residual)`."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Return `layer_norm(x + residual)`, shaped as `x`."""
        return self.with_sum(x, residual)[0]

    def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `layer_norm(x + residual)` and `x + residual`, both shaped as `x`."""
        flat, weight, bias = _flatten(self, x)
        residual = _flatten_residual(residual, x, flat)
        y, total = add_layer_norm_with_sum(flat, residual, weight, bias, self.eps)
        return y.view(x.shape), total.view(x.shape)


class RMSNorm(nn.RMSNorm):
    """Replacement for `torch.nn.RMSNorm` with the same arguments, state dict, repr and errors.

    Each row is divided by its root mean square. Its mean is not subtracted:

    >>> import torch
    >>> RMSNorm(4, eps=0.0)(torch.tensor([[2.0, 2.0, 4.0, 4.0]])).round(decimals=4)
    tensor([[0.6325, 0.6325, 1.2649, 1.2649]], grad_fn=...)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised over its last dimensions, those in `normalized_shape`."""
        flat, weight, _ = _flatten(self, x)
        return rms_norm(flat, weight, _eps(self, x)).view(x.shape)


class AddRMSNorm(nn.RMSNorm):
    """Residual addition and RMS norm as one module: `rms_norm(x + residual)`."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """Return `rms_norm(x + residual)`, shaped as `x`."""
        return self.with_sum(x, residual)[0]

    def with_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return `rms_norm(x + residual)` and `x + residual`, both shaped as `x`."""
        flat, weight, _ = _flatten(self, x)
        residual = _flatten_residual(residual, x, flat)
        y, total = add_rms_norm_with_sum(flat, residual, weight, _eps(self, x))
        return y.view(x.shape), total.view(x.shape)


def _eps(norm: nn.RMSNorm, x: Tensor) -> float:
    # torch's default: the machine epsilon of the dtype in which the norm is computed.
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.finfo(wide).eps if norm.eps is None else norm.eps


def _flatten(
    norm: nn.LayerNorm | nn.RMSNorm, x: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return `x`, weight and bias with the normalised dimensions flattened into one."""
    shape = norm.normalized_shape
    if tuple(x.shape[-len(shape) :]) != shape:
        expected = ", ".join(map(str, ("*", *shape)))
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [{expected}], "
            f"but got input of size{list(x.shape)}"
        )
    bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
    if len(shape) == 1:
        return x, norm.weight, bias
    flat = x.reshape(*x.shape[: -len(shape)], math.prod(shape))
    flat_weight, flat_bias = (None if p is None else p.view(-1) for p in (norm.weight, bias))
    return flat, flat_weight, flat_bias


def _flatten_residual(residual: Tensor, x: Tensor, flat: Tensor) -> Tensor:
    """Return the residual of `x` in the shape of `flat`, which is `x` flattened by `_flatten`."""
    if flat is x:
        return residual
    if residual.shape != x.shape:
        raise RuntimeError(
            f"residual and x differ in shape: {tuple(residual.shape)}, {tuple(x.shape)}"
        )
    return residual.reshape(flat.shape)
