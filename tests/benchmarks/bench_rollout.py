"""Requests during rolling updates: `python -m tests.benchmarks.bench_rollout artifacts/e5`.

Replaces all replicas of a simulated cluster, with the periods and timeouts of the manifests, while
clients send requests to its Service and to the gateway.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks.comparison import machine
from tests.deploy.simulated_cluster import clients, running
from tests.deploy.test_kubernetes import OWN


def main() -> None:
    """Print the outcomes of the requests, and the duration of an update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", help="artifact of the replicas")
    parser.add_argument("--updates", type=int, default=20, help="number of rolling updates")
    parser.add_argument("--clients", type=int, default=2, help="clients of each load balancer")
    arguments = parser.parse_args()
    environment = {"VITRINE_MODEL__PATH": arguments.artifact, "VITRINE_ENGINE__THREADS": "1"}
    seconds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), environment, OWN) as cluster,
        clients(cluster.service, arguments.clients) as direct,
        clients(cluster.gateway, arguments.clients) as through_gateway,
    ):
        deployment = cluster.deployment
        deployment.fewest_ready = deployment.replicas
        for update in range(arguments.updates):
            began = time.perf_counter()
            deployment.apply(environment | {"UPDATE": str(update)})
            deployment.wait_until(lambda: deployment.is_complete)
            seconds.append(time.perf_counter() - began)
        deployment.wait_until(lambda: len(deployment.pods) == deployment.replicas)
    print(f"{arguments.updates} updates of {deployment.replicas} replicas, {machine()}")
    print(f"fewest ready replicas: {deployment.fewest_ready}")
    print(f"duration of an update: {statistics.median(seconds):.1f} s (median)")
    for name, outcomes in (("Service", direct), ("gateway", through_gateway)):
        counts = ", ".join(f"{outcome}: {count:,}" for outcome, count in outcomes.items())
        print(f"{name}: {counts}")


if __name__ == "__main__":
    main()
