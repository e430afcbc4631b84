"""Jobs: results of each kind, formats, errors, duplicates and options."""

import asyncio
import json
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from transformers import pipeline

import vitrine
from models.artifact import Artifact
from models.identity import identity_of
from service.bulk import pipeline as bulk_pipeline
from service.bulk.encoder import RecordEncoder
from service.bulk.job import _Plan, encode_files
from service.bulk.opening import open_job
from service.bulk.options import BulkError, BulkOptions, Kind, OptionError
from service.bulk.pipeline import EncodedBlock, Pipeline
from service.bulk.progress import Progress
from service.bulk.readers import Block
from service.bulk.sources import Source, open_source
from service.bulk.texts import Item, items_of
from service.inference.batching.batcher import Outcome
from service.inference.results.loaded_model import LoadedModel
from service.inference.results.vectors import RowResults
from service.inference.tokenizing.rows import Row
from tests.eventually import HANG_S, eventually_async
from tests.service.bulk.conftest import Encode, rows_of

TEXTS = ["The cat sat on the mat.", "Strassenbahn", "a b c " * 40, "x", "The cat sat on the mat."]


def write_lines(folder: Path, records: Iterable[object]) -> Path:
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(folder: Path, texts: Iterable[str | None]) -> Path:
    return write_lines(folder, ({"text": text} for text in texts))


def test_dense_vectors_equal_sentence_transformers(
    encode: Encode, tmp_path: Path, output: Path, small_folder: Path
) -> None:
    texts = [f"{text} {number}" for number in range(200) for text in TEXTS]
    progress = encode(write_texts(tmp_path, texts), part_rows=300)
    table = rows_of(output)
    oracle = SentenceTransformer(str(small_folder), device="cpu")
    actual = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(actual, oracle.encode(texts), rtol=0, atol=1e-5)
    assert table["row"].to_pylist() == list(range(1000))
    assert table["tokens"].to_pylist() == [len(oracle.tokenizer(t)["input_ids"]) for t in texts]
    assert table["error"].null_count == 1000
    assert sorted(path.name for path in output.glob("*.parquet")) == [
        f"part-0000{number}.parquet" for number in range(4)
    ]
    assert (progress.rows, progress.is_complete) == (1000, True)
    assert progress.tokens == sum(table["tokens"].to_pylist())


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


