"""Ragged token ids to the flat arrays that a graph takes. numpy only.

All tokens of a batch lie end to end in one axis, so that linear layers, norms and activations
work on real tokens alone. Two index maps lay them out as `(B, L)` for attention, and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", np.int64, np.float32)


@dataclass(frozen=True)
class PackedBatch:
    """A batch as a graph takes it; the field names are the graph's input names.

    Attributes:
        input_ids: `(T,)` int64, all rows end to end.
        padded_index: `(B, L)` int64, the flat token at each place; 0 at padding.
        packed_index: `(T,)` int64, the place of each token in `B * L`.
        attention_mask: `(B, L)` float32, 1 at tokens and 0 at padding.
        pooling_mask: `(B, L)` float32, 1 at tokens that pooling counts.
    """

    input_ids: NDArray[np.int64]
    padded_index: NDArray[np.int64]
    packed_index: NDArray[np.int64]
    attention_mask: NDArray[np.float32]
    pooling_mask: NDArray[np.float32]

    @property
    def rows(self) -> int:
        """B, the number of rows."""
        return self.padded_index.shape[0]

    def inputs(self) -> dict[str, NDArray[np.int64] | NDArray[np.float32]]:
        """Return the arrays by input name."""
        return {name: getattr(self, name) for name in INPUT_NAMES}


def round_up(batch: PackedBatch, tokens: int, length: int) -> PackedBatch:
    """Return the batch with T and L rounded up, for an engine that prepares for every new shape.

    Its first T token vectors, and its row vectors, are those of `batch`.

    Args:
        batch: As `pack` returns it.
        tokens: T becomes a multiple of it; what is added is token 0, which no row holds.
        length: L becomes a multiple of it.
    """
    (T,), (B, L) = batch.input_ids.shape, batch.padded_index.shape
    flat, padded = (T + -T % tokens,), (B, L + -L % length)
    row, place = np.divmod(batch.packed_index, L)
    return PackedBatch(
        input_ids=_extended(batch.input_ids, flat),
        padded_index=_extended(batch.padded_index, padded),
        packed_index=_extended(row * padded[1] + place, flat),
        attention_mask=_extended(batch.attention_mask, padded),
        pooling_mask=_extended(batch.pooling_mask, padded),
    )


def _extended(array: NDArray[Number], shape: tuple[int, ...]) -> NDArray[Number]:
    """Return the array with zeros behind it in every dimension, up to `shape`."""
    wider = np.zeros(shape, array.dtype)
    wider[tuple(map(slice, array.shape))] = array
    return wider


INPUT_NAMES = tuple(field.name for field in fields(PackedBatch))


def pack(rows: Sequence[Sequence[int]], unpooled: Sequence[int] | None = None) -> PackedBatch:
    """Return the rows as one packed batch.

    Args:
        rows: Token ids of each row; B rows of at least one id each.
        unpooled: For each row, how many leading tokens pooling leaves out; None: none.

    Raises:
        ValueError: There is no row, a row is empty, or no token of a row is left to pool.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))  # (B,)
    skipped = np.zeros_like(lengths) if unpooled is None else np.asarray(unpooled, np.int64)
    if not len(rows):
        raise ValueError("a batch needs at least one row")
    for index in np.flatnonzero(lengths <= skipped):
        raise ValueError(f"row {index}: {lengths[index]} tokens, of which none is pooled")

    places = np.arange(lengths.max())  # (L,)
    is_token = places < lengths[:, None]  # (B, L)
    input_ids = np.concatenate([np.asarray(row, np.int64) for row in rows])  # (T,)
    padded_index = np.zeros(is_token.shape, np.int64)
    padded_index[is_token] = np.arange(len(input_ids))
    return PackedBatch(
        input_ids=input_ids,
        padded_index=padded_index,
        packed_index=np.flatnonzero(is_token),
        attention_mask=is_token.astype(np.float32),
        pooling_mask=(is_token & (places >= skipped[:, None])).astype(np.float32),
    )
