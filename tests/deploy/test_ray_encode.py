"""Bulk encoding with Ray Data, on local clusters and, for its settings, without Ray."""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, PartEncoder
from models.artifact import Artifact
from service.bulk.job import encode_files
from service.bulk.options import BulkOptions
from tests.deploy.faulty_encode import Fault
from tests.deploy.test_monitoring import ROOT
from tests.eventually import eventually
from tests.service.bulk.conftest import rows_of
from tests.service.bulk.test_resume import assert_equal

pytestmark = pytest.mark.slow

# Ray starts a dozen processes: minutes, on a machine whose cores are busy.
_PATIENCE_S = 3600
ROWS = 500
PART_ROWS = 60


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


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[dict[str, str]]:
    # Ray creates sockets in this folder; their paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory() as short:
        yield {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}',
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_TMPDIR": short,
        }


@pytest.fixture(scope="module")
def on_cluster(ray_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of jobs on one running cluster."""
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    options = ["--head", "--port=0", "--include-dashboard=false", "--block"]
    process = subprocess.Popen([*ray, "start", *options], cwd=ROOT, env=ray_environment)
    address = Path(ray_environment["RAY_TMPDIR"], "ray", "ray_current_cluster")
    try:
        eventually(lambda: address.exists() or process.poll() is not None)
        yield ray_environment | {"RAY_ADDRESS": address.read_text()}
    finally:
        process.terminate()
        process.wait()


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


def environment_of(*faults: Fault) -> dict[str, str]:
    return {"FAULTS": json.dumps([asdict(fault) for fault in faults])}


def assert_equal_output(output: Path, expected: Path) -> None:
    files = sorted(path.name for path in expected.glob("*.parquet"))
    assert sorted(path.name for path in output.iterdir()) == ["_settings.json", *files]
    for name in files:
        schema, other = pq.read_schema(output / name), pq.read_schema(expected / name)
        assert schema.equals(other, check_metadata=True)
    assert_equal(rows_of(output), rows_of(expected))


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


@pytest.mark.timeout(_PATIENCE_S)
def test_part_of_a_killed_actor_is_neither_lost_nor_doubled(
    arguments: Arguments, on_cluster: dict[str, str], output: Path, expected: Path, tmp_path: Path
) -> None:
    faults = [
        Fault("SIGKILL", "actor", "part-00003.parquet", "before", str(tmp_path / "before")),
        Fault("SIGKILL", "actor", "part-00006.parquet", "after", str(tmp_path / "after")),
    ]
    job = run("tests.deploy.faulty_encode", arguments(), on_cluster | environment_of(*faults))
    assert job.returncode == 3, job.stderr
    assert all(Path(fault.mark).exists() for fault in faults)
    assert f"{ROWS} rows encoded" in job.stderr
    assert_equal_output(output, expected)


@pytest.mark.timeout(_PATIENCE_S)
def test_interrupted_job_keeps_finished_parts_when_it_is_started_again(
    arguments: Arguments, on_cluster: dict[str, str], output: Path, expected: Path, tmp_path: Path
) -> None:
    def finished() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_mtime_ns) for path in output.glob("*.parquet")}

    def interrupt(signal: str) -> subprocess.CompletedProcess[str]:
        fault = Fault(signal, "job", "part-00004.parquet", "before", str(tmp_path / signal))
        environment = on_cluster | environment_of(fault)
        return run("tests.deploy.faulty_encode", arguments(), environment)

    job = interrupt("SIGTERM")
    assert job.returncode == 4, job.stderr
    assert "interrupted: start again" in job.stderr
    after_sigterm = finished()
    assert after_sigterm
    job = interrupt("SIGKILL")
    assert job.returncode == -9, job.stderr
    after_sigkill = finished()
    job = run("deploy.ray_encode", arguments(), on_cluster)
    assert job.returncode == 3, job.stderr
    assert "rows were there already" in job.stderr
    assert after_sigterm <= after_sigkill <= finished()
    assert_equal_output(output, expected)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the calls that a cluster would run in this process, and its parts one after the other."""

    def call(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **_: int) -> list[Any]:
        return [function(*arguments) for arguments in calls]

    def encoded_parts(job: ClusterJob, parts: Sequence[int], _actors: int) -> list[dict[str, Any]]:
        with opened(job) as encoder:
            rows = [encoder({"part": [number]}) for number in parts]
        return [{name: value for name, [value] in row.items()} for row in rows]

    monkeypatch.setattr(ray_encode, "connected", nullcontext)
    monkeypatch.setattr(ray_encode, "_on_cluster", call)
    monkeypatch.setattr(ray_encode, "_encoded_parts", encoded_parts)


@contextmanager
def opened(job: ClusterJob) -> Iterator[PartEncoder]:
    """Yield an actor's encoder in this process."""
    encoder = PartEncoder(job)
    try:
        yield encoder
    finally:
        closed = asyncio.run_coroutine_threadsafe(encoder._stack.aclose(), encoder._loop)
        closed.result()
        encoder._loop.call_soon_threadsafe(encoder._loop.stop)
        eventually(lambda: not encoder._loop.is_running())
        encoder._loop.close()


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().err


Stderr = Callable[[], str]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--dimensions=7", "was begun with another --dimensions: None, not 7; use the same, or"),
        ("--part-rows=61", "was begun with another --part-rows: 60, not 61"),
        ("--text-column=id", "was begun with another text columns: ['text'], not ['id']"),
        ("--limit=9", "was begun with another --limit: None, not 9"),
    ],
)
@pytest.mark.usefixtures("without_ray")
def test_output_of_a_cluster_refuses_other_settings_by_name(
    arguments: Arguments, stderr: Stderr, option: str, message: str
) -> None:
    assert ray_encode.main(arguments()) == 3
    assert ray_encode.main(arguments(option)) == 2
    assert message in stderr()


