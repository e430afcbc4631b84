"""The cache of results, which all models of a process share, bounded in bytes."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class CacheCounts:
    """Numbers of items, by the origin of their results.

    Attributes:
        hits: Items found in the cache.
        shared: Items computed by another request at the same time, or for an equal item of the same
            request.
        misses: Items computed.
        saved_tokens: Tokens of the items found in the cache or shared.
    """

    hits: int = 0
    shared: int = 0
    misses: int = 0
    saved_tokens: int = 0

    def __add__(self, other: "CacheCounts") -> "CacheCounts":
        """Return the counts of two requests together."""
        return CacheCounts(
            self.hits + other.hits,
            self.shared + other.shared,
            self.misses + other.misses,
            self.saved_tokens + other.saved_tokens,
        )


class ResultCache(Generic[Result]):
    """Results by key; the least recently used are evicted.

    All methods run in one event loop.

    Args:
        max_bytes: Maximum total size of the results and their keys; 0: nothing is cached.

    Attributes:
        counts: Counts of all requests.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.counts = CacheCounts()
        self._results: OrderedDict[bytes, tuple[Result, int]] = OrderedDict()
        self._bytes = 0

    @property
    def size(self) -> int:
        """Total size of the cached results and their keys, in bytes."""
        return self._bytes

    def get(self, key: bytes) -> Result | None:
        """Return the cached result of a key, which is then the most recently used; None: none."""
        entry = self._results.get(key)
        if entry is None:
            return None
        self._results.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, result: Result, size: int) -> None:
        """Cache the result of a key that is not in the cache, unless it is larger than the cache.

        Args:
            key: Key of the result.
            result: The result, which nobody changes.
            size: Size of the result, in bytes.
        """
        size += len(key)
        if size > self.max_bytes:
            return
        self._results[key] = result, size
        self._bytes += size
        while self._bytes > self.max_bytes:
            _, (_, evicted) = self._results.popitem(last=False)
            self._bytes -= evicted
