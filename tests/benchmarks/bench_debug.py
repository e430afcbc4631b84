"""`make bench-debug`: latency and throughput of `/encode` beside gradient jobs.

The same load, in turns with and without a client that requests one attribution after the other.
Each figure is the median of the rounds.
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.benchmarks.servers import Kind, Load, Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS

_PORT = 8130
_JOB = {
    "text": "The cat sat on the mat and looked at the rain that fell on the garden.",
    "target": {"type": "cosine", "text": "A feline rested on the rug."},
    "tolerance": 1e-4,
}


@contextmanager
def attributions() -> Iterator[list[float]]:
    """Request attributions in a loop; the yielded list receives their durations in milliseconds."""
    answered: list[float] = []
    end = threading.Event()

    def ask() -> None:
        while not end.is_set():
            connection = HTTPConnection("127.0.0.1", _PORT, timeout=120)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/debug/attribute", json.dumps(_JOB), headers)
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200:
                raise RuntimeError(content["detail"])
            answered.append(content["wall_ms"])

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield answered
    finally:
        end.set()
        client.join()


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10, help="duration of one measurement")
    options = parser.parse_args()
    need_wrk()
    serve = str(Path(sys.executable).with_name("vitrine-serve"))
    # Under full load a job gets little CPU time and takes long.
    debug = ("--debug.enabled=true", "--debug.deadline_s=120")
    server = Server(
        Kind((serve, f"--server.port={_PORT}", *debug), "/encode", "inputs", Path()), _PORT
    )
    print("| | p50, ms | p99, ms | with a gradient job: p50 | p99 | attributions |")
    print("|---|--:|--:|--:|--:|--:|")
    try:
        for name in ("one client", "short", "mixed"):
            quiet: list[Load] = []
            busy: list[Load] = []
            answered = 0
            for round_ in range(options.rounds + 1):
                alone = server.load(WORKLOADS[name], options.seconds)
                server.resume()
                with attributions() as times:
                    beside = server.load(WORKLOADS[name], options.seconds)
                    server.resume()
                if round_:  # the first round is the warm-up
                    quiet.append(alone)
                    busy.append(beside)
                    answered += len(times)
            cells = [
                statistics.median(getattr(load, figure) for load in loads)
                for loads in (quiet, busy)
                for figure in ("p50_ms", "p99_ms")
            ]
            shown = [
                f"{cell:.1f}" + (f" ({cell / cells[place - 2]:.2f})" if place > 1 else "")
                for place, cell in enumerate(cells)
            ]
            print(f"| {name} | {' | '.join(shown)} | {answered} |", flush=True)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
