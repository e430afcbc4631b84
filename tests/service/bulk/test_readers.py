"""Blocks of records from files of each format."""

import csv
import errno
import gzip
import io
import json
import os
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from service.bulk.options import BulkError, BulkOptions, OptionError
from service.bulk.readers import READERS, Block, ReadPlan
from service.bulk.sources import Source, open_source
from service.bulk.texts import copied_array, items_of


def options(*inputs: Path | str, **others: object) -> BulkOptions:
    fields = {"inputs": tuple(map(str, inputs)), "output": Path("out"), "model": Path("model")}
    return BulkOptions(**{**fields, **others})  # type: ignore[arg-type]


def texts(source: Source) -> dict[int, object]:
    """Return the text of each record, by its index."""
    found: dict[int, object] = {}
    for block in source.read(ReadPlan()):
        if block.columns:
            items, errors = items_of(block, options("x"), "dense")
            values = [errors.get(i, item) for i, item in enumerate(items)]
            found |= {block.first + i: value for i, value in enumerate(values)}
    return found


Write = Callable[[Path, Sequence[str]], Path]


def write_parquet(folder: Path, values: Sequence[str]) -> Path:
    pq.write_table(pa.table({"text": values}), folder / "a.parquet", row_group_size=7)
    return folder / "a.parquet"


def write_jsonl(folder: Path, values: Sequence[str]) -> Path:
    lines = [json.dumps({"text": value, "other": 1}) + "\n" for value in values]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def write_csv(folder: Path, values: Sequence[str]) -> Path:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(values)])
    return folder / "a.csv"


def write_text(folder: Path, values: Sequence[str]) -> Path:
    (folder / "a.txt").write_text("".join(f"{value}\n" for value in values))
    return folder / "a.txt"


FORMATS = [write_parquet, write_jsonl, write_csv, write_text]


@pytest.mark.parametrize(
    ("write", "compress"),
    [
        (write_parquet, None),
        *((write, c) for write in FORMATS[1:] for c in (None, gzip.compress, zstandard.compress)),
    ],
)
def test_every_format_gives_the_records_in_order(
    tmp_path: Path, write: Write, compress: Callable[[bytes], bytes] | None
) -> None:
    values = [f"text {number}, äöü" for number in range(1000)]
    path = write(tmp_path, values)
    if compress is not None:
        content = path.read_bytes()
        path.unlink()
        half = content.index(b"\n", len(content) // 2)
        # Two members, as of a log that was appended to.
        compressed = compress(content[:half]) + compress(content[half:])
        path = path.with_name(path.name + (".gz" if compress is gzip.compress else ".zst"))
        path.write_bytes(compressed)
    assert texts(open_source(options(path), "dense")) == dict(enumerate(values))


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n")), max_size=40),
    st.integers(1, 9),
    st.sets(st.integers(0, 9)),
    st.integers(1, 50),
)
def test_blocks_cover_all_records_up_to_the_limit_and_have_the_wanted_columns(
    values: list[str], rows: int, wanted: set[int], limit: int
) -> None:
    plan = ReadPlan(rows, limit=limit, wants=wanted.__contains__)
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(values, pa.string())}), parquet, row_group_size=4)
    lines = "".join(json.dumps({"text": value}) + "\n" for value in values)
    contents = {
        "parquet": parquet.getvalue(),
        "jsonl": lines.encode(),
        "text": "".join(f"{value}\n" for value in values).encode(),
    }
    for name, content in contents.items():
        blocks: list[Block] = list(READERS[name](io.BytesIO(content), ["text"], 0, plan))  # type: ignore[index]
        assert sum(block.rows for block in blocks) == min(len(values), limit)
        first = 0
        for block in blocks:
            part = block.first // rows
            assert block.first == first
            assert (first + block.rows - 1) // rows == part  # of one part
            first += block.rows
            assert bool(block.columns) == (part in wanted)
            if block.columns:
                own = list(block.columns["text"])
                actual = [v.as_py() if isinstance(v, pa.Scalar) else v for v in own]
                assert actual == values[block.first : first]


def test_invalid_records_have_errors_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\r\n{"text": \n[1]\n{"text": null}\n{"other": 1}\n\n'
        b'{"text": 7}\n{"text": "\xff"}\n{"text": "two"}'
    )
    assert texts(open_source(options(path), "dense")) == {
        0: "one",
        1: "line 2: the record is not JSON: unexpected end of data, at character 9",
        2: "line 3: the record is not a JSON object",
        3: "the column 'text' is null or missing",
        4: "the column 'text' is null or missing",
        5: "the column 'text' is not a text",
        6: "line 8: the record is not JSON: str is not valid UTF-8: surrogates not allowed, at "
        "character 0",
        7: "two",
    }


