"""Throughput of `POST /encode` with a cache and without it, for repeated and for new texts.

Two services get the same requests from wrk. They take turns, and one is suspended while the other
is measured. "zipf": one text per request, drawn from 100,000 short texts; the k-th is drawn with a
probability in proportion to 1 / k. Each round continues the stream, so the cache stays as it is.
"unique": no text occurs twice.

    python -m tests.benchmarks.bench_cache
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path

from tests.benchmarks.servers import Kind, Load, Server, need_wrk
from tests.benchmarks.workloads import random_text

_PORT = 8461
_TEXTS = 100_000
_CLIENTS = 16
# More than a service encodes in one measurement.
_REQUESTS_PER_S = 6000
_HITS = 'vitrine_cache_items_total{result="hit"}'


def zipf() -> Iterator[str]:
    """Yield texts, each drawn from the same 100,000."""
    draw = random.Random(1)  # noqa: S311 - not for secrets
    texts = [_short_text(draw) for _ in range(_TEXTS)]
    weights = list(accumulate(1 / rank for rank in range(1, _TEXTS + 1)))
    while True:
        yield from draw.choices(texts, cum_weights=weights, k=1000)


def unique() -> Iterator[str]:
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
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=5, help="duration of one measurement")
    parser.add_argument("--cache-bytes", type=int, default=512 * 2**20)
    options = parser.parse_args()
    need_wrk()
    serve = str(Path(sys.executable).with_name("vitrine-serve"))
    print("| texts | requests/s without cache | with it | ratio of the medians | hits |")
    print("|---|--:|--:|--:|--:|")
    for name, texts in {"zipf": zipf, "unique": unique}.items():
        # Each service reads the stream at its own pace.
        streams = {size: texts() for size in (0, options.cache_bytes)}
        servers = {size: _server(serve, _PORT + index, size) for index, size in enumerate(streams)}
        try:
            rates = _rates(servers, streams, options.rounds, options.seconds)
            lines = servers[options.cache_bytes]
            lines.resume()
            hits = _share_of_hits(lines.get("/metrics"))
        finally:
            for server in servers.values():
                server.stop()
        without, cached = (statistics.median(own) for own in rates.values())
        ratio = cached / without
        print(f"| {name} | {without:.0f} | {cached:.0f} | {ratio:.2f} | {hits:.0%} |", flush=True)


def _server(serve: str, port: int, cache_bytes: int) -> Server:
    command = (serve, f"--server.port={port}", f"--cache.max_bytes={cache_bytes}")
    server = Server(Kind(command, "/encode", "inputs", Path()), port)
    server.pause()
    return server


def _rates(
    servers: Mapping[int, Server], streams: Mapping[int, Iterator[str]], rounds: int, seconds: int
) -> dict[int, list[float]]:
    """Return the requests per second of each round, by size of the cache."""
    rates: dict[int, list[float]] = {size: [] for size in servers}
    for round_ in range(rounds + 1):
        order = list(servers) if round_ % 2 else list(servers)[::-1]
        for size in order:
            texts = islice(streams[size], _REQUESTS_PER_S * seconds)
            bodies = [json.dumps({"inputs": [text]}) for text in texts]
            load: Load = servers[size].load_bodies(bodies, _CLIENTS, seconds)
            assert not load.failed
            assert load.requests < len(bodies)  # none was sent twice
            if round_:  # the first round is the warm-up
                rates[size].append(load.requests / load.seconds)
    return rates


def _share_of_hits(metrics: str) -> float:
    counts = {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in metrics.splitlines())
        if name.startswith("vitrine_cache_items_total{")
    }
    return counts[_HITS] / max(1.0, sum(counts.values()))


if __name__ == "__main__":
    main()
