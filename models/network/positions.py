"""Positions of tokens: ids, rotary positions, attention masks, ALiBi, and MPNet's position bias.

Sources: Su et al. 2021, arXiv:2104.09864 (rotary positions); Press et al. 2021, arXiv:2108.12409
(ALiBi); Raffel et al. 2019, arXiv:1910.10683 (distance buckets).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: element pairs of queries and keys are rotated by the token's position.

    Attributes:
        base: Base of the angles. Pair `i` of the `K / 2` pairs is rotated by
            `base ** (-2 * i / K) / scale` radians per position.
        scale: Divisor of all angles, or of the angles of each pair.
        amplitude: Factor of all cosines and sines.
    """

    base: float
    scale: float | tuple[float, ...] = 1.0
    amplitude: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of each token's rotation angles, `(..., 1, K / 2)` each."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, rotary: Rotary, width: int, dtype: torch.dtype) -> Rotation:
    """Return the rotation of tokens at the given positions.

    Args:
        positions: Position of each token, `(...)`.
        rotary: Base and scale of the angles.
        width: Width of a head, K.
        dtype: Dtype of the token vectors. Angles are float64 for float64, and float32 otherwise.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device).to(wide) / width  # (K / 2,)
    frequencies = 1.0 / (rotary.base**exponents)
    if isinstance(rotary.scale, tuple):
        frequencies = frequencies / frequencies.new_tensor(rotary.scale)
    elif rotary.scale != 1:
        frequencies = frequencies / rotary.scale
    angles = positions[..., None, None].to(wide) * frequencies  # (..., 1, K / 2)
    cos, sin = angles.cos(), angles.sin()
    if rotary.amplitude != 1:
        cos, sin = cos * rotary.amplitude, sin * rotary.amplitude
    return Rotation(cos, sin)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys `(..., H, K)`, with element `i` paired with element `i + K / 2`."""
    first, second = x.chunk(2, -1)  # (..., H, K / 2)
    cos, sin = rotation.cos, rotation.sin
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


@dataclass(frozen=True)
class Reach:
    """Position-dependent masks and bias of attention.

    Attributes:
        window: Largest distance of two tokens that attend to each other; None: no limit.
        causal: Whether tokens attend only to themselves and to earlier tokens.
        alibi: Whether attention scores decrease linearly with distance; see `alibi_slopes`.
    """

    window: int | None = None
    causal: bool = False
    alibi: bool = False

    def excludes(self, length: int, device: torch.device) -> Tensor | None:
        """Return a bool mask `(L, L)`, True where a query must not attend to a key.

        If window and causality exclude no key, return None.

        Args:
            length: Number of positions, L.
            device: Device of the result.
        """
        if self.window is None and not self.causal:
            return None
        distance = _distances(length, device)  # (L, L)
        latest = 0 if self.causal else self.window
        outside = distance > (length if latest is None else latest)
        return outside if self.window is None else outside | (distance < -self.window)


def alibi_bias(length: int, num_heads: int, like: Tensor) -> Tensor:
    """Return the ALiBi bias of attention scores, `(1, H, L, L)`, in the dtype of `like`."""
    slopes = like.new_tensor(alibi_slopes(num_heads))[:, None, None]  # (H, 1, 1)
    return (-slopes * _distances(length, like.device).abs())[None]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the ALiBi slope of each head: the decrease of its scores per position of distance.

    If the number of heads is a power of two, the slopes are a geometric sequence. Otherwise, the
    slopes of the next lower power of two are followed by every second slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    more = [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return slopes + more[: num_heads - power]


def _distances(length: int, device: torch.device) -> Tensor:
    """Return the position of each key minus that of each query, `(L, L)`."""
    positions = torch.arange(length, device=device)
    return positions[None, :] - positions[:, None]


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
        """Return the bias `(1, H, L, L)` for rows of `length` tokens; queries are on axis 2."""
        distance = _distances(length, self.weight.device) + self.max_positions - 1  # (L, L)
        bucket = self.bucket_of.index_select(0, distance.view(-1))  # (L * L,)
        bias = self.weight.index_select(0, bucket).view(1, length, length, -1)  # (1, L, L, H)
        return bias.permute(0, 3, 1, 2)


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