def test_duplicate_key_of_json_is_an_error_of_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one", "text": "two"}\n{"text": "x", "more": [{"a": 1, "a": 2}]}\n'
        '{"text": "\\"a\\": 1", "more": {"text": "y"}}\n'
    )
    assert texts(open_source(options(path), "dense")) == {
        0: "line 1: an object has a duplicate key",
        1: "line 2: an object has a duplicate key",
        2: '"a": 1',
    }


def test_invalid_utf8_is_an_error_of_its_record_in_every_format(tmp_path: Path) -> None:
    message = "the record is not valid UTF-8"
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\xfe\nthree\n")
    (tmp_path / "a.csv").write_bytes(b"text\none\n\xff\xfe\nthree\n")
    array = pa.array([b"one", b"\xff\xfe", b"three"]).view(pa.string())
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    for name, line in (("a.txt", "line 2: "), ("a.csv", "line 3: "), ("a.parquet", "")):
        found = texts(open_source(options(tmp_path / name), "dense"))
        assert found == {0: "one", 1: line + message, 2: "three"}


def test_csv_has_quoted_line_ends_and_errors_of_records_with_other_numbers_of_cells(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffid,text\n1,"two\nlines, ""quoted"""\n2\n3,x,y\n4,end')
    assert texts(open_source(options(path), "dense")) == {
        0: 'two\nlines, "quoted"',
        1: "line 4: the record has 1 cells, and the header 2",
        2: "line 5: the record has 3 cells, and the header 2",
        3: "end",
    }


def test_carriage_return_alone_ends_a_record_of_csv_as_in_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\na\rb\nc\r\n"d\re\r\nf"\ng')
    expected = pyarrow.csv.read_csv(
        path, parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)
    )
    found = texts(open_source(options(path), "dense"))
    assert list(found.values()) == expected["text"].to_pylist() == ["a", "b", "c", "d\re\r\nf", "g"]


