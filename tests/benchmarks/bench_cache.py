"""Throughput of `POST /encode` with a cache and without it, for repeated and for new texts.

Two services get the same requests from wrk. They take turns, and one is suspended while the other
is measured. "zipf": one text per request, drawn from 100,000 short texts; the k-th is drawn with a
probability in proportion to 1 / k. The cache is empty at first, and rounds continue the stream
until 100,000 requests were sent to it, so the share of hits grows. "unique": no text occurs twice.

    python -m tests.benchmarks.bench_cache
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, islice
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
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="number of the zipf requests")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the unique texts")
    parser.add_argument("--seconds", type=int, default=5, help="duration of one measurement")
    parser.add_argument("--cache-bytes", type=int, default=512 * 2**20)
    options = parser.parse_args()
    need_wrk()
    with _servers(options.cache_bytes) as pair:
        _measure_zipf(pair, options.requests, options.seconds)
    with _servers(options.cache_bytes) as pair:
        _measure_unique(pair, options.rounds, options.seconds)


def _measure_zipf(pair: Sequence[Server], requests: int, seconds: int) -> None:
    print("| zipf: requests so far | requests/s without cache | with it | ratio | hits |")
    print("|--:|--:|--:|--:|--:|")
    total, hits = [0, 0], 0.0
    for plain, cached in _rounds(pair, zipf, seconds):
        pair[1].resume()
        before, hits = hits, float(_counts(pair[1].get("/metrics"))[_HITS])
        pair[1].pause()
        total = [total[0] + plain.requests, total[1] + cached.requests]
        _print_row(f"{total[1]:,}", plain, cached, (hits - before) / cached.requests)
        if total[1] >= requests:
            break
    print(f"whole stream: ratio {total[1] / total[0]:.2f}, hits {hits / total[1]:.0%}", flush=True)


def _measure_unique(pair: Sequence[Server], rounds: int, seconds: int) -> None:
    loads = list(islice(_rounds(pair, unique, seconds), rounds))
    ratios = [cached.requests / plain.requests for plain, cached in loads]
    cpu = [
        (cached.cpu_s / cached.requests) / (plain.cpu_s / plain.requests) for plain, cached in loads
    ]
    print(f"unique: ratio of requests/s {statistics.median(ratios):.3f}, in the rounds", end=" ")
    print(*(f"{ratio:.3f}" for ratio in sorted(ratios)))
    print(
        f"unique: ratio of CPU time per request {statistics.median(cpu):.3f}, in the rounds",
        end=" ",
    )
    print(*(f"{ratio:.3f}" for ratio in sorted(cpu)))


def _print_row(name: str, plain: Load, cached: Load, hits: float) -> None:
    rates = [load.requests / load.seconds for load in (plain, cached)]
    ratio = rates[1] / rates[0]
    print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} | {hits:.0%} |", flush=True)


@contextmanager
def _servers(cache_bytes: int) -> Iterator[tuple[Server, Server]]:
    """Start a service without a cache and one with a cache, both warm and suspended."""
    serve = str(Path(sys.executable).with_name("vitrine-serve"))
    pair = _server(serve, _PORT, 0), _server(serve, _PORT + 1, cache_bytes)
    warm_up = [json.dumps({"inputs": [f"warm-up {index}"]}) for index in range(_REQUESTS_PER_S)]
    try:
        for server in pair:
            server.load_bodies(warm_up, _CLIENTS, 1)
        yield pair
    finally:
        for server in pair:
            server.stop()


def _server(serve: str, port: int, cache_bytes: int) -> Server:
    command = (serve, f"--server.port={port}", f"--cache.max_bytes={cache_bytes}")
    server = Server(Kind(command, "/encode", "inputs", Path()), port)
    server.pause()
    return server


def _rounds(
    pair: Sequence[Server], texts: Callable[[], Iterator[str]], seconds: int
) -> Iterator[tuple[Load, Load]]:
    """Yield the loads of the service without a cache and of the other one, round by round."""
    streams = [texts() for _ in pair]  # each service reads its stream at its own pace
    for round_ in count():
        loads: dict[int, Load] = {}
        for index in (0, 1) if round_ % 2 else (1, 0):
            bodies = [
                json.dumps({"inputs": [text]})
                for text in islice(streams[index], _REQUESTS_PER_S * seconds)
            ]
            loads[index] = pair[index].load_bodies(bodies, _CLIENTS, seconds)
            assert not loads[index].failed
            assert loads[index].requests < len(bodies)  # none was sent twice
        yield loads[0], loads[1]


def _counts(metrics: str) -> dict[str, str]:
    return {
        name: value for name, _, value in (line.partition(" ") for line in metrics.splitlines())
    }


if __name__ == "__main__":
    main()
