"""Clients of the service under load; imports little, as each of their processes does it anew."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

from tests.benchmarks.workloads import WORKLOADS


def latencies_of_clients(
    port: int, models: list[str], threads: int, seconds: float, seed: int
) -> list[float]:
    """Return the latencies of the requests of some connections, in seconds."""
    until = time.perf_counter() + seconds

    def requests(client: int) -> list[float]:
        draw = random.Random(1000 * seed + client)  # noqa: S311 - not for secrets
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        latencies: list[float] = []
        while not latencies or time.perf_counter() < until:  # one at least, on a busy machine
            words = WORKLOADS["mixed"].words(draw)
            text = " ".join(f"w{draw.randint(4, 59)}" for _ in range(words))
            body = json.dumps({"inputs": text, "model": draw.choice(models)})
            started = time.perf_counter()
            connection.request("POST", "/encode", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RuntimeError(f"/encode answered {response.status}: {content[:200]!r}")
            latencies.append(time.perf_counter() - started)
        return latencies

    with ThreadPoolExecutor(threads) as pool:
        return [latency for own in pool.map(requests, range(threads)) for latency in own]
