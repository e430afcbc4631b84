"""The queue from which batches of items with similar lengths are formed. Thread-safe.

An item is one input of a request, and its length is its number of tokens. Each stream runs one
batch at a time, and takes its next batch from this queue.

- Fairness: queued requests form a ring, and each batch starts with the oldest item of the next
  request. A request with thousands of items therefore delays each turn of another request by at
  most one batch, and every item runs eventually.
- Filling: the batch is then filled with the items closest in length to its first item, from any
  request, oldest first within each length. Filling stops before an item with which the batch would
  exceed its cost budget (tokens, plus attention over padded rows), or which would cost less in a
  separate batch.
- Long items: a CPU engine runs a long item on all CPUs. While it runs, no other stream starts a
  batch with a long item. With one stream, long items take at most every second turn while shorter
  items are queued, so that a batch of shorter items waits for at most one long batch.
- Splitting: a batch is also full once it has `1 / streams` of all queued and running tokens.
  Otherwise the first stream would take all items and leave the other streams idle.
"""

import bisect
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Maximum number of queued requests that `tokens_ahead` samples. Sampling them takes 0.1 ms.
_SAMPLED_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """A batch of items that run together; empty by default.

    Attributes:
        items: Items of the batch.
        tokens: Total length of the items, in tokens.
        cost: Estimated cost of the batch, in tokens; see `BatchFormer`.
        is_long: Whether the batch contains a long item; see `BatchFormer`.
    """

    items: Sequence[Item] = ()
    tokens: int = 0
    cost: float = 0.0
    is_long: bool = False


@dataclass(eq=False, slots=True)
class _QueueEntry(Generic[Item]):
    """Queue entry of one item. Removal is lazy: entries are marked and skipped later."""

    item: Item
    length: int
    request: "QueuedRequest[Item]"
    is_removed: bool = False


_Entries = deque[_QueueEntry[Item]]


@dataclass(eq=False, slots=True)
class QueuedRequest(Generic[Item]):
    """Queue entries of one request, oldest first, and its number of queued tokens."""

    entries: _Entries[Item]
    tokens: int


