"""Ray, texts, and the output of `vitrine-encode` for them, which a Ray cluster must write too."""

import asyncio
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from service.bulk.job import encode_files
from service.bulk.options import BulkOptions
from tests.deploy.ray_nodes import FEW_PROCESSES
from tests.deploy.test_monitoring import ROOT
from tests.service.bulk.conftest import rows_of
from tests.service.bulk.test_resume import assert_equal

# PYTHONPATH of Ray's processes. Without the package that the first folder hides, `import ray` takes
# 0.6 s of CPU time and not 2.0.
RAY_PATH = f"{ROOT}/tests/deploy/without_iris{os.pathsep}{ROOT}"

ROWS = 500
PART_ROWS = 60

# Returns the arguments of the command `deploy.ray_encode`, followed by others.
Arguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[dict[str, str]]:
    # Ray creates sockets in this folder; their paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory() as short:
        yield {
            **os.environ,
            **FEW_PROCESSES,
            "PYTHONPATH": RAY_PATH,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
            # Other tests would leave little time to processes of Ray's default, 15.
            "RAY_worker_niceness": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_TMPDIR": short,
        }


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files; their row groups do not end where parts end."""
    draw = random.Random(3)  # noqa: S311 - not for secrets
    texts = [" ".join(["cat"] * draw.randint(0, 30)) or None for _ in range(ROWS)]
    table = pa.table({"text": texts, "id": [f"id {row}" for row in range(ROWS)]})
    folder = tmp_path_factory.mktemp("texts")
    pq.write_table(table.slice(0, 290), folder / "1.parquet", row_group_size=100)
    pq.write_table(table.slice(290), folder / "2.parquet", row_group_size=37)
    (folder / "_notes.txt").touch()
    return folder


@pytest.fixture(scope="module")
def expected(
    texts: Path, small_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The output of `vitrine-encode`."""
    output = tmp_path_factory.mktemp("expected") / "output"
    options = BulkOptions(
        inputs=(str(texts),),
        output=output,
        model=small_artifact.path,
        id_column="id",
        part_rows=PART_ROWS,
        threads=2,
    )
    assert asyncio.run(encode_files(options)).errors
    return output


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def arguments(texts: Path, output: Path, small_artifact: Artifact) -> Arguments:
    """Return the arguments of the command, followed by others."""

    def with_others(*others: str, inputs: Sequence[str] = (str(texts),)) -> list[str]:
        own = [f"--model={small_artifact.path}", "--id-column=id", f"--part-rows={PART_ROWS}"]
        return [*inputs, str(output), *own, "--actors=2", *others]

    return with_others


def assert_equal_output(output: Path, expected: Path) -> None:
    files = sorted(path.name for path in expected.glob("*.parquet"))
    assert sorted(path.name for path in output.iterdir()) == ["_settings.json", *files]
    for name in files:
        schema, other = pq.read_schema(output / name), pq.read_schema(expected / name)
        assert schema.equals(other, check_metadata=True)
    assert_equal(rows_of(output), rows_of(expected))
