"""Jobs on the small model, and the artifacts of other kinds of models."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest

from models.artifact import Artifact
from service.bulk.job import encode_files
from service.bulk.options import BulkOptions
from service.bulk.progress import Progress
from tests.service.api.conftest import (  # noqa: F401 - fixtures
    classifier,
    cross_encoder,
    multi_encoder,
    reranker,
    sparse_encoder,
)

TEXTS = ["The cat sat on the mat.", "Strassenbahn", "a b c " * 40, "x", "The cat sat on the mat."]

# Runs a job on an input file, and returns its final state.
Encode = Callable[..., Progress]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def encode(small_artifact: Artifact, output: Path) -> Encode:
    """Runs a job of the small model, unless it is told otherwise."""

    def run(*inputs: Path | str, **fields: Any) -> Progress:  # noqa: ANN401
        watched = {name: fields.pop(name) for name in ("report", "stop") if name in fields}
        own = {"output": output, "model": small_artifact.path, "threads": 2, **fields}
        options = BulkOptions(inputs=tuple(map(str, inputs)), **own)
        return asyncio.run(encode_files(options, **watched))

    return run


def write_lines(folder: Path, records: Iterable[object]) -> Path:
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(folder: Path, texts: Iterable[str | None]) -> Path:
    return write_lines(folder, ({"text": text} for text in texts))


def rows_of(folder: Path) -> pa.Table:
    """Return all rows of the Parquet files in a folder, in the order of their names."""
    table: pa.Table = pyarrow.dataset.dataset(folder, format="parquet").to_table()
    return table


def json_rows_of(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a job's only part in JSON Lines."""
    return list(map(json.loads, (output / "part-00000.jsonl").read_text().splitlines()))
