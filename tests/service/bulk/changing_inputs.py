"""Jobs whose input or output is changed while they run and between their runs, by seed.

    python -m tests.service.bulk.changing_inputs ARTIFACT 300 --from 100

runs that many jobs with an embedder, and reports each that breaks the rule: a job that ends without
an error has every row of its input, as it is then, with the results of its text.
"""

import argparse
import asyncio
import csv
import gzip
import io
import json
import logging
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from service.bulk import input_files, opening, pipeline, readers
from service.bulk.job import encode_files
from service.bulk.options import BulkError, BulkOptions
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model

# Small blocks, so that small files have many, and jobs read only a few ahead.
_LIMITS: tuple[tuple[ModuleType, dict[str, Any]], ...] = (
    (input_files, {"BLOCK_BYTES": 512}),
    (readers, {"_CHUNK_BYTES": 256, "_BLOCK_RECORDS": 8}),
    (pipeline, {"_MAX_ROWS": 16}),
)
_WORDS = ["dog", "ran", "park", "rain", "fell", "city", "north", "river", "house", "small"]


def _jsonl(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "rest": "x" * 40}).encode() + b"\n" for text in texts)


def _csv(texts: Sequence[str]) -> bytes:
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("text",), *((text,) for text in texts)])
    return file.getvalue().encode()


def _parquet(texts: Sequence[str]) -> bytes:
    file = io.BytesIO()
    # Without compression, which would shrink the file to a few blocks.
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, file, row_group_size=13, compression="none", use_dictionary=False)
    return file.getvalue()


_WRITERS: dict[str, Callable[[Sequence[str]], bytes]] = {
    "jsonl": _jsonl,
    "jsonl.gz": lambda texts: gzip.compress(_jsonl(texts), mtime=0),
    "csv": _csv,
    "parquet": _parquet,
    "txt": lambda texts: "".join(f"{text}\n" for text in texts).encode(),
}


@asynccontextmanager
async def opened(artifact: Path) -> AsyncIterator[Model]:
    """Open the model once for all jobs."""
    unlimited = ModelOptions(max_queue_tokens=2**62, max_token_vectors=2**62)
    async with await open_model(artifact, unlimited) as model:

        async def open_again(*_: object) -> nullcontext[Model]:
            return nullcontext(model)

        with ExitStack() as stack:
            stack.enter_context(patch.object(opening, "open_model", open_again))
            for module, limits in _LIMITS:
                stack.enter_context(patch.multiple(module, **limits))
            yield model


class _Change:
    """Changes an input file or a part at random.

    Args:
        draw: Source of randomness.
        path: The input file.
        output: Output folder of the job.
        contents: Contents of the input file, the first of which is the original.
    """

    def __init__(
        self, draw: random.Random, path: Path, output: Path, contents: Sequence[bytes]
    ) -> None:
        self._draw = draw
        self._path = path
        self._output = output
        self._contents = contents
        self._times = path.stat()
        of_input = [self.overwrite, self.mix, self.replace, self.truncate, self.append]
        of_parts = [self.remove_part, self.change_part]
        self._changes = draw.choice([[*of_input, *[self.restore] * 3], of_parts])

    def __call__(self) -> str:
        """Change something, and return its name."""
        change = self._draw.choice(self._changes)
        change()
        if self._draw.random() < 0.5 and self._path.exists():
            os.utime(self._path, ns=(self._times.st_atime_ns, self._times.st_mtime_ns))
        return change.__name__

    def overwrite(self) -> None:
        with self._path.open("r+b") as file:
            file.write(self._contents[1])

    def mix(self) -> None:
        good, bad = self._contents
        at = self._draw.randrange(len(good))
        with self._path.open("r+b") as file:
            file.seek(at)
            file.write(bad[at : at + self._draw.randint(1, 3000)])

    def replace(self) -> None:
        other = self._path.with_suffix(".other")
        other.write_bytes(self._draw.choice(self._contents))
        other.replace(self._path)

    def truncate(self) -> None:
        os.truncate(self._path, self._draw.randrange(len(self._contents[0])))

    def append(self) -> None:
        with self._path.open("ab") as file:
            file.write(self._contents[1][:100])

    def restore(self) -> None:
        with self._path.open("r+b") as file:
            file.write(self._contents[0])
            file.truncate()

    def remove_part(self) -> None:
        for part in self._parts()[:1]:
            part.unlink()

    def change_part(self) -> None:
        for part in self._parts()[:1]:
            content = bytearray(part.read_bytes())
            content[self._draw.randrange(len(content))] ^= 1
            part.write_bytes(content)

    def _parts(self) -> list[Path]:
        parts = sorted(self._output.glob("*.parquet"))
        self._draw.shuffle(parts)
        return parts


