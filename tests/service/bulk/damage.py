"""Input files with damaged records, by seed.

    python -m tests.service.bulk.damage 2000 --from 100

reads that many files and reports each that breaks the rule: every undamaged record is read with its
own text, and nothing is raised but a `BulkError`, and that only for a damaged Parquet file.
"""

import argparse
import datetime
import io
import json
import random
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from service.bulk import readers
from service.bulk.options import BulkError, BulkOptions
from service.bulk.sources import open_source
from service.bulk.texts import records_of

# Small limits, so that small files exceed them.
_MAX_RECORD = 4096
_LIMITS: dict[str, Any] = {
    "MAX_RECORD_BYTES": _MAX_RECORD,
    "_CHUNK_BYTES": 512,
    "_BLOCK_RECORDS": 16,
    "_BLOCK_BYTES": 2048,
}
_WORDS = ["cat", "naïve", "東京", "5,5", "it's", "a;b", "end.", "😀", "\\", "{x}", "tab\there"]


@dataclass(frozen=True)
class DamagedFile:
    """A file, and what has to be read from it.

    Attributes:
        name: Name of the file.
        content: Content of the file.
        texts: Text of each undamaged record, by its id.
        options: Settings of the job.
        may_fail: Whether the whole file may be unreadable.
    """

    name: str
    content: bytes
    texts: Mapping[str, str]
    options: Mapping[str, object]
    may_fail: bool = False


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 12)))