@pytest.mark.usefixtures("without_ray")
def test_output_of_a_cluster_refuses_another_artifact(
    arguments: Arguments, stderr: Stderr, other_artifact: Artifact
) -> None:
    assert ray_encode.main(arguments()) == 3
    assert ray_encode.main(arguments(f"--model={other_artifact.path}")) == 2
    assert "was begun with another model version" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_actor_with_another_artifact_at_the_path_ends_the_job(
    arguments: Arguments,
    stderr: Stderr,
    other_artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    output: Path,
) -> None:
    class OtherMachine(PartEncoder):
        def __init__(self, job: ClusterJob) -> None:
            super().__init__(replace(job, options=replace(job.options, model=other_artifact.path)))

    monkeypatch.setattr("tests.deploy.test_ray_encode.PartEncoder", OtherMachine)
    assert ray_encode.main(arguments()) == 1
    assert "on the machine" in (message := stderr())
    assert "another model version" in message
    assert not list(output.glob("*.parquet"))


@pytest.mark.usefixtures("without_ray")
def test_damaged_part_of_a_cluster_is_encoded_again(
    arguments: Arguments,
    stderr: Stderr,
    output: Path,
    expected: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert ray_encode.main(arguments()) == 3
    (output / "part-00002.parquet").write_bytes(b"")
    (output / ".part-00002.parquet.0123.partial").touch()
    stderr()
    assert ray_encode.main(arguments("--progress=json")) == 3
    progress = json.loads(stderr().splitlines()[-1])
    assert "part-00002.parquet was changed" in caplog.text
    assert (progress["rows"], progress["complete"]) == (ROWS, True)
    assert_equal_output(output, expected)


@pytest.mark.usefixtures("without_ray")
def test_complete_output_of_a_cluster_is_not_encoded_again(
    arguments: Arguments, stderr: Stderr
) -> None:
    assert ray_encode.main(arguments()) == 3
    errors = stderr().partition(" rows have errors")[0].split()[-1]
    assert ray_encode.main(arguments()) == 3
    assert f"{ROWS} rows were there already; {errors} rows have errors" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_limit_and_maximum_number_of_errors_apply_on_a_cluster(
    arguments: Arguments, stderr: Stderr, output: Path, tmp_path: Path
) -> None:
    assert ray_encode.main(arguments("--limit=70")) == 3
    assert [len(pq.read_table(path)) for path in sorted(output.glob("*.parquet"))] == [60, 10]
    command = arguments("--max-errors=0")
    command[1] = str(tmp_path / "other")
    assert ray_encode.main(command) == 1
    assert "more than 0 records have errors; the first is row" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_input_that_changes_during_the_job_is_an_error(
    texts: Path,
    arguments: Arguments,
    stderr: Stderr,
    tmp_path: Path,
    output: Path,
    expected: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path / "copy.parquet"
    # Uncompressed and without a dictionary, so that parts are in several blocks.
    table = pq.read_table(texts).append_column("rest", pa.array(["x" * 2000] * ROWS))
    pq.write_table(table, copy, row_group_size=60, compression="none", use_dictionary=False)
    original, times = copy.read_bytes(), copy.stat()
    publish = ray_encode.publish

    def then_change(file: Path, *others: Any) -> None:  # noqa: ANN401 - publish's
        publish(file, *others)
        if file.name == "part-00003.parquet":
            copy.write_bytes(original.replace(b"cat", b"mat"))
            os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))

    monkeypatch.setattr(ray_encode, "publish", then_change)
    command = arguments(inputs=[str(copy)])
    assert ray_encode.main(command) == 1
    assert "copy.parquet was changed during the job; the output is of its earlier" in stderr()
    assert ray_encode.main(command) == 2
    assert "was begun with another input file 1" in stderr()
    copy.write_bytes(original)
    monkeypatch.setattr(ray_encode, "publish", publish)
    assert ray_encode.main(command) == 3
    assert "240 rows were there already" in stderr()
    assert_equal(rows_of(output), rows_of(expected))


