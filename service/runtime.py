"""What one process serves with: artifact, tokenizer, engine and batcher, opened and checked."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from models.artifact import Artifact
from models.engines import Engine, Output, open_engine, self_check
from models.packing import pack
from service.batch_former import BatchFormer
from service.batching import Batcher
from service.metrics import Metrics
from service.settings import Settings
from service.tokenizer import Row, TextTokenizer


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engine is asked for.

    Attributes:
        row: One input.
        output: Its vector `(W,)`, or those of its tokens `(L, D)`.
    """

    row: Row
    output: Output


class NotFinite(Exception):
    """The engine gave an infinity or a NaN."""


@dataclass(frozen=True)
class Runtime:
    """A served model. The batcher is alive while it can encode.

    Attributes:
        batch_cost: Budget of a batch; see `service.batch_former`.
        graph_sha256: Of the file that the engine runs.
        self_check_cosine: The worst between a check vector and the engine's.
    """

    artifact: Artifact
    tokenizer: TextTokenizer
    engine: Engine
    batch_cost: int
    graph_sha256: str
    self_check_cosine: float
    batcher: Batcher[Wanted, NDArray[np.float32]]


async def open_runtime(
    settings: Settings, metrics: Metrics, on_stop: Callable[[BaseException], None]
) -> Runtime:
    """Return the runtime of the settings, its self-check passed and its batcher running.

    Raises:
        ArtifactError: The artifact is not complete and intact.
        EngineError: The engine is not usable, or does not give the model's vectors.
    """
    artifact, tokenizer, engine, cosine = await asyncio.to_thread(_open, settings)
    batch_cost = settings.batch.max_tokens or engine.batches.most
    # A layer does 24 D^2 operations a token and 4 D a pair, which run six times slower.
    pair_cost = 1 / artifact.manifest.width
    if engine.target == "cuda":
        await asyncio.to_thread(_warm_up, engine, artifact, batch_cost, pair_cost)

    def run(batch: Sequence[Wanted]) -> list[NDArray[np.float32]]:
        results: dict[int, NDArray[np.float32]] = {}
        for output in get_args(Output):
            places = [place for place, wanted in enumerate(batch) if wanted.output == output]
            if places:
                rows = [batch[place].row for place in places]
                results |= zip(places, run_rows(rows, output), strict=True)
        return [results[place] for place in range(len(batch))]

    def run_rows(rows: Sequence[Row], output: Output) -> Sequence[NDArray[np.float32]]:
        batch = pack([row.ids for row in rows], [row.unpooled for row in rows])
        with metrics.batch_seconds.time():
            vectors = engine.run(batch, output)  # (B, W), or (T, D)
        if not np.isfinite(vectors).all():
            raise NotFinite
        metrics.batch_rows.observe(batch.rows)
        metrics.batch_tokens.observe(len(batch.input_ids))
        metrics.padded_tokens.inc(batch.padded_index.size)
        if output == "pooled":
            return list(vectors)
        return np.split(vectors, np.cumsum([len(row.ids) for row in rows])[:-1])

    probe = [Wanted(Row(artifact.check().rows[0], truncated=False, unpooled=0), "pooled")]
    batcher: Batcher[Wanted, NDArray[np.float32]] = Batcher(
        run,
        lambda wanted: len(wanted.row.ids),
        BatchFormer(
            lanes=engine.lanes,
            max_cost=batch_cost,
            min_share=engine.batches.divided,
            overhead=engine.batches.overhead,
            pair_cost=pair_cost,
        ),
        probe=partial(run, probe),
        cancel=engine.cancel,
        max_queue=settings.batch.max_queue_tokens,
        timeout_s=settings.engine.timeout_s,
        on_stop=on_stop,
    )
    manifest = artifact.manifest
    metrics.queue_tokens.set_function(lambda: batcher.queued_tokens)
    metrics.queue_seconds.set_function(lambda: batcher.oldest_s)
    graph = manifest.files[artifact.graph(engine.target).file]
    metrics.model.info(
        {
            "model": manifest.name,
            "graph": graph[:12],
            "engine": engine.name,
            "precision": engine.precision,
        }
    )
    batcher.start()
    return Runtime(artifact, tokenizer, engine, batch_cost, graph, cosine, batcher)


def _open(settings: Settings) -> tuple[Artifact, TextTokenizer, Engine, float]:
    artifact = Artifact.load(settings.model.path)
    tokenizer = TextTokenizer(artifact, settings.limits.max_chars)
    chosen = settings.engine
    engine = open_engine(artifact, chosen.name, chosen.precision, chosen.threads, chosen.gpu)
    return artifact, tokenizer, engine, self_check(engine, artifact)


def _warm_up(engine: Engine, artifact: Artifact, batch_cost: int, pair_cost: float) -> None:
    """Run one row of each length, and as many as a batch takes, in all lanes at once.

    So no caller waits for a GPU to load kernels and to give memory.
    """
    length = artifact.manifest.max_tokens
    with ThreadPoolExecutor(engine.lanes) as lanes:
        while length:
            rows = int(batch_cost / (length + pair_cost * length**2))
            for count in {1, max(1, rows)}:
                batch = pack([[0] * length] * count)
                list(lanes.map(engine.run, [batch] * engine.lanes))
            length //= 2