def _flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncated(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _spliced(*parts: bytes) -> Callable[[random.Random, bytes], bytes]:
    def splice(draw: random.Random, content: bytes) -> bytes:
        at = draw.randrange(len(content) + 1)
        return content[:at] + draw.choice(parts) + content[at:]

    return splice


def _field(*values: bytes) -> Callable[[random.Random, bytes], bytes]:
    """Damage a JSON object by another field, or by another value of its text."""

    def add(draw: random.Random, content: bytes) -> bytes:
        value = draw.choice(values)
        name = draw.choice([b'"unused"', b'"text"', b'"\\ud83d"', b'"id"'])
        return content[:-1] + b", " + name + b": " + value + b"}"

    return add


_JSON_DAMAGE: list[Callable[[random.Random, bytes], bytes]] = [
    _flipped,
    _truncated,
    _spliced(b"\xff", b"\xed\xa0\xbd", b"\0", b"\x1b", b"\xef\xbb\xbf", b'"', b"\\", b"[", b"}"),
    _spliced(b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b"{}", b"\\ud83d", b"\\u0000"),
    _field(b'"half \\ud83d"', b'"\\ude00"', b'["\\ud83d"]', b'{"\\ud83d": 1}'),
    _field(b"[" * 200 + b"]" * 200, b'{"a":' * 300 + b"1" + b"}" * 300, b"[" * 3000),
    _field(b"1" * 19, b"-" + b"9" * 40, b"1" * 4000, b"1e999", b"NaN", b"-Infinity", b"01"),
    _field(b'"' + b"x" * _MAX_RECORD + b'"', b"null", b"true", b"[]", b'{"a": [{}]}', b"1.5"),
    lambda _, content: b"[" + content + b"]",
    lambda _, content: content + b" " * _MAX_RECORD,
    lambda draw, _: draw.randbytes(draw.randint(1, 200)).replace(b"\n", b"\r"),
    lambda _draw, _content: b"x" * (3 * _MAX_RECORD),
]


def damaged_json(draw: random.Random) -> DamagedFile:
    """Return JSON Lines with some damaged records."""
    lines, texts = [], {}
    for number in range(draw.randint(2, 120)):
        own, text = f"id-{number}", _text(draw)
        record = {"id": own, "text": text, "unused": draw.choice([None, 2**70, [1, {"a": 2}], "x"])}
        line = json.dumps(record, ensure_ascii=draw.random() < 0.5).encode()
        if number and draw.random() < 0.2:
            line = draw.choice(_JSON_DAMAGE)(draw, line)
        else:
            texts[own] = text
        lines.append(line)
        lines += [b"", b" \r"][: draw.randint(0, 2)] if draw.random() < 0.05 else []
    content = draw.choice([b"\n", b"\r\n"]).join(lines)
    return DamagedFile("a.jsonl", content, texts, {"columns": ("unused",)})


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


# The text of a damaged record; the id before it and the last cell after it are whole.
_CSV_DAMAGE: list[Callable[[random.Random, bytes], bytes]] = [
    lambda _, text: b'"' + text,
    lambda _, text: b'"a 5" ' + text + b'"',
    lambda _, text: text + b",,",
    lambda _, text: b'"' + text + b'" x',
    lambda _, text: b"\xff" + text,
    lambda _, text: text + b"\xed\xa0\xbd",
    lambda _, text: b"x" * (2 * _MAX_RECORD) + text,
    lambda draw, _: draw.randbytes(30).translate(None, b'"\r\n'),
]


def damaged_csv(draw: random.Random) -> DamagedFile:
    """Return CSV with some damaged records, at most one of which has an unclosed quote.

    Quoted cells do not begin with a comma or a line end: behind an unclosed quote they could not be
    told from the end of its cell.
    """
    end = draw.choice(["\n", "\r\n", "\r"])
    lines, texts = [b"id,text,last"], {}
    damage = list(_CSV_DAMAGE)
    for number in range(draw.randint(2, 120)):
        own, text = f"id-{number}", _text(draw)
        if draw.random() < 0.3:
            text += draw.choice(['\nsecond "line"', "\r\nx, y", ' "quoted"'])
        if draw.random() < 0.15:
            chosen = draw.choice(damage)
            if chosen is _CSV_DAMAGE[0]:
                damage.remove(chosen)
            cell = chosen(draw, _text(draw).replace(",", "").encode())
        else:
            plain = draw.random() < 0.5 and not set(',"\r\n') & set(text)
            cell = (text if plain else _quoted(text)).encode()
            texts[own] = text
        lines.append(own.encode() + b"," + cell + b"," + str(number).encode())
        lines += [b""] if draw.random() < 0.05 else []
    content = end.encode().join(lines) + draw.choice([b"", end.encode()])
    return DamagedFile("a.csv", content, texts, {})


def damaged_text(draw: random.Random) -> DamagedFile:
    """Return lines of text, of which some are not UTF-8 or too long; an id is a text's start."""
    lines, texts = [], {}
    for number in range(draw.randint(2, 120)):
        text = f"id-{number} {_text(draw)}"
        line = text.encode()
        if draw.random() < 0.2:
            line = draw.choice([b"\xff" + line, line + b"\xe6\x9d", line + b"x" * _MAX_RECORD])
        else:
            texts[f"id-{number}"] = text
        lines.append(line)
    content = draw.choice([b"\n", b"\r\n"]).join(lines)
    return DamagedFile("a.txt", content, texts, {})


_TIME = datetime.datetime(2024, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


def _times(draw: random.Random, is_damaged: list[bool]) -> pa.Array:
    unit = draw.choice(["ms", "us"])
    values = [2**61 * draw.choice([1, -1]) if bad else 1000 * i for i, bad in enumerate(is_damaged)]
    return pa.array(values, pa.timestamp(unit, draw.choice([None, "UTC"])))


def _zones(_: random.Random, is_damaged: list[bool]) -> pa.Array:
    return pa.array([1 if bad else None for bad in is_damaged], pa.timestamp("s", "Mars/Base"))


def _strings(draw: random.Random, is_damaged: list[bool]) -> pa.Array:
    values = [b"\xff\xfe" if bad else "é".encode() for bad in is_damaged]
    kind = draw.choice(["string", "large", "dictionary", "list", "struct", "view"])
    if kind == "large":
        return pa.array(values, pa.large_binary()).view(pa.large_string())
    array = pa.array(values, pa.binary()).view(pa.string())
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), pa.int32()), array)
    if kind == "list":
        return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), array)
    if kind == "view":
        return pa.array(["x"] * len(values), pa.string_view())
    return pa.StructArray.from_arrays([array], ["s"]) if kind == "struct" else array


def _long(_: random.Random, is_damaged: list[bool]) -> pa.Array:
    return pa.array(["x" * (_MAX_RECORD if bad else 3) for bad in is_damaged])


