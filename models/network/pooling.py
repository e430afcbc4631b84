"""Pooling: from token vectors to one vector per row.

A pooling function takes token vectors `(B, L, D)` and a mask `(B, L)`, 1.0 at the tokens to pool
and 0.0 elsewhere. It returns row vectors `(B, D)`.

Source: Reimers and Gurevych 2019, arXiv:1908.10084.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pooling = Callable[[Tensor, Tensor], Tensor]


def _sum(tokens: Tensor, mask: Tensor) -> Tensor:
    return (mask[:, None, :] @ tokens).squeeze(1)  # (B, D)


def _count(mask: Tensor) -> Tensor:
    return mask.sum(1, keepdim=True).clamp(min=1.0)  # (B, 1)


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    return _sum(tokens, mask) / _count(mask)


def _mean_sqrt_len(tokens: Tensor, mask: Tensor) -> Tensor:
    return _sum(tokens, mask) / _count(mask).sqrt()


def _weighted_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    # A token's weight is its position in the row, from 1.
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)
    return _mean(tokens, weights)


def _max(tokens: Tensor, mask: Tensor) -> Tensor:
    return (tokens + (mask[:, :, None] - 1.0) * torch.finfo(tokens.dtype).max).amax(1)


def _select(tokens: Tensor, position: Tensor) -> Tensor:
    B, L, D = tokens.shape
    flat = torch.arange(B, device=tokens.device) * L + position  # (B,)
    return tokens.reshape(B * L, D).index_select(0, flat)


def _cls(tokens: Tensor, mask: Tensor) -> Tensor:
    # Ranks make the maximum unique. Engines differ in which of several equal maxima they return.
    ranks = torch.arange(mask.shape[1], 0, -1, device=mask.device, dtype=mask.dtype)
    return _select(tokens, (mask * ranks).argmax(1))


def _last(tokens: Tensor, mask: Tensor) -> Tensor:
    ranks = torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype)
    return _select(tokens, (mask * ranks).argmax(1))


POOLINGS: dict[str, Pooling] = {
    "mean": _mean,
    "cls": _cls,
    "max": _max,
    "mean_sqrt_len": _mean_sqrt_len,
    "weighted_mean": _weighted_mean,
    "last": _last,
}


def pool(names: Sequence[str], tokens: Tensor, mask: Tensor) -> Tensor:
    """Apply poolings and return their concatenated results, `(B, D * len(names))`.

    Args:
        names: Names in `POOLINGS`.
        tokens: Token vectors, `(B, L, D)`.
        mask: `(B, L)`, 1.0 at the tokens to pool and 0.0 elsewhere.
    """
    return torch.cat([POOLINGS[name](tokens, mask) for name in names], dim=-1)
