"""Packing of rows of different lengths into the input arrays of a graph. numpy only.

The T tokens of a batch are concatenated along one axis, so that linear layers, norms and
activations compute nothing on padding. Two index maps convert between this packed layout `(T,)` and
the padded layout `(B, L)`, which attention needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.manifest import Check

Number = TypeVar("Number", np.int64, np.float32)


# Inputs of every graph. Models with adapters have the additional input "adapters", and classifiers
# of text pairs can have the additional input "token_types".
INPUT_NAMES = ("input_ids", "padded_index", "packed_index", "attention_mask", "pooling_mask")
# Inputs of some graphs for CUDA.
COMPUTED_NAMES = ("token_order", "cumulative_lengths")
# Index of the adapter of a row without one.
NO_ADAPTER = -1
# Position of the first token of a word without tokens.
NO_TOKEN = -1


@dataclass(frozen=True)
class PackedWords:
    """Index arrays of the words and labels in a batch, by input name.

    The rows have N words, of up to K in one row, up to C labels, and P pairs of a word and a label.

    Attributes:
        word_tokens: `(N,)` int64, 1 + the index of each word's first token among the T packed
            tokens; 0 for a word without tokens.
        padded_words: `(B, K)` int64, index into the N words for each padded word; 0 at padding.
        packed_words: `(N,)` int64, index into the `B * K` padded words for each word.
        word_counts: `(B,)` int64, number of words in each row.
        label_tokens: `(B, C)` int64, index of each label's token among the T packed tokens; 0 at
            padding.
        pairs: `(P,)` int64, index into the `B * K * C` padded pairs for each pair, words first.
    """

    word_tokens: NDArray[np.int64]
    padded_words: NDArray[np.int64]
    packed_words: NDArray[np.int64]
    word_counts: NDArray[np.int64]
    label_tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]


# Inputs of graphs that compute the output "spans".
WORD_NAMES = tuple(field.name for field in fields(PackedWords))


@dataclass(frozen=True)
class PackedBatch:
    """Input arrays of an exported graph, by input name.

    `adapters`, `token_types` and `COMPUTED_NAMES` are inputs of some graphs only.

    Attributes:
        input_ids: `(T,)` int64, token ids of all rows, concatenated.
        padded_index: `(B, L)` int64, index into the T packed tokens for each padded position; 0 at
            padding.
        packed_index: `(T,)` int64, index into the `B * L` padded positions for each packed token.
        attention_mask: `(B, L)` float32, 1 at tokens, and 0 at padding and at tokens that no token
            attends to.
        pooling_mask: `(B, L)` float32, 1 at the tokens to pool and 0 elsewhere.
        adapters: `(T,)` int64, index of each token's adapter, or `NO_ADAPTER`.
        token_types: `(T,)` int64, type of each token: 1 in the second text of a pair.
        words: Index arrays of words and labels, which are inputs too; None: rows without words.
    """

    input_ids: NDArray[np.int64]
    padded_index: NDArray[np.int64]
    packed_index: NDArray[np.int64]
    attention_mask: NDArray[np.float32]
    pooling_mask: NDArray[np.float32]
    adapters: NDArray[np.int64]
    token_types: NDArray[np.int64]
    words: PackedWords | None = None

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        return self.padded_index.shape[0]

    @property
    def token_order(self) -> NDArray[np.int32]:
        """The padded positions of all tokens, then those of padding, `(B, L)`."""
        is_padding = np.ones(self.padded_index.size, np.bool_)
        is_padding[self.packed_index] = False
        order = np.concatenate([self.packed_index, np.flatnonzero(is_padding)])
        return order.astype(np.int32).reshape(self.padded_index.shape)

    @property
    def cumulative_lengths(self) -> NDArray[np.int32]:
        """Index of each row's first token among the T tokens, and T, `(B + 1,)`."""
        B, L = self.padded_index.shape
        ends = np.searchsorted(self.packed_index, np.arange(B + 1) * L)
        return ends.astype(np.int32)

    def inputs(
        self, names: Iterable[str] = INPUT_NAMES
    ) -> dict[str, NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]]:
        """Return the arrays with the given input names, by name."""
        return {name: getattr(self.words if name in WORD_NAMES else self, name) for name in names}


def round_up(batch: PackedBatch, tokens: int, length: int) -> PackedBatch:
    """Return the batch padded to larger T and L, for an engine that recompiles for every new shape.

    The row vectors and the first T token vectors stay the same.

    Args:
        batch: Batch from `pack`.
        tokens: T is rounded up to a multiple of this number. The added tokens have id 0 and belong
            to no row.
        length: L is rounded up to a multiple of this number.
    """
    (T,), (B, L) = batch.input_ids.shape, batch.padded_index.shape
    flat, padded = (T + -T % tokens,), (B, L + -L % length)
    row, position = np.divmod(batch.packed_index, L)
    return PackedBatch(
        input_ids=_zero_pad(batch.input_ids, flat),
        padded_index=_zero_pad(batch.padded_index, padded),
        packed_index=_zero_pad(row * padded[1] + position, flat),
        attention_mask=_zero_pad(batch.attention_mask, padded),
        pooling_mask=_zero_pad(batch.pooling_mask, padded),
        adapters=_zero_pad(batch.adapters, flat),
        token_types=_zero_pad(batch.token_types, flat),
        words=batch.words,
    )