def _begun(draw: random.Random, artifact: Path, folder: Path) -> tuple[BulkOptions, _Change]:
    """Write the input of a job, and return its settings and what changes it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    suffix = draw.choice(list(_WRITERS))
    count = draw.randint(40, 150)
    texts = [" ".join(["cat", *draw.choices(_WORDS, k=4), str(row)]) for row in range(count)]
    others = [text.replace("cat", "mat") for text in texts]
    contents = [_WRITERS[suffix](own) for own in (texts, others)]
    path = folder / f"a.{suffix}"
    path.write_bytes(contents[0])
    inputs = [str(path)]
    if draw.random() < 0.3:  # a second file that does not change
        second = folder / f"b.{suffix}"
        second.write_bytes(_WRITERS[suffix](["cat north", "cat"]))
        inputs.append(str(second))
    options = BulkOptions(
        inputs=tuple(inputs),
        output=folder / "out",
        model=artifact,
        columns=("text",),
        part_rows=draw.choice([7, 20, 33]),
        concat=draw.random() < 0.2,
        threads=1,
    )
    return options, _Change(draw, path, options.output, contents)


async def problem(seed: int, artifact: Path, folder: Path) -> str | None:
    """Return how a job breaks the rule; None: it does not. Call it within `opened`."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    options, change = await asyncio.to_thread(_begun, draw, artifact, folder)
    log: list[str] = []
    for chance in draw.choices([0.0, 0.05, 0.3], k=4):
        stop = asyncio.Event()

        def report(_: object, chance: float = chance, stop: asyncio.Event = stop) -> None:
            if draw.random() < chance:
                log.append(change())
            if draw.random() < chance / 4:
                stop.set()

        try:
            is_complete = (await encode_files(options, report, stop)).is_complete
            log.append(f"complete: {is_complete}")
        except BulkError as error:
            is_complete = False
            log.append(str(error))
        if is_complete and (difference := await _difference(options)):
            return f"{difference}: {log}"
        if draw.random() < 0.5:
            log.append(change())
    change.restore()
    try:
        await encode_files(options)
    except BulkError as error:
        return f"the original input is refused: {[*log, str(error)]}"
    return await _difference(options)


async def _difference(options: BulkOptions) -> str | None:
    """Return how a complete output differs from that of a fresh run; None: it does not."""
    fresh = BulkOptions(
        inputs=options.inputs,
        output=options.output.with_name("fresh"),
        model=options.model,
        columns=("text",),
        threads=1,
    )
    shutil.rmtree(fresh.output, ignore_errors=True)
    await encode_files(fresh)
    actual, expected = (_rows(folder) for folder in (options.output, fresh.output))
    if actual["text"] != expected["text"] or actual["row"] != expected["row"]:
        return "rows have other texts"
    vectors = [
        np.array(table["embedding"].combine_chunks().to_pylist()) for table in (actual, expected)
    ]
    if vectors[0].shape != vectors[1].shape or np.abs(vectors[0] - vectors[1]).max() > 1e-4:
        return "rows have other vectors"
    return None


def _rows(folder: Path) -> pa.Table:
    return pyarrow.dataset.dataset(folder, format="parquet").to_table()


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path, help="folder of a small embedder")
    parser.add_argument("count", type=int, help="number of seeds")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    problems = 0
    logging.getLogger("vitrine").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        async with opened(options.artifact):
            for seed in range(options.first, options.first + options.count):
                if found := await problem(seed, options.artifact, Path(name) / "job"):
                    problems += 1
                    print(f"seed {seed}: {found}\n", flush=True)
    print(f"{options.count:,} jobs, {problems} problems")


if __name__ == "__main__":
    asyncio.run(_main())