@pytest.mark.usefixtures("without_ray")
def test_input_that_changes_after_it_was_read_is_an_error_of_a_cluster(
    texts: Path,
    arguments: Arguments,
    stderr: Stderr,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path / "copy.parquet"
    pq.write_table(pq.read_table(texts), copy)
    monkeypatch.setattr(ray_encode, "_encoded_parts", after(lambda: copy.write_bytes(b"x")))
    assert ray_encode.main(arguments(inputs=[str(copy)])) == 1
    assert "copy.parquet was changed during the job" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_part_that_vanishes_during_the_job_is_an_error_of_a_cluster(
    arguments: Arguments,
    stderr: Stderr,
    output: Path,
    expected: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remove() -> None:
        (output / "part-00001.parquet").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(ray_encode, "_encoded_parts", after(remove))
        assert ray_encode.main(arguments()) == 1
    assert "lacks the part 1, which another process has removed or changed" in stderr()
    assert ray_encode.main(arguments()) == 3
    assert_equal_output(output, expected)


def after(change: Callable[[], object]) -> Callable[..., Iterator[dict[str, Any]]]:
    """Return the encoding of parts, followed by a change."""
    encoded_parts = ray_encode._encoded_parts

    def then_change(*arguments: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - passed on
        yield from encoded_parts(*arguments)
        change()

    return then_change


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"\xff"])
@pytest.mark.usefixtures("without_ray")
def test_damaged_settings_of_a_cluster_are_an_error(
    arguments: Arguments, stderr: Stderr, output: Path, content: bytes
) -> None:
    assert ray_encode.main(arguments()) == 3
    (output / "_settings.json").write_bytes(content)
    assert ray_encode.main(arguments()) == 1
    assert "_settings.json is damaged: " in stderr()


@pytest.mark.parametrize(
    ("others", "inputs", "message"),
    [
        ([], ["-"], "a cluster cannot read standard input; write the texts to a Parquet file"),
        ([], ["none"], "there is no Parquet file at none"),
        ([], ["README.md"], "README.md is not a Parquet file; vitrine-encode reads other formats"),
        ([], ["other://host/texts"], "other://host/texts cannot be opened"),
        (["--actors=0"], ["none"], "--actors must be at least 1"),
        (["--cpus-per-actor=0"], ["none"], "--cpus-per-actor must be at least 1"),
        (["--part-rows=0"], ["none"], "--part-rows must be at least 1"),
        (["--kind=sparse"], ["none"], "cannot compute sparse"),
        (["--columns=year"], None, "has no column 'year'; its columns are: text, id"),
        (["--engine=abacus"], None, "abacus"),
    ],
)
@pytest.mark.usefixtures("without_ray")
def test_invalid_option_on_a_cluster_is_refused_with_a_sentence(
    texts: Path,
    arguments: Arguments,
    stderr: Stderr,
    monkeypatch: pytest.MonkeyPatch,
    others: list[str],
    inputs: list[str] | None,
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    assert ray_encode.main(arguments(*others, inputs=inputs or [str(texts)])) == 2
    assert message in stderr()


@pytest.mark.parametrize("option", ["--shard=1/2", "--concat", "--format=jsonl", "--threads=2"])
def test_option_of_one_machine_is_unknown_on_a_cluster(
    arguments: Arguments, stderr: Stderr, option: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        ray_encode.main(arguments(option))
    assert exit_.value.code == 2
    assert f"unrecognized arguments: {option}" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_folder_with_other_files_is_refused_on_a_cluster(
    arguments: Arguments, stderr: Stderr, output: Path
) -> None:
    output.mkdir()
    (output / "thesis.doc").touch()
    assert ray_encode.main(arguments()) == 2
    assert "has files, but no job was begun there; choose an empty folder" in stderr()
    assert [path.name for path in output.iterdir()] == ["thesis.doc"]


@pytest.mark.usefixtures("without_ray")
def test_job_on_a_cluster_starts_again_after_a_kill_before_its_settings_were_written(
    arguments: Arguments, output: Path, expected: Path
) -> None:
    output.mkdir()
    (output / "._settings.json.0123.partial").touch()
    assert ray_encode.main(arguments()) == 3
    assert_equal_output(output, expected)
