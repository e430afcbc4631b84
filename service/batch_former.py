"""What waits for the engine, and the batches that are formed of it.

It knows neither text nor numpy nor HTTP. Any thread may call it.

- Turns: the requests that wait form a ring, and each batch starts from the oldest item of the next
  one. So a request of thousands of items holds nobody for longer than a batch, and every item is
  reached, whatever else arrives.
- Filling: the batch takes the items nearest in length to that one, whosever they are and the oldest
  first, while the cost (tokens, plus attention over padded rows) stays within the budget, and none
  costs more there than it would in a batch of its own.
- Sharing: a batch is full once it has a lane's share of all that waits and runs. Otherwise the lane
  that comes first would take everything, and the others would be left with what trickles in.
"""

import bisect
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """Items that run together, and how many tokens they have."""

    items: Sequence[Item] = ()
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _Place(Generic[Item]):
    """An item's; it leaves the queue by being marked, and is skipped where it still stands."""

    item: Item
    length: int
    is_taken: bool = False


# Of a request, the oldest first.
Places = deque[_Place[Item]]


class BatchFormer(Generic[Item]):
    """The queue.

    Args:
        lanes: Batches that run at once.
        max_cost: Budget of a batch; a single item may exceed it.
        min_share: Tokens below which what waits is not divided among the lanes.
        overhead: Cost of a batch before that of its items, in tokens.
        pair_cost: Cost of one pair in the padded attention product, in tokens.
    """

    def __init__(
        self, *, lanes: int, max_cost: float, min_share: int, overhead: int, pair_cost: float
    ) -> None:
        self.lanes = lanes
        self._max_cost = max_cost
        self._min_share = min_share
        self._overhead = overhead
        self._pair_cost = pair_cost
        self._ring: deque[Places[Item]] = deque()
        self._by_length: dict[int, Places[Item]] = {}
        self._waiting_tokens = 0
        self._running_tokens = 0
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return self._waiting_tokens

    def add(self, items: Sequence[Item], lengths: Sequence[int]) -> Places[Item]:
        """Let the items of a request wait, which have so many tokens; return their places."""
        places = deque(map(_Place, items, lengths))
        with self._lock:
            for place in places:
                self._by_length.setdefault(place.length, deque()).append(place)
            self._ring.append(places)
            self._waiting_tokens += sum(lengths)
        return places

    def remove(self, places: Places[Item]) -> None:
        """Take those items of a request out that still wait."""
        with self._lock:
            self._take(places)

    def form(self, ended: Batch[Item]) -> Batch[Item]:
        """Take the next batch out, in place of one that has ended; it is empty if nothing waits."""
        with self._lock:
            self._running_tokens -= ended.tokens
            places = self._next_batch()
            tokens = sum(place.length for place in places)
            self._running_tokens += tokens
            self._take(places)
        return Batch([place.item for place in places], tokens)

    def _next_batch(self) -> list[_Place[Item]]:
        self._drop_taken()
        first = self._next_turn()
        if first is None:
            return []
        share = max(self._min_share, (self._waiting_tokens + self._running_tokens) / self.lanes)
        batch = [first]
        tokens = longest = first.length
        cost = self._cost(tokens, 1, longest)
        for place in self._nearest(first):
            if tokens >= share:
                break
            tokens, longest = tokens + place.length, max(longest, place.length)
            before, cost = cost, self._cost(tokens, len(batch) + 1, longest)
            alone = self._overhead + self._cost(place.length, 1, place.length)
            if cost > self._max_cost or cost - before > alone:
                break
            batch.append(place)
        return batch

    def _cost(self, tokens: int, rows: int, longest: int) -> float:
        return tokens + self._pair_cost * rows * longest**2

    def _drop_taken(self) -> None:
        """Drop what has been taken of each length, but for what stands behind an item that waits.

        All lengths: one that no batch reaches would keep whatever its clients have given up.
        """
        for length, places in tuple(self._by_length.items()):
            while places and places[0].is_taken:
                places.popleft()
            if not places:
                del self._by_length[length]

    def _next_turn(self) -> _Place[Item] | None:
        """Return the oldest item of the request whose turn it is."""
        while self._ring:
            places = self._ring.popleft()
            while places and places[0].is_taken:
                places.popleft()
            if places:
                self._ring.append(places)
                return places[0]
        return None

    def _nearest(self, first: _Place[Item]) -> Iterator[_Place[Item]]:
        """Give the other items that wait, the nearest in length first."""
        lengths = sorted(self._by_length)
        high = bisect.bisect_left(lengths, first.length)
        low = high - 1
        while low >= 0 or high < len(lengths):
            take_longer = low < 0 or (
                high < len(lengths) and lengths[high] - first.length <= first.length - lengths[low]
            )
            length = lengths[high] if take_longer else lengths[low]
            low, high = (low, high + 1) if take_longer else (low - 1, high)
            for place in self._by_length[length]:
                if not place.is_taken and place is not first:
                    yield place

    def _take(self, places: Sequence[_Place[Item]]) -> None:
        for place in places:
            if not place.is_taken:
                place.is_taken = True
                self._waiting_tokens -= place.length
