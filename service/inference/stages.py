"""Durations of the stages of a call."""

from collections.abc import Mapping

from service.inference.cache import CacheCounts


class Stages(dict[str, float]):
    """Duration in seconds of each stage of a call, by name.

    Args:
        seconds: Duration of each stage.
        cache_counts: Counts of the call's rows in the cache; None: they were not looked up.
    """

    def __init__(
        self, seconds: Mapping[str, float], cache_counts: CacheCounts | None = None
    ) -> None:
        super().__init__(seconds)
        self.cache_counts = cache_counts

    def __add__(self, other: "Stages") -> "Stages":
        """Return the durations and counts of two calls together."""
        names = {**self, **other}
        counts = [stages.cache_counts for stages in (self, other) if stages.cache_counts]
        return Stages(
            {name: self.get(name, 0.0) + other.get(name, 0.0) for name in names},
            sum(counts, CacheCounts()) if counts else None,
        )