def _zero_pad(array: NDArray[Number], shape: tuple[int, ...]) -> NDArray[Number]:
    """Return the array, padded with zeros at the end of every axis to `shape`."""
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def pack(
    rows: Sequence[Sequence[int]],
    prompt_tokens: Sequence[int] | None = None,
    adapters: Sequence[int] | None = None,
    token_types: Sequence[Sequence[int]] | None = None,
    unattended: Sequence[int] | None = None,
    words: Sequence[Sequence[int]] | None = None,
    labels: Sequence[Sequence[int]] | None = None,
) -> PackedBatch:
    """Return the rows as one packed batch.

    Args:
        rows: Token ids of each row; at least one row, and at least one id per row.
        prompt_tokens: Number of leading tokens of each row to exclude from pooling; None: pool all
            tokens.
        adapters: Index of each row's adapter, or `NO_ADAPTER`; None: no adapters.
        token_types: Type of each token of each row; None: type 0.
        unattended: Number of last tokens of each row that no token attends to, as of the tokens
            that expand a query in ColBERT; None: none.
        words: Position in its row of the first token of each word, or `NO_TOKEN`; None: no words.
        labels: Position in its row of the token of each label; None: no labels.

    Raises:
        ValueError: There are no rows, or no token of a row would be pooled or attended to.
    """
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))  # (B,)
    skipped = (
        np.zeros_like(lengths) if prompt_tokens is None else np.asarray(prompt_tokens, np.int64)
    )
    if not len(rows):
        raise ValueError("a batch needs at least one row")
    for index in np.flatnonzero(lengths <= skipped):
        raise ValueError(f"row {index} has {lengths[index]} tokens, none of which would be pooled")

    attended = lengths if unattended is None else lengths - np.asarray(unattended, np.int64)
    for index in np.flatnonzero(attended < 1):
        raise ValueError(f"row {index} has {lengths[index]} tokens, none of which is attended to")

    positions = np.arange(lengths.max())  # (L,)
    is_token = positions < lengths[:, None]  # (B, L)
    input_ids = _concatenate(rows)  # (T,)
    padded_index = np.zeros(is_token.shape, np.int64)
    padded_index[is_token] = np.arange(len(input_ids))
    if adapters is None:
        adapters = [NO_ADAPTER] * len(rows)
    return PackedBatch(
        input_ids=input_ids,
        padded_index=padded_index,
        packed_index=np.flatnonzero(is_token),
        attention_mask=(positions < attended[:, None]).astype(np.float32),
        pooling_mask=(is_token & (positions >= skipped[:, None])).astype(np.float32),
        adapters=np.repeat(np.asarray(adapters, np.int64), lengths),
        token_types=np.zeros_like(input_ids) if token_types is None else _concatenate(token_types),
        words=None if words is None else _pack_words(lengths, words, labels or ()),
    )


def pack_some(
    indices: Sequence[int], rows: Sequence[Sequence[int]], *others: Sequence[Any] | None
) -> PackedBatch:
    """Return the rows at the indices as one packed batch.

    Args:
        indices: Indices of the rows, in the order of the batch.
        rows: Token ids of all rows.
        others: Other arguments of `pack`, in its order, for all rows. None or empty: the default.
    """
    chosen = ([own[i] for i in indices] if own else None for own in others)
    return pack([rows[i] for i in indices], *chosen)


def pack_check(check: Check, indices: Sequence[int]) -> PackedBatch:
    """Return the inputs of a self-check at the indices as one packed batch."""
    others = check.adapters, check.token_types, check.unattended, check.words, check.labels
    return pack_some(indices, check.rows, None, *others)


def _pack_words(
    lengths: NDArray[np.int64], words: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> PackedWords:
    """Return the index arrays of words and labels in rows of the given lengths, `(B,)`."""
    starts = np.cumsum(lengths) - lengths  # (B,)
    counts, label_counts = (
        np.fromiter(map(len, each), np.int64, len(each)) for each in (words, labels)
    )
    positions = _concatenate(words)  # (N,)
    is_word = np.arange(counts.max()) < counts[:, None]  # (B, K)
    is_label = np.arange(label_counts.max()) < label_counts[:, None]  # (B, C)
    padded_words = np.zeros(is_word.shape, np.int64)
    padded_words[is_word] = np.arange(len(positions))
    label_tokens = np.zeros(is_label.shape, np.int64)
    label_tokens[is_label] = _concatenate(labels) + np.repeat(starts, label_counts)
    return PackedWords(
        word_tokens=np.where(positions == NO_TOKEN, 0, positions + np.repeat(starts, counts) + 1),
        padded_words=padded_words,
        packed_words=np.flatnonzero(is_word),
        word_counts=counts,
        label_tokens=label_tokens,
        pairs=np.flatnonzero(is_word[:, :, None] & is_label[:, None]),
    )


def first_tokens(word_ids: Iterable[int | None]) -> dict[int, int]:
    """Return the position of the first token of each word that has tokens, by word.

    Args:
        word_ids: Index of each token's word; None for special tokens.
    """
    positions: dict[int, int] = {}
    for position, word in enumerate(word_ids):
        if word is not None:
            positions.setdefault(word, position)
    return positions


def prompt_length(ids: Sequence[int], added_tokens: Mapping[int, Any]) -> int:
    """Return the number of leading tokens that pooling excludes with a prompt.

    As in sentence-transformers, a special token at the end of the prompt is not one of them,
    whether the tokenizer adds it or the prompt spells it.

    Args:
        ids: Token ids of the prompt alone.
        added_tokens: Added tokens of the tokenizer, by id.
    """
    last = added_tokens.get(ids[-1]) if ids else None
    return len(ids) - (last is not None and last.special)


def _concatenate(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    # For rows of 20 tokens, three times as fast as arrays of each that are concatenated.
    return np.fromiter(chain.from_iterable(rows), np.int64, sum(map(len, rows)))
