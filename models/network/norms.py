"""Norms of a network: layer norm or RMS norm, alone or fused with the residual addition."""

from dataclasses import dataclass

from models.add_layer_norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

Norm = LayerNorm | RMSNorm
AddNorm = AddLayerNorm | AddRMSNorm

KINDS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class NormConfig:
    """The norm of a network.

    Attributes:
        kind: Name in `KINDS`.
        eps: Constant added to the variance, or to the mean of the squares.
        bias: Whether a layer norm has a bias; RMS norm has none.
    """

    kind: str = "layer_norm"
    eps: float = 1e-5
    bias: bool = True

    def norm(self, width: int) -> Norm:
        """Return a norm of rows of a width."""
        if self.kind == "rms_norm":
            return RMSNorm(width, self.eps)
        return LayerNorm(width, self.eps, bias=self.bias)

    def add_norm(self, width: int) -> AddNorm:
        """Return a norm, fused with the residual addition, of rows of a width."""
        if self.kind == "rms_norm":
            return AddRMSNorm(width, self.eps)
        return AddLayerNorm(width, self.eps, bias=self.bias)
