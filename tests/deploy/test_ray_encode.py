"""Bulk encoding with Ray Data, on local clusters and, for its settings, without Ray."""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, PartEncoder
from models.artifact import Artifact
from service.bulk.job import encode_files
from service.bulk.opening import open_job
from service.bulk.options import BulkOptions
from tests.deploy.test_monitoring import ROOT
from tests.service.bulk.conftest import rows_of
from tests.service.bulk.test_resume import assert_equal

# Ray starts a dozen processes: minutes, on a machine whose cores are busy.
_PATIENCE_S = 3600
ROWS = 500
PART_ROWS = 60

on_a_cluster = [pytest.mark.slow, pytest.mark.timeout(_PATIENCE_S)]


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


Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(texts: Path, output: Path, small_artifact: Artifact) -> Arguments:
    """Return the arguments of the command, followed by others."""

    def with_others(*others: str, inputs: Sequence[str] = (str(texts),)) -> list[str]:
        own = [f"--model={small_artifact.path}", "--id-column=id", f"--part-rows={PART_ROWS}"]
        return [*inputs, str(output), *own, "--actors=2", *others]

    return with_others


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    # Ray creates sockets in this folder; their paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory() as short:
        yield {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
            "RAY_TMPDIR": short,
        }


def run(
    module: str, arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_equal_output(output: Path, expected: Path) -> None:
    files = sorted(path.name for path in expected.glob("*.parquet"))
    assert sorted(path.name for path in output.iterdir()) == ["_settings.json", *files]
    for name in files:
        schema, other = pq.read_schema(output / name), pq.read_schema(expected / name)
        assert schema.equals(other, check_metadata=True)
    assert_equal(rows_of(output), rows_of(expected))


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
def test_cluster_writes_the_files_of_vitrine_encode(
    arguments: Arguments, ray_environment: dict[str, str], output: Path, expected: Path
) -> None:
    command = arguments()
    command[1] = output.as_uri()
    job = run("deploy.ray_encode", command, ray_environment)
    assert job.returncode == 3, job.stderr  # some texts are null
    assert f"{ROWS} rows encoded" in job.stderr
    assert "the first: row" in job.stderr
    assert_equal_output(output, expected)


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
@pytest.mark.parametrize("step", ["before", "after"])
def test_part_of_a_killed_actor_is_neither_lost_nor_doubled(
    arguments: Arguments,
    ray_environment: dict[str, str],
    output: Path,
    expected: Path,
    tmp_path: Path,
    step: str,
) -> None:
    mark = tmp_path / "mark"
    fault = {"FAULT": f"SIGKILL actor part-00003.parquet {step}", "FAULT_MARK": str(mark)}
    job = run("tests.deploy.faulty_encode", arguments(), ray_environment | fault)
    assert job.returncode == 3, job.stderr
    assert mark.exists()
    assert f"{ROWS} rows encoded" in job.stderr
    assert_equal_output(output, expected)


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 4), ("SIGKILL", -9)])
def test_interrupted_job_keeps_finished_parts_when_it_is_started_again(
    arguments: Arguments,
    ray_environment: dict[str, str],
    output: Path,
    expected: Path,
    tmp_path: Path,
    signal: str,
    status: int,
) -> None:
    fault = {
        "FAULT": f"{signal} job part-00004.parquet before",
        "FAULT_MARK": str(tmp_path / "mark"),
    }
    job = run("tests.deploy.faulty_encode", arguments(), ray_environment | fault)
    assert job.returncode == status, job.stderr
    assert status != 4 or "interrupted: start again" in job.stderr
    before = {path.name: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert before
    job = run("deploy.ray_encode", arguments(), ray_environment)
    assert job.returncode == 3, job.stderr
    assert "rows were there already" in job.stderr
    after = {path.name: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert before.items() <= after.items()
    assert_equal_output(output, expected)
