"""`make soak`: resident memory under mixed load.

All workloads take turns, with requests of 2,048 texts between them. The result is the growth after
the fifth minute.
"""

import itertools
import statistics
import time
from dataclasses import replace

from tests.benchmarks.bench_servers import our_kinds
from tests.benchmarks.comparison import parser
from tests.benchmarks.servers import ServerProcess
from tests.benchmarks.workloads import WORKLOADS

_SETTLED_S = 300


def main() -> None:
    """Run the load and print the memory."""
    options = parser(__doc__, rounds=1, seconds=10)
    options.add_argument("--engine", default="auto")
    options.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--minutes", type=float, default=30)
    arguments = options.parse_args()
    many = [text for request in WORKLOADS["documents"].requests() for text in request][:2048]
    kind = our_kinds(arguments.environments)[arguments.precision]
    kind = replace(kind, command=[*kind.command, f"--engine.name={arguments.engine}"])
    samples: list[tuple[float, float]] = []
    with ServerProcess(kind) as server:
        started = time.monotonic()
        for workload in itertools.cycle(WORKLOADS.values()):
            server.load(workload, arguments.seconds)
            server.post({"inputs": [text[:200] for text in many]})
            seconds = time.monotonic() - started
            samples.append((seconds, server.resident_mb()))
            print(f"{seconds / 60:5.1f} min {samples[-1][1]:7.1f} MB", flush=True)
            if seconds > 60 * arguments.minutes:
                break
    settled = [mb for seconds, mb in samples if _SETTLED_S <= seconds < _SETTLED_S + 120]
    last = [mb for seconds, mb in samples if seconds > samples[-1][0] - 120]
    if settled:
        growth = statistics.median(last) / statistics.median(settled) - 1
        what = f"{arguments.engine}, {arguments.precision}"
        print(f"{what}: {growth:+.1%} from minute 5 to minute {arguments.minutes:g}")


if __name__ == "__main__":
    main()
