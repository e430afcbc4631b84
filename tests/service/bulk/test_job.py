"""Jobs: files, errors, duplicates, shards, progress and options."""

import asyncio
import errno
import json
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import (
    SentenceTransformer,
)

import vitrine
from models.artifact import Artifact
from models.identity import identity_of
from service.bulk import parts
from service.bulk.job import encode_files
from service.bulk.options import BulkError, BulkOptions, OptionError
from service.bulk.parts import FORMATS, PartFiles
from service.bulk.pipeline import Pipeline
from service.inference.batching.batcher import Outcome
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.vectors import RowResults
from service.inference.tokenizing.rows import Row
from tests.batchers import settled
from tests.eventually import HANG_S, eventually_async
from tests.service.bulk.conftest import (
    TEXTS,
    Encode,
    json_rows_of,
    rows_of,
    write_lines,
    write_texts,
)


@pytest.mark.parametrize("name", ["run:2", "~", os.fsdecode(b"\xe9")])
def test_folder_may_have_any_name(
    encode: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """pyarrow takes the first for a URI and the second for a home directory."""
    path = write_texts(tmp_path, TEXTS)
    monkeypatch.chdir(tmp_path)
    encode(path, output=Path(name) / "vectors", part_rows=2, concat=True, verify=2)
    with (tmp_path / name / "vectors" / "embeddings.parquet").open("rb") as file:
        assert pq.read_table(file)["row"].to_pylist() == [*range(len(TEXTS))]


def test_records_with_errors_are_rows_with_errors_and_never_stop_the_job(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    texts = ["fine", "", None, "y " * 2_500_000, "", "also fine"]
    progress = encode(write_texts(tmp_path, texts))
    table = rows_of(output)
    empty = "the text is empty"
    assert table["error"].to_pylist() == [
        None,
        empty,
        "the column 'text' is null or missing",
        None,
        empty,
        None,
    ]
    valid = table["error"].is_null()
    assert table["embedding"].is_valid() == valid
    assert table["tokens"].is_valid() == valid
    assert table["truncated"].to_pylist()[3] is True
    assert (progress.errors, progress.truncated) == (3, 1)
    assert progress.first_error == f"row 1: {empty}"


def test_pairs_with_an_empty_text_are_rows_with_errors(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    pairs = [("a cat", "a dog"), ("a cat", ""), ("", "a dog"), (" ", "\0")]
    path = write_lines(tmp_path, [{"query": query, "text": text} for query, text in pairs])
    encode(path, kind="scores")
    errors = [None, "the text is empty", "the text is empty", None]
    assert rows_of(output)["error"].to_pylist() == errors


def test_texts_that_the_tokenizer_reads_as_nothing_have_vectors(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    texts = ["fine", "\0", " \n", "\u200b\u200d", "ra\0in", "also fine"]
    assert encode(write_texts(tmp_path, texts)).errors == 0
    with vitrine.SyncModel(small_artifact.path) as model:
        expected = model.encode(texts).vectors
    vectors = np.array(rows_of(output)["embedding"].to_pylist())
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)


def test_item_that_fails_in_the_engine_is_an_error_and_the_others_are_encoded(
    encode: Encode,
    tmp_path: Path,
    output: Path,
    small_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from service.inference.model import opening
    from service.inference.results.batch_run import run_batch

    def run(engine: object, metrics: object, direction: object, batch: list) -> object:  # type: ignore[type-arg]
        if any(len(item.row.ids) == 6 for item in batch):
            raise ValueError("an engine's own message")
        return run_batch(engine, metrics, direction, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "run_batch", run)
    encode(write_texts(tmp_path, TEXTS[:4]))
    table = rows_of(output)
    assert table["error"].to_pylist() == [None, "the engine failed on this input", None, None]
    oracle = SentenceTransformer(str(small_folder), device="cpu").encode(TEXTS[:4])
    for row in (0, 2, 3):
        np.testing.assert_allclose(table["embedding"][row].as_py(), oracle[row], rtol=0, atol=1e-5)


def test_job_stops_after_more_errors_than_allowed(encode: Encode, tmp_path: Path) -> None:
    path = write_texts(tmp_path, ["fine", "", "", ""])
    message = "more than 2 records have errors; the first is row 1: the text is empty"
    with pytest.raises(BulkError, match=message):
        encode(path, max_errors=2)
    assert encode(path, max_errors=3).is_complete


def test_errors_of_an_earlier_run_count_towards_those_allowed(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, ["", "fine"])
    encode(path, part_rows=1)
    (output / "part-00001.parquet").unlink()
    with pytest.raises(BulkError, match=r"^more than 0 records have errors$"):
        encode(path, part_rows=1, max_errors=0)


def test_equal_texts_are_computed_once_also_across_blocks(
    encode: Encode, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    encode_rows = LoadedModel.encode_rows

    async def counted(
        self: LoadedModel,
        rows: Sequence[Row],
        *others: Any,  # noqa: ANN401 - passed on
        **options: Any,  # noqa: ANN401 - passed on
    ) -> Outcome[RowResults]:
        computed.append(len(rows))
        return await encode_rows(self, rows, *others, **options)

    monkeypatch.setattr(LoadedModel, "encode_rows", counted)
    texts = [f"text {number % 300}" for number in range(3000)]
    encode(write_texts(tmp_path, texts))
    assert sum(computed) == 300 + 1  # and the check of the options
    vectors = np.stack(rows_of(output)["embedding"].to_numpy())
    assert (vectors[:300] == vectors[2700:]).all()
    assert len(np.unique(vectors, axis=0)) == 300


def test_json_lines_and_numpy_have_the_same_values_as_parquet(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_lines(
        tmp_path, [{"text": text, "key": f"k{i}"} for i, text in enumerate([*TEXTS, ""])]
    )
    for name in ("parquet", "jsonl", "npy"):
        encode(path, format=name, output=output / name, id_column="key")
    expected = rows_of(output / "parquet").to_pylist()
    for actual, row in zip(json_rows_of(output / "jsonl"), expected, strict=True):
        assert actual.pop("embedding") == (row["embedding"] and pytest.approx(row["embedding"]))
        assert actual == {name: row[name] for name in actual}
    vectors = np.load(output / "npy" / "part-00000.npy")
    assert vectors.shape == (6, 32)
    assert np.isnan(vectors[5]).all()
    np.testing.assert_array_equal(vectors[:5], [row["embedding"] for row in expected[:5]])
    assert [row["key"] for row in json_rows_of(output / "npy")] == [f"k{i}" for i in range(6)]


@pytest.mark.parametrize("name", ["parquet", "jsonl", "npy"])
def test_joined_file_replaces_the_parts(
    encode: Encode, tmp_path: Path, output: Path, name: str
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(50)])
    encode(path, format=name, part_rows=20, concat=True)
    assert {file.stem for file in output.iterdir() if file.name[0] != "_"} == {"embeddings"}
    if name == "npy":
        assert np.load(output / "embeddings.npy").shape == (50, 32)
    elif name == "parquet":
        assert rows_of(output)["row"].to_pylist() == list(range(50))
    else:
        assert len((output / "embeddings.jsonl").read_text().splitlines()) == 50
    assert encode(path, format=name, part_rows=20, concat=True).kept == 50


def test_metadata_of_a_file_describes_the_job(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    encode(write_texts(tmp_path, TEXTS))
    metadata = pq.read_schema(output / "part-00000.parquet").metadata
    job = json.loads(metadata[b"vitrine"])
    assert job["model"] == small_artifact.manifest.name
    assert job["model version"] == identity_of(small_artifact, "onnxruntime", "float32")
    assert job["--precision"] == "float32"
    assert len(job["input sha256"]) == 64


def test_shards_divide_the_parts_and_their_files_equal_those_of_one_job(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(95)])
    encode(path, part_rows=10, output=output / "one")
    rows = [
        encode(path, part_rows=10, output=output / "shards", shard=(index, 3)).rows
        for index in (1, 2, 3)
    ]
    assert rows == [35, 30, 30]
    one, shards = rows_of(output / "one"), rows_of(output / "shards")
    assert one.drop_columns("embedding") == shards.drop_columns("embedding")
    names = [sorted(p.name for p in (output / o).glob("part-*")) for o in ("one", "shards")]
    assert names[0] == names[1]


def test_progress_is_reported_while_finished_parts_are_skipped(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(50)])
    encode(path, part_rows=10)
    (output / "part-00004.parquet").unlink()
    kept: list[int] = []
    encode(path, part_rows=10, report=lambda progress: kept.append(progress.kept))
    assert kept == [10, 20, 30, 40, 40]


def test_limit_ends_the_input(encode: Encode, tmp_path: Path, output: Path) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(95)])
    assert encode(path, part_rows=10, limit=27).rows == 27
    assert rows_of(output)["row"].to_pylist() == list(range(27))


@pytest.mark.parametrize("limit", [27, 95, 200, None])
def test_progress_ends_at_all_of_the_input_or_of_the_limit(
    encode: Encode, tmp_path: Path, limit: int | None
) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(95)]}), path)
    shares: list[float] = []
    encode(path, limit=limit, report=lambda progress: shares.append(progress.share))
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_stop_ends_the_job_after_the_current_part_and_a_second_run_does_the_rest(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(3000)])
    stop = asyncio.Event()
    first = encode(path, part_rows=700, report=lambda _: stop.set(), stop=stop)
    assert (first.rows, first.is_complete) == (700, False)
    assert not list(output.glob(".*"))
    second = encode(path, part_rows=700)
    assert (second.rows, second.kept, second.is_complete) == (2300, 700, True)
    assert rows_of(output)["row"].to_pylist() == list(range(3000))


