"""An exact cache of results; equal items in flight are computed once.

A cached result is one that was computed for an equal item, so it is the same to the last bit. All
methods run in the event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.inference.batch_former import Priority
from service.inference.batcher import Batcher, Outcome
from service.inference.metrics import CacheMetrics
from service.inference.runs import ItemFailed

# Maximum number of tokens of a request whose keys are computed in the event loop, in about 1 ms.
_INLINE_TOKENS = 10_000

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Running(Generic[Result]):
    """An item in flight.

    Attributes:
        result: Future of the result. It is cancelled if the request of the item fails or is
            cancelled, and has the exception `ItemFailed` if the item itself fails.
        length: Number of tokens that the request of this item computes.
        priority: Priority of the request.
    """

    result: asyncio.Future[Result]
    length: int
    priority: Priority


class ResultCache(Generic[Item, Result]):
    """A bounded cache in front of a batcher; the least recently used results are evicted.

    A request waits for an equal item of another request, in place of computing it, if that request
    computes no more tokens than it lacks itself, and has no lower priority. Requests take turns, so
    it waits about as long as for its own items.

    Args:
        batcher: Runs items that are not in the cache.
        key: Returns the key of an item. Items with equal keys have equal results.
        length: Returns the number of tokens of an item.
        sealed: Returns a copy of a result that nobody can change, and its size in bytes.
        max_bytes: Maximum total size of the cached results and their keys.
        metrics: Metrics of the cache.
    """

    def __init__(
        self,
        batcher: Batcher[Item, Result],
        *,
        key: Callable[[Item], bytes],
        length: Callable[[Item], int],
        sealed: Callable[[Result], tuple[Result, int]],
        max_bytes: int,
        metrics: CacheMetrics,
    ) -> None:
        self._batcher = batcher
        self._key = key
        self._length = length
        self._sealed = sealed
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._results: OrderedDict[bytes, tuple[Result, int]] = OrderedDict()
        self._bytes = 0
        self._running: dict[bytes, _Running[Result]] = {}

    @property
    def size(self) -> int:
        """Total size of the cached results and their keys, in bytes."""
        return self._bytes

    async def submit(
        self,
        items: Sequence[Item],
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Outcome[Result]:
        """Return the results of the items, from the cache or from a run; see `Batcher.submit`.

        Raises:
            ItemFailed: The batch function fails on one of the items.
            Exception: Any other error of `Batcher.submit`, under the same conditions.
        """
        started = time.perf_counter()
        is_long = sum(map(self._length, items)) > _INLINE_TOKENS
        keys = await asyncio.to_thread(self._keys, items) if is_long else self._keys(items)
        missing: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            missing.setdefault(key, index)  # equal items of a request run once
        results = self._cached(missing)
        hits = sum(key in results for key in keys)
        runs: list[Outcome[Result]] = []
        computed: set[int] = set()
        while missing := {key: index for key, index in missing.items() if key not in results}:
            length = sum(self._length(items[index]) for index in missing.values())
            shared = {
                key: self._running[key] for key in missing if self._can_wait(key, length, priority)
            }
            own = {key: index for key, index in missing.items() if key not in shared}
            if own:
                run, kept = await self._run(items, own, timeout_s, priority)
                runs.append(run)
                results |= kept
                computed |= {*own.values()}
            if shared:
                results |= await _results_of(shared, missing)
            # What is still missing is of requests that have failed or were cancelled.
            results |= self._cached(key for key in missing if key not in results)
        self._count(items, hits, computed)
        queue_s, run_s = sum(run.queue_s for run in runs), sum(run.run_s for run in runs)
        cache_s = max(0.0, time.perf_counter() - started - queue_s - run_s)
        return Outcome([results[key] for key in keys], queue_s, run_s, cache_s)

    def _count(self, items: Sequence[Item], hits: int, computed: Collection[int]) -> None:
        misses = len(computed)
        counts = {"hit": hits, "miss": misses, "shared": len(items) - hits - misses}
        for result, count in counts.items():
            if count:  # each increment takes a lock
                self._metrics.items[result].inc(count)
        if misses < len(items):
            others = (item for index, item in enumerate(items) if index not in computed)
            self._metrics.saved_tokens.inc(sum(map(self._length, others)))

    def _cached(self, keys: Iterable[bytes]) -> dict[bytes, Result]:
        """Return the cached results of keys, which are then the most recently used."""
        found: dict[bytes, Result] = {}
        for key in keys:
            if (entry := self._results.get(key)) is not None:
                self._results.move_to_end(key)
                found[key] = entry[0]
        return found

    def _keys(self, items: Sequence[Item]) -> list[bytes]:
        return [self._key(item) for item in items]

    def _can_wait(self, key: bytes, length: int, priority: Priority) -> bool:
        running = self._running.get(key)
        if running is None or (running.priority, priority) == ("bulk", "interactive"):
            return False
        return running.length <= length

    async def _run(
        self,
        items: Sequence[Item],
        own: Mapping[bytes, int],
        timeout_s: float | None,
        priority: Priority,
    ) -> tuple[Outcome[Result], dict[bytes, Result]]:
        """Run items, and cache each result as soon as it is there; return the results by key too.

        Args:
            items: All items of a request.
            own: Index of each item to run, by key.
            timeout_s: See `submit`.
            priority: See `submit`.
        """
        keys, loop = list(own), asyncio.get_running_loop()
        length = sum(self._length(items[index]) for index in own.values())
        running = {key: _Running[Result](loop.create_future(), length, priority) for key in keys}
        self._running |= running

        def keep(index: int, result: Result) -> None:
            kept, size = self._sealed(result)
            self._keep(keys[index], kept, size)
            if not running[keys[index]].result.done():
                running[keys[index]].result.set_result(kept)

        try:
            missing = [items[index] for index in own.values()]
            outcome = await self._batcher.submit(missing, timeout_s, keep, priority)
            return outcome, {key: entry.result.result() for key, entry in running.items()}
        except ItemFailed as error:
            future = running[keys[error.index]].result
            future.set_exception(error)
            future.exception()  # so that asyncio does not report it if nobody waits
            error.index = own[keys[error.index]]
            raise
        finally:
            for key, entry in running.items():
                entry.result.cancel()  # no effect on a future that is done
                if self._running.get(key) is entry:
                    del self._running[key]

    def _keep(self, key: bytes, result: Result, size: int) -> None:
        size += len(key)
        _, previous = self._results.pop(key, (None, 0))
        self._bytes -= previous
        if size > self._max_bytes:
            return
        self._results[key] = result, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, evicted) = self._results.popitem(last=False)
            self._bytes -= evicted


async def _results_of(
    running: Mapping[bytes, _Running[Result]], indices: Mapping[bytes, int]
) -> dict[bytes, Result]:
    """Wait for items of other requests, and return the results of those that completed.

    Raises:
        ItemFailed: One of the items failed; its index is the one in `indices`.
    """
    futures = {key: entry.result for key, entry in running.items()}
    await asyncio.wait(futures.values())
    results: dict[bytes, Result] = {}
    for key, future in futures.items():
        if future.cancelled():
            continue
        if (error := future.exception()) is not None:
            raise ItemFailed(indices[key]) from error.__cause__
        results[key] = future.result()
    return results
