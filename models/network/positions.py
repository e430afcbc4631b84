"""Positions of tokens: their ids, rotary positions, windows, and MPNet's relative position bias.

Sources: Su et al. 2021, arXiv:2104.09864 (rotary positions); Raffel et al. 2019, arXiv:1910.10683
(distance buckets).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: pairs of elements of queries and keys are rotated by their position.

    Attributes:
        base: Pair `i` of `K / 2` turns by `base ** (-2 * i / K)` radians per position.
        scale: Divisor of all angles.
    """

    base: float
    scale: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of each token, `(..., 1, K / 2)` each."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, rotary: Rotary, width: int, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at the given positions.

    Args:
        positions: Position of each token, `(...)`.
        rotary: Base and scale of the angles.
        width: Width of a head, K.
        dtype: Dtype of the token vectors. Angles are float32, or float64 for float64.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device).to(wide) / width  # (K / 2,)
    frequencies = 1.0 / (rotary.base**exponents)
    if rotary.scale != 1:
        frequencies = frequencies / rotary.scale
    angles = positions[..., None, None].to(wide) * frequencies  # (..., 1, K / 2)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return queries or keys `(..., H, K)`, rotated; element `i` is paired with `i + K / 2`."""
    first, second = x.chunk(2, -1)  # (..., H, K / 2)
    cos, sin = rotation.cos, rotation.sin
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


def is_out_of_reach(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Return whether a query does not attend to a key because of their positions, `(L, L)` bool.

    Args:
        length: Number of positions, L.
        window: Largest distance of two tokens that attend to each other; None: no limit.
        causal: Whether tokens attend to earlier tokens and themselves only.
        device: Device of the result.
    """
    positions = torch.arange(length, device=device)
    distance = positions[None, :] - positions[:, None]  # (L, L), key minus query
    latest = 0 if causal else window
    outside = distance > (length if latest is None else latest)
    return outside if window is None else outside | (distance < -window)


class RelativePositionBias(nn.Module):
    """MPNet's bias of the attention scores: one learnt number per head and distance bucket."""

    bucket_of: Tensor

    def __init__(self, buckets: int, num_heads: int, max_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, num_heads))
        nn.init.normal_(self.weight, std=0.02)
        self.max_positions = max_positions
        distance = torch.arange(1 - max_positions, max_positions)
        self.register_buffer("bucket_of", distance_bucket(distance, buckets), persistent=False)

    def forward(self, length: int) -> Tensor:
        """Return the bias `(1, H, L, L)` of each query and key, in that order; L is `length`."""
        L = length
        positions = torch.arange(L, device=self.weight.device)
        distance = positions[None, :] - positions[:, None] + self.max_positions - 1  # (L, L)
        bucket = self.bucket_of.index_select(0, distance.view(-1))  # (L * L,)
        return self.weight.index_select(0, bucket).view(1, L, L, -1).permute(0, 3, 1, 2)


def distance_bucket(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """Return the bucket of each key-minus-query distance, int64, shaped as `distance`.

    The second half of the buckets is for keys after the query, the first half for all other keys.
    In each half, the first half of the buckets covers one distance each. The others cover ranges
    that grow exponentially up to `max_distance`; longer distances share the last bucket.
    """
    half = buckets // 2
    exact = half // 2
    size = distance.abs()
    ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(size < exact, size, coarse) + half * (distance > 0)


def position_ids(input_ids: Tensor, padding_id: int | None) -> Tensor:
    """Return the position of each token, `(B, L)`.

    Args:
        input_ids: Token ids, `(B, L)`.
        padding_id: Token id of padding, for RoBERTa's numbering: padding has the position
            `padding_id`, and other tokens are numbered from `padding_id + 1`. None: all tokens are
            numbered from 0.
    """
    if padding_id is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    counted = (input_ids != padding_id).long()
    return counted.cumsum(1) * counted + padding_id
