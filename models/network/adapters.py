"""Low-rank adapters (LoRA): updates of the weights, one set per task, at most one set per row.

The matrices of all adapters are stacked. Each token vector is projected to the ranks of all
adapters, the ranks of other adapters are set to zero, and the result is projected to the output.
So rows of different tasks can share a batch, and the base weights are stored once.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class AdapterConfig:
    """Hyperparameters of a model's adapters.

    Attributes:
        names: Name of each of the N adapters.
        rank: Rank R of each weight's update.
        scale: Factor by which each update is multiplied.
    """

    names: tuple[str, ...]
    rank: int
    scale: float

    def scales(self, adapters: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scale of each stacked rank for each token, `(..., N * R)`.

        It is `scale` for the ranks of the token's adapter, and zero for all other ranks.

        Args:
            adapters: Index of each token's adapter, `(...)`; -1: no adapter.
            dtype: Dtype of the result.
        """
        every = torch.arange(len(self.names), device=adapters.device)
        one_hot = (adapters[..., None] == every).to(dtype) * self.scale  # (..., N)
        return one_hot[..., None].expand(*one_hot.shape, self.rank).flatten(-2)


class LinearAdapters(nn.Module):
    """Stacked adapters of a linear layer."""

    def __init__(self, config: AdapterConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        N, R = len(config.names), config.rank
        self.down = nn.Parameter(torch.empty(N, R, in_features).normal_(std=0.02))
        self.up = nn.Parameter(torch.zeros(N, out_features, R))

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        """Return the update of the layer's output, `(..., out_features)`, for its input `x`."""
        down, up = self.stack()
        return F.linear(F.linear(x, down) * scales, up)

    def stack(self) -> tuple[Tensor, Tensor]:
        """Return the stacked projections to the ranks, `(N * R, in)`, and back, `(out, N * R)`."""
        return self.down.flatten(0, 1), self.up.transpose(0, 1).flatten(1)


class EmbeddingAdapters(nn.Module):
    """Stacked adapters of an embedding table."""

    def __init__(self, config: AdapterConfig, count: int, width: int) -> None:
        super().__init__()
        N, R = len(config.names), config.rank
        self.down = nn.Parameter(torch.zeros(N, count, R))
        self.up = nn.Parameter(torch.empty(N, R, width).normal_(std=0.02))

    def forward(self, ids: Tensor, scales: Tensor) -> Tensor:
        """Return the update of the embeddings, `(..., width)`, for the ids `(...)`."""
        table, up = self.stack()
        return F.linear(F.embedding(ids, table) * scales, up)

    def stack(self) -> tuple[Tensor, Tensor]:
        """Return the stacked tables, `(count, N * R)`, and projections, `(width, N * R)`."""
        return self.down.transpose(0, 1).flatten(1), self.up.flatten(0, 1).T


class AdaptedEmbedding(nn.Embedding):
    """Embedding table with optional adapters."""

    adapters: EmbeddingAdapters | None

    def __init__(self, count: int, width: int, adapters: AdapterConfig | None) -> None:
        super().__init__(count, width)
        self.adapters = EmbeddingAdapters(adapters, count, width) if adapters else None

    def forward(self, ids: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the embeddings of the ids `(...)`, `(..., width)`.

        Args:
            ids: Row indices of the table, `(...)`.
            scales: Scales from `AdapterConfig.scales`; None: no adapters.
        """
        y = super().forward(ids)
        return y if self.adapters is None or scales is None else y + self.adapters(ids, scales)


class AdaptedLinear(nn.Linear):
    """Linear layer with optional adapters."""

    adapters: LinearAdapters | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, adapters: AdapterConfig | None
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.adapters = LinearAdapters(adapters, in_features, out_features) if adapters else None

    def forward(self, x: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the output `(..., out_features)`.

        Args:
            x: Input, `(..., in_features)`.
            scales: Scales from `AdapterConfig.scales`; None: no adapters.
        """
        y = super().forward(x)
        return y if self.adapters is None or scales is None else y + self.adapters(x, scales)
