"""Jobs that are killed, interrupted, or run out of space, and are started again."""

import asyncio
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from service.bulk import job, parts
from service.bulk.command_line import main
from service.bulk.job import encode_files
from service.bulk.options import BulkError, BulkOptions, OptionError
from tests.eventually import eventually
from tests.models.checkpoints import edit_json
from tests.service.bulk.conftest import Encode, rows_of, write_lines

pytestmark = pytest.mark.slow

ROWS = 4000
# Settings of most jobs here.
PARTS: dict[str, Any] = {"part_rows": 250, "id_column": "id", "threads": 2}


def write(folder: Path) -> Path:
    """Write the input of the jobs."""
    draw = random.Random(1)  # noqa: S311 - not for secrets
    words = (["cat"] * draw.randint(0, 30) for _ in range(ROWS))
    return write_lines(
        folder, ({"text": " ".join(own), "id": number} for number, own in enumerate(words))
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path)


def assert_equal(actual: pa.Table, expected: pa.Table) -> None:
    assert actual.drop_columns("embedding") == expected.drop_columns("embedding")
    valid = expected["error"].is_null()
    vectors, others = (
        np.stack(t["embedding"].filter(valid).to_numpy()) for t in (actual, expected)
    )
    np.testing.assert_allclose(vectors, others, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def expected(small_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The rows of a job that nothing interrupts."""
    folder = tmp_path_factory.mktemp("expected")
    inputs = (str(write(folder)),)
    options = BulkOptions(inputs=inputs, output=folder / "out", model=small_artifact.path, **PARTS)
    asyncio.run(encode_files(options))
    return rows_of(folder / "out")


def forget_parts(output: Path) -> None:
    """Leave the settings and four parts in the journal, as if the job had ended after them."""
    journal = output / "_journal"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:5]))


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock a file as another process does."""
    with file.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def command(artifact: Artifact, texts: Path, output: Path, *options: str) -> list[str]:
    own = ["--model", str(artifact.path), "--part-rows=250", "--id-column=id", "--threads=1"]
    return [sys.executable, "-m", "service.bulk", str(texts), str(output), *own, *options]


def test_job_killed_at_random_moments_loses_and_repeats_no_row(
    small_artifact: Artifact,
    texts: Path,
    output: Path,
    expected: pa.Table,
) -> None:
    arguments = command(small_artifact, texts, output)
    kept: set[str] = set()
    for target in (0, 2, 3, 7, 12):
        with subprocess.Popen(arguments) as job:
            journal = output / "_journal"
            eventually(lambda: journal.exists() and journal.read_bytes().count(b"\n") > target)  # noqa: B023
            job.kill()
        files = {p.name: p.stat().st_mtime_ns for p in output.glob("*.parquet")}
        finished = journal.read_bytes().count(b'"part"')
        assert finished <= len(files) <= finished + 1  # at most one part is encoded again
        assert kept <= files.keys()
        kept = set(files)
    assert subprocess.run(arguments).returncode == 3
    assert_equal(rows_of(output), expected)
    assert not list(output.glob(".*"))


# Runs the command, which sends itself each signal after a further block of rows.
SIGNALLED = """
import os, sys
from contextlib import nullcontext
from service.bulk import command_line

signals = list(map(int, sys.argv.pop(1).split()))

def report(_):
    if signals:
        os.kill(os.getpid(), signals.pop(0))

command_line.report_progress = lambda _: nullcontext(report)
sys.exit(command_line.main())
"""


def signalled(arguments: list[str], *signals: signal.Signals) -> subprocess.CompletedProcess[str]:
    numbers = " ".join(str(int(number)) for number in signals)
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, numbers, *arguments[3:]],
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_job_after_the_current_part(
    small_artifact: Artifact,
    texts: Path,
    output: Path,
    expected: pa.Table,
    number: signal.Signals,
) -> None:
    arguments = command(small_artifact, texts, output)
    job = signalled(arguments, number)
    assert job.returncode == 4, job.stderr
    assert "the job ends after the current part" in job.stderr
    rows = rows_of(output).num_rows
    assert rows % 250 == 0
    assert 0 < rows < ROWS
    assert subprocess.run(arguments).returncode == 3
    assert_equal(rows_of(output), expected)


def test_second_signal_ends_the_job_at_once(
    small_artifact: Artifact, texts: Path, output: Path
) -> None:
    # One part has all rows, so that the job can only end inside of it.
    arguments = [*command(small_artifact, texts, output), f"--part-rows={ROWS}"]
    job = signalled(arguments, signal.SIGTERM, signal.SIGINT)
    assert job.returncode == 4, job.stderr
    assert "interrupted; finished parts are kept" in job.stderr
    assert not list(output.glob("*.parquet"))


def test_torn_last_line_of_the_journal_is_dropped(
    encode: Encode, texts: Path, output: Path, expected: pa.Table
) -> None:
    encode(texts, **PARTS)
    torn = (output / "_journal").read_bytes().splitlines()[5][:40]
    forget_parts(output)
    with (output / "_journal").open("ab") as journal:
        journal.write(torn)
    again = encode(texts, **PARTS)
    assert (again.kept, again.rows) == (1000, ROWS - 1000)
    assert_equal(rows_of(output), expected)
    assert encode(texts, **PARTS).kept == ROWS


@pytest.mark.parametrize("damage", ["remove", "change"])
def test_missing_or_changed_part_is_encoded_again(
    encode: Encode,
    texts: Path,
    output: Path,
    expected: pa.Table,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    encode(texts, **PARTS)
    part = output / "part-00003.parquet"
    if damage == "remove":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1] + b"x")
    again = encode(texts, **PARTS)
    assert again.rows == 250
    assert "part-00003.parquet" in caplog.text
    assert_equal(rows_of(output), expected)


