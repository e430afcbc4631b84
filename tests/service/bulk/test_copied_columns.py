"""Copied columns: their names, types and values in each format."""

import json
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.bulk.options import BulkOptions, OptionError
from service.bulk.readers import ReadPlan
from service.bulk.sources import open_source
from service.bulk.texts import items_of
from tests.service.bulk.conftest import Encode, json_rows_of, rows_of, write_lines


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
    (row,) = json_rows_of(output)
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
    values = [row["time"] for row in json_rows_of(output)]
    if pa.types.is_nested(times.type):
        assert str(values).count("00:00:00.000000001") == 1
        return
    expected = NANOSECONDS.cast(pa.int64()).to_pylist()
    assert [value and pd.Timedelta(value).value for value in values] == expected
    # Without nanoseconds they are as Python writes them.
    assert [values[index] for index in (1, 3)] == [str(NANOSECONDS[i]) for i in (1, 3)]
    chosen = BulkOptions(inputs=(str(path),), output=output, model=tmp_path, template="at {time}")
    (block,) = open_source(chosen, "dense").read(ReadPlan())
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
    (row,) = json_rows_of(output)
    assert row["time"] == local.isoformat()
    assert datetime.fromisoformat(row["time"]) == local


def test_durations_are_texts_of_python_whether_pandas_is_installed_or_not(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    values = pa.array([86_400_000_000_000, 1500, 1_000, -1_000_000_000], pa.duration("ns"))
    pq.write_table(pa.table({"text": ["x"] * 4, "time": values}), tmp_path / "a.parquet")
    encode(tmp_path / "a.parquet", columns=("time",), template="{time}", format="jsonl")
    rows = json_rows_of(output)
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
    rows = json_rows_of(output / "jsonl")
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
    assert [row["embedding"] for row in json_rows_of(output)] == values.to_pylist()


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
