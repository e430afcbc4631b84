"""The queue of the items of one priority: requests in turns, and items by length."""

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")

# Maximum number of queued requests that `tokens_ahead` samples. Sampling them takes 0.1 ms.
_SAMPLED_REQUESTS = 1000


@dataclass(eq=False, slots=True)
class QueueEntry(Generic[Item]):
    """Queue entry of one item. Removal is lazy: entries are marked and skipped later.

    A removed entry has no item, which would stay in memory with it.
    """

    item: Item
    length: int
    request: "QueuedRequest[Item]"
    is_removed: bool = False


_Entries = deque[QueueEntry[Item]]


@dataclass(eq=False, slots=True)
class QueuedRequest(Generic[Item]):
    """Queue entries of one request, oldest first, its number of queued tokens, and its queue."""

    entries: _Entries[Item]
    tokens: int
    queue: "RequestQueue[Item]"


@dataclass(eq=False)
class RequestQueue(Generic[Item]):
    """The queued items of one priority. `BatchFormer` removes them.

    Attributes:
        ring: Requests in the order of their turns.
        by_length: Entries of each length, oldest first.
        tokens: Number of queued tokens.
    """

    ring: deque[QueuedRequest[Item]] = field(default_factory=deque)
    by_length: dict[int, _Entries[Item]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, request: QueuedRequest[Item]) -> None:
        """Queue a request."""
        for entry in request.entries:
            self.by_length.setdefault(entry.length, deque()).append(entry)
        self.ring.append(request)
        self.tokens += request.tokens

    def tokens_ahead(self, tokens: int) -> int:
        """Estimate the tokens of other requests that run until a new request has run."""
        ahead = list(islice(self.ring, _SAMPLED_REQUESTS))
        sampled = sum(min(request.tokens, tokens) for request in ahead)
        return sampled * len(self.ring) // max(1, len(ahead))

    def oldest_items(self) -> list[Item]:
        """Return the oldest queued item of each request with queued items."""
        oldest = (next((e for e in each.entries if not e.is_removed), None) for each in self.ring)
        return [entry.item for entry in oldest if entry is not None]

    def drop_removed(self) -> None:
        """Drop the removed entries at the heads of the ring and of each length's queue.

        All lengths are checked. Otherwise the items of cancelled requests would stay in memory at
        lengths that no batch reaches.
        """
        while self.ring and not self.ring[0].tokens:
            self.ring.popleft().entries.clear()
        for length, entries in tuple(self.by_length.items()):
            while entries and entries[0].is_removed:
                entries.popleft()
            if not entries:
                del self.by_length[length]

    def next_turn(self, longest: float, *, or_longer: bool) -> QueueEntry[Item] | None:
        """Advance the ring to the next request with an item that may run, and return the oldest.

        Args:
            longest: Maximum length of the item.
            or_longer: Whether the first item of the ring is returned if all items are longer.
        """
        skipped: list[QueuedRequest[Item]] = []
        turn = first = None
        while turn is None and self.ring:
            request = self.ring.popleft()
            entries = request.entries
            while entries and entries[0].is_removed:
                entries.popleft()
            if not entries:
                continue
            first = next(
                (entry for entry in entries if not entry.is_removed and entry.length <= longest),
                None,
            )
            if first is None:
                skipped.append(request)
            else:
                turn = request
        if turn is None and skipped and or_longer:
            turn = skipped.pop(0)
            first = turn.entries[0]
        self.ring.extendleft(reversed(skipped))
        if turn is None:
            return None
        self.ring.append(turn)
        return first

    def nearest(self, first: QueueEntry[Item]) -> Iterator[QueueEntry[Item]]:
        """Yield the other queued items, ordered by how much their length differs from `first`."""
        lengths = sorted(self.by_length)
        high = bisect.bisect_left(lengths, first.length)
        low = high - 1
        while low >= 0 or high < len(lengths):
            longer_is_closer = low < 0 or (
                high < len(lengths) and lengths[high] - first.length <= first.length - lengths[low]
            )
            length = lengths[high] if longer_is_closer else lengths[low]
            low, high = (low, high + 1) if longer_is_closer else (low - 1, high)
            for entry in self.by_length[length]:
                if not entry.is_removed and entry is not first:
                    yield entry