def test_complete_job_is_not_run_again(encode: Encode, texts: Path) -> None:
    encode(texts)
    again = encode(texts)
    assert (again.rows, again.kept, again.is_complete) == (0, ROWS, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dimensions": 7}, "was begun with another --dimensions: None, not 7; use the same, or"),
        ({"text_column": "id"}, r"another text columns: \['text'\], not \['id'\]"),
        ({"part_rows": 9}, "another --part-rows: 8192, not 9"),
    ],
)
def test_other_settings_are_refused_by_name(
    encode: Encode, texts: Path, settings: dict[str, object], message: str
) -> None:
    encode(texts)
    with pytest.raises(OptionError, match=message):
        encode(texts, **settings)


def test_changed_input_and_another_model_are_refused(
    encode: Encode, texts: Path, other_artifact: Artifact
) -> None:
    encode(texts)
    with pytest.raises(OptionError, match="another model version"):
        encode(texts, model=other_artifact.path)
    texts.write_text(texts.read_text() + '\n{"text": "one more"}')
    with pytest.raises(OptionError, match="another input file 1"):
        encode(texts)


@pytest.mark.parametrize(
    "settings",
    [
        {"normalize": False},
        {"max_tokens": 7},
        {"prompts": {"": "query: "}},
        {"truncation_side": "left"},
        {"include_prompt": False},
    ],
)
def test_same_weights_with_other_settings_are_refused(
    encode: Encode, texts: Path, other_settings: Path, settings: dict[str, object]
) -> None:
    encode(texts, limit=10, part_rows=5, shard=(1, 2))
    edit_json(other_settings / "manifest.json", **settings)
    with pytest.raises(OptionError, match=r"another model version: \w{64}, not \w{64}; use the"):
        encode(texts, limit=10, part_rows=5, model=other_settings)


def test_file_in_place_of_the_output_folder_is_refused(encode: Encode, texts: Path) -> None:
    with pytest.raises(OptionError, match=f"{texts} is not a folder"):
        encode(texts, output=texts)


def test_same_artifact_elsewhere_under_another_name_is_accepted(
    encode: Encode, texts: Path, other_settings: Path
) -> None:
    encode(texts, limit=10, part_rows=5, shard=(1, 2))
    edit_json(other_settings / "manifest.json", name="another", source="elsewhere", versions={})
    progress = encode(texts, limit=10, part_rows=5, model=other_settings)
    assert (progress.rows, progress.kept, progress.is_complete) == (5, 5, True)