def test_unclosed_quote_in_csv_is_an_error_of_its_line_and_tsv_has_no_quotes(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.csv").write_text('text\nfirst\n"unclosed\nthird\n"a 5" nail"\nfifth\n')
    assert texts(open_source(options(tmp_path / "a.csv"), "dense")) == {
        0: "first",
        1: "line 3: the record cannot be read: ',' expected after '\"'",
        2: "third",
        3: "line 5: the record cannot be read: ',' expected after '\"'",
        4: "fifth",
    }
    (tmp_path / "b.tsv").write_text('text\tid\n"hello\t1\nthere"\t2\n')
    assert texts(open_source(options(tmp_path / "b.tsv"), "dense")) == {0: '"hello', 1: 'there"'}


def test_json_lines_files_may_be_empty_or_lack_columns_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": "x", "year": null}')
    (tmp_path / "c.jsonl").write_text('\ufeff{"text": "y", "year": 7}')
    (tmp_path / "d.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "z"}\n'))
    source = open_source(options(tmp_path, columns=("year",)), "dense")
    assert source.copied == pa.schema([("year", pa.int64())])
    assert texts(source) == {0: "x", 1: "y", 2: "z"}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["b.csv", "b.tsv", "b.jsonl", "b.txt"])
def test_files_without_content_have_no_records(tmp_path: Path, name: str, suffix: str) -> None:
    content = {"": b"", ".gz": gzip.compress(b""), ".zst": zstandard.compress(b"")}[suffix]
    (tmp_path / f"{name}{suffix}").write_bytes(content)
    with pytest.raises(BulkError, match="the input has no records"):
        open_source(options(tmp_path), "dense")
    record = {"jsonl": '{"text": "x"}', "txt": "x"}
    (tmp_path / name.replace("b", "a")).write_text(record.get(name[2:], "text\nx"))
    assert texts(open_source(options(tmp_path), "dense")) == {0: "x"}


def test_standard_input_without_content_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SimpleNamespace(fileno=lambda: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr("sys.stdin", opened)
    with pytest.raises(BulkError, match="the input has no records: -"):
        open_source(options("-", input_format="csv"), "dense")


def test_parquet_file_without_content_is_refused_before_other_files_are_read(
    tmp_path: Path,
) -> None:
    write_parquet(tmp_path, ["x"])
    (tmp_path / "z.parquet").write_bytes(b"")
    with pytest.raises(BulkError, match=r"z\.parquet cannot be read"):
        open_source(options(tmp_path), "dense")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_first_record_of_json_lines_may_exceed_the_sample(tmp_path: Path, name: str) -> None:
    long = "x" * 2**21
    content = (json.dumps({"text": long}) + '\n{"text": "end"}\n').encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert texts(open_source(options(path), "dense")) == {0: long, 1: "end"}


def test_first_record_of_standard_input_may_exceed_the_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = "x" * 2**21
    content = json.dumps({"text": long}) + '\n{"text": "end"}\n'
    (tmp_path / "stdin").write_text(content)
    opened = SimpleNamespace(fileno=lambda: os.open(tmp_path / "stdin", os.O_RDONLY))
    monkeypatch.setattr("sys.stdin", opened)
    source = open_source(options("-", input_format="jsonl"), "dense")
    assert texts(source) == {0: long, 1: "end"}


def test_output_folder_in_an_input_folder_or_pattern_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("a.txt", "out/part-00000.jsonl"):
        (tmp_path / name).write_text("x\n")
    for pattern in (tmp_path, tmp_path / "**/*"):
        source = open_source(
            options(pattern, output=tmp_path / "out", input_format="text"), "dense"
        )
        assert texts(source) == {0: "x"}


def test_folders_and_patterns_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "_log.txt", ".hidden.txt", "notes.md"):
        (tmp_path / name).write_text(f"{name}\n")
    expected = {0: "a.txt", 1: "b.txt", 2: "sub/c.txt"}
    assert texts(open_source(options(tmp_path), "dense")) == expected
    assert texts(open_source(options(f"{tmp_path}/*.txt"), "dense")) == {
        0: "_log.txt",
        1: "a.txt",
        2: "b.txt",
    }


def test_linked_folders_are_read_and_links_to_a_folder_above_are_not_followed(
    tmp_path: Path,
) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    for name in ("in/a.txt", "in/sub/b.txt", "other/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    (folder / "linked").symlink_to(other)
    (folder / "linked.txt").symlink_to(other / "c.txt")
    (folder / "sub/above").symlink_to(folder)
    expected = {0: "in/a.txt", 1: "other/c.txt", 2: "other/c.txt", 3: "in/sub/b.txt"}
    assert texts(open_source(options(folder), "dense")) == expected


def test_links_in_a_circle_are_followed_once(tmp_path: Path) -> None:
    for name in ("a/1.txt", "b/2.txt", "b/.hidden/3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    for name, target in {"a/above": "..", "a/here": ".", "a/b": "../b", "b/a": "../a"}.items():
        (tmp_path / name).symlink_to(target)
    expected = {0: "a/1.txt", 1: "b/2.txt", 2: "b/2.txt", 3: "a/1.txt"}  # a/b and b/a are read too
    patterns = ("", "**", "**/*", "**/*.txt", "**/**/*.txt", "*/**/[12].txt")
    for pattern in patterns:
        source = open_source(options(f"{tmp_path}/{pattern}", input_format="text"), "dense")
        names = [Path(file.path).relative_to(tmp_path) for file in source.files]
        assert list(map(str, names)) == ["a/1.txt", "a/b/2.txt", "b/2.txt", "b/a/1.txt"], pattern
        assert sorted(map(str, texts(source).values())) == sorted(expected.values())


def test_link_to_the_working_directory_from_elsewhere_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/1.txt", "there/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x\n")
    (tmp_path / "there/link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../there", "../there/**"):
        source = open_source(options(name, input_format="text"), "dense")
        assert [file.path for file in source.files] == ["../there/2.txt", "../there/link/1.txt"]


def test_patterns_match_the_files_that_the_glob_module_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1.txt", "a/2.txt", "a/[b]/3.txt", "a/.c/4.txt", "a/.5.txt", "a/d/e/6.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    monkeypatch.chdir(tmp_path)
    for pattern in ("**", "**/*.txt", "a/**", "a/**/*", "./**/e/*", "**/a/**/*.txt", "*/**/[1-4]*"):
        source = open_source(options(pattern, input_format="text"), "dense")
        matches = map(Path, glob(pattern, recursive=True))
        assert [Path(file.path) for file in source.files] == sorted(filter(Path.is_file, matches))


def test_link_to_itself_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "a.txt")
    for name in ("a.txt", "*.txt"):
        with pytest.raises(OptionError, match=r"a\.txt is not a regular file"):
            open_source(options(tmp_path / name), "dense")


def test_subfolder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("x\n")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(BulkError, match="sub cannot be read: Permission denied"):
        open_source(options(tmp_path), "dense")


def test_name_that_is_too_long_is_an_error_with_the_name() -> None:
    name = "x" * 300
    with pytest.raises(BulkError, match=f"^{name} cannot be read: File name too long"):
        open_source(options(name), "dense")


def test_template_fills_columns_and_nulls_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"title": "T", "year": 7}, {"title": None, "year": 8}, {"title": None, "year": None}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen = options(path, template="{title}: {year} {{}}")
    (block,) = open_source(chosen, "dense").read(ReadPlan())
    items, errors = items_of(block, chosen, "dense")
    assert items == ["T: 7 {}", ": 8 {}", None]
    assert errors == {2: "the columns of the template are null: title, year"}


def test_pairs_have_a_query_and_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("query\ttext\nq\tt\n")
    (block,) = open_source(options(path), "scores").read(ReadPlan())
    assert items_of(block, options(path), "scores") == ([("q", "t")], {})


@pytest.mark.parametrize(
    ("type_", "values", "expected"),
    [
        (pa.int64(), [1, "x", None, 2**80], [1, None, None, None]),
        (pa.int64(), [1, 2.5, 2.0, True], [1, None, 2, None]),
        (pa.float64(), [0.5, 2, True, 2**60 + 1], [0.5, 2.0, None, None]),
        (pa.bool_(), [True, 1, 0.0, None], [True, None, None, None]),
    ],
)
def test_value_of_another_type_than_its_column_is_an_error_of_its_record(
    type_: pa.DataType, values: list[object], expected: list[object]
) -> None:
    errors: dict[int, str] = {}
    assert copied_array("year", type_, values, errors).to_pylist() == expected
    message = f"the value of 'year' is not of the type {type_}"
    pairs = zip(values, expected, strict=True)
    lost = [i for i, (value, own) in enumerate(pairs) if own is None is not value]
    assert errors == dict.fromkeys(lost, message)


def test_large_records_are_in_small_blocks(tmp_path: Path) -> None:
    values = ["x" * 400_000] * 10
    for write in (write_parquet, write_text):
        blocks = list(open_source(options(write(tmp_path, values)), "dense").read(ReadPlan()))
        assert max(block.rows for block in blocks) == (2 if write is write_parquet else 3)


@pytest.mark.parametrize(
    ("files", "inputs", "message"),
    [
        ({}, "none.txt", "there is no input file at "),
        ({"a.md": ""}, "", "there is no file with a known suffix in .*; known suffixes are .pa"),
        ({"a.md": ""}, "a.md", "the format of .*a.md is unknown; known suffixes are .parquet"),
        ({"a.parquet.zst": ""}, "", "a.parquet.zst must not be compressed; decompress it"),
        (
            {"a.jsonl.zst.gz": ""},
            "a.jsonl.zst.gz",
            "zst.gz is compressed twice",
        ),
        ({"a.jsonl.gz.zst": "", "b.jsonl": ""}, "", "gz.zst is compressed twice; decompress it"),
        ({"a.txt": "x", "b.csv": "text"}, "", "the input files have several formats: text, csv"),
        ({"a.csv": "id,body\n"}, "a.csv", "a.csv has no column 'text'; its columns are: id, body"),
        ({"a.jsonl": '{"body": 1}\n'}, "a.jsonl", "has no column 'text'; its columns are: body"),
        ({"a.jsonl": '[{"text": "x"}]'}, "a.jsonl", "a.jsonl is a JSON array; write each of its"),
        ({"a.json": '[\n{"text": "x"}\n]\n'}, "a.json", "a.json is a JSON array"),
    ],
)
def test_missing_files_formats_and_columns_are_refused(
    tmp_path: Path, files: dict[str, str], inputs: str, message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=message):
        open_source(options(tmp_path / inputs), "dense")


def test_closed_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(OptionError, match="standard input is closed"):
        open_source(options("-"), "dense")


def test_text_lines_have_the_column_text_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_text(tmp_path, ["x"])
    with pytest.raises(OptionError, match="has no column 'query'; its columns are: text"):
        open_source(options(file), "scores")
    with pytest.raises(OptionError, match="has no column 'body'; its columns are: text"):
        open_source(options(file, text_column="body"), "dense")
    with file.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(OptionError, match="standard input has no column 'query'"):
            open_source(options("-"), "scores")


def test_truncated_compressed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text\n" * 10**6)[:-100])
    source = open_source(options(path), "dense")
    with pytest.raises(BulkError, match=r"a.txt.gz cannot be read: Compressed file ended"):
        list(source.read(ReadPlan()))
