"""A damaged record is a row with an error, and no other record suffers from it."""

import io
import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.artifact import Artifact
from service.bulk import command_line, encoder, opening, readers
from service.bulk.columns import copied_columns
from service.bulk.encoder import RecordEncoder
from service.bulk.options import BulkError, OptionError
from service.bulk.readers import READERS, ReadPlan
from service.bulk.sources import open_source
from service.bulk.texts import items_of
from tests.service.bulk.conftest import Encode, json_rows_of, rows_of
from tests.service.bulk.damage import GENERATORS, DamagedFile, problem, read
from tests.service.bulk.test_readers import options, texts


@pytest.mark.parametrize("generate", GENERATORS)
def test_undamaged_records_are_read_beside_damaged_ones(
    tmp_path: Path, generate: Callable[[random.Random], DamagedFile]
) -> None:
    files = [generate(random.Random(seed)) for seed in range(60)]  # noqa: S311
    assert [found for file in files if (found := problem(file, tmp_path))] == []


BAD_LINES = {
    r'{"id": 2, "text": "cut \ud83d"}': "line 2: the record is not JSON: no low surrogate",
    r'{"id": 2, "text": "x", "\ud83d": 1}': "line 2: the record is not JSON: no low surrogate",
    r'{"id": 1234567890123456789, "text": "cut \ud83d"}': "line 2: the record is not JSON",
    '{"id": 12345678901234567890, "text": "x", "y": NaN}': "line 2: the record is not JSON",
    '{"id": 2, "text": "x", "y": ' + "[" * 3000 + "]" * 3000 + "}": "line 2: it is nested too",
    '{"id": 2, "text": "x", "y": 1' + "0" * 5000 + "}": "line 2: the record is not JSON: number",
}


@pytest.mark.parametrize("line", BAD_LINES)
@pytest.mark.parametrize("before", [1, 40_000])
def test_line_that_is_not_json_is_an_error_in_the_sample_and_after_it(
    tmp_path: Path, line: str, before: int
) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"id": 1, "text": "good text, of some length"}\n'
    path.write_text(good * before + line + "\n" + good)
    found = texts(open_source(options(path, id_column="id"), "dense"))
    assert len(found) == before + 2
    assert set(found.values()) - {found[before]} == {"good text, of some length"}
    expected = BAD_LINES[line].replace("line 2", f"line {before + 1}")
    assert str(found[before]).startswith(expected)


def test_columns_are_inferred_from_the_first_objects_whatever_is_before_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xff" * 2**21 + b"\n[1]\n" + b'{"text": "x", "year": 7}\n')
    source = open_source(options(path, columns=("year",)), "dense")
    assert source.copied == pa.schema([("year", pa.int64())])
    assert texts(source)[2] == "x"


def test_input_without_any_object_is_an_error_but_one_file_without_is_not(tmp_path: Path) -> None:
    for content in ('{\n"text": "x"\n}\n', '{"text": \n'):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(BulkError, match="JSON object; write each object on a line of its own"):
            open_source(options(tmp_path), "dense")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    assert list(texts(open_source(options(tmp_path), "dense")))[1:] == [1]


@pytest.mark.parametrize("name", ["text", "jsonl", "csv", "tsv"])
def test_record_beyond_the_limit_is_an_error_and_is_never_held_in_memory(name: str) -> None:
    long = b"x" * (readers.MAX_RECORD_BYTES + 1)
    good = b'{"text": "good"}' if name == "jsonl" else b"good"
    header = [b"text"] if name in ("csv", "tsv") else []

    class OnlyChunks(io.BytesIO):
        """A file of which no more than a chunk may be read at a time."""

        def read1(self, size: int | None = -1) -> bytes:
            assert 0 < (size or 0) <= readers._CHUNK_BYTES
            return super().read1(size)

        read = readline = None  # type: ignore[assignment]

    for end in (b"\n", b"\r\n"):
        file = OnlyChunks(end.join([*header, good, long * 3, good, long]))
        blocks = list(READERS[name](file, ["text"], 0, ReadPlan()))  # type: ignore[index]
        values = [value for block in blocks for value in block.columns["text"]]
        assert values == ["good", None, "good", None]
        errors = {b.first + i: error for b in blocks for i, error in b.errors.items()}
        line = len(header) + 2
        assert f"line {line}: the record " in errors[1]
        assert f"the record has more than {readers.MAX_RECORD_BYTES} bytes" in errors[1]
        assert sorted(errors) == [1, 3]


def test_no_more_than_a_chunk_beyond_the_limit_is_kept_of_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 4000)
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 1000)
    file = io.BytesIO(b"x" * 20_000 + b"\ngood")
    long, good = readers._lines(file, readers._split_at_line_feeds)
    assert 4000 < len(long) <= 6000
    assert good == b"good"


def test_value_of_parquet_beyond_the_limit_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", "y" * 2**21, "z"]}), path)
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 2**20)
    found = texts(open_source(options(path), "dense"))
    assert (found[0], found[2]) == ("x", "z")
    assert str(found[1]).startswith("the record has more than")


