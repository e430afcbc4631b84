"""The pipeline of a job: what is in flight, and in which order blocks are yielded."""

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from models.artifact import Artifact
from service.bulk import pipeline as bulk_pipeline
from service.bulk.encoder import RecordEncoder
from service.bulk.opening import open_job
from service.bulk.options import BulkOptions, Kind
from service.bulk.pipeline import EncodedBlock, Pipeline
from service.bulk.readers import Block
from service.bulk.sources import Source
from service.bulk.texts import Item
from tests.eventually import HANG_S, eventually_async
from tests.service.bulk.conftest import Encode, rows_of, write_texts


def test_blocks_without_new_texts_are_bounded_in_memory(
    encode: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = at_starts(monkeypatch, lambda pipeline: len(pipeline._in_flight))
    progress = encode(write_texts(tmp_path, [None] * 10_000 + ["same"] * 10_000))
    assert (progress.rows, progress.errors) == (20_000, 10_000)
    assert max(in_flight) <= 17


def at_starts(monkeypatch: pytest.MonkeyPatch, measure: Callable[[Pipeline], int]) -> Sequence[int]:
    """Return a list, which grows by a number of the pipeline whenever it has started a block."""
    numbers: list[int] = []

    def measured(self: Pipeline, pending: Any) -> None:  # noqa: ANN401 - of another class
        start(self, pending)
        numbers.append(measure(self))

    start = Pipeline._start
    monkeypatch.setattr(Pipeline, "_start", measured)
    return numbers


class HeldEncoder(RecordEncoder):
    """Encodes no items before `release` is set.

    Attributes:
        started: Number of calls that have started.
    """

    def __init__(self, encoder: RecordEncoder) -> None:
        vars(self).update(vars(encoder))
        self.started = 0
        self.release = asyncio.Event()

    async def encode(self, items: Sequence[Item]) -> pa.RecordBatch:
        self.started += 1
        await self.release.wait()
        return await super().encode(items)


def blocks(*texts: str | None) -> Iterator[Block]:
    """Yield a block per text; None: a skipped block, of more records than may be in flight."""
    for number, text in enumerate(texts):
        first = 10_000 * number
        yield Block(first, 10_000) if text is None else Block(first, 1, {"text": [text]})


@asynccontextmanager
async def held(
    options: BulkOptions, kind: Kind = "dense"
) -> AsyncIterator[tuple[HeldEncoder, Pipeline]]:
    """Yield the encoder and the pipeline of a job."""
    source = Source("jsonl", (), ("text",), pa.schema([]))
    async with open_job(options, kind, source) as job:
        encoder = HeldEncoder(job.encoder)
        yield encoder, Pipeline(encoder, options, kind, source.copied)


def test_highlights_keep_the_memory_limit(
    small_artifact: Artifact, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, count = 2**20, 8
    options = BulkOptions(
        inputs=("-",),
        output=output,
        model=small_artifact.path,
        threads=1,
        highlight=2,
        max_memory=limit,
    )
    in_flight = at_starts(monkeypatch, lambda pipeline: len(pipeline._in_flight))

    def read(numbers: range) -> Iterator[Block]:
        for number in numbers:
            text = " ".join(f"The cat sat on mat {number:02} {index}." for index in range(60))
            yield Block(number, 1, {"query": ["a cat"], "text": [text]})

    async def run() -> int:
        async with held(options, "scores") as (encoder, pipeline):
            task = asyncio.create_task(collected(pipeline, read(range(40))))
            await eventually_async(lambda: encoder.started >= count)
            encoder.release.set()
            assert len(await task) == 40
            # One record alone: how much of several exists at a time depends on the threads.
            tracemalloc.start()
            try:
                await collected(pipeline, read(range(40, 41)))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    # Python's memory: the text, its variants and their tokens. The limit bounds an estimate of it.
    assert count * asyncio.run(run()) < 2 * limit
    assert max(in_flight) == count


async def collected(pipeline: Pipeline, read: Iterator[Block]) -> list[EncodedBlock]:
    return [block async for block in pipeline.run(read)]


@pytest.mark.parametrize(("kind", "count"), [("dense", 16), ("chunks", 4)])
def test_texts_in_chunks_never_exceed_what_may_be_tokenised_at_once(
    small_artifact: Artifact,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    count: int,
) -> None:
    # A text in chunks counts four times towards the characters that `open_model` accepts.
    monkeypatch.setattr(bulk_pipeline, "_MAX_CHARS", 16_000)
    options = BulkOptions(inputs=("-",), output=output, model=small_artifact.path, threads=1)
    chars = at_starts(monkeypatch, lambda pipeline: pipeline._chars_in_flight)

    async def run() -> int:
        async with held(options, kind) as (encoder, pipeline):
            read = blocks(*(f"{number:04} {'cat ' * 248}end" for number in range(30)))
            task = asyncio.create_task(collected(pipeline, read))
            await eventually_async(lambda: encoder.started >= count)
            encoder.release.set()
            return len(await task)

    assert asyncio.run(run()) == 30
    assert max(chars) == count * 1000


def test_skipped_blocks_do_not_wait_for_the_engine(small_artifact: Artifact, output: Path) -> None:
    options = BulkOptions(inputs=("-",), output=output, model=small_artifact.path, threads=1)

    async def run() -> list[tuple[int, bool]]:
        async with held(options) as (encoder, pipeline):
            read = blocks(None, "one", None, None, "two", None)
            encoded: list[EncodedBlock] = []

            async def collect() -> None:
                encoded.extend([block async for block in pipeline.run(read)])

            task = asyncio.create_task(collect())
            await eventually_async(lambda: encoder.started == 2)
            encoder.release.set()
            await task
            return [(block.first, block.rows is not None) for block in encoded]

    is_encoded = [False, True, False, False, True, False]
    assert asyncio.run(run()) == [(10_000 * n, encoded) for n, encoded in enumerate(is_encoded)]


def test_encoded_blocks_are_yielded_while_the_reader_waits(
    small_artifact: Artifact, output: Path
) -> None:
    options = BulkOptions(inputs=("-",), output=output, model=small_artifact.path, threads=1)
    is_yielded = threading.Event()

    def read() -> Iterator[Block]:
        yield from blocks("one")
        assert is_yielded.wait(HANG_S)

    async def run() -> int:
        async with held(options) as (encoder, pipeline):
            encoder.release.set()
            count = 0
            async for _ in pipeline.run(read()):
                is_yielded.set()
                count += 1
            return count

    assert asyncio.run(run()) == 1


def test_memory_limit_below_one_block_still_encodes_all(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(2000)])
    assert encode(path, max_memory=1).rows == 2000
    assert rows_of(output)["row"].to_pylist() == list(range(2000))
