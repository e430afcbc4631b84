"""A batcher behind a cache of results; equal items in flight are computed once.

A cached result is one that was computed for an equal item, so it is the same to the last bit. All
methods run in the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.inference.batching.batcher import Batcher, Outcome
from service.inference.batching.cache import CacheCounts, ResultCache
from service.inference.batching.runs import ItemFailed
from service.inference.call_options import Priority

# Maximum number of tokens of a request whose keys are computed in the event loop, in about 1 ms.
_INLINE_TOKENS = 10_000

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _SharedRun(Generic[Result]):
    """The items that a request computes.

    Attributes:
        length: Number of tokens of the items.
        priority: Priority of the request.
        waiting: Futures of the items for which other requests wait, by key. A future is cancelled
            if the request fails or is cancelled, and has the exception `ItemFailed` if the item
            itself fails.
    """

    length: int
    priority: Priority
    waiting: dict[bytes, asyncio.Future[Result]]


class CachedBatcher(Generic[Item, Result]):
    """A batcher whose results are cached.

    A request waits for an equal item of another request, in place of computing it, if that request
    computes no more tokens than it lacks itself, and has no lower priority. Requests take turns, so
    it waits about as long as for its own items.

    The cache has no reference to the batcher, so that it may outlive it.

    Args:
        batcher: Runs items that are not in the cache.
        cache: Cache of results, which other batchers may share.
        key: Returns the key of an item. Items with equal keys have equal results.
        length: Returns the number of tokens of an item.
        copy_read_only: Returns a copy of a result that nobody can change, and its size in bytes.
    """

    def __init__(
        self,
        batcher: Batcher[Item, Result],
        cache: ResultCache[Result],
        *,
        key: Callable[[Item], bytes],
        length: Callable[[Item], int],
        copy_read_only: Callable[[Result], tuple[Result, int]],
    ) -> None:
        self._batcher = batcher
        self._cache = cache
        self._key = key
        self._length = length
        self._copy_read_only = copy_read_only
        self._running: dict[bytes, _SharedRun[Result]] = {}

    async def submit(
        self,
        items: Sequence[Item],
        *,
        timeout_s: float | None = None,
        priority: Priority = "interactive",
    ) -> Outcome[Result]:
        """Return the results of the items, from the cache or from a run; see `Batcher.submit`.

        Raises:
            ItemFailed: The batch function fails on one of the items.
            Exception: Any other error of `Batcher.submit`, under the same conditions.
        """
        started = time.perf_counter()

        def remaining_s() -> float | None:
            return None if timeout_s is None else timeout_s - (time.perf_counter() - started)

        lengths = [self._length(item) for item in items]
        is_long = sum(lengths) > _INLINE_TOKENS
        keys = await asyncio.to_thread(self._keys, items) if is_long else self._keys(items)
        first: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            first.setdefault(key, index)  # equal items of a request run once
        results: dict[bytes, Result] = {}
        missing = self._look_up(first, results)
        hits = sum([key in results for key in keys])
        misses, computed, queue_s, run_s = 0, 0, 0.0, 0.0
        while missing:
            length = sum([lengths[index] for index in missing.values()])
            shared = self._wait(missing, length, priority)
            own = missing
            if shared:
                own = {key: index for key, index in missing.items() if key not in shared}
                length = sum([lengths[index] for index in own.values()])
            if own:
                run = await self._run(items, own, length, results, remaining_s(), priority)
                queue_s, run_s = queue_s + run.queue_s, run_s + run.run_s
                misses, computed = misses + len(own), computed + length
            if not shared:
                break
            await _collect(shared, missing, results, remaining_s())
            # What is still missing is of requests that have failed or were cancelled.
            missing = self._look_up(missing, results)
        counts = CacheCounts(hits, len(items) - hits - misses, misses, sum(lengths) - computed)
        self._cache.counts += counts
        cache_s = max(0.0, time.perf_counter() - started - queue_s - run_s)
        return Outcome([results[key] for key in keys], queue_s, run_s, cache_s, counts)

    def _keys(self, items: Sequence[Item]) -> list[bytes]:
        return [self._key(item) for item in items]

    def _look_up(
        self, indices: Mapping[bytes, int], results: dict[bytes, Result]
    ) -> dict[bytes, int]:
        """Add cached results of keys to `results`, and return the indices of keys without one."""
        missing: dict[bytes, int] = {}
        for key, index in indices.items():
            if key in results:
                continue
            if (result := self._cache.get(key)) is None:
                missing[key] = index
            else:
                results[key] = result
        return missing

    def _wait(
        self, missing: Mapping[bytes, int], length: int, priority: Priority
    ) -> dict[bytes, asyncio.Future[Result]]:
        """Return futures of the items for which a request waits that lacks `length` tokens."""
        futures: dict[bytes, asyncio.Future[Result]] = {}
        for key in missing:
            run = self._running.get(key)
            if run is None or (run.priority, priority) == ("bulk", "interactive"):
                continue
            if run.length <= length:
                if key not in run.waiting:
                    run.waiting[key] = asyncio.get_running_loop().create_future()
                futures[key] = run.waiting[key]
        return futures

    async def _run(
        self,
        items: Sequence[Item],
        own: Mapping[bytes, int],
        length: int,
        results: dict[bytes, Result],
        timeout_s: float | None,
        priority: Priority,
    ) -> Outcome[Result]:
        """Run items; cache each result, and add it to `results`, as soon as it is there.

        Args:
            items: All items of a request.
            own: Index of each item to run, by key.
            length: Number of tokens of the items to run.
            results: Results of the request, by key.
            timeout_s: See `submit`.
            priority: See `submit`.
        """
        keys = list(own)
        run: _SharedRun[Result] = _SharedRun(length, priority, {})
        for key in keys:
            self._running[key] = run

        def keep(index: int, result: Result) -> None:
            key = keys[index]
            # Another request may have computed the item too; its result is the one that is cached.
            kept = self._cache.get(key)
            if kept is None:
                kept, size = self._copy_read_only(result)
                self._cache.put(key, kept, size)
            results[key] = kept
            future = run.waiting.get(key)
            if future is not None and not future.done():
                future.set_result(kept)

        try:
            missing = [items[index] for index in own.values()]
            return await self._batcher.submit(
                missing, timeout_s=timeout_s, on_result=keep, priority=priority
            )
        except ItemFailed as error:
            key = keys[error.index]
            if (future := run.waiting.get(key)) is not None:
                future.set_exception(error)
                future.exception()  # so that asyncio does not report it if the others are cancelled
            error.index = own[key]
            raise
        finally:
            for key in keys:
                if self._running.get(key) is run:
                    del self._running[key]
            for future in run.waiting.values():
                future.cancel()  # no effect on a future that is done


async def _collect(
    futures: Mapping[bytes, asyncio.Future[Result]],
    indices: Mapping[bytes, int],
    results: dict[bytes, Result],
    timeout_s: float | None,
) -> None:
    """Wait for items of other requests, and add the results of those that completed to `results`.

    Raises:
        TimeoutError: They have not ended within `timeout_s`; None: no limit.
        ItemFailed: One of the items failed; its index is the one in `indices`.
    """
    _, pending = await asyncio.wait(futures.values(), timeout=timeout_s)
    if pending:
        raise TimeoutError
    for key, future in futures.items():
        if future.cancelled():
            continue
        if (error := future.exception()) is not None:
            raise ItemFailed(indices[key]) from error.__cause__
        results[key] = future.result()