def test_stop_in_the_last_part_completes_the_job(encode: Encode, tmp_path: Path) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(900)])
    stop = asyncio.Event()
    progress = encode(path, report=lambda _: stop.set(), stop=stop)
    assert (progress.rows, progress.is_complete) == (900, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sparse"}, "cannot compute sparse; it can compute: dense, chunks, scores"),
        ({"dimensions": 33}, "dimensions must be from 1 to 32, the model's width"),
        ({"prompt_name": "none"}, "unknown"),
        ({"kind": "scores", "dimensions": 3}, "--dimensions applies to dense vectors, not to sco"),
        ({"query_column": "question"}, "--query-column applies to scores, not to dense"),
        ({"shard": (0, 3)}, "--shard I/N: the number I must be from 1 to N"),
        ({"shard": (1, 3), "concat": True}, "--concat needs all parts"),
        ({"template": "text"}, "--template has no column in braces"),
        ({"template": "{a.b}"}, "--template takes names of columns in braces alone"),
        ({"template": "{"}, "--template is invalid"),
        ({"part_rows": 0}, "--part-rows must be at least 1"),
        ({"dimensions": -1, "dtype": "float16"}, "--dimensions must be at least 1"),
        ({"threads": -1}, "--threads must be at least 0"),
        ({"template": "\udcff {text}"}, "--template and names of columns must be valid UTF-8"),
    ],
)
def test_invalid_options_are_refused_before_the_output_folder_is_made(
    encode: Encode, tmp_path: Path, output: Path, settings: dict[str, object], message: str
) -> None:
    path = write_lines(tmp_path, [{"text": "x", "query": "q"}])
    with pytest.raises(OptionError, match=message):
        encode(path, **settings)
    assert not output.exists()


