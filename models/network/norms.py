"""Norms of a network: layer norm or RMS norm, alone or fused with the residual addition."""

from dataclasses import dataclass

from models.add_layer_norm import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm

Norm = LayerNorm | RMSNorm
AddNorm = AddLayerNorm | AddRMSNorm

KINDS = ("layer_norm", "rms_norm")


@dataclass(frozen=True)
class NormConfig:
    """Hyperparameters of a network's norms.

    Attributes:
        kind: Name in `KINDS`.
        eps: Constant added to the variance (layer norm) or mean square (RMS norm).
        bias: Whether a layer norm has a bias. An RMS norm never has one.
    """

    kind: str = "layer_norm"
    eps: float = 1e-5
    bias: bool = True

    def norm(self, width: int) -> Norm:
        """Return a norm for rows of `width` elements."""
        if self.kind == "rms_norm":
            return RMSNorm(width, self.eps)
        return LayerNorm(width, self.eps, bias=self.bias)

    def add_norm(self, width: int) -> AddNorm:
        """Return a norm for rows of `width` elements, fused with the residual addition."""
        if self.kind == "rms_norm":
            return AddRMSNorm(width, self.eps)
        return AddLayerNorm(width, self.eps, bias=self.bias)
