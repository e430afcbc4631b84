"""Input files are read only where their content is the one that was hashed."""

import asyncio
import io
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.artifact import Artifact
from service.bulk import input_files, job
from service.bulk.input_files import hash_file, with_verification
from service.bulk.options import BulkError
from service.bulk.readers import ReadPlan
from service.bulk.sources import open_source
from tests.service.bulk.changing_inputs import opened, problem
from tests.service.bulk.conftest import Encode, rows_of
from tests.service.bulk.test_readers import options, texts

_SIZES = st.integers(0, 3 * input_files.BLOCK_BYTES)


@given(_SIZES, st.lists(st.tuples(_SIZES, st.integers(0, 2 * input_files.BLOCK_BYTES)), max_size=5))
def test_verified_file_reads_the_bytes_at_any_position(
    size: int, reads: list[tuple[int, int]]
) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    file = with_verification(io.BytesIO(content), hash_file("a", io.BytesIO(content)))
    for start, count in reads:
        assert file.seek(start) == start
        assert file.read(count) == content[start : start + count]
        assert file.tell() == max(start, min(start + count, size))
    assert file.seek(0, io.SEEK_END) == size
    file.seek(0)
    assert file.read() == content


@given(st.integers(1, 3 * input_files.BLOCK_BYTES), st.data())
def test_changed_byte_is_an_error_and_the_blocks_before_it_are_read(
    size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, size - 1))
    content = bytearray(size)
    expected = hash_file("a.txt", io.BytesIO(content))
    content[at] = 1
    file = with_verification(io.BytesIO(content), expected)
    before = at // input_files.BLOCK_BYTES * input_files.BLOCK_BYTES
    assert file.read(before) == bytes(before)
    with pytest.raises(BulkError, match=r"the input a\.txt was changed during the job"):
        file.read(at - before + 1)


@pytest.mark.parametrize("count", [-1, 1])
def test_file_that_is_longer_or_shorter_than_before_is_an_error(count: int) -> None:
    content = bytes(input_files.BLOCK_BYTES + 10)
    expected = hash_file("a.txt", io.BytesIO(content))
    file = with_verification(io.BytesIO(content[:count] if count < 0 else content + b"x"), expected)
    with pytest.raises(BulkError, match="was changed during the job"):
        file.read()


def test_parquet_that_changes_while_it_is_read_is_an_error_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {row}" * 200 for row in range(3000)]})
    pq.write_table(table, path, row_group_size=300, compression="none", use_dictionary=False)
    blocks = open_source(options(path), "dense").read(ReadPlan())
    next(blocks)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text 2900", b"text 0000"))
    with pytest.raises(BulkError, match=r"a\.parquet was changed during the job"):
        list(blocks)


def test_columns_are_those_of_the_hashed_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x", "year": "2024"}\n')
    hashed = input_files.hash_file

    def after_a_change(*arguments: object) -> input_files.InputFile:
        path.write_text('{"text": "y", "year": 2024}\n')
        return hashed(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("service.bulk.sources.hash_file", after_a_change)
    source = open_source(options(path, columns=("year",)), "dense")
    assert source.copied == pa.schema([("year", pa.int64())])
    assert texts(source) == {0: "y"}


def test_input_that_is_changed_after_it_was_read_is_an_error(
    encode: Encode, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    times = path.stat()
    end_part = job._JobRun._end_part

    async def then_change(run: job._JobRun) -> None:
        await end_part(run)
        await asyncio.to_thread(path.write_text, "six\ntwo\n")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    with monkeypatch.context() as patch:
        patch.setattr(job._JobRun, "_end_part", then_change)
        with pytest.raises(BulkError, match=r"a\.txt was changed during the job"):
            encode(path)
    with pytest.raises(BulkError, match="was begun with another input file 1"):
        encode(path)
    path.write_text("one\ntwo\n")
    assert encode(path).kept == rows_of(output).num_rows == 2


@pytest.mark.slow
def test_rows_are_those_of_the_input_whatever_changes_between_and_in_runs(
    small_artifact: Artifact, tmp_path: Path
) -> None:
    async def problems() -> list[str]:
        async with opened(small_artifact.path):
            found = [
                await problem(seed, small_artifact.path, tmp_path / "job") for seed in range(8)
            ]
        return [text for text in found if text]

    assert asyncio.run(problems()) == []
