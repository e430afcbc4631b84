"""Low-rank adapters: updates of the weights, one set per task; each row has one adapter or none.

The adapters of all tasks are stacked. A token's vector is projected to the ranks of all of them,
those of other tasks are set to zero, and the rest is projected to the output. So rows of several
tasks share a batch, and the weights exist once.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class AdapterConfig:
    """Hyperparameters of adapters.

    Attributes:
        names: Name of each adapter; there are N.
        rank: Rank of the update of a weight, R.
        scale: Factor of the updates.
    """

    names: tuple[str, ...]
    rank: int
    scale: float

    def scales(self, adapters: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scale of each of the stacked ranks, `(..., N * R)`.

        They are `scale` for the adapter of a token, and zero for all others.

        Args:
            adapters: Index of the adapter of each token, `(...)`; -1: none.
            dtype: Dtype of the result.
        """
        every = torch.arange(len(self.names), device=adapters.device)
        one_hot = (adapters[..., None] == every).to(dtype) * self.scale  # (..., N)
        return one_hot[..., None].expand(*one_hot.shape, self.rank).flatten(-2)


class LinearAdapters(nn.Module):
    """Adapters of a linear layer."""

    def __init__(self, config: AdapterConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        N, R = len(config.names), config.rank
        self.down = nn.Parameter(torch.empty(N, R, in_features).normal_(std=0.02))
        self.up = nn.Parameter(torch.zeros(N, out_features, R))

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        """Return the update of the output `(..., out_features)` for the input `x`."""
        down, up = self.stacked()
        return F.linear(F.linear(x, down) * scales, up)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return the projections to all ranks, `(N * R, in)`, and back, `(out, N * R)`."""
        return self.down.flatten(0, 1), self.up.transpose(0, 1).flatten(1)


class EmbeddingAdapters(nn.Module):
    """Adapters of an embedding table."""

    def __init__(self, config: AdapterConfig, count: int, width: int) -> None:
        super().__init__()
        N, R = len(config.names), config.rank
        self.down = nn.Parameter(torch.zeros(N, count, R))
        self.up = nn.Parameter(torch.empty(N, R, width).normal_(std=0.02))

    def forward(self, ids: Tensor, scales: Tensor) -> Tensor:
        """Return the update of the embeddings `(..., width)` of the ids `(...)`."""
        table, up = self.stacked()
        return F.linear(F.embedding(ids, table) * scales, up)

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return the table of all ranks, `(count, N * R)`, and the projection, `(width, N * R)`."""
        return self.down.transpose(0, 1).flatten(1), self.up.flatten(0, 1).T


class AdaptedEmbedding(nn.Embedding):
    """Embedding table that can have adapters."""

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
    """Linear layer that can have adapters."""

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
