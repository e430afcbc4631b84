"""Heads: modules between the pooled vector and the row vector, or after a token vector."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.network.norms import Norm

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "LeakyReLU": nn.functional.leaky_relu,
    "SiLU": nn.functional.silu,
    "GELU": nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
}


class DenseHead(nn.Module):
    """A linear layer and an activation, equivalent to sentence-transformers' `Dense` module.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether the linear layer has a bias.
        activation: Name in `HEAD_ACTIVATIONS`.
        residual: Whether the input is added to the output. If their widths differ, the input passes
            through a second linear layer before that.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        activation: str,
        *,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = HEAD_ACTIVATIONS[activation]
        self.residual: nn.Module | None = None
        if residual:
            is_same = in_features == out_features
            self.residual = (
                nn.Identity() if is_same else nn.Linear(in_features, out_features, False)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `(..., out_features)` for the input `x`, `(..., in_features)`."""
        x = x.to(self.linear.weight.dtype)
        out = self.activation(self.linear(x))
        return out if self.residual is None else out + self.residual(x)


class NormHead(nn.Module):
    """A norm after pooling, such as sentence-transformers' `LayerNorm` module.

    Args:
        norm: Norm for rows of `width` elements.
        width: Width of the input and of the output.

    Attributes:
        in_features: Width of the input.
        out_features: Width of the output, equal to `in_features`.
    """

    def __init__(self, norm: Norm, width: int) -> None:
        super().__init__()
        self.in_features = self.out_features = width
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows of `x`, `(B, width)`."""
        return self.norm(x.to(self.norm.weight.dtype))


class NormalizeHead(nn.Module):
    """Normalisation to unit length, equivalent to sentence-transformers' `Normalize` module."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, `(B, W)`, with its rows scaled to unit length."""
        return nn.functional.normalize(x)


class TruncateHead(nn.Module):
    """Truncation to the leading dimensions, equivalent to sentence-transformers' `truncate_dim`.

    Attributes:
        width: Maximum width of the output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return the leading dimensions of `x`, `(B, W)`, up to `width`."""
        return x[:, : self.width]


Head = DenseHead | NormHead | NormalizeHead | TruncateHead
