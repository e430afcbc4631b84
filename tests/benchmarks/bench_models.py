"""Several models in one process: memory, latency, and latency beside the load of another model.

- "ten": resident memory of ten copies of the artifact, and the median latency of one client that
  sends each request to the next of them, compared with a service of one model. The copies share a
  tokenizer, as all models with equal tokenizer files do.
- "flood": latency of short texts at a fixed rate, alone and while 16 clients send documents to
  another model of the same process without pause.

    python -m tests.benchmarks.bench_models
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import httpx2
import numpy as np

from tests.benchmarks.servers import WRK_SCRIPT, Kind, Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS, random_text

_PORT = 8471
_MODELS = 10


def main() -> None:
    """Run the benchmarks and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifacts/all-MiniLM-L6-v2"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="duration of one measurement")
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second beside load")
    options = parser.parse_args()
    need_wrk()
    with tempfile.TemporaryDirectory() as folder:
        for index in range(_MODELS):
            shutil.copytree(options.artifact, Path(folder) / f"model{index}")
        weights = (options.artifact / "model.weights").stat().st_size / 1e6
        _ten(options.artifact, folder, options.rounds, weights)
        _flood(folder, options.rounds, options.seconds, options.rate)


def _ten(artifact: Path, folder: str, rounds: int, weights: float) -> None:
    names = [f"model{index}" for index in range(_MODELS)]
    with _server(_PORT, f"--model.path={artifact}") as one:
        one.pause()
        with _server(_PORT + 1, f"--models.folder={folder}", "--models.default=model0") as ten:
            ten.pause()
            medians: dict[str, list[float]] = {"one": [], "ten": []}
            for _ in range(rounds):
                for key, server, models in (("one", one, [None]), ("ten", ten, names)):
                    medians[key].append(_median_ms(server, _PORT + (key == "ten"), models))
            ten.resume()
            alone, among = (statistics.median(values) for values in medians.values())
            print(f"weights of {_MODELS} models: {_MODELS * weights:.0f} MB")
            print(f"resident with {_MODELS} models: {ten.resident_mb():.0f} MB")
            print(
                f"one client, p50: {alone:.2f} ms with one model, {among:.2f} ms with ten in turn"
            )
            print(f"ratio: {among / alone:.2f}", flush=True)


def _median_ms(server: Server, port: int, models: Sequence[str | None]) -> float:
    """Return the median latency of 300 short texts, sent in turn to the models, in ms."""
    draw = random.Random(3)  # noqa: S311 - not for secrets
    server.resume()
    seconds: list[float] = []
    with httpx2.Client() as client:
        for model in islice(cycle(models), 320):
            body = {"inputs": random_text(draw, draw.randint(4, 12)), "model": model}
            started = time.perf_counter()
            client.post(f"http://127.0.0.1:{port}/encode", json=body).raise_for_status()
            seconds.append(time.perf_counter() - started)
    server.pause()
    return 1e3 * statistics.median(seconds[20:])


def _flood(folder: str, rounds: int, seconds: int, rate: float) -> None:
    p99: dict[str, list[float]] = {"alone": [], "beside a flood": []}
    with _server(_PORT, f"--models.folder={folder}", "--models.default=model0") as server:
        for _ in range(rounds):
            for name, own in p99.items():
                with _documents(seconds + 2, flood=name != "alone"):
                    times = asyncio.run(_paced(seconds, rate))
                own.append(float(np.percentile(times, 99)))
                time.sleep(3)
        batch_ms = _batch_ms(server)
    alone, beside = (statistics.median(values) for values in p99.values())
    print(f"{rate:g} short texts per second, p99: {alone:.1f} ms alone, {beside:.1f} ms beside a")
    print(f"flood of another model; ratio: {beside / alone:.2f}; mean batch {batch_ms:.1f} ms")


@contextmanager
def _documents(seconds: int, *, flood: bool) -> Iterator[None]:
    """Send documents to the first model from 16 clients while the context lasts."""
    if not flood:
        yield
        return
    bodies = [
        json.dumps({"inputs": texts, "model": "model0"})
        for texts in WORKLOADS["documents"].requests()
    ]
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(bodies))
        file.flush()
        url = f"http://127.0.0.1:{_PORT}/encode"
        command = ["wrk", "-t1", "-c16", "--timeout=60s", f"-d{seconds}s", f"-s{WRK_SCRIPT}"]
        with subprocess.Popen(
            [*command, url, "--", file.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as load:
            time.sleep(1)
            yield
            load.wait()


async def _paced(seconds: int, rate: float) -> list[float]:
    """Send short texts to the second model at a fixed rate; return the latencies in ms."""
    draw = random.Random(5)  # noqa: S311 - not for secrets
    latencies: list[float] = []
    async with httpx2.AsyncClient(timeout=60) as client:

        async def send() -> None:
            body = {"inputs": random_text(draw, draw.randint(4, 12)), "model": "model1"}
            started = time.perf_counter()
            response = await client.post(f"http://127.0.0.1:{_PORT}/encode", json=body)
            response.raise_for_status()
            latencies.append(1e3 * (time.perf_counter() - started))

        await send()
        latencies.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(int(seconds * rate)):
                tasks.create_task(send())
                await asyncio.sleep(draw.expovariate(rate))
    return latencies


def _batch_ms(server: Server) -> float:
    """Return the mean duration of a batch of the first model, in ms."""
    values: Mapping[str, float] = {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in server.get("/metrics").splitlines())
        if name.startswith("vitrine_batch_seconds_") and 'model="model0"' in name
    }
    total, count = (
        values[f'vitrine_batch_seconds_{part}{{model="model0"}}'] for part in ("sum", "count")
    )
    return 1e3 * total / count


@contextmanager
def _server(port: int, *options: str) -> Iterator[Server]:
    serve = str(Path(sys.executable).with_name("vitrine-serve"))
    server = Server(
        Kind((serve, f"--server.port={port}", *options), "/encode", "inputs", Path()), port
    )
    try:
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    main()
