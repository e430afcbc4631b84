"""The queue, and the batches that are formed from it. Thread-safe.

- Fairness: queued requests form a ring, and each batch starts from the oldest item of the next
  request. So a request with thousands of items blocks others for one batch at most, and every item
  is reached, whatever else arrives.
- Filling: a batch takes the items closest in length, oldest first, of any request. It stops when
  the cost (tokens, plus attention over padded rows) exceeds the budget, or when an item would cost
  less in a batch of its own.
- Splitting: a batch is full once it has its stream's share of all queued and running tokens.
  Otherwise the first stream would take everything and leave the others idle.
"""

import bisect
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Number of requests that an estimate samples, in 0.1 ms.
_SAMPLED_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """Items that run together, and their number of tokens."""

    items: Sequence[Item] = ()
    tokens: int = 0


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
    """Queued items of one request, oldest first, and their number of tokens."""

    entries: _Entries[Item]
    tokens: int


class BatchFormer(Generic[Item]):
    """The queue.

    Args:
        streams: Number of batches that run at once.
        max_cost: Cost budget of a batch, in tokens; a single item may exceed it.
        min_split_tokens: Queue size, in tokens, from which on it is split among the streams.
        fixed_cost: Cost of a batch that does not depend on its items, in tokens.
        pair_cost: Cost of one pair of tokens in the padded attention product, in tokens.
    """

    def __init__(
        self,
        *,
        streams: int,
        max_cost: float,
        min_split_tokens: int,
        fixed_cost: int,
        pair_cost: float,
    ) -> None:
        self.streams = streams
        self._max_cost = max_cost
        self._min_split_tokens = min_split_tokens
        self._fixed_cost = fixed_cost
        self._pair_cost = pair_cost
        self._ring: deque[QueuedRequest[Item]] = deque()
        self._by_length: dict[int, _Entries[Item]] = {}
        self._queued_tokens = 0
        self._running_tokens = 0
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Number of queued tokens."""
        return self._queued_tokens

    def tokens_ahead(self, tokens: int) -> int:
        """Return the number of queued tokens that run before a new request is complete.

        Requests take turns: by then, each one ahead has run as many tokens as the new one, or all
        of its own.

        Args:
            tokens: Number of tokens of the new request.
        """
        with self._lock:
            ahead = list(islice(self._ring, _SAMPLED_REQUESTS))
            count = len(self._ring)
        sampled = sum(min(request.tokens, tokens) for request in ahead)
        return sampled * count // max(1, len(ahead))

    def oldest_items(self) -> list[Item]:
        """Return the oldest queued item of each request that has one."""
        with self._lock:
            oldest = (next(filter(_is_queued, request.entries), None) for request in self._ring)
            return [entry.item for entry in oldest if entry is not None]

    def add(self, items: Sequence[Item], lengths: Sequence[int]) -> QueuedRequest[Item]:
        """Queue the items of a request, whose numbers of tokens are `lengths`."""
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
        """Remove the items of a request that are still queued."""
        with self._lock:
            self._remove(request.entries)

    def form(self, ended: Batch[Item]) -> Batch[Item]:
        """Remove and return the next batch; it is empty if the queue is.

        Args:
            ended: The stream's previous batch.
        """
        with self._lock:
            self._running_tokens -= ended.tokens
            entries = self._next_batch()
            tokens = sum(entry.length for entry in entries)
            self._running_tokens += tokens
            self._remove(entries)
        return Batch([entry.item for entry in entries], tokens)

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
        return tokens + self._pair_cost * rows * longest**2

    def _drop_removed(self) -> None:
        """Drop the removed entries at the head of each length's queue.

        Of all lengths: one that no batch reaches would keep the items of cancelled requests.
        """
        for length, entries in tuple(self._by_length.items()):
            while entries and entries[0].is_removed:
                entries.popleft()
            if not entries:
                del self._by_length[length]

    def _next_turn(self) -> _QueueEntry[Item] | None:
        """Return the oldest item of the next request in turn."""
        while self._ring:
            request = self._ring.popleft()
            entries = request.entries
            while entries and entries[0].is_removed:
                entries.popleft()
            if entries:
                self._ring.append(request)
                return entries[0]
        return None

    def _nearest(self, first: _QueueEntry[Item]) -> Iterator[_QueueEntry[Item]]:
        """Yield the other queued items, closest in length first."""
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