@pytest.fixture
def other_settings(small_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of the model's artifact, whose manifest a test may change."""
    return Path(shutil.copytree(small_artifact.path, tmp_path / "copy"))


def test_journal_of_an_earlier_version_of_vitrine_is_refused(
    encode: Encode, texts: Path, output: Path
) -> None:
    encode(texts, limit=10)
    journal = output / "_journal"
    first, *parts = journal.read_text().splitlines()
    begun = json.loads(first)["settings"]
    del begun["model version"]
    begun |= {"graph": "12", "tokenizer": "34", "calibration": None}
    journal.write_text("\n".join([json.dumps({"settings": begun}), *parts, ""]))
    with pytest.raises(
        OptionError,
        match="was begun with another version of Vitrine, which recorded no model version; choose",
    ):
        encode(texts, limit=10)


def test_moved_input_with_the_same_content_is_accepted(encode: Encode, texts: Path) -> None:
    encode(texts)
    assert encode(texts.rename(texts.with_name("moved.jsonl"))).kept == ROWS


def test_folder_with_other_files_is_refused(encode: Encode, texts: Path, output: Path) -> None:
    output.mkdir()
    (output / "thesis.doc").touch()
    with pytest.raises(OptionError, match="has files, but no job was begun there"):
        encode(texts)
    assert [path.name for path in output.iterdir()] == ["thesis.doc"]


@pytest.mark.parametrize("name", ["_journal", "_lock", "_journal-2-of-3", "part-00000.parquet"])
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder"])
def test_link_or_other_thing_in_place_of_a_file_of_the_output_is_refused(
    encode: Encode, texts: Path, tmp_path: Path, output: Path, name: str, kind: str
) -> None:
    encode(texts, limit=10)
    other, path = tmp_path / "other", output / name
    if path.exists():
        path.rename(other)
    else:
        other.write_bytes((output / "_journal").read_bytes())
    content = other.read_bytes()
    if kind == "link":
        path.symlink_to(other)
    elif kind == "broken link":
        path.symlink_to(tmp_path / "missing")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OptionError, match=rf"{name} is a link, or no regular file; remove it"):
        encode(texts, limit=10)
    assert other.read_bytes() == content
    assert not (tmp_path / "missing").exists()


def test_file_that_a_temporary_name_links_to_is_not_written(
    encode: Encode, texts: Path, tmp_path: Path, output: Path
) -> None:
    encode(texts, limit=10)
    (output / "part-00000.parquet").unlink()
    other = tmp_path / "other"
    other.write_text("of another")
    (output / ".part-00000.parquet.partial").symlink_to(other)
    assert encode(texts, limit=10).rows == 10
    assert other.read_text() == "of another"
    assert not (output / "part-00000.parquet").is_symlink()


DAMAGED_LINES = [
    b"[" * 100_000,
    b"{",
    b"[]",
    b"7",
    b'{"part": {}}',
    b'{"part": {"number": "\\ud83d"}}',
    b'{"rows": -1}',
    b'{"rows": true}',
    b'{"settings": {}}',
    b'{"joined": {"../input.jsonl": "' + b"0" * 64 + b'"}}',
    b'{"joined": {"part-00000.parquet": 7}}',
    b'{"rows": 1, "joined": {}}',
    b"\xff",
]


@pytest.mark.parametrize("line", DAMAGED_LINES)
def test_damaged_line_of_a_journal_is_an_error_with_its_number(
    encode: Encode, texts: Path, output: Path, line: bytes
) -> None:
    encode(texts, limit=10)
    journal = output / "_journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]))
    with pytest.raises(BulkError, match=r"_journal is damaged in line 3: .*; remove the folder"):
        encode(texts, limit=10)
    journal.write_bytes(line + b"\n")
    if b"settings" not in line:
        with pytest.raises(BulkError, match="_journal is damaged in line 1"):
            encode(texts, limit=10)