def test_list_view_counts_as_its_own_values_not_as_those_of_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    lists = pa.array([["y" * 2**13]] * 256, pa.list_view(pa.string()))
    pq.write_table(pa.table({"text": ["x"] * 256, "value": lists}), path)
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 2**20)
    found = texts(open_source(options(path, columns=("value",)), "dense"))
    assert set(found.values()) == {"x"}


def test_unclosed_quote_takes_no_other_record_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"text {row}" for row in range(1000)]
    rows[10] = '"unclosed'
    path.write_text("text\n" + "\n".join(rows))
    found = texts(open_source(options(path), "dense"))
    assert found.pop(10) == "line 12: the record cannot be read: unexpected end of data"
    assert found == {row: text for row, text in enumerate(rows) if row != 10}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'"te" xt\nfirst\n', "',' expected after '\"'"),
        ("text,é\nfirst,a\n".encode("latin-1"), "it is not valid UTF-8"),
        ("text\nfirst\n".encode("utf-16"), "it is not valid UTF-8"),
    ],
)
def test_header_that_cannot_be_read_is_an_error_with_its_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    problem = f"a.csv cannot be read: line 1, which has the names of the columns: {reason}"
    with pytest.raises(BulkError, match=re.escape(problem)):
        open_source(options(path), "dense")


def test_names_of_columns_have_no_control_characters_in_messages(
    small_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"\x1b[31m": "a"}))
    arguments = [str(path), str(tmp_path / "out"), "--model", str(small_artifact.path)]
    assert command_line.main(arguments) == 2
    assert capsys.readouterr().err.endswith("its columns are: \\x1b[31m\n")


def test_damaged_row_group_is_an_error_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = [f"text {row}" for row in range(200)]
    pq.write_table(pa.table({"text": values}), path, row_group_size=100, compression="zstd")
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(BulkError, match=r"a\.parquet cannot be read: its row group 1, rows 100 to"):
        texts(open_source(options(path), "dense"))


def test_name_of_a_parquet_column_that_is_not_utf8_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"], "damaged": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"\xe1amaged"))
    with pytest.raises(BulkError, match=r"a\.parquet cannot be read: .*can't decode byte 0xe1"):
        open_source(options(path), "dense")


def test_binary_column_of_texts_is_read_as_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array(["naïve".encode(), b"\xff", None])
    pq.write_table(pa.table({"text": values, "id": [1, 2, 3]}), path)
    expected = {1: "the record is not valid UTF-8", 2: "the column 'text' is null or missing"}
    assert texts(open_source(options(path), "dense")) == {0: "naïve", **expected}
    source = open_source(options(path, template="{id} {text}"), "dense")
    (block,) = source.read(ReadPlan())
    items, errors = items_of(block, options(path, template="{id} {text}"), "dense")
    assert items == ["1 naïve", None, "3 "]
    assert errors == {1: "the record is not valid UTF-8"}


def test_nested_text_that_is_not_utf8_is_an_error_of_its_record_alone(tmp_path: Path) -> None:
    words = pa.array([b"\xff", b"good", b"\xff"], pa.binary()).view(pa.string())
    views = words.view(pa.binary()).cast(pa.binary_view()).view(pa.string_view())
    for nested in (
        pa.ListArray.from_arrays(pa.array(range(4), pa.int32()), words),
        pa.StructArray.from_arrays([words], ["word"]),
        pa.ListViewArray.from_arrays(range(3), [1] * 3, words),
        pa.ListViewArray.from_arrays(range(3), [1] * 3, views),
    ):
        table = pa.table({"id": ["a", "b", "c"], "text": ["x", "y", "z"], "value": nested})
        content = io.BytesIO()
        pq.write_table(table, content)
        file = DamagedFile("a.parquet", content.getvalue(), {}, {"columns": ("value",)})
        found, errors = read(file, tmp_path)
        assert found == {"b": ["y"]}
        assert list(errors) == ["a 0", "c 2"]


def write_columns(folder: Path, *columns: pa.Array) -> None:
    for number, column in enumerate(columns):
        table = pa.table({"text": ["t"] * len(column), "value": column})
        pq.write_table(table, folder / f"{number}.parquet")


