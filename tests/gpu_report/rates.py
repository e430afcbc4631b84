"""Batches of random rows, and the rate of one of several processes.

The processes import this module, which needs neither torch nor transformers.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np

from models.artifact import Artifact
from models.engines import Precision, open_engine
from models.packing import PackedBatch, pack
from tests.benchmarks.workloads import WORKLOADS


def rate_of_process(
    path: Path, name: str, precision: Precision, gpu: int, together: Barrier, seconds: float
) -> float:
    """Return the tokens per second of one of several processes that begin together."""
    engine = open_engine(Artifact.load(path), name, precision, gpu=gpu)
    draw = random.Random(0)  # noqa: S311 - not for secrets
    batches = batches_of(random_rows(sorted(mixed_length(draw) for _ in range(400))), 8192)
    for batch in batches:
        engine.run(batch)
    together.wait(300)
    tokens, until = 0, time.perf_counter() + seconds
    with ThreadPoolExecutor(engine.streams) as threads:
        while time.perf_counter() < until:
            list(threads.map(engine.run, batches))
            tokens += sum(len(batch.input_ids) for batch in batches)
    return tokens / (time.perf_counter() - until + seconds)


def random_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows of random token ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(4, 60, length).tolist() for length in lengths]


def batches_of(rows: list[list[int]], cost: int) -> list[PackedBatch]:
    """Return the rows in batches of at most `cost` tokens, in their order."""
    batches: list[list[list[int]]] = [[]]
    tokens = 0
    for row in rows:
        if batches[-1] and tokens + len(row) > cost:
            batches.append([])
            tokens = 0
        batches[-1].append(row)
        tokens += len(row)
    return [pack(batch) for batch in batches]


def mixed_length(draw: random.Random) -> int:
    """Return a random length of the mixed workload."""
    return WORKLOADS["mixed"].words(draw)
