"""Bulk encoding with Ray Data: its settings, inputs and outputs, without a cluster."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy import ray_encode
from deploy.ray_encode import ClusterJob, PartEncoder
from models.artifact import Artifact
from tests.deploy.conftest import ROWS, Arguments, assert_equal_output
from tests.deploy.test_monitoring import ROOT
from tests.eventually import eventually
from tests.service.bulk.conftest import rows_of
from tests.service.bulk.test_resume import assert_equal

pytestmark = pytest.mark.slow


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the calls that a cluster would run in this process, and its parts one after the other."""

    def call(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], **_: int) -> list[Any]:
        return [function(*arguments) for arguments in calls]

    def encoded_parts(job: ClusterJob, parts: Sequence[int], _actors: int) -> list[dict[str, Any]]:
        with opened(job) as encoder:
            rows = [encoder({"part": [number]}) for number in parts]
        return [{name: value for name, [value] in row.items()} for row in rows]

    monkeypatch.setattr(ray_encode, "connect", nullcontext)
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
def test_output_in_the_input_folder_of_a_cluster_is_no_input(
    arguments: Arguments, stderr: Stderr, texts: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(texts, tmp_path / "texts")
    command = arguments("--columns=text", inputs=[str(folder)])
    command[1] = str(folder / "vectors")
    assert [ray_encode.main(command) for _ in range(2)] == [3, 3]
    assert f"{ROWS} rows were there already" in stderr()
    command[1] = str(folder)
    assert ray_encode.main(command) == 2
    assert f"there is no Parquet file at {folder}" in stderr()


@pytest.mark.usefixtures("without_ray")
def test_errors_of_a_cluster_are_not_those_in_a_copied_struct(
    arguments: Arguments, stderr: Stderr, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    errors = pa.array([{"error": "x"}, {"error": None}, None])
    pq.write_table(pa.table({"text": ["a", "b", ""], "id": range(3), "last": errors}), path)
    command = arguments("--columns=last", inputs=[str(path)])
    assert [ray_encode.main(command) for _ in range(2)] == [3, 3]
    assert "3 rows were there already; 1 rows have errors" in stderr()


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


def test_settings_of_a_cluster_are_written_in_any_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from types import SimpleNamespace as Job\n"
        "from deploy.ray_encode import locate, open_output\n"
        "for _ in range(2):\n"
        "    settings = {'--template': '{text} \\u732b'}\n"
        "    print(open_output(Job(output=locate(sys.argv[1]), settings=settings)))"
    )
    # Python would take the locale "C" for UTF-8.
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    assert subprocess.check_output(command, env=os.environ | locale, text=True) == "{}\n{}\n"


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
