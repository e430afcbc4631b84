"""`make bench-models`: several models in one process.

- Ten models: resident memory of ten copies of the artifact, and the median latency of one client
  that sends each request to the next of them, compared with a service of one model. The copies
  share a tokenizer, as all models with equal tokenizer files do.
- Flood: latency of short texts at a fixed rate, alone and while 16 clients send documents to
  another model of the same process without pause.
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Event

import httpx2
import numpy as np

from tests.benchmarks.bench_servers import ARTIFACT
from tests.benchmarks.comparison import Figures, Turns, parser, report
from tests.benchmarks.servers import ServerProcess, vitrine
from tests.benchmarks.workloads import WORKLOADS, random_text

_NAMES = [f"model{index}" for index in range(10)]
_FLOODING, _FLOODED = _NAMES[:2]
_FLOOD_CLIENTS = 16


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parser(__doc__, rounds=5, seconds=5)
    options.add_argument("--artifact", type=Path, default=ARTIFACT)
    options.add_argument("--rate", type=float, default=30.0, help="requests per second beside load")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in _NAMES:
            shutil.copytree(arguments.artifact, Path(folder) / name)
        ten = vitrine(f"--models.folder={folder}", f"--models.default={_FLOODING}")
        models, flood = Turns("one model"), Turns("alone")
        one = vitrine(f"--model.path={arguments.artifact}")
        with ServerProcess(one) as one_model, ServerProcess(ten) as ten_models:
            contenders = {
                "one model": partial(_in_turn, one_model, [None], arguments.seconds),
                "ten models": partial(_in_turn, ten_models, _NAMES, arguments.seconds),
            }
            models.measure(contenders, arguments.rounds, title="one client, short texts: ")
            models.add("resident, MB", "one model", one_model.resident_mb())
            models.add("resident, MB", "ten models", ten_models.resident_mb())
        with ServerProcess(ten) as server:
            load = (server, arguments.seconds, arguments.rate)
            pair = {"alone": partial(_alone, *load), "beside a flood": partial(_flooded, *load)}
            flood.measure(
                pair, arguments.rounds, title=f"{arguments.rate:g} short texts a second: "
            )
    weights = (arguments.artifact / "model.weights").stat().st_size / 1e6
    facts = f"Weights of {len(_NAMES)} models: {len(_NAMES) * weights:,.0f} MB"
    report(facts, models, flood)


def _in_turn(server: ServerProcess, models: Sequence[str | None], seconds: int) -> Figures:
    """Send short texts from one client, each to the next model."""
    texts = [text for request in WORKLOADS["one client"].requests() for text in request]
    pairs = zip(texts, cycle(models), strict=False)
    bodies = [{"inputs": text, "model": model} for text, model in pairs]
    return {"p50, ms": server.load_bodies(bodies, 1, seconds).p50_ms}


def _alone(server: ServerProcess, seconds: int, rate: float) -> Figures:
    with server.awake():
        latencies = asyncio.run(_paced(f"{server.url}/encode", seconds, rate))
    return {"p99, ms": float(np.percentile(latencies, 99))}


def _flooded(server: ServerProcess, seconds: int, rate: float) -> Figures:
    """Measure beside 16 clients that send documents to another model."""
    requests = WORKLOADS["documents"].requests()
    bodies = [{"inputs": texts, "model": _FLOODING} for texts in requests]
    end = Event()

    def send(client: int) -> None:
        for body in cycle(bodies[client:] + bodies[:client]):
            if end.is_set():
                return
            server.post(body)

    with server.awake(), ThreadPoolExecutor(_FLOOD_CLIENTS) as clients:
        flood = clients.map(send, range(_FLOOD_CLIENTS))
        time.sleep(1)
        try:
            figures = _alone(server, seconds, rate)
        finally:
            end.set()
        list(flood)
    return figures


async def _paced(url: str, seconds: int, rate: float) -> list[float]:
    """Send short texts to a model at a fixed rate; return the latencies in ms."""
    draw = random.Random(5)  # noqa: S311 - not for secrets
    latencies: list[float] = []
    async with httpx2.AsyncClient(timeout=60) as client:

        async def send() -> None:
            body = {"inputs": random_text(draw, draw.randint(4, 12)), "model": _FLOODED}
            started = time.perf_counter()
            response = await client.post(url, json=body)
            response.raise_for_status()
            latencies.append(1e3 * (time.perf_counter() - started))

        await send()
        latencies.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(int(seconds * rate)):
                tasks.create_task(send())
                await asyncio.sleep(draw.expovariate(rate))
    return latencies


if __name__ == "__main__":
    main()