def _other_types(draw: random.Random, is_damaged: list[bool]) -> pa.Array:
    """Return values of a type that has no invalid ones; damaged records are null."""
    value, type_ = draw.choice(
        [
            (datetime.timedelta(1), pa.duration("ns")),
            (datetime.time(1, 2, 3), pa.time64("ns")),
            (datetime.date(2024, 1, 2), pa.date64()),
            (_TIME, pa.timestamp("ns", "+05:30")),
            (Decimal("1.5"), pa.decimal128(20, 3)),
            ([[1, None], []], pa.list_(pa.list_(pa.int8()))),
            ([("k", 1)], pa.map_(pa.string(), pa.int64())),
            ({"a": None}, pa.struct([("a", pa.null())])),
            (None, pa.null()),
            (b"\0\1", pa.binary(2)),
        ]
    )
    return pa.array([None if bad else value for bad in is_damaged], type_)


_PARQUET_DAMAGE = [_times, _zones, _strings, _long, _other_types]


def damaged_parquet(draw: random.Random) -> DamagedFile:
    """Return Parquet with values that Python, JSON or UTF-8 do not have, or with flipped bytes."""
    texts = {f"id-{number}": _text(draw) for number in range(draw.randint(2, 120))}
    is_damaged = [draw.random() < 0.2 for _ in texts]
    column = draw.choice(_PARQUET_DAMAGE)(draw, is_damaged)
    table = pa.table({"id": list(texts), "text": list(texts.values()), "value": column})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=draw.choice([7, 50, 200]))
    settings: dict[str, object] = {"format": draw.choice(["parquet", "jsonl"])}
    if draw.random() < 0.5:
        settings["columns"] = ("value",)
    if draw.random() < 0.5:
        settings["template"] = "{id}: {text} {value}"
    if draw.random() < 0.3:
        content = _flipped(draw, file.getvalue())
        return DamagedFile("a.parquet", content, {}, settings, may_fail=True)
    whole = {
        own: text for (own, text), bad in zip(texts.items(), is_damaged, strict=True) if not bad
    }
    return DamagedFile("a.parquet", file.getvalue(), whole, settings)


GENERATORS = (damaged_json, damaged_csv, damaged_text, damaged_parquet)


def read(file: DamagedFile, folder: Path) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the texts of all records by their ids, and the errors of the others by id or row.

    Raises:
        BulkError: The file cannot be read.
    """
    path = folder / file.name
    path.write_bytes(file.content)
    is_text = file.name == "a.txt"
    settings: dict[str, Any] = {"id_column": None if is_text else "id", **file.options}
    options = BulkOptions(
        inputs=(str(path),), output=folder / "out", model=folder / "model", **settings
    )
    found: dict[str, list[Any]] = {}
    errors: dict[str, str] = {}
    with patch.multiple(readers, **_LIMITS):
        source = open_source(options, "dense")
        for block in source.read(readers.ReadPlan(part_rows=50)):
            items, columns, own_errors = records_of(block, options, "dense", source.copied)
            ids = [str(item).split(" ")[0] for item in items] if is_text else columns[0].to_pylist()
            for index, (own, item) in enumerate(zip(ids, items, strict=True)):
                if index in own_errors:
                    errors[f"{own} {block.first + index}"] = own_errors[index]
                else:
                    found.setdefault(str(own), []).append(item)
            assert all(len(column) == block.rows for column in columns)
    return found, errors


def problem(file: DamagedFile, folder: Path) -> str | None:
    """Return how reading a file breaks the rule; None: it does not."""
    try:
        found, errors = read(file, folder)
    except BulkError as error:
        return None if file.may_fail else f"the file cannot be read: {error}"
    except Exception:  # noqa: BLE001 - what is looked for
        return traceback.format_exc()
    for own, text in file.texts.items():
        texts = found.get(own, [])
        start = f"{own}: {text} " if "template" in file.options else text
        # A damaged record can have the id of another one.
        if len([text for text in texts if text[: len(start)] == start]) != 1:
            near = [error for name, error in errors.items() if name.startswith(f"{own} ")]
            return f"{own}: {texts} in place of {text!r}; errors: {near}"
    return None


def main() -> None:
    """Read files of many seeds, and print what breaks the rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="number of seeds; each has a file of each format")
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    problems = 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(options.first, options.first + options.count):
            for generate in GENERATORS:
                file = generate(random.Random(seed))  # noqa: S311 - not for secrets
                if found := problem(file, Path(name)):
                    problems += 1
                    print(f"{generate.__name__}, seed {seed}: {found}\n")
    print(f"{len(GENERATORS) * options.count:,} files, {problems} problems")


if __name__ == "__main__":
    main()