def test_input_without_records_is_an_error(encode: Encode, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("")
    with pytest.raises(BulkError, match=r"the input has no records: .*a\.txt"):
        encode(path)


def test_joined_array_is_not_written_through_a_memory_map(
    encode: Encode, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would kill the process, by SIGBUS, without a message."""
    own: Any = np.memmap

    arrays: list[weakref.ref[Any]] = []

    def read_only(*arguments: Any, mode: str, **options: Any) -> Any:  # noqa: ANN401
        assert mode == "r"
        # There can be more parts than files that may be open.
        assert sum(array() is not None for array in arrays) <= 2
        array = own(*arguments, mode=mode, **options)
        arrays.append(weakref.ref(array))
        return array

    monkeypatch.setattr(np, "memmap", read_only)
    path = write_texts(tmp_path, TEXTS)
    encode(path, format="npy", part_rows=2, output=output / "parts")
    encode(path, format="npy", part_rows=2, output=output / "joined", concat=True)
    parts = [np.load(part) for part in sorted((output / "parts").glob("*.npy"))]
    joined = np.load(output / "joined" / "embeddings.npy")
    np.testing.assert_allclose(joined, np.concatenate(parts), atol=1e-6, strict=True)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_arrays_are_written_while_rows_come_as_numpy_writes_them_at_once(
    tmp_path: Path, count: int
) -> None:
    vectors = np.random.default_rng(0).normal(size=(count * 1000, 64)).astype(np.float16)
    type_ = pa.list_(pa.float16(), 64)
    schema = pa.schema([("embedding", type_)])
    path = tmp_path / "own.npy"
    writer = FORMATS["npy"].writer([path, tmp_path / "own.jsonl"], schema)
    for part in vectors.reshape(count, 1000, 64):
        values = pa.FixedSizeListArray.from_arrays(part.ravel(), 64)
        writer.add(pa.record_batch([values], schema=schema))
    assert path.stat().st_size >= vectors.nbytes - 2**16
    writer.close()
    np.save(tmp_path / "expected.npy", vectors)
    assert path.read_bytes() == (tmp_path / "expected.npy").read_bytes()


@pytest.mark.parametrize("settings", [{}, {"concat": True}, {"dtype": "float16"}])
def test_verification_compares_rows_encoded_alone(
    encode: Encode, tmp_path: Path, settings: dict[str, object]
) -> None:
    path = write_texts(tmp_path, [*(f"text {number} " * (number % 9) for number in range(90))])
    progress = encode(path, part_rows=20, verify=50, **settings)
    assert progress.verified == 50
    assert progress.difference < (1e-5 if settings.get("dtype") is None else 1e-3)


def test_verification_finds_rows_that_are_not_of_their_records(
    encode: Encode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_texts(tmp_path, [f"text number {number}" for number in range(90)])

    def rotated(self: Pipeline, pending: Any) -> Any:  # noqa: ANN401 - of another class
        pending.origins.insert(0, pending.origins.pop())
        return rows(self, pending)

    rows = Pipeline._rows
    monkeypatch.setattr(Pipeline, "_rows", rotated)
    with pytest.raises(BulkError, match=r"row \d+ of .*output differs from its record encoded al"):
        encode(path, verify=90)


@pytest.mark.parametrize("step", ["add", "finish"])
def test_cancelled_job_closes_files_after_its_thread_has_written_them(
    small_artifact: Artifact,
    output: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """pyarrow ends the process if a file is closed while another thread writes it."""
    begun, gate = threading.Event(), threading.Event()
    calls: list[str] = []
    write, discard = getattr(PartFiles, step), PartFiles.discard

    def held(files: PartFiles, *arguments: Any) -> Any:  # noqa: ANN401 - those of the step
        begun.set()
        assert gate.wait(HANG_S)
        result = write(files, *arguments)
        calls.append("written")
        return result

    def noted(files: PartFiles) -> None:
        calls.append("discarded")
        discard(files)

    monkeypatch.setattr(PartFiles, step, held)
    monkeypatch.setattr(PartFiles, "discard", noted)
    inputs = (str(write_texts(tmp_path, TEXTS)),)
    options = BulkOptions(inputs=inputs, output=output, model=small_artifact.path, threads=2)

    async def cancel() -> None:
        running = asyncio.create_task(encode_files(options))
        await eventually_async(begun.is_set)
        for _ in range(2):
            running.cancel()
            await settled()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancel())
    assert calls == ["written", "discarded"]
    assert not list(output.glob(".*"))


@pytest.mark.parametrize("format_", FORMATS)
def test_full_disk_at_the_end_of_a_part_is_named(
    encode: Encode, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str
) -> None:
    def sync(_path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parts, "sync", sync)
    with pytest.raises(BulkError, match="cannot be written: No space left on device"):
        encode(write_texts(tmp_path, TEXTS), format=format_)
    assert not list(output.glob("*part-*"))