def test_part_of_another_name_is_damage_of_the_journal(
    encode: Encode, texts: Path, output: Path
) -> None:
    encode(texts, limit=10)
    journal = output / "_journal"
    journal.write_bytes(journal.read_bytes().replace(b'"part-00000.parquet"', b'"../input.jsonl"'))
    with pytest.raises(BulkError, match="_journal is damaged in line 2"):
        encode(texts, limit=10)
    assert texts.exists()


def test_complete_output_without_the_journal_of_a_shard_is_encoded_again(
    encode: Encode, texts: Path, output: Path
) -> None:
    for shard in ((1, 2), (2, 2)):
        encode(texts, part_rows=1000, shard=shard)
    assert encode(texts, part_rows=1000).kept == ROWS
    (output / "_journal-2-of-2").unlink()
    assert encode(texts, part_rows=1000).rows == 2000


@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("name", ["part-00004.parquet", "part-00001.jsonl"])
def test_file_that_is_named_as_a_part_and_is_none_is_an_error_of_a_complete_job(
    encode: Encode, texts: Path, output: Path, name: str, concat: bool
) -> None:
    encode(texts, part_rows=1000, concat=concat)
    (output / "notes.parquet").write_bytes(b"a file of the user's")
    stranger = output / name
    stranger.write_bytes(b"")
    with pytest.raises(BulkError, match=rf"{name} is no part of this job, .*; remove it"):
        encode(texts, part_rows=1000, concat=concat)
    stranger.unlink()
    assert encode(texts, part_rows=1000, concat=concat).kept == ROWS