class BatchFormer(Generic[Item]):
    """A queue of items, from which each stream takes its next batch.

    Costs are in tokens: the unit is the cost of one token without attention.

    Args:
        streams: Number of batches that can run concurrently.
        max_cost: Cost budget of a batch, in tokens; a batch of one item may exceed it.
        min_split_tokens: Minimum batch size when the queue is split among streams, in tokens.
        fixed_cost: Part of a batch's cost that does not depend on its items, in tokens.
        long_row: Length above which an item is long, in tokens.
        attention_cost: Returns the cost of attention for a row of a given padded length, in tokens.
    """

    def __init__(
        self,
        *,
        streams: int,
        max_cost: float,
        min_split_tokens: int,
        fixed_cost: int,
        long_row: int,
        attention_cost: Callable[[int], float],
    ) -> None:
        self.streams = streams
        self._max_cost = max_cost
        self._min_split_tokens = min_split_tokens
        self._fixed_cost = fixed_cost
        self._long_row = long_row
        self._attention_cost = attention_cost
        self._ring: deque[QueuedRequest[Item]] = deque()
        self._by_length: dict[int, _Entries[Item]] = {}
        self._queued_tokens = 0
        self._running_tokens = 0
        self._running_long = 0
        self._last_was_long = False
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Number of queued tokens."""
        return self._queued_tokens

    def tokens_ahead(self, tokens: int) -> int:
        """Estimate the number of already queued tokens that run before a new request completes.

        Requests take turns. Until the new request completes, each queued request runs about as many
        tokens as the new request, or all of its tokens if it has fewer.

        Args:
            tokens: Number of tokens of the new request.
        """
        with self._lock:
            ahead = list(islice(self._ring, _SAMPLED_REQUESTS))
            count = len(self._ring)
        sampled = sum(min(request.tokens, tokens) for request in ahead)
        return sampled * count // max(1, len(ahead))

    def oldest_items(self) -> list[Item]:
        """Return the oldest queued item of each request with queued items."""
        with self._lock:
            oldest = (next(filter(_is_queued, request.entries), None) for request in self._ring)
            return [entry.item for entry in oldest if entry is not None]

    def add(self, items: Sequence[Item], lengths: Sequence[int]) -> QueuedRequest[Item]:
        """Queue the items of one request, and return their entries for `remove`.

        Args:
            items: Items of the request.
            lengths: Number of tokens of each item.
        """
        request: QueuedRequest[Item] = QueuedRequest(deque(), sum(lengths))
        for item, length in zip(items, lengths, strict=True):
            request.entries.append(_QueueEntry(item, length, request))
        with self._lock:
            for entry in request.entries:
                self._by_length.setdefault(entry.length, deque()).append(entry)
            self._ring.append(request)
            self._queued_tokens += request.tokens
        return request

    def remove(self, request: QueuedRequest[Item]) -> None:
        """Remove all items of a request that are still in the queue."""
        with self._lock:
            self._remove(request.entries)

    def form(self) -> Batch[Item]:
        """Remove the next batch from the queue, and return it. It counts as running from then on.

        The batch is empty if the queue is empty, or has only long items while another stream runs a
        long item.
        """
        with self._lock:
            entries = self._next_batch()
            if not entries:
                return Batch()
            tokens = sum(entry.length for entry in entries)
            longest = max(entry.length for entry in entries)
            cost = self._fixed_cost + self._cost(tokens, len(entries), longest)
            is_long = longest > self._long_row
            self._running_tokens += tokens
            self._running_long += is_long
            self._last_was_long = is_long
            self._remove(entries)
        return Batch([entry.item for entry in entries], tokens, cost, is_long)

    def release(self, batch: Batch[Item]) -> None:
        """Count a batch as running no longer."""
        with self._lock:
            self._running_tokens -= batch.tokens
            self._running_long -= batch.is_long

    def _next_batch(self) -> list[_QueueEntry[Item]]:
        self._drop_removed()
        first = self._next_turn()
        if first is None:
            return []
        share = max(
            self._min_split_tokens, (self._queued_tokens + self._running_tokens) / self.streams
        )
        batch = [first]
        tokens = longest = first.length
        cost = self._cost(tokens, 1, longest)
        for entry in self._nearest(first):
            if tokens >= share:
                break
            tokens, longest = tokens + entry.length, max(longest, entry.length)
            before, cost = cost, self._cost(tokens, len(batch) + 1, longest)
            alone = self._fixed_cost + self._cost(entry.length, 1, entry.length)
            if cost > self._max_cost or cost - before > alone:
                break
            batch.append(entry)
        return batch

    def _cost(self, tokens: int, rows: int, longest: int) -> float:
        return tokens + rows * self._attention_cost(longest)

    def _drop_removed(self) -> None:
        """Drop the removed entries at the head of each length's queue.

        All lengths are checked. Otherwise the items of cancelled requests would stay in memory at
        lengths that no batch reaches.
        """
        for length, entries in tuple(self._by_length.items()):
            while entries and entries[0].is_removed:
                entries.popleft()
            if not entries:
                del self._by_length[length]

    def _next_turn(self) -> _QueueEntry[Item] | None:
        """Advance the ring to the next request, and return its oldest queued item.

        Long items are skipped while another stream runs a long item. With one stream, they are
        skipped after a long batch, unless all queued items are long. Returns None if no item may
        run now.
        """
        skips_long = self._last_was_long if self.streams == 1 else self._running_long > 0
        skipped: list[QueuedRequest[Item]] = []
        turn = first = None
        while turn is None and self._ring:
            request = self._ring.popleft()
            entries = request.entries
            while entries and entries[0].is_removed:
                entries.popleft()
            if not entries:
                continue
            first = entries[0]
            if skips_long:
                first = next(filter(self._is_short, entries), None)
            if first is None:
                skipped.append(request)
            else:
                turn = request
        if turn is None and skipped and self.streams == 1:
            turn = skipped.pop(0)
            first = turn.entries[0]
        self._ring.extendleft(reversed(skipped))
        if turn is None:
            return None
        self._ring.append(turn)
        return first

    def _is_short(self, entry: _QueueEntry[Item]) -> bool:
        return not entry.is_removed and entry.length <= self._long_row

    def _nearest(self, first: _QueueEntry[Item]) -> Iterator[_QueueEntry[Item]]:
        """Yield the other queued items, ordered by how much their length differs from `first`."""
        lengths = sorted(self._by_length)
        high = bisect.bisect_left(lengths, first.length)
        low = high - 1
        while low >= 0 or high < len(lengths):
            longer_is_closer = low < 0 or (
                high < len(lengths) and lengths[high] - first.length <= first.length - lengths[low]
            )
            length = lengths[high] if longer_is_closer else lengths[low]
            low, high = (low, high + 1) if longer_is_closer else (low - 1, high)
            for entry in self._by_length[length]:
                if not entry.is_removed and entry is not first:
                    yield entry

    def _remove(self, entries: Iterable[_QueueEntry[Item]]) -> None:
        for entry in entries:
            if not entry.is_removed:
                entry.is_removed = True
                entry.request.tokens -= entry.length
                self._queued_tokens -= entry.length


def _is_queued(entry: _QueueEntry[Item]) -> bool:
    return not entry.is_removed


class AttentionCost:
    """The cost of attention for one row, over all layers, in tokens.

    A layer takes 24 D^2 operations per token, plus 4 D operations per pair of a token and a token
    that it attends to. Operations on pairs run six times slower, so a pair costs
    6 * 4 D / (24 D^2) = 1 / D tokens. In layers with an attention window, onnxruntime computes few
    pairs outside the window.

    Args:
        windows: Maximum distance between two tokens that attend to each other, for each layer;
            None: no limit.
        hidden_size: Width of a token vector, D.
    """

    def __init__(self, windows: Sequence[int | None], hidden_size: int) -> None:
        # Each window's size in tokens, and the cost of a pair over all layers with this window.
        self._pairs = [
            (None if window is None else 2 * window + 1, count / len(windows) / hidden_size)
            for window, count in Counter(windows).items()
        ]

    def __call__(self, length: int) -> float:
        """Return the cost of attention for one row of a batch, in tokens.

        Args:
            length: Padded length of the row in tokens, which is the length of the batch's longest
                row.
        """
        return length * sum(
            cost * (length if span is None else min(length, span)) for span, cost in self._pairs
        )
