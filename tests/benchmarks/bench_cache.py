"""`make bench-cache`: `POST /encode` with a cache and without it, for repeated and for new texts.

Two services get the same requests from wrk, in turn. "repeated": one text per request, drawn from
100,000 short texts; the k-th is drawn with a probability in proportion to 1 / k. The cache is empty
at first, and each round continues the stream, so the share of hits grows. "new": no text occurs
twice.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, islice

from tests.benchmarks.comparison import (
    Figures,
    Measure,
    Turns,
    markdown,
    number,
    parser,
    report,
)
from tests.benchmarks.servers import ServerProcess, vitrine
from tests.benchmarks.workloads import random_text

_PLAIN, _CACHED = "without cache", "with cache"
_TEXTS = 100_000
_CLIENTS = 16
# More than a service encodes in one measurement.
_REQUESTS_PER_S = 6000
_HITS = 'vitrine_cache_items_total{result="hit"}'


def repeated() -> Iterator[str]:
    """Yield texts, each drawn from the same 100,000."""
    draw = random.Random(1)  # noqa: S311 - not for secrets
    texts = [_short_text(draw) for _ in range(_TEXTS)]
    weights = list(accumulate(1 / rank for rank in range(1, _TEXTS + 1)))
    while True:
        yield from draw.choices(texts, cum_weights=weights, k=1000)


def new() -> Iterator[str]:
    """Yield texts that all differ."""
    draw, seen = random.Random(2), set[str]()  # noqa: S311 - not for secrets
    while True:
        text = _short_text(draw)
        if text not in seen:
            seen.add(text)
            yield text


def _short_text(draw: random.Random) -> str:
    return random_text(draw, draw.randint(4, 12))


def main() -> None:
    """Run the benchmark and print a table per stream of texts."""
    options = parser(__doc__, rounds=5, seconds=5)
    options.add_argument("--cache-bytes", type=int, default=512 * 2**20)
    arguments = options.parse_args()
    again, unique = (
        _compare(texts, rounds, arguments.seconds, arguments.cache_bytes)
        for texts, rounds in ((repeated, arguments.rounds), (new, 2 * arguments.rounds))
    )
    rates = again.figures["requests/s"]
    total, hits = (again.figures[name][_CACHED] for name in ("requests so far", "hits so far"))
    rows = (
        [f"{so_far:,.0f}", number(plain), number(cached), f"{cached / plain:.2f}", f"{share:.0%}"]
        for so_far, plain, cached, share in zip(
            total, rates[_PLAIN], rates[_CACHED], hits, strict=True
        )
    )
    header = ["repeated texts: requests so far", "requests/s without cache", "with it", "ratio"]
    table = markdown([*header, "hits so far"], rows)
    whole = total[-1] / again.figures["requests so far"][_PLAIN][-1]
    report(table, f"Ratio over the whole stream: {whole:.2f}", unique)


def _compare(
    texts: Callable[[], Iterator[str]], rounds: int, seconds: int, cache_bytes: int
) -> Turns:
    """Send a stream of texts to both services, each at its own pace."""
    comparison = Turns(_PLAIN)
    contenders: dict[str, Measure] = {}
    with ExitStack() as stack:
        for name, size in ((_PLAIN, 0), (_CACHED, cache_bytes)):
            server = stack.enter_context(ServerProcess(vitrine(f"--cache.max_bytes={size}")))
            contenders[name] = partial(_WarmService(server, texts()).load, seconds)
        comparison.measure(contenders, rounds, warm_up=False)
    if comparison.problems:
        report(comparison)
    return comparison


class _WarmService:
    """A warm service and the texts that it gets."""

    def __init__(self, server: ServerProcess, texts: Iterator[str]) -> None:
        self._server = server
        self._texts = texts
        self._requests = 0
        warm_up = [{"inputs": f"warm-up {index}"} for index in range(_REQUESTS_PER_S)]
        server.load_bodies(warm_up, _CLIENTS, 1)
        self._hits_before = server.metrics()[_HITS]

    def load(self, seconds: int) -> Figures:
        """Send the next texts."""
        bodies = [{"inputs": text} for text in islice(self._texts, _REQUESTS_PER_S * seconds)]
        load = self._server.load_bodies(bodies, _CLIENTS, seconds)
        assert load.requests < len(bodies)  # none was sent twice
        self._requests += load.requests
        return {
            "requests/s": load.rate,
            "CPU time, ms a request": 1e3 * load.cpu_s / load.requests,
            "requests so far": self._requests,
            "hits so far": (self._server.metrics()[_HITS] - self._hits_before) / self._requests,
        }


if __name__ == "__main__":
    main()