@pytest.mark.parametrize("damage", ["remove", "change"])
def test_part_that_is_removed_or_changed_during_the_job_is_an_error_at_its_end(
    encode: Encode, texts: Path, output: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    end_part = job._JobRun._end_part

    async def then_damage(run: job._JobRun) -> None:
        await end_part(run)
        part = output / "part-00002.parquet"
        if part.exists():
            part.unlink() if damage == "remove" else part.write_bytes(b"")

    with monkeypatch.context() as patch:
        patch.setattr(job._JobRun, "_end_part", then_damage)
        problem = "is missing" if damage == "remove" else "was changed"
        with pytest.raises(BulkError, match=rf"part-00002\.parquet {problem}; start again"):
            encode(texts, part_rows=250)
    again = encode(texts, part_rows=250)
    assert (again.rows, again.kept) == (250, ROWS - 250)


def test_part_that_is_changed_while_parts_are_joined_is_an_error(
    encode: Encode, texts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = parts.join

    def after_a_change(*arguments: object) -> object:
        part = output / "part-00001.parquet"
        part.write_bytes((output / "part-00000.parquet").read_bytes())
        return join(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(job, "join", after_a_change)
        with pytest.raises(BulkError, match=r"part-00001\.parquet was changed; start again"):
            encode(texts, part_rows=1000, concat=True)
    assert encode(texts, part_rows=1000, concat=True).rows == 1000
    assert rows_of(output)["row"].to_pylist() == list(range(ROWS))


def test_second_process_on_an_output_is_refused_before_it_hashes_the_input(
    encode: Encode, texts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(texts, limit=10)
    with locked(output / "_lock"), monkeypatch.context() as patch:
        patch.delattr(job, "open_source")
        with pytest.raises(BulkError, match=r"another process writes to .*output"):
            encode(texts, limit=10)
    assert encode(texts, limit=10).is_complete


def test_process_that_locks_the_output_meanwhile_is_not_joined(
    encode: Encode, texts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(texts, limit=10)
    monkeypatch.setattr(job, "check_unlocked", lambda *_: None)  # it was not locked then
    with locked(output / "_lock"), pytest.raises(BulkError, match="another process writes"):
        encode(texts, limit=10)


def test_shards_run_at_the_same_time_but_not_the_same_shard_twice(
    encode: Encode, texts: Path, output: Path
) -> None:
    encode(texts, part_rows=1000, shard=(1, 2))
    with (output / "_lock").open("rb") as lock, (output / "_journal-1-of-2").open() as own:
        fcntl.flock(lock, fcntl.LOCK_SH)
        fcntl.flock(own, fcntl.LOCK_EX)
        with pytest.raises(BulkError, match="another process"):
            encode(texts, part_rows=1000, shard=(1, 2))
        with pytest.raises(BulkError, match="another process"):
            encode(texts, part_rows=1000)
        with pytest.raises(OptionError, match="was begun with 2 shards, not 3"):
            encode(texts, part_rows=1000, shard=(3, 3))
        assert encode(texts, part_rows=1000, shard=(2, 2)).rows == 2000
    assert encode(texts, part_rows=1000, concat=True).kept == ROWS
    assert [path.name for path in output.glob("*.parquet")] == ["embeddings.parquet"]


@pytest.mark.parametrize("failing", ["write_batch", "sync"])
def test_full_disk_is_a_clear_error_and_the_job_resumes_when_there_is_space(
    encode: Encode,
    texts: Path,
    output: Path,
    expected: pa.Table,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    calls = iter(range(10**9))

    def fail(*_: object, **__: object) -> None:
        if next(calls) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failing == "sync":
            patch.setattr(parts, "sync", fail)
        else:
            write = pq.ParquetWriter.write_batch

            def write_batch(*arguments: object, **options: object) -> None:
                fail()
                write(*arguments, **options)

            patch.setattr(pq.ParquetWriter, "write_batch", write_batch)
        with pytest.raises(BulkError, match="output cannot be written: No space left on device"):
            encode(texts, **PARTS)
    assert not list(output.glob(".*"))
    assert encode(texts, **PARTS).kept > 0
    assert_equal(rows_of(output), expected)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bytes]:
    """Content of standard input, the first element of the list."""
    content = [b""]

    class Input:
        def fileno(self) -> int:
            (tmp_path / "stdin").write_bytes(content[0])
            return os.open(tmp_path / "stdin", os.O_RDONLY)

    monkeypatch.setattr(sys, "stdin", Input())
    return content


def test_standard_input_is_resumed_when_it_is_sent_again(
    encode: Encode, texts: Path, output: Path, stdin: list[bytes], expected: pa.Table
) -> None:
    stdin[0] = texts.read_bytes()
    encode("-", input_format="jsonl", **PARTS)
    forget_parts(output)
    again = encode("-", input_format="jsonl", **PARTS)
    assert (again.kept, again.rows) == (1000, ROWS - 1000)
    assert_equal(rows_of(output), expected)


def test_standard_input_with_integers_of_any_length_is_encoded_and_compared(
    encode: Encode, output: Path, stdin: list[bytes]
) -> None:
    stdin[0] = b'{"text": "a", "id": %d}\n{"text": "b", "id": {"x": %d}}\n' % (2**70, 2**80)
    settings = {"input_format": "jsonl", "id_column": "id"}
    encode("-", **settings)
    assert rows_of(output)["id"].to_pylist() == [f"{2**70}", f'{{"x": {2**80}}}']
    assert encode("-", **settings).kept == 2
    stdin[0] = stdin[0].replace(b"%d" % 2**70, b"%d" % (2**70 + 1))
    with pytest.raises(BulkError, match="the input differs from the one that"):
        encode("-", **settings)


@pytest.mark.parametrize("concat", [False, True])
def test_complete_output_refuses_other_standard_input_and_stays(
    encode: Encode, texts: Path, stdin: list[bytes], *, concat: bool
) -> None:
    lines = texts.read_bytes().splitlines(keepends=True)[:1000]
    settings = {"input_format": "jsonl", "part_rows": 250, "concat": concat}
    stdin[0] = b"".join(lines)
    encode("-", **settings)
    another = b'{"text": "another"}\n'
    for other in (lines[:500], [another, *lines[1:]], [*lines, another]):
        stdin[0] = b"".join(other)
        with pytest.raises(BulkError, match="the input differs from the one that"):
            encode("-", **settings)
    stdin[0] = b"".join(lines)
    assert encode("-", **settings).kept == 1000


@pytest.mark.parametrize("change", [-1, 1, 600])
@pytest.mark.parametrize("shard", [1, 2])
def test_shards_refuse_standard_input_with_another_number_of_records(
    encode: Encode, texts: Path, stdin: list[bytes], shard: int, change: int
) -> None:
    lines = texts.read_bytes().splitlines(keepends=True)
    settings = {"input_format": "jsonl", "part_rows": 250}
    stdin[0] = b"".join(lines[:1000])
    encode("-", shard=(1, 2), **settings)  # the last part is not of this shard
    stdin[0] = b"".join(lines[: 1000 + change])
    with pytest.raises(BulkError, match="the input differs from the one that"):
        encode("-", shard=(shard, 2), **settings)
    stdin[0] = b"".join(lines[:1000])
    assert encode("-", shard=(2, 2), **settings).is_complete
    assert encode("-", **settings).kept == 1000


def test_shard_without_parts_says_so(
    small_artifact: Artifact, texts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(texts), str(output), "--model", str(small_artifact.path), "--shard", "9/9"]
    assert main(words) == 0
    assert capsys.readouterr().err.startswith("vitrine-encode: 0 rows encoded, ")


def test_complete_job_of_standard_input_takes_no_more_records_when_a_part_is_lost(
    encode: Encode, texts: Path, output: Path, stdin: list[bytes]
) -> None:
    lines = texts.read_bytes().splitlines(keepends=True)
    settings = {"input_format": "jsonl", "part_rows": 250}
    stdin[0] = b"".join(lines[:1000])
    encode("-", **settings)
    (output / "part-00003.parquet").unlink()
    stdin[0] = b"".join(lines[:1250])
    with pytest.raises(BulkError, match=r"the input differs from .* had 1000 rows"):
        encode("-", **settings)


@pytest.mark.parametrize("moment", ["before the journal", "before the removal", "damaged"])
def test_no_row_is_in_two_files_after_an_interrupted_or_damaged_join(
    encode: Encode, texts: Path, output: Path, expected: pa.Table, moment: str
) -> None:
    encode(texts, **PARTS)
    parts = {path: path.read_bytes() for path in output.glob("part-*")}
    journal = output / "_journal"
    before = journal.read_bytes()
    encode(texts, concat=True, **PARTS)
    if moment == "damaged":
        (output / "embeddings.parquet").write_bytes(b"")
    else:
        for path, content in parts.items():
            path.write_bytes(content)
    if moment == "before the journal":
        journal.write_bytes(before)
    encode(texts, **PARTS)
    assert_equal(rows_of(output), expected)


def test_other_standard_input_is_refused(
    encode: Encode, texts: Path, output: Path, stdin: list[bytes]
) -> None:
    lines = texts.read_bytes().splitlines(keepends=True)
    stdin[0] = b"".join(lines)
    encode("-", input_format="jsonl", part_rows=250)
    forget_parts(output)
    stdin[0] = b"".join([*lines[:300], b'{"text": "another"}\n', *lines[300:]])
    with pytest.raises(BulkError, match=r"differs from the one .* in rows 250 to 499"):
        encode("-", input_format="jsonl", part_rows=250)


def test_job_that_fails_does_not_wait_for_the_rest_of_standard_input(
    small_artifact: Artifact, output: Path
) -> None:
    arguments = [sys.executable, "-m", "service.bulk", "-", str(output)]
    arguments += ["--model", str(small_artifact.path), "--max-errors", "0"]
    # The reader has passed the sample, and waits for more when the empty text is an error.
    lines = [*["x" * 90_000] * 12, "", *(f"text {number}" for number in range(1000))]
    job = subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    with job:
        assert job.stdin is not None
        assert job.stderr is not None
        job.stdin.write("".join(f"{line}\n" for line in lines).encode())
        job.stdin.flush()
        eventually(lambda: job.poll() is not None)  # before the input ends
        assert job.returncode == 1
        assert b"more than 0 records have errors" in job.stderr.read()
