"""`make bench-debug`: latency and throughput of `/encode` beside gradient jobs.

The same load, in turns with and without a client that requests one attribution after the other.
"""

from functools import partial

from tests.benchmarks.comparison import Figures, Turns, parser, report
from tests.benchmarks.servers import ServerProcess, vitrine
from tests.benchmarks.workloads import WORKLOADS, Workload

_JOB = {
    "text": "The cat sat on the mat and looked at the rain that fell on the garden.",
    "target": {"type": "cosine", "text": "A feline rested on the rug."},
    "tolerance": 1e-4,
}


def main() -> None:
    """Run the benchmark and print its table."""
    options = parser(__doc__, rounds=5, seconds=10).parse_args()
    comparison = Turns("alone")
    # Under full load a job gets little CPU time and takes long.
    with ServerProcess(vitrine("--debug.enabled=true", "--debug.deadline_s=120")) as server:
        for name in ("one client", "short", "mixed"):
            load = (server, WORKLOADS[name], options.seconds)
            contenders = {"alone": partial(_alone, *load), "beside jobs": partial(_beside, *load)}
            comparison.measure(contenders, options.rounds, title=f"{name}: ")
    report(comparison)


def _alone(server: ServerProcess, workload: Workload, seconds: int) -> Figures:
    return server.load(workload, seconds).figures()


def _beside(server: ServerProcess, workload: Workload, seconds: int) -> Figures:
    """Load the server beside a client with one job after the other."""
    with server.busy_client(_JOB, "/debug/attribute", seconds) as count:
        figures = _alone(server, workload, seconds)
    return {**figures, "gradient jobs": count()}


if __name__ == "__main__":
    main()
