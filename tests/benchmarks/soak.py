"""`make soak`: resident memory under mixed load.

All workloads take turns, with requests of 2,048 texts between them. The result is the growth after
the fifth minute.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.bench_servers import kinds
from tests.benchmarks.servers import Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS

_SETTLED_S = 300


def main() -> None:
    """Run the load and print the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--port", type=int, default=8110)
    options = parser.parse_args()
    need_wrk()
    many = [text for request in WORKLOADS["documents"].requests() for text in request][:2048]
    samples: list[tuple[float, float]] = []
    kind = kinds(options.environments, Path())[options.precision]
    command = [*kind.command, f"--engine.name={options.engine}"]
    server = Server(replace(kind, command=command), options.port)
    started = time.monotonic()
    try:
        for workload in itertools.cycle(WORKLOADS.values()):
            load = server.load(workload, 10)
            server.resume()
            answer = server.encode([text[:200] for text in many])
            assert not load.failed
            assert answer, "a request of 2,048 texts had no answer"
            seconds = time.monotonic() - started
            samples.append((seconds, server.resident_mb()))
            print(f"{seconds / 60:5.1f} min {samples[-1][1]:7.1f} MB", flush=True)
            if seconds > 60 * options.minutes:
                break
    finally:
        server.stop()
    settled = [mb for seconds, mb in samples if _SETTLED_S <= seconds < _SETTLED_S + 120]
    last = [mb for seconds, mb in samples if seconds > samples[-1][0] - 120]
    if settled:
        growth = statistics.median(last) / statistics.median(settled) - 1
        what = f"{options.engine}, {options.precision}"
        print(f"{what}: {growth:+.1%} from minute 5 to minute {options.minutes:g}")


if __name__ == "__main__":
    main()
