"""The queue from which batches of items with similar lengths are formed. Thread-safe.

An item is one input of a request, and its length is its number of tokens. Each stream runs one
batch at a time, and takes its next batch from this queue.

- Fairness: queued requests form a ring, and each batch starts with the oldest item of the next
  request. A request with thousands of items therefore delays each turn of another request by at
  most one batch, and every item runs eventually.
- Priorities: each priority has its own ring. Interactive requests have the next turn, but while
  bulk requests are queued, a tenth of the tokens that run are theirs.
- Filling: the batch is then filled with the items of the same priority that are closest in length
  to its first item, from any request, oldest first within each length. Filling stops before an item
  with which the batch would exceed its cost budget (tokens, plus attention over padded rows), or
  which would cost less in a separate batch. Bulk items never fill interactive batches, because the
  duration of a batch is in proportion to its cost: 384 tokens take 30 times as long as 10
  (all-MiniLM-L6-v2, onnxruntime, one core). A separate batch costs bulk items little: `fixed_cost`.
- Bulk beside interactive requests: an interactive request can come while a bulk batch runs, and
  waits for it. While interactive items are queued or running, bulk batches are therefore small.
  Each that follows without an interactive turn between them may be twice as large. And clients that
  wait for a response before they send the next request leave the queue empty when a batch ends, but
  not for long: a stream that has run interactive items waits a moment for more of them before it
  starts a bulk batch. It does not if a tenth is due, or if such waits since the last bulk batch
  have taken several moments.
- Long items: a CPU engine runs a long item on all CPUs. While it runs, no other stream starts a
  batch with a long item. With one stream, long items take at most every second turn while shorter
  items of their priority are queued, so that a batch of shorter items waits for at most one long
  batch.
- Splitting: a batch is also full once it has `1 / streams` of the running tokens and of those that
  are queued with its priority. Otherwise the first stream would leave the others idle.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from service.inference.batching.request_queue import QueuedRequest, QueueEntry, RequestQueue
from service.inference.call_options import Priority

Item = TypeVar("Item")

# Number of interactive tokens that run for each bulk token while both are queued.
_TOKENS_BEFORE_BULK = 9
# Maximum size of a bulk batch beside interactive items, in tokens; one item may exceed it.
_SMALL_BULK_TOKENS = 128
# Seconds for which a stream that has run interactive items waits for more of them, and for which
# all such waits together may keep bulk items from running. With 16 clients that wait for each
# response, bulk items take half of the throughput without waits, and a tenth with these.
_PATIENCE_S = 0.01
_MAX_WAITED_S = 0.2


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """A batch of items that run together; empty by default.

    Attributes:
        items: Items of the batch.
        tokens: Total length of the items, in tokens.
        cost: Estimated cost of the batch, in tokens; see `BatchFormer`.
        is_long: Whether the batch contains a long item; see `BatchFormer`.
        is_interactive: Whether the items are interactive.
    """

    items: Sequence[Item] = ()
    tokens: int = 0
    cost: float = 0.0
    is_long: bool = False
    is_interactive: bool = False


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
        self._queues: dict[Priority, RequestQueue[Item]] = {
            "interactive": RequestQueue(),
            "bulk": RequestQueue(),
        }
        self._bulk_due = 0.0  # bulk tokens that are due, by the interactive ones that have run
        self._ramp = inf  # maximum size of the next bulk batch without interactive items, in tokens
        # Time since which each of the streams that have run interactive items waits for more.
        self._waiting_since: deque[float] = deque()
        self._waited_s = 0.0  # while bulk items were queued, since the latest bulk batch
        self._running = 0
        self._running_tokens = 0
        self._running_long = 0
        self._running_interactive = 0
        self._last_was_long = False
        self._lock = threading.Lock()

    @property
    def tokens(self) -> int:
        """Number of queued tokens."""
        return self._queues["interactive"].tokens + self._queues["bulk"].tokens

    def tokens_of(self, priority: Priority) -> int:
        """Return the number of queued tokens of a priority."""
        return self._queues[priority].tokens

    def tokens_ahead(self, tokens: int, priority: Priority = "interactive") -> int:
        """Estimate the number of already queued tokens that run before a new request completes.

        Requests take turns. Until the new request completes, each queued request of its priority
        runs about as many tokens as the new request, or all of its tokens if it has fewer. All
        queued interactive tokens run before a bulk request completes; before an interactive one,
        the bulk turns run about a ninth of what the interactive turns run.

        Args:
            tokens: Number of tokens of the new request.
            priority: Priority of the new request.
        """
        interactive, bulk = self._queues["interactive"], self._queues["bulk"]
        with self._lock:
            if priority == "bulk":
                return interactive.tokens + bulk.tokens_ahead(tokens)
            ahead = interactive.tokens_ahead(tokens)
            return ahead + min(bulk.tokens, (ahead + tokens) // _TOKENS_BEFORE_BULK)

    def oldest_items(self) -> list[Item]:
        """Return the oldest queued item of each request with queued items."""
        with self._lock:
            return [item for queue in self._queues.values() for item in queue.oldest_items()]

    def add(
        self, items: Sequence[Item], lengths: Sequence[int], priority: Priority = "interactive"
    ) -> QueuedRequest[Item]:
        """Queue the items of one request, and return their entries for `remove`.

        Args:
            items: Items of the request.
            lengths: Number of tokens of each item.
            priority: Priority of the request.
        """
        queue = self._queues[priority]
        request: QueuedRequest[Item] = QueuedRequest(deque(), sum(lengths), queue)
        for item, length in zip(items, lengths, strict=True):
            request.entries.append(QueueEntry(item, length, request))
        with self._lock:
            queue.add(request)
        return request

    def remove(self, request: QueuedRequest[Item]) -> None:
        """Remove all items of a request that are still in the queue."""
        with self._lock:
            self._remove(request.entries)

    def form(self, now: float) -> Batch[Item]:
        """Remove the next batch from the queue, and return it. It counts as running from then on.

        The batch is empty if the queue is empty, or has only long items while another stream runs a
        long item, or only bulk items while the stream waits for interactive ones; see `retry_s`.

        Args:
            now: The time, in seconds.
        """
        with self._lock:
            entries = self._next_batch(now)
            if not entries:
                return Batch()
            tokens = sum(entry.length for entry in entries)
            longest = max(entry.length for entry in entries)
            cost = self._fixed_cost + self._cost(tokens, len(entries), longest)
            is_long = longest > self._long_row
            self._running += 1
            self._running_tokens += tokens
            self._running_long += is_long
            self._last_was_long = is_long
            is_interactive = entries[0].request.queue is self._queues["interactive"]
            self._account(tokens, now, is_interactive=is_interactive)
            self._running_interactive += is_interactive
            items = [entry.item for entry in entries]
            self._remove(entries)
        return Batch(items, tokens, cost, is_long, is_interactive)

    def release(self, batch: Batch[Item], now: float) -> None:
        """Count a batch as running no longer."""
        with self._lock:
            self._running -= 1
            self._running_tokens -= batch.tokens
            if batch.is_interactive:
                self._waiting_since.append(now)
            self._running_long -= batch.is_long
            self._running_interactive -= batch.is_interactive

    def retry_s(self, now: float) -> float:
        """Return the seconds until `form` may return bulk items that wait now; inf: none wait."""
        with self._lock:
            waits = self._queues["bulk"].tokens and self._is_patient(now)
            return self._waiting_since[0] + _PATIENCE_S - now if waits else inf

    def _next_batch(self, now: float) -> list[QueueEntry[Item]]:
        interactive, bulk = self._queues["interactive"], self._queues["bulk"]
        interactive.drop_removed()
        bulk.drop_removed()
        for queue in (bulk, interactive) if self._is_bulk_due else (interactive, bulk):
            if queue is bulk and self._is_patient(now):
                continue
            first = self._next_turn(queue)
            if first is not None:
                return self._fill(queue, first, self._max_bulk() if queue is bulk else inf)
        return []

    @property
    def _is_bulk_due(self) -> bool:
        """Whether a tenth of the tokens that have run is more than a small bulk batch."""
        return self._bulk_due >= _SMALL_BULK_TOKENS

    @property
    def _has_interactive(self) -> bool:
        """Whether interactive items are queued or running."""
        return self._queues["interactive"].tokens > 0 or self._running_interactive > 0

    def _max_bulk(self) -> float:
        """Return the maximum number of tokens of the next bulk batch."""
        return max(_SMALL_BULK_TOKENS, self._bulk_due) if self._has_interactive else self._ramp

    def _account(self, tokens: int, now: float, *, is_interactive: bool) -> None:
        """Count the tokens of a batch for the next bulk batch and its tenth."""
        bulk = self._queues["bulk"]
        if not is_interactive:
            self._ramp = 2 * (_SMALL_BULK_TOKENS if self._has_interactive else self._ramp)
            self._waited_s = 0.0
            if self._has_interactive:
                # A batch is paid afterwards, but not all that idle streams have run meanwhile.
                self._bulk_due = max(self._bulk_due - tokens, -float(tokens))
            return
        if bulk.tokens:
            self._ramp = _SMALL_BULK_TOKENS
            self._bulk_due += tokens / _TOKENS_BEFORE_BULK
        else:
            self._ramp, self._bulk_due, self._waited_s = inf, 0.0, 0.0
        if self._waiting_since:
            waited_s = min(now - self._waiting_since.popleft(), _PATIENCE_S)
            self._waited_s += waited_s if bulk.tokens else 0.0

    def _is_patient(self, now: float) -> bool:
        """Return whether all idle streams wait for interactive items."""
        while self._waiting_since and now - self._waiting_since[0] >= _PATIENCE_S:
            self._waiting_since.popleft()
        if self._is_bulk_due or self._waited_s >= _MAX_WAITED_S:
            return False
        return len(self._waiting_since) >= max(1, self.streams - self._running)

    def _next_turn(self, queue: RequestQueue[Item]) -> QueueEntry[Item] | None:
        """Return the first item of the next batch; None if no item of a priority may run now.

        Long items are skipped while another stream runs a long item. With one stream, they are
        skipped after a long batch, unless all queued items are long.
        """
        has_one_stream = self.streams == 1
        skips_long = self._last_was_long if has_one_stream else self._running_long > 0
        return queue.next_turn(self._long_row if skips_long else inf, or_longer=has_one_stream)

    def _fill(
        self, queue: RequestQueue[Item], first: QueueEntry[Item], max_tokens: float
    ) -> list[QueueEntry[Item]]:
        """Return the batch that starts with an item; only this item may exceed the tokens."""
        share = max(self._min_split_tokens, (queue.tokens + self._running_tokens) / self.streams)
        batch = [first]
        tokens = longest = first.length
        cost = self._cost(tokens, 1, longest)
        for entry in queue.nearest(first):
            if tokens >= share:
                break
            tokens, longest = tokens + entry.length, max(longest, entry.length)
            before, cost = cost, self._cost(tokens, len(batch) + 1, longest)
            alone = self._fixed_cost + self._cost(entry.length, 1, entry.length)
            if tokens > max_tokens or cost > self._max_cost or cost - before > alone:
                break
            batch.append(entry)
        return batch

    def _cost(self, tokens: int, rows: int, longest: int) -> float:
        return tokens + rows * self._attention_cost(longest)

    def _remove(self, entries: Iterable[QueueEntry[Item]]) -> None:
        for entry in entries:
            if not entry.is_removed:
                entry.is_removed = True
                del entry.item  # with its results; the entry stays until a later batch
                entry.request.tokens -= entry.length
                entry.request.queue.tokens -= entry.length