def test_dimensions_prompt_and_type_of_vectors_are_those_of_the_options(
    encode: Encode, tmp_path: Path, output: Path, small_folder: Path
) -> None:
    encode(write_texts(tmp_path, TEXTS), dimensions=8, dtype="float16")
    table = rows_of(output)
    assert table.schema.field("embedding").type == pa.list_(pa.float16(), 8)
    oracle = SentenceTransformer(str(small_folder), device="cpu")
    expected = oracle.encode(TEXTS)[:, :8]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    actual = np.stack(table["embedding"].to_numpy())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_sparse_vectors_equal_sentence_transformers(
    encode: Encode,
    tmp_path: Path,
    output: Path,
    sparse_encoder: tuple[SparseEncoder, Artifact],
) -> None:
    texts = ["w3 w4 w5", "w6", "w7 w8 w9 " * 9]
    oracle, artifact = sparse_encoder
    encode(write_texts(tmp_path, texts), model=artifact.path)
    table = rows_of(output)
    expected = oracle.encode(texts, convert_to_sparse_tensor=False).numpy()
    actual = np.zeros_like(expected)
    for row, (ids, weights) in enumerate(
        zip(table["ids"].to_pylist(), table["weights"].to_pylist(), strict=True)
    ):
        actual[row, ids] = weights
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_multi_vectors_equal_sentence_transformers(
    encode: Encode,
    tmp_path: Path,
    output: Path,
    multi_encoder: tuple[MultiVectorEncoder, Artifact],
) -> None:
    oracle, artifact = multi_encoder
    texts = ["The cat sat on the mat.", "rain"]
    encode(write_texts(tmp_path, texts), model=artifact.path, prompt_name="document")
    expected = oracle.encode_document(texts)
    for actual, own in zip(rows_of(output)["embedding"].to_pylist(), expected, strict=True):
        np.testing.assert_allclose(actual, own.numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_scores_of_a_reranker_equal_sentence_transformers(
    encode: Encode, tmp_path: Path, output: Path, reranker: Artifact, cross_encoder: CrossEncoder
) -> None:
    pairs = [("w1 w2", "w3 w4 w5"), ("w6", "w7"), ("w1 w2", "w8 " * 30)]
    records = [{"query": query, "text": text} for query, text in pairs]
    encode(write_lines(tmp_path, records), model=reranker.path)
    expected = cross_encoder.predict(pairs)
    np.testing.assert_allclose(rows_of(output)["score"].to_numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_labels_equal_transformers(
    encode: Encode, tmp_path: Path, output: Path, classifier: Artifact
) -> None:
    texts = ["w1 w2 w3", "w4", "w5 w6 " * 20]
    encode(write_texts(tmp_path, texts), model=classifier.path)
    oracle = pipeline("text-classification", str(classifier.path.with_name("model")), device="cpu")
    table = rows_of(output)
    for label, score, expected in zip(
        table["label"].to_pylist(),
        table["score"].to_pylist(),
        oracle(texts, truncation=True),
        strict=True,
    ):
        assert label == expected["label"]
        assert score == pytest.approx(expected["score"], abs=1e-5)
    scores = np.stack(table["scores"].to_numpy())
    np.testing.assert_allclose(scores.sum(axis=1), 1.0, rtol=0, atol=1e-6)


def test_chunks_equal_those_of_the_model(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    texts = ["One cat sat. Two cats ran. " * 9, "Short.", ""]
    chunking = vitrine.Chunking(strategy="sentences", size=12, overlap=4)
    encode(write_texts(tmp_path, texts), kind="chunks", chunking=chunking, verify=3)
    table = rows_of(output)
    with vitrine.SyncModel(small_artifact.path) as model:
        expected = model.encode_chunks(texts[:2], chunking)
    for row, chunks, vectors in zip(
        table.to_pylist(), expected.chunks, expected.vectors, strict=False
    ):
        assert row["chunks"] == [asdict(chunk) for chunk in chunks]
        np.testing.assert_allclose(row["embedding"], vectors, rtol=0, atol=1e-6)
    assert len(expected.chunks[0]) > 5
    assert table["tokens"].to_pylist() == [*expected.tokens, None]
    assert table["embedding"][2].as_py() is None


def test_scores_with_chunking_have_the_best_chunk(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    query, text = "Two cats", "One dog sat. Two cats ran. It rained."
    chunking = vitrine.Chunking(strategy="sentences", size=6)
    path = write_lines(tmp_path, [{"query": query, "text": text}])
    encode(path, kind="scores", chunking=chunking)
    with vitrine.SyncModel(small_artifact.path) as model:
        expected = model.score([query], [text], chunking=chunking)
    (row,) = rows_of(output).to_pylist()
    assert row["score"] == pytest.approx(expected.scores[0], abs=1e-6)
    assert row["best_chunk"] == asdict(expected.best_chunks[0])


def test_scores_with_highlights_have_the_best_sentences(
    encode: Encode, tmp_path: Path, output: Path, small_artifact: Artifact
) -> None:
    query, text = "Two cats", "One dog sat. Two cats ran. It rained."
    records = [{"query": query, "text": own} for own in (text, "", "Two dogs.")]
    encode(write_lines(tmp_path, records), kind="scores", highlight=2, verify=3)
    with vitrine.SyncModel(small_artifact.path) as model:
        found = model.score(query, text, explain=vitrine.Highlights(2)).deletions[0].texts[0].units
    table = rows_of(output)
    assert table["error"].to_pylist()[::2] == [None, None]
    first, empty, single = table["highlights"].to_pylist()
    assert [own["start"] for own in first] == [unit.start for unit in found]
    for own, unit in zip(first, found, strict=True):
        assert own["end"] == unit.end
        assert own["left_out"] == pytest.approx(unit.left_out, abs=1e-5)
        assert own["alone"] == pytest.approx(unit.alone, abs=1e-5)
    assert empty is None
    assert [(own["start"], own["end"]) for own in single] == [(0, 9)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "dense", "highlight": 2}, "applies to scores, not to dense"),
        ({"kind": "scores", "highlight": 11}, "from 1 to 10"),
        (
            {"kind": "scores", "highlight": 2, "chunking": vitrine.Chunking()},
            "does not apply to chunks",
        ),
    ],
)
def test_highlights_that_do_not_apply_are_refused(
    encode: Encode, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path, [{"query": "a", "text": "b"}])
    with pytest.raises(OptionError, match=message):
        encode(path, **options)


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
    from service.inference.results.loaded_model import run_batch

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


def test_ids_and_columns_keep_their_names_and_types(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    table = pa.table(
        {
            "text": ["one", "two"],
            "year": pa.array([1, None], pa.int16()),
            "tags": [["a"], []],
            "key": ["k1", "k2"],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", id_column="key", columns=("year", "tags"))
    rows = rows_of(output)
    assert rows.column_names[:4] == ["row", "key", "year", "tags"]
    assert rows.select(["key", "year", "tags"]) == table.select(["key", "year", "tags"])


def test_column_with_the_name_of_a_result_is_refused(encode: Encode, tmp_path: Path) -> None:
    path = write_lines(tmp_path, [{"text": "x", "tokens": 7}])
    with pytest.raises(OptionError, match="the output has a column 'tokens' of its own"):
        encode(path, columns=("tokens",))


def test_json_lines_and_numpy_have_the_same_values_as_parquet(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_lines(
        tmp_path, [{"text": text, "key": f"k{i}"} for i, text in enumerate([*TEXTS, ""])]
    )
    for name in ("parquet", "jsonl", "npy"):
        encode(path, format=name, output=output / name, id_column="key")
    expected = rows_of(output / "parquet").to_pylist()
    lines = (output / "jsonl" / "part-00000.jsonl").read_text().splitlines()
    for actual, row in zip(map(json.loads, lines), expected, strict=True):
        assert actual.pop("embedding") == (row["embedding"] and pytest.approx(row["embedding"]))
        assert actual == {name: row[name] for name in actual}
    vectors = np.load(output / "npy" / "part-00000.npy")
    assert vectors.shape == (6, 32)
    assert np.isnan(vectors[5]).all()
    np.testing.assert_array_equal(vectors[:5], [row["embedding"] for row in expected[:5]])
    others = (output / "npy" / "part-00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in others] == [f"k{i}" for i in range(6)]


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


def test_copied_columns_are_the_same_in_json_lines(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    columns = {
        "pair": pa.array([[2**24 + 1, 2]], pa.list_(pa.int64(), 2)),
        "names": pa.array([["a", None]], pa.list_(pa.string(), 2)),
        "color": pa.array(["red"]).dictionary_encode(),
        "raw": pa.array([b"\xff"]),
    }
    pq.write_table(pa.table({"text": ["x"], **columns}), tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", columns=tuple(columns), format="jsonl")
    row = json.loads((output / "part-00000.jsonl").read_text())
    assert {name: row[name] for name in columns} == {
        "pair": [2**24 + 1, 2],
        "names": ["a", None],
        "color": "red",
        "raw": "/w==",
    }


TIME = pa.time64("ns")
NANOSECONDS = pa.array([1, 3_723_000_000_000, None, 3_723_120_000_000, 86_399_999_999_999], TIME)


@pytest.mark.parametrize(
    "times",
    [
        NANOSECONDS,
        NANOSECONDS.dictionary_encode(),
        pa.array([[1], [], None, [2, None]], pa.list_(TIME)),
        pa.array([{"t": 1}, None], pa.struct([("t", TIME)])),
        pa.array([[("t", 1)], None], pa.map_(pa.string(), TIME)),
    ],
    ids=lambda times: str(times.type),
)
def test_times_keep_their_nanoseconds_in_json_lines_and_templates(
    encode: Encode, tmp_path: Path, output: Path, times: pa.Array
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"] * len(times), "time": times}), path)
    encode(path, columns=("time",), format="jsonl")
    rows = map(json.loads, (output / "part-00000.jsonl").read_text().splitlines())
    values = [row["time"] for row in rows]
    if pa.types.is_nested(times.type):
        assert str(values).count("00:00:00.000000001") == 1
        return
    expected = NANOSECONDS.cast(pa.int64()).to_pylist()
    assert [value and pd.Timedelta(value).value for value in values] == expected
    # Without nanoseconds they are as Python writes them.
    assert [values[index] for index in (1, 3)] == [str(NANOSECONDS[i]) for i in (1, 3)]
    chosen = BulkOptions(inputs=(str(path),), output=output, model=tmp_path, template="at {time}")
    (block,) = open_source(chosen, "dense").read(_Plan(chosen, frozenset(), reads_all=True))
    texts, _ = items_of(block, chosen, "dense")
    assert texts == [value and f"at {value}" for value in values]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_of_json_lines_are_in_iso_8601_with_seconds_of_the_zone(
    encode: Encode, tmp_path: Path, output: Path, unit: str
) -> None:
    local = datetime(1900, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))
    zoned = pa.array([local], pa.timestamp("us", "Europe/Amsterdam")).cast(
        pa.timestamp(unit, "Europe/Amsterdam")
    )
    pq.write_table(pa.table({"text": ["x"], "time": zoned}), tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", columns=("time",), format="jsonl")
    row = json.loads((output / "part-00000.jsonl").read_text())
    assert row["time"] == local.isoformat()
    assert datetime.fromisoformat(row["time"]) == local


def test_durations_are_texts_of_python_whether_pandas_is_installed_or_not(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    values = pa.array([86_400_000_000_000, 1500, 1_000, -1_000_000_000], pa.duration("ns"))
    pq.write_table(pa.table({"text": ["x"] * 4, "time": values}), tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", columns=("time",), template="{time}", format="jsonl")
    rows = [json.loads(line) for line in (output / "part-00000.jsonl").read_text().splitlines()]
    expected = [timedelta(days=1), None, timedelta(microseconds=1), timedelta(seconds=-1)]
    assert [row["time"] for row in rows] == [value and str(value) for value in expected]
    assert "would lose data" in rows[1]["error"]
    assert [row["error"] is None for row in rows] == [True, False, True, True]


@pytest.mark.parametrize("text", [pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_nested_texts_of_any_layout_are_copied(
    encode: Encode, tmp_path: Path, output: Path, text: pa.DataType
) -> None:
    columns = {
        "list": pa.array([["a", "b"], None, []], pa.list_(text)),
        "large": pa.array([["a", "b"], None, []], pa.large_list(text)),
        "pair": pa.array([["a", "b"], None, [None, "c"]], pa.list_(text, 2)),
        "struct": pa.array([{"t": ["a"]}, None, {"t": None}], pa.struct([("t", pa.list_(text))])),
        "map": pa.array([[("k", "a")], None, []], pa.map_(text, text)),
    }
    table = pa.table({"text": ["x", None, "y"], **columns})
    pq.write_table(table, tmp_path / "a.parquet")
    for format_ in ("parquet", "jsonl"):
        encode(
            tmp_path / "a.parquet", columns=tuple(columns), format=format_, output=output / format_
        )
    expected = {name: array.to_pylist() for name, array in columns.items()}
    assert rows_of(output / "parquet").select(list(columns)).to_pydict() == expected
    rows = list(map(json.loads, (output / "jsonl" / "part-00000.jsonl").read_text().splitlines()))
    for name, values in expected.items():
        assert [row[name] for row in rows] == json.loads(json.dumps(values))


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", None]),
        pa.array([[0.5, 2.0], []]),
        pa.array([[1, None], None], pa.list_(pa.int64(), 2)),
        pa.array([[True, False], None], pa.list_(pa.bool_(), 2)),
        pa.array([[0.5, 0.25], None], pa.list_(pa.float16(), 2)),
        pa.array([[["a"]], [None]], pa.list_(pa.list_(pa.string(), 1))),
    ],
    ids=lambda values: str(values.type),
)
def test_copied_column_with_the_name_of_vectors_may_have_any_type(
    encode: Encode, tmp_path: Path, output: Path, values: pa.Array
) -> None:
    table = pa.table({"text": ["x", "y"], "query": ["x", "y"], "embedding": values})
    pq.write_table(table, tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", kind="scores", columns=("embedding",), format="jsonl")
    rows = map(json.loads, (output / "part-00000.jsonl").read_text().splitlines())
    assert [row["embedding"] for row in rows] == values.to_pylist()


def test_json_values_that_no_column_type_holds_are_copied_as_json(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    records: list[dict[str, object]] = [
        {"text": "x", "id": 10**30, "meta": {"a": 1}, "mixed": 1, "flag": 0.5},
        {"text": "y", "id": 5, "meta": {"b": [2]}, "mixed": "two", "flag": True},
    ]
    encode(write_lines(tmp_path, records), columns=("id", "meta", "mixed", "flag"))
    table = rows_of(output)
    assert table["id"].to_pylist() == [str(10**30), "5"]
    assert table["meta"].to_pylist() == ['{"a": 1}', '{"b": [2]}']
    assert table["mixed"].to_pylist() == ["1", "two"]
    assert table["flag"].to_pylist() == ["0.5", "true"]


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


def test_progress_is_reported_while_finished_parts_are_skipped(
    small_artifact: Artifact, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(50)])
    options = BulkOptions(
        inputs=(str(path),), output=output, model=small_artifact.path, part_rows=10, threads=1
    )
    asyncio.run(encode_files(options))
    (output / "part-00004.parquet").unlink()
    kept: list[int] = []
    asyncio.run(encode_files(options, lambda progress: kept.append(progress.kept)))
    assert kept == [10, 20, 30, 40, 40]


def test_limit_ends_the_input(encode: Encode, tmp_path: Path, output: Path) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(95)])
    assert encode(path, part_rows=10, limit=27).rows == 27
    assert rows_of(output)["row"].to_pylist() == list(range(27))


@pytest.mark.parametrize("limit", [27, 95, 200, None])
def test_progress_ends_at_all_of_the_input_or_of_the_limit(
    small_artifact: Artifact, tmp_path: Path, output: Path, limit: int | None
) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(95)]}), path)
    options = BulkOptions(
        inputs=(str(path),), output=output, model=small_artifact.path, limit=limit, threads=1
    )
    shares: list[float] = []
    asyncio.run(encode_files(options, lambda progress: shares.append(progress.share)))
    assert shares[-1] == 1.0
    assert shares == sorted(shares)


def test_memory_limit_below_one_block_still_encodes_all(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(2000)])
    assert encode(path, max_memory=1).rows == 2000
    assert rows_of(output)["row"].to_pylist() == list(range(2000))


def test_stop_ends_the_job_after_the_current_part_and_a_second_run_does_the_rest(
    small_artifact: Artifact, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(3000)])
    options = BulkOptions(
        inputs=(str(path),), output=output, model=small_artifact.path, part_rows=700, threads=2
    )

    async def stopped() -> tuple[int, bool]:
        stop = asyncio.Event()
        progress = await encode_files(options, lambda _: stop.set(), stop)
        return progress.rows, progress.is_complete

    assert asyncio.run(stopped()) == (700, False)
    assert not list(output.glob(".*"))
    second = asyncio.run(encode_files(options))
    assert (second.rows, second.kept, second.is_complete) == (2300, 700, True)
    assert rows_of(output)["row"].to_pylist() == list(range(3000))


def test_stop_in_the_last_part_completes_the_job(
    small_artifact: Artifact, tmp_path: Path, output: Path
) -> None:
    path = write_texts(tmp_path, [f"text {number}" for number in range(900)])
    options = BulkOptions(inputs=(str(path),), output=output, model=small_artifact.path, threads=2)

    async def stopped() -> Progress:
        stop = asyncio.Event()
        return await encode_files(options, lambda _: stop.set(), stop)

    progress = asyncio.run(stopped())
    assert (progress.rows, progress.is_complete) == (900, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sparse"}, "cannot compute sparse; it can compute: dense, chunks, scores"),
        ({"dimensions": 33}, "dimensions must be from 1 to 32, the model's width"),
        ({"prompt_name": "none"}, "unknown"),
        ({"kind": "scores", "dimensions": 3}, "--dimensions applies to dense vectors, not to sco"),
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
    with pytest.raises(BulkError, match="the input has no records"):
        encode(path)


def test_quantised_vectors_equal_the_model_s_own(
    encode: Encode, tmp_path: Path, output: Path, calibrated_artifact: Artifact
) -> None:
    path = write_texts(tmp_path, TEXTS)
    with vitrine.SyncModel(calibrated_artifact.path) as model:
        vectors = model.encode(TEXTS).vectors
        for dtype in ("int8", "uint8", "binary", "ubinary"):
            encode(path, model=calibrated_artifact.path, dtype=dtype, output=output / dtype)
            actual = np.stack(rows_of(output / dtype)["embedding"].to_numpy())
            expected = model.quantizer(dtype)(vectors)
            assert actual.dtype == expected.dtype
            assert np.abs(actual.astype(int) - expected).max() <= 1


def test_quantisation_without_calibration_is_refused(encode: Encode, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="int8 needs the ranges of the model's vectors"):
        encode(write_texts(tmp_path, TEXTS), dtype="int8")


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