COLUMNS: dict[str, tuple[list[Any], pa.DataType, list[Any], pa.DataType]] = {
    "decimals beside integers": ([2], pa.int64(), [Decimal("1.5")], pa.decimal128(30, 2)),
    "nulls first": ([None], pa.null(), ["x"], pa.string()),
    "nulls last": (["x"], pa.string(), [None], pa.null()),
    "large": (["x"], pa.large_string(), ["y"], pa.string()),
    "view": (["x"], pa.string(), ["y"], pa.string_view()),
    "integers": ([1], pa.int32(), [2**40], pa.int64()),
    "floats beside integers": ([1], pa.int64(), [0.5], pa.float64()),
    "times": ([1], pa.timestamp("ms"), [2], pa.timestamp("us")),
    "lists of nulls": ([[]], pa.list_(pa.null()), [["x"]], pa.list_(pa.string())),
    "binary": ([b"x"], pa.binary(), ["y"], pa.string()),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_harmlessly_different_types_are_copied(
    encode: Encode, tmp_path: Path, output: Path, name: str
) -> None:
    first, first_type, second, second_type = COLUMNS[name]
    arrays = pa.array(first, first_type), pa.array(second, second_type)
    (tmp_path / "in").mkdir()
    write_columns(tmp_path / "in", *arrays)
    assert encode(tmp_path / "in", columns=("value",)).errors == 0
    joint = rows_of(output).schema.field("value").type
    expected = [pa.array(array.to_pylist() if name == "binary" else array) for array in arrays]
    for actual, own in zip(rows_of(output)["value"].to_pylist(), expected, strict=True):
        assert actual == own.cast(joint).to_pylist()[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.string()),
        (pa.bool_(), pa.int8()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.decimal128(38, 10), pa.float64()),
        (pa.int64(), pa.decimal128(3, 2)),
        (pa.list_(pa.string()), pa.string()),
    ],
)
def test_columns_of_types_without_a_common_one_are_refused(
    first: pa.DataType, second: pa.DataType
) -> None:
    schemas = {
        name: pa.schema([("text", pa.string()), ("x", type_)])
        for name, type_ in (("a.parquet", first), ("b.parquet", second))
    }
    with pytest.raises(OptionError, match=r"the column 'x' has the type .* in b\.parquet, but "):
        copied_columns(schemas, ["text"], ["x"])


def test_integer_that_the_joint_type_does_not_hold_is_an_error_of_its_record(
    encode: Encode, tmp_path: Path, output: Path
) -> None:
    (tmp_path / "in").mkdir()
    write_columns(tmp_path / "in", pa.array([1, 2**60 + 1]), pa.array([0.5]))
    encode(tmp_path / "in", columns=("value",))
    rows = rows_of(output)
    assert rows["value"].to_pylist() == [1.0, None, 0.5]
    assert [error is None for error in rows["error"].to_pylist()] == [True, False, True]
    assert "the value of 'value', of the type int64, cannot be read" in rows["error"][1].as_py()


def test_types_of_json_lines_are_those_of_all_files_together(tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {
        "a": [1, "x", None],
        "b": [0.5, 2, None],
        "c": [None, None, {"d": 1}],
    }
    for row in range(3):
        record = {"text": "t", **{name: own[row] for name, own in values.items()}}
        (tmp_path / f"{row}.jsonl").write_text(json.dumps(record))
    source = open_source(options(tmp_path, columns=("a", "b", "c")), "dense")
    types = {"a": pa.string(), "b": pa.float64(), "c": pa.string()}
    assert source.copied == pa.schema(types)


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_time_that_json_cannot_be_written_of_is_an_error_in_json_alone(
    encode: Encode, tmp_path: Path, output: Path, format_: str
) -> None:
    path = tmp_path / "a.parquet"
    times = pa.array([0, 2**61, 1], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "time": times}), path)
    progress = encode(path, columns=("time",), format=format_)
    if format_ == "parquet":
        assert rows_of(output)["time"].combine_chunks() == times
        assert progress.errors == 0
    else:
        rows = json_rows_of(output)
        assert [row["time"] is None for row in rows] == [False, True, False]
        assert rows[1]["error"].endswith("cannot be read: date value out of range")
        assert rows[2]["embedding"] is not None


def test_text_that_must_be_tokenised_whole_beyond_the_limit_is_an_error(
    encode: Encode, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MAX_WHOLE_CHARS", 50_000)
    path = tmp_path / "a.jsonl"
    values = ["good", "." * 50_001, "y " * 100_000, "." * 50_000]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in values))
    encode(path)
    rows = rows_of(output)
    message = "a part of 50001 characters of the text must be tokenised at once; the limit is 50000"
    assert rows["error"].to_pylist() == [None, message, None, None]
    assert rows["truncated"].to_pylist() == [False, None, True, True]
    # For chunks, every text is tokenised whole.
    encode(path, kind="chunks", output=output / "chunks")
    errors = rows_of(output / "chunks")["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, True]


def test_long_texts_are_encoded_one_at_a_time(
    encode: Encode, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_LONG_CHARS", 1000)
    active, most = 0, 0
    computed = RecordEncoder._compute

    async def counted(
        self: RecordEncoder, items: list[str], indices: list[int], errors: dict[int, str]
    ) -> list[Any]:
        nonlocal active, most
        is_long = any(len(items[index]) > 1000 for index in indices)
        assert not is_long or len(indices) == 1
        active += is_long
        most = max(most, active)
        result = await computed(self, items, indices, errors)
        active -= is_long
        return result

    monkeypatch.setattr(RecordEncoder, "_compute", counted)
    path = tmp_path / "a.txt"
    texts = [f"{row} " + "cat " * (300 * (row % 2)) for row in range(600)]
    path.write_text("\n".join(texts))
    assert encode(path).rows == 600
    assert most == 1
    assert rows_of(output)["truncated"].to_pylist() == [row % 2 == 1 for row in range(600)]
